"""Training checkpoints: save them. `megaclip.zero.reshard` loads them.

    RUN/checkpoints/
        latest              name of the newest complete checkpoint; replaced atomically after every rank has written
        step_00000100/      DeepSpeed's files of all ranks; loss_rank_*.pt if the loss has its own state; state.json;
                            and the manifest, which is written last
        model/              open_clip_config.json, the tokenizer and a manifest: everything of an export except the
                            weights; with bf16 the float32 values of locked parameters

docs/checkpoints.md describes the order in which they are written, and which ones are kept. DeepSpeed itself writes
`latest` before the other ranks have finished, so that feature of DeepSpeed is turned off.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from megaclip.checkpoint import manifest
from megaclip.checkpoint.deepspeed_files import CheckedFiles, read_file, save_with
from megaclip.checkpoint.durable import FileRecord, checksum, make_folders
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.search import LATEST, STATE, all_tags, is_complete, latest_tag, run_of, step_of, tag_of
from megaclip.comm.collectives import gather_objects, raise_on_all_ranks
from megaclip.comm.groups import group_rank
from megaclip.errors import CheckpointError, first_line
from megaclip.files import sync_folder, write_atomically
from megaclip.logging import get_logger

logger = get_logger(__name__)

LOSS_STATE = "loss_rank_"
_STATE_FORMAT = 2
"""Value of "format" in state.json."""


@dataclass(frozen=True)
class Target:
    """A checkpoint to write, and the rules by which other checkpoints are kept."""

    folder: Path
    """RUN/checkpoints; it must exist."""
    step: int
    """Number of optimizer steps taken."""
    state: dict[str, Any]
    """JSON-serialisable state of the run, which `read_state` returns."""
    keep_last: int
    """Number of checkpoints of this run to keep, this one included; at least 1."""
    keep_every: int | None = None
    """Also keep the first checkpoint at or after each multiple of this number of steps."""
    run: str = ""
    """Identifier of this run; only the first rank's is used."""
    best: str | None = None
    """Name of a checkpoint to keep besides these; only the first rank's is used."""

    @property
    def tag(self) -> str:
        """Name of the checkpoint's folder."""
        return tag_of(self.step)


def save(engine: DeepSpeedEngine, target: Target, loss_state: dict[str, Any] | None = None) -> str:
    """Write a checkpoint from all ranks, make `latest` name it, and delete old checkpoints of this run.

    loss_state: this rank's part of the loss's own state (tensors, numbers, strings), or None. Returns the tag (folder
    name) of the checkpoint. Raises CheckpointError on every rank, if any rank cannot write.
    """
    files = CheckedFiles()
    write_rank(engine, target, loss_state, files)
    records: dict[str, FileRecord] = {}
    with writing(target.folder):
        records = finish_rank(target, files)
    records = join(gather_objects(records))
    with writing(target.folder):
        publish(target, records)
    return target.tag


def write_rank(engine: DeepSpeedEngine, target: Target, loss_state: dict[str, Any] | None, files: CheckedFiles) -> None:
    """Pass this rank's data to `files`, the checkpoint engine. All ranks must call it.

    `engine.save_checkpoint` contains collectives, so a rank that cannot write must still take part in all of them. Its
    error is stored in `files`. Raises CheckpointError on every rank, if the first one cannot create the folder.
    """
    folder, tag = target.folder, target.tag
    with writing(folder):
        if group_rank() == 0:
            _clear(folder, tag, target.run)
    try:
        save_with(files, engine, folder, tag)
    except OSError as problem:
        files.error = files.error or problem
    if loss_state is not None:
        files.save(loss_state, str(folder / tag / f"{LOSS_STATE}{group_rank():05d}.pt"))


def finish_rank(target: Target, files: CheckedFiles) -> dict[str, FileRecord]:
    """Write the remaining data of `files`; return the records of this rank's files, by path in the checkpoint.

    It does not communicate and may run in any thread. Raises the first error of this rank.
    """
    files.write()
    if files.error is not None:
        raise files.error
    checkpoint = target.folder / target.tag
    records = {path.relative_to(checkpoint).as_posix(): record for path, record in files.records.items()}
    sync_folder(checkpoint)
    return records


def join(records: Iterable[dict[str, FileRecord]]) -> dict[str, FileRecord]:
    """Return the records of all ranks in one dictionary."""
    return {name: record for of_rank in records for name, record in of_rank.items()}


def publish(target: Target, files: dict[str, FileRecord]) -> None:
    """Write state.json, the manifest and `latest`, in this order, and delete old checkpoints; on the first rank only.

    It does not communicate and may run in any thread. files: records of the files of all ranks. Raises OSError if a
    file cannot be written.
    """
    if group_rank() != 0:
        return
    folder, checkpoint = target.folder, target.folder / target.tag
    write_atomically(checkpoint / STATE, json.dumps({**target.state, "format": _STATE_FORMAT}, indent=1))
    manifest.write(checkpoint, {**files, STATE: checksum(checkpoint / STATE)}, run=target.run)
    write_atomically(folder / LATEST, target.tag)
    for old in _to_delete(target):
        _delete(folder / old)


def _clear(folder: Path, tag: str, run: str) -> None:
    """Remove an existing checkpoint `tag`. If `latest` names it, make `latest` name an earlier complete one first.

    A run that has resumed from an earlier step may save again at the step that `latest` names. A complete checkpoint of
    another run is renamed, never deleted.
    """
    if latest_tag(folder) == tag:
        earlier = [old for old in all_tags(folder) if old < tag and is_complete(folder, old)]
        if earlier:
            write_atomically(folder / LATEST, earlier[-1])
    if is_complete(folder, tag) and run_of(folder, tag) != run:
        number = next(number for number in range(1, 10**9) if not (folder / f"{tag}.old{number}").exists())
        (folder / tag).rename(folder / f"{tag}.old{number}")
        sync_folder(folder)
        logger.warning("%s belongs to another run; renamed it to %s.old%d", folder / tag, tag, number)
    else:
        _delete(folder / tag)
    make_folders(folder / tag)


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first, so that the rest never counts as complete if the process is killed."""
    with contextlib.suppress(OSError):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        sync_folder(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _to_delete(target: Target) -> list[str]:
    """Return the checkpoints to delete after `target` has been saved: incomplete ones, and old ones of this run.

    Checkpoints of this run after the target's step are deleted first: the run has resumed from an earlier step because
    they were damaged. The others follow by age, the oldest first.
    """
    folder, newest = target.folder, target.tag
    others = [tag for tag in all_tags(folder) if tag != newest]
    incomplete = [tag for tag in others if not is_complete(folder, tag)]
    own = [tag for tag in others if tag not in incomplete and run_of(folder, tag) == target.run]
    own = [*sorted(own, key=lambda tag: (tag <= newest, tag)), newest]
    kept = {*own[-target.keep_last :], *_every(own, target.keep_every), target.best}
    return incomplete + [tag for tag in own if tag not in kept]


def _every(tags: list[str], steps: int | None) -> list[str]:
    """Return the first of `tags` at or after each multiple of `steps`, except those before the first multiple."""
    first = {} if steps is None else {step_of(tag) // steps: tag for tag in sorted(tags, reverse=True)}
    return [tag for block, tag in first.items() if block]


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Run the body of a `with` statement; if it cannot write on any rank, raise one CheckpointError on every rank.

    The body must not communicate.
    """
    with raise_on_all_ranks():
        try:
            yield
        except (OSError, RuntimeError) as problem:
            free = "it cannot be reached"
            with contextlib.suppress(OSError):  # PyTorch's message for a full disk is obscure
                free = f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free"
            raise CheckpointError(
                f"cannot write the checkpoint: {first_line(problem)}; free space at {str(folder)!r} ({free}) or fix "
                "permissions, then use --resume auto"
            ) from problem


def read_state(folder: Path, tag: str) -> dict[str, Any]:
    """Return the state of a checkpoint that is whole (`search.require_whole`)."""
    state: dict[str, Any] = json.loads((folder / tag / STATE).read_text(encoding="utf-8"))
    return state


def read_loss_states(folder: Path, tag: str) -> Iterator[dict[str, Any]]:
    """Yield the loss's state of every rank that saved, in rank order. Raises CheckpointError if one cannot be read."""
    for path in sorted((folder / tag).glob(f"{LOSS_STATE}*.pt")):
        yield read_file(path, map_location="cpu")
