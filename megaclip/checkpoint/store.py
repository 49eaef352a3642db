"""Training checkpoints: written so that a killed run never loses the last good one, and found again.

    RUN/checkpoints/
        latest              name of the newest complete checkpoint, replaced atomically after every rank has written
        step_00000100/      DeepSpeed's files of all ranks, loss_rank_*.pt of a loss with state of its own, and
                            state.json (written last of all)
        model/              open_clip_config.json and the tokenizer: the export but for the weights

DeepSpeed itself writes `latest` before the other ranks have finished, so it is told not to.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megaclip.comm.collectives import raise_together
from megaclip.errors import CheckpointError, first_line

LATEST = "latest"
STATE = "state.json"
LOSS_STATE = "loss_rank_"
MODEL_CARD = "model"
_TAG = re.compile(r"step_\d{8,}")


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`; whoever reads it sees the old text or the new, never a part."""
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
    """Write a checkpoint from all ranks, move `latest` onto it, delete all but the newest `keep_last`.

    Args:
        engine: whose parameters and optimizer state are written.
        folder: RUN/checkpoints; exists.
        step: optimizer steps taken.
        state: JSON-able; what `load` gives back.
        keep_last: at least 1.
        loss_state: this rank's part of the loss's own state (tensors, numbers, strings), if it has any.

    Returns:
        the checkpoint's tag.

    Raises:
        CheckpointError: on every rank, when one of them cannot write.
    """
    tag = f"step_{step:08d}"
    first = dist.get_rank() == 0
    _write_together(lambda: _clear(folder, tag), first, folder)
    _write_engine(engine, folder, tag)
    if loss_state is not None:
        path = folder / tag / f"{LOSS_STATE}{dist.get_rank():05d}.pt"
        _write_together(lambda: torch.save(loss_state, path), True, folder)

    def finish() -> None:
        write_atomically(folder / tag / STATE, json.dumps(state, indent=1))
        write_atomically(folder / LATEST, tag)
        for old in _least_wanted_first(folder, tag)[:-keep_last]:
            shutil.rmtree(folder / old, ignore_errors=True)

    _write_together(finish, first, folder)
    return tag


def _write_engine(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """DeepSpeed's files. A rank that cannot write its own goes on to the barrier at the end, where the others wait."""
    error: Exception | None = None
    write = engine.checkpoint_engine.save

    def save_or_remember(*arguments: Any, **options: Any) -> None:
        nonlocal error
        try:
            write(*arguments, **options)
        except (OSError, RuntimeError) as problem:
            error = _cannot_write(problem, folder)

    engine.checkpoint_engine.save = save_or_remember
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    except OSError as problem:  # what it copies beside its states; the collectives that follow are made up for
        error = error or _cannot_write(problem, folder)
        getattr(engine.optimizer, "checkpoint_event_epilogue", lambda: None)()
        dist.barrier()
    finally:
        engine.checkpoint_engine.save = write
    raise_together(error)


def _clear(folder: Path, tag: str) -> None:
    """Delete what lies at `tag`. A run that went back may write again what `latest` names: an earlier one first."""
    latest = folder / LATEST
    if latest.is_file() and latest.read_text(encoding="utf-8").strip() == tag:
        earlier = [old for old in _tags(folder) if old < tag and (folder / old / STATE).is_file()]
        if earlier:
            write_atomically(latest, earlier[-1])
    shutil.rmtree(folder / tag, ignore_errors=True)


def _tags(folder: Path) -> list[str]:
    """Every step_N folder, the oldest first, complete or not."""
    return sorted(path.name for path in folder.iterdir() if _TAG.fullmatch(path.name))


def _least_wanted_first(folder: Path, newest: str) -> list[str]:
    """Every step_N folder: unfinished ones, then what a run that went back has left behind, then this run's by age."""
    return sorted(_tags(folder), key=lambda tag: ((folder / tag / STATE).is_file(), tag <= newest, tag))


def _write_together(action: Callable[[], None], writes: bool, folder: Path) -> None:
    """Run `action` where this rank `writes`; a rank that cannot ends all of them."""
    error: Exception | None = None
    if writes:
        try:
            action()
        except (OSError, RuntimeError) as problem:
            error = _cannot_write(problem, folder)
    raise_together(error)


def _cannot_write(problem: Exception, folder: Path) -> CheckpointError:
    """PyTorch's own words for a full disk are obscure, so the free space stands beside them."""
    try:
        free = f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free"
    except OSError:
        free = "it cannot be reached"
    return CheckpointError(
        f"cannot write the checkpoint: {first_line(problem)}; free space at {str(folder)!r} ({free}) or fix "
        "permissions, then --resume"
    )


def find_latest(folder: Path) -> str | None:
    """Tag of the newest complete checkpoint below `folder`, or None when there is none.

    Raises:
        CheckpointError: `latest` names a checkpoint that is not there or not complete.
    """
    latest = folder / LATEST
    if not latest.is_file():
        return None
    tag = latest.read_text(encoding="utf-8").strip()
    require_complete(folder, tag)
    return tag


def locate(path: Path, tag: str | None = None) -> tuple[Path, str]:
    """The checkpoints folder and tag that a user means by PATH: a step's folder, a checkpoints folder, or a run's.

    tag: which of the checkpoints there, such as "step_00000100"; None is the latest.

    Raises:
        CheckpointError: none of the three, or no such checkpoint there.
    """
    if _TAG.fullmatch(path.name) and path.is_dir():
        if tag not in (None, path.name):
            raise CheckpointError(f"{str(path)!r} is one checkpoint: name the run's folder to pick {tag!r} by its tag")
        require_complete(path.parent, path.name)
        return path.parent, path.name
    for folder in (path, path / "checkpoints"):
        if tag is None:
            latest = find_latest(folder)
            if latest is not None:
                return folder, latest
        elif folder.is_dir() and (tags := _tags(folder)):
            if tag not in tags:
                raise CheckpointError(f"no checkpoint {tag!r} in {str(folder)!r}: it has {', '.join(tags[-5:])}")
            require_complete(folder, tag)
            return folder, tag
    raise CheckpointError(
        f"no checkpoint at {str(path)!r}: expected a step_N folder, or a folder with a file '{LATEST}'"
    )


def require_complete(folder: Path, tag: str) -> None:
    """Raise CheckpointError unless checkpoint `tag` was written to the end."""
    if not _TAG.fullmatch(tag) or not (folder / tag / STATE).is_file():
        raise CheckpointError(
            f"checkpoint {str(folder / tag)!r} is missing or was not written to the end; choose another one"
        )


def read_state(folder: Path, tag: str) -> dict[str, Any]:
    """What `save` was given as `state`. Raises CheckpointError when it cannot be read."""
    path = folder / tag / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{str(path)!r} does not hold a JSON object")
    return state


def load(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load parameters and optimizer state into `engine`, whose ranks and ZeRO stage are those that saved, on every rank
    (`reshard.load_resharded` is for others). The optimizer's settings stay the engine's own.

    Raises:
        CheckpointError: on every rank, when any of them cannot read its part.
    """
    error: Exception | None = None
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in engine.optimizer.param_groups
    ]
    epilogue = getattr(engine.optimizer, "checkpoint_event_epilogue", None)
    if epilogue is not None:  # ZeRO-3: it gathers parameters, so no rank may begin it while another has failed
        engine.optimizer.checkpoint_event_epilogue = lambda: None
    try:
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
        if loaded is None:
            error = CheckpointError(f"checkpoint {str(folder / tag)!r} lacks DeepSpeed's files")
        for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(own)
    except Exception as problem:  # whatever DeepSpeed or torch.load makes of a damaged file
        error = CheckpointError(f"cannot load checkpoint {str(folder / tag)!r}: {first_line(problem)}")
    raise_together(error)
    if epilogue is not None:
        engine.optimizer.checkpoint_event_epilogue = epilogue
        epilogue()


def read_loss_states(folder: Path, tag: str) -> Iterator[dict[str, Any]]:
    """The loss's state of each rank that saved, one at a time; none when the loss had none.

    Raises CheckpointError when a file cannot be read.
    """
    for path in sorted((folder / tag).glob(f"{LOSS_STATE}*.pt")):
        try:
            yield torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {first_line(error)}") from None
