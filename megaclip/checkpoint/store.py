"""Training checkpoints: save, find and load them.

    RUN/checkpoints/
        latest              name of the newest complete checkpoint; replaced atomically after every rank has written
        step_00000100/      DeepSpeed's files of all ranks; loss_rank_*.pt if the loss has state of its own; and
                            state.json, which is written last
        model/              open_clip_config.json and the tokenizer: everything of an export except the weights

A run that is killed while it saves keeps its previous checkpoint. DeepSpeed itself writes `latest` before the other
ranks have finished, so that feature of DeepSpeed is turned off.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.errors import CheckpointError, first_line

LATEST = "latest"
STATE = "state.json"
LOSS_STATE = "loss_rank_"
MODEL_CARD = "model"
_TAG = re.compile(r"step_\d{8,}")


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`. A reader sees the old text or the new text, never a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def save(
    engine: DeepSpeedEngine,
    folder: Path,
    step: int,
    state: dict[str, Any],
    keep_last: int,
    loss_state: dict[str, Any] | None = None,
) -> str:
    """Write a checkpoint from all ranks, make `latest` name it, and delete old checkpoints.

    Args:
        engine: its parameters and optimizer state are written.
        folder: RUN/checkpoints; it must exist.
        step: number of optimizer steps taken.
        state: JSON-serialisable state of the run, which `read_state` returns.
        keep_last: number of checkpoints to keep, this one included; at least 1.
        loss_state: this rank's part of the loss's own state (tensors, numbers, strings), or None.

    Returns:
        the tag (folder name) of the checkpoint.

    Raises:
        CheckpointError: on every rank, if any rank cannot write.
    """
    tag = f"step_{step:08d}"
    is_first_rank = dist.get_rank() == 0
    with _writing(folder):
        if is_first_rank:
            _clear(folder, tag)
    _write_engine(engine, folder, tag)
    if loss_state is not None:
        with _writing(folder):
            torch.save(loss_state, folder / tag / f"{LOSS_STATE}{dist.get_rank():05d}.pt")
    with _writing(folder):
        if is_first_rank:
            write_atomically(folder / tag / STATE, json.dumps(state, indent=1))
            write_atomically(folder / LATEST, tag)
            for old in _in_order_of_deletion(folder, tag)[:-keep_last]:
                shutil.rmtree(folder / old, ignore_errors=True)
    return tag


def _write_engine(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Write DeepSpeed's files.

    `engine.save_checkpoint` contains collectives, so a rank that cannot write must still take part in all of them. Its
    error is stored, and raised on every rank after the last collective.
    """
    error: Exception | None = None
    write = engine.checkpoint_engine.save

    def write_or_store_error(*arguments: Any, **options: Any) -> None:
        nonlocal error
        try:
            write(*arguments, **options)
        except (OSError, RuntimeError) as problem:
            error = problem

    engine.checkpoint_engine.save = write_or_store_error
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    except OSError as problem:
        # DeepSpeed could not copy its scripts or offloaded tensors. Run the collectives that it has skipped.
        error = error or problem
        getattr(engine.optimizer, "checkpoint_event_epilogue", lambda: None)()
        dist.barrier()
    finally:
        engine.checkpoint_engine.save = write
    with _writing(folder):
        if error is not None:
            raise error


def _clear(folder: Path, tag: str) -> None:
    """Delete checkpoint `tag`. If `latest` names it, make `latest` name an earlier complete one first.

    A run that has resumed from an earlier step may save again at the step that `latest` names.
    """
    latest = folder / LATEST
    if latest.is_file() and latest.read_text(encoding="utf-8").strip() == tag:
        earlier = [old for old in _tags(folder) if old < tag and (folder / old / STATE).is_file()]
        if earlier:
            write_atomically(latest, earlier[-1])
    shutil.rmtree(folder / tag, ignore_errors=True)


def _tags(folder: Path) -> list[str]:
    """Return the names of all step_N folders, complete or not, oldest first."""
    return sorted(path.name for path in folder.iterdir() if _TAG.fullmatch(path.name))


def _in_order_of_deletion(folder: Path, newest: str) -> list[str]:
    """Return all step_N folders in the order in which `save` deletes them; `newest` is the last one.

    Incomplete checkpoints come first, then complete ones after step `newest`, which an earlier run has left, then the
    others by age.
    """
    return sorted(_tags(folder), key=lambda tag: ((folder / tag / STATE).is_file(), tag <= newest, tag))


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Run the body of a `with` statement; if it cannot write on any rank, raise one CheckpointError on every rank.

    The body must not communicate.
    """
    with raise_on_all_ranks():
        try:
            yield
        except (OSError, RuntimeError) as problem:
            raise _cannot_write(problem, folder) from problem


def _cannot_write(problem: Exception, folder: Path) -> CheckpointError:
    """Return the error of a failed write. It reports the free space: PyTorch's message for a full disk is obscure."""
    try:
        free = f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free"
    except OSError:
        free = "it cannot be reached"
    return CheckpointError(
        f"cannot write the checkpoint: {first_line(problem)}; free space at {str(folder)!r} ({free}) or fix "
        "permissions, then --resume"
    )


def find_latest(folder: Path) -> str | None:
    """Return the tag of the newest complete checkpoint in `folder`, or None if it holds none.

    Raises:
        CheckpointError: `latest` names a checkpoint that does not exist or is incomplete.
    """
    latest = folder / LATEST
    if not latest.is_file():
        return None
    tag = latest.read_text(encoding="utf-8").strip()
    require_complete(folder, tag)
    return tag


def locate(path: Path, tag: str | None = None) -> tuple[Path, str]:
    """Return the checkpoints folder and the tag for a path that a user gave.

    Args:
        path: a step's folder, a checkpoints folder, or the folder of a run.
        tag: name of a checkpoint, such as "step_00000100"; None selects the latest.

    Raises:
        CheckpointError: `path` is none of the three, or does not hold that checkpoint, or the checkpoint is incomplete.
    """
    if _TAG.fullmatch(path.name) and path.is_dir():
        if tag not in (None, path.name):
            raise CheckpointError(
                f"{str(path)!r} is one checkpoint; give the run's folder to select {tag!r} by its tag"
            )
        require_complete(path.parent, path.name)
        return path.parent, path.name
    for folder in (path, path / "checkpoints"):
        if tag is None:
            latest = find_latest(folder)
            if latest is not None:
                return folder, latest
        elif folder.is_dir() and (tags := _tags(folder)):
            if tag not in tags:
                raise CheckpointError(f"no checkpoint {tag!r} in {str(folder)!r}; it has {', '.join(tags[-5:])}")
            require_complete(folder, tag)
            return folder, tag
    raise CheckpointError(
        f"no checkpoint at {str(path)!r}; expected a step_N folder, or a folder with a file '{LATEST}'"
    )


def require_complete(folder: Path, tag: str) -> None:
    """Raise CheckpointError unless checkpoint `tag` exists and is complete."""
    if not _TAG.fullmatch(tag) or not (folder / tag / STATE).is_file():
        raise CheckpointError(f"checkpoint {str(folder / tag)!r} does not exist or is incomplete; choose another one")


def read_state(folder: Path, tag: str) -> dict[str, Any]:
    """Return the `state` that was given to `save`. Raises CheckpointError if it cannot be read."""
    path = folder / tag / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{str(path)!r} does not hold a JSON object; choose another checkpoint")
    return state


def load(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load parameters and optimizer state into `engine`, on every rank; the optimizer's settings stay unchanged.

    The number of ranks and the ZeRO stage must be those that saved; `reshard.load_resharded` loads all other cases.

    Raises:
        CheckpointError: on every rank, if any rank cannot read its part.
    """
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in engine.optimizer.param_groups
    ]
    # At ZeRO-3 the epilogue gathers parameters, so no rank may start it while another rank has failed.
    epilogue = getattr(engine.optimizer, "checkpoint_event_epilogue", None)
    if epilogue is not None:
        engine.optimizer.checkpoint_event_epilogue = lambda: None
    with raise_on_all_ranks():
        try:
            loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
            for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
                group.update(own)
        except Exception as problem:  # a damaged file can cause any exception inside DeepSpeed or torch.load
            raise CheckpointError(f"cannot load checkpoint {str(folder / tag)!r}: {first_line(problem)}") from problem
        if loaded is None:
            raise CheckpointError(f"checkpoint {str(folder / tag)!r} lacks DeepSpeed's files; choose another one")
    if epilogue is not None:
        engine.optimizer.checkpoint_event_epilogue = epilogue
        epilogue()


def read_loss_states(folder: Path, tag: str) -> Iterator[dict[str, Any]]:
    """Yield the loss's state of every rank that saved, in rank order; yield nothing if the loss had no state.

    Raises CheckpointError if a file cannot be read.
    """
    for path in sorted((folder / tag).glob(f"{LOSS_STATE}*.pt")):
        try:
            yield torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {first_line(error)}") from None
