"""Training checkpoints: save and load them.

    RUN/checkpoints/
        latest              name of the newest complete checkpoint; replaced atomically after every rank has written
        step_00000100/      DeepSpeed's files of all ranks; loss_rank_*.pt if the loss has state of its own; state.json;
                            and the manifest, which is written last
        model/              open_clip_config.json, the tokenizer and a manifest: everything of an export except the
                            weights

A run that is killed, or whose machine loses power, while it saves keeps its previous checkpoint. Files and folders are
made to survive a power cut before the manifest names them, and the checkpoint is complete before `latest` names it.
DeepSpeed itself writes `latest` before the other ranks have finished, so that feature of DeepSpeed is turned off.

Every checkpoint records the run that wrote it. A run deletes only its own checkpoints, and incomplete ones.
"""

import contextlib
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megaclip.checkpoint import manifest
from megaclip.checkpoint.deepspeed_files import CheckedFiles
from megaclip.checkpoint.durable import (
    FileRecord,
    checksum,
    make_folders,
    save_tensors,
    sync_files,
    sync_folder,
    write_atomically,
)
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.search import (
    LATEST,
    STATE,
    STATE_FORMAT,
    all_tags,
    is_complete,
    read_latest,
    run_of,
    step_of,
    tag_of,
)
from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.comm.groups import group_rank
from megaclip.errors import CheckpointError, first_line
from megaclip.logging import get_logger

logger = get_logger(__name__)

LOSS_STATE = "loss_rank_"
_OFFLOADED = "offloaded_tensors"
"""Folder in a checkpoint to which DeepSpeed copies optimizer states from NVMe, in one subfolder per rank."""


def save(
    engine: DeepSpeedEngine,
    folder: Path,
    step: int,
    state: dict[str, Any],
    keep_last: int,
    loss_state: dict[str, Any] | None = None,
    *,
    keep_every: int | None = None,
    best: str | None = None,
    run: str = "",
) -> str:
    """Write a checkpoint from all ranks, make `latest` name it, and delete old checkpoints of this run.

    Args:
        engine: its parameters and optimizer state are written.
        folder: RUN/checkpoints; it must exist.
        step: number of optimizer steps taken.
        state: JSON-serialisable state of the run, which `read_state` returns.
        keep_last: number of checkpoints of this run to keep, this one included; at least 1.
        loss_state: this rank's part of the loss's own state (tensors, numbers, strings), or None.
        keep_every: also keep the first checkpoint at or after each multiple of this number of steps.
        best: tag of a checkpoint to keep besides these, or None; only the first rank's is used.
        run: identifier of this run; only the first rank's is used.

    Returns:
        the tag (folder name) of the checkpoint.

    Raises:
        CheckpointError: on every rank, if any rank cannot write.
    """
    tag = tag_of(step)
    is_first_rank = group_rank() == 0
    with _writing(folder):
        if is_first_rank:
            _clear(folder, tag, run)
    files = _write_engine(engine, folder, tag)
    with _writing(folder):
        if loss_state is not None:
            path = folder / tag / f"{LOSS_STATE}{group_rank():05d}.pt"
            files[path.name] = save_tensors(loss_state, path)
    all_files = {name: record for records in gather_objects(files) for name, record in records.items()}
    with _writing(folder):
        if is_first_rank:
            write_atomically(folder / tag / STATE, json.dumps({**state, "format": STATE_FORMAT}, indent=1))
            all_files[STATE] = checksum(folder / tag / STATE)
            manifest.write(folder / tag, all_files, run=run)
            write_atomically(folder / LATEST, tag)
            for old in _to_delete(folder, tag, keep_last, keep_every, best, run):
                _delete(folder / old)
    return tag


def _write_engine(engine: DeepSpeedEngine, folder: Path, tag: str) -> dict[str, FileRecord]:
    """Write DeepSpeed's files; return the records of those that this rank has written, by path in the checkpoint.

    `engine.save_checkpoint` contains collectives, so a rank that cannot write must still take part in all of them. Its
    error is stored, and raised on every rank after the last collective.
    """
    error: Exception | None = None
    own, files = engine.checkpoint_engine, CheckedFiles()
    engine.checkpoint_engine = files
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    except OSError as problem:
        # DeepSpeed could not copy its scripts or offloaded tensors. Run the collectives that it has skipped.
        error = problem
        getattr(engine.optimizer, "checkpoint_event_epilogue", lambda: None)()
        dist.barrier()
    finally:
        engine.checkpoint_engine = own
    records = {path.relative_to(folder / tag).as_posix(): record for path, record in files.records.items()}
    with _writing(folder):
        if (first_error := files.error or error) is not None:
            raise first_error
        offloaded = folder / tag / _OFFLOADED
        if offloaded.is_dir():
            own_part = f"{_OFFLOADED}/rank{group_rank():02d}"
            records |= {f"{own_part}/{name}": record for name, record in sync_files(folder / tag / own_part).items()}
            sync_folder(offloaded)
        sync_folder(folder / tag)
    return records


def _clear(folder: Path, tag: str, run: str) -> None:
    """Make room for checkpoint `tag`. If `latest` names it, make `latest` name an earlier complete one first.

    A run that has resumed from an earlier step may save again at the step that `latest` names. A complete checkpoint of
    another run is renamed, never deleted.
    """
    latest = folder / LATEST
    if read_latest(folder) == tag:
        earlier = [old for old in all_tags(folder) if old < tag and is_complete(folder, old)]
        if earlier:
            write_atomically(latest, earlier[-1])
    if is_complete(folder, tag) and run_of(folder, tag) != run:
        number = next(number for number in range(1, 10**9) if not (folder / f"{tag}.old{number}").exists())
        (folder / tag).rename(folder / f"{tag}.old{number}")
        sync_folder(folder)
        logger.warning("%s is of another run; renamed it to %s.old%d", folder / tag, tag, number)
    else:
        _delete(folder / tag)
    make_folders(folder / tag)


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint. Its manifest goes first, so what a killed process leaves is not taken for a complete one."""
    with contextlib.suppress(OSError):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        sync_folder(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _to_delete(
    folder: Path, newest: str, keep_last: int, keep_every: int | None, best: str | None, run: str
) -> list[str]:
    """Return the checkpoints to delete after `newest` has been saved: incomplete ones, and old ones of this run.

    Among those of this run, the ones after step `newest` go first: the run has resumed from an earlier step because
    they were damaged. Then the others follow by age.
    """
    others = [tag for tag in all_tags(folder) if tag != newest]
    incomplete = [tag for tag in others if not is_complete(folder, tag)]
    own = [tag for tag in others if tag not in incomplete and run_of(folder, tag) == run]
    own = [*sorted(own, key=lambda tag: (tag <= newest, tag)), newest]
    kept = {*own[-keep_last:], *_every(own, keep_every), best}
    return incomplete + [tag for tag in own if tag not in kept]


def _every(tags: list[str], steps: int | None) -> list[str]:
    """Return the first of `tags` at or after each multiple of `steps`, except those before the first multiple."""
    first: dict[int, str] = {}
    for tag in sorted(tags, reverse=True):
        if steps is not None:
            first[step_of(tag) // steps] = tag
    return [tag for block, tag in first.items() if block]


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


def read_state(folder: Path, tag: str) -> dict[str, Any]:
    """Return the `state` that was given to `save`. Raises CheckpointError if it cannot be read."""
    path = folder / tag / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    engine.checkpoint_engine = CheckedFiles()  # reads without executing anything
    with raise_on_all_ranks():
        try:
            loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
            for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
                group.update(own)
        except CheckpointError:
            raise
        except Exception as problem:  # a damaged file can cause any exception inside DeepSpeed
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
