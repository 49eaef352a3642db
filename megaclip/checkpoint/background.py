"""Save checkpoints while training continues.

`BackgroundSaves.start` copies the data that this rank writes to host memory. Training waits only for this copy. A
thread then writes the copy. When the files of all ranks are on the disk, a thread of the first rank writes state.json,
the manifest and `latest`, as a synchronous save does (`megaclip.checkpoint.store`). The files are the same, byte for
byte.

The threads do not communicate, because collectives of two threads could have a different order on different ranks. The
ranks exchange their progress in `poll`, which all main threads call between two steps.

Not used:

- DeepSpeed's DecoupledCheckpointEngine. It passes tensors to another process in shared memory, without a copy, so it
  must write everything before the next update. It does not call fsync, and prints errors instead of raising them.
  FastCheckpointEngine writes synchronously.
- torch.distributed.checkpoint.async_save. It has another file format, without DeepSpeed's states, and runs collectives
  in a thread. Its `DefaultStager` for copies is missing in torch 2.8 and fails at its second save in 2.11. It also does
  not keep `requires_grad`, so files would differ from those of a synchronous save.
"""

import copy
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch.utils._pytree import tree_iter

from megaclip.checkpoint import store
from megaclip.checkpoint.deepspeed_files import CheckedFiles
from megaclip.checkpoint.store import Target
from megaclip.comm.collectives import gather_integers, gather_objects
from megaclip.errors import CheckpointError, first_line
from megaclip.logging import get_logger
from megaclip.threads import in_thread

logger = get_logger(__name__)


class HostCopies:
    """Host memory for the copies of one save.

    The next save reuses the memory if its tensors have the same sizes, because filling new memory takes several times
    as long."""

    def __init__(self) -> None:
        self._buffers: list[torch.UntypedStorage] = []
        self._used = 0
        """Number of `_buffers` that the current save uses."""

    def reuse(self) -> None:
        """Start the copies of another save. The copies of the previous save must no longer be in use."""
        self._used = 0

    def copy(self, content: Any) -> Any:
        """Return a copy of nested dictionaries, lists and tuples. Its tensors are on the CPU.

        Tensors that share memory still do so in the copy: `torch.save` writes the same bytes, if the originals are on
        the CPU too. Raises RuntimeError if there is not enough memory.
        """
        memo: dict[int, Any] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for value in tree_iter(content):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = self._on_host(value, storages)
        return copy.deepcopy(content, memo)

    def _on_host(self, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return a copy of one tensor. storages: copies of storages, by the address of the original."""
        original = tensor.untyped_storage()
        if original._cdata not in storages:
            storages[original._cdata] = self._filled(original)
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(storages[original._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        copied.__dict__.update(copy.deepcopy(tensor.__dict__))  # torch.save writes them: DeepSpeed's ds_id at ZeRO-3
        return copied.requires_grad_(tensor.requires_grad)

    def _filled(self, original: torch.UntypedStorage) -> torch.UntypedStorage:
        if self._used == len(self._buffers):
            self._buffers.append(torch.UntypedStorage(original.nbytes()))
        elif self._buffers[self._used].nbytes() != original.nbytes():
            self._buffers[self._used] = torch.UntypedStorage(original.nbytes())
        buffer = self._buffers[self._used]
        self._used += 1
        buffer.copy_(original, non_blocking=False)
        return buffer


class CopiedFiles(CheckedFiles):
    """Checkpoint engine that copies files' contents to host memory. `write` writes them, in any thread."""

    def __init__(self, copies: HostCopies) -> None:
        super().__init__()
        self._copies = copies
        self._copied: list[tuple[Any, str]] = []
        copies.reuse()

    def save(self, state_dict: Any, path: str) -> None:
        """Copy a file's content."""
        try:
            self._copied.append((self._copies.copy(state_dict), path))
        except (RuntimeError, MemoryError) as problem:
            self.error = self.error or CheckpointError(
                "host memory is too small for the copy of the checkpoint that --async-save makes "
                f"({first_line(problem)}); leave out --async-save, and resume with --resume auto"
            )

    def write(self) -> None:
        """Write the copies, up to the first error."""
        for content, path in self._copied:
            if self.error is None:
                super().save(content, path)
        self._copied.clear()


@dataclass(frozen=True)
class _Save:
    """A save in flight on this rank."""

    target: Target
    job: Future[Any]
    """Result of the thread: first the records of this rank's files, then None."""
    publishes: bool = False
    """True if all ranks' files are on the disk, so that the first rank completes the checkpoint."""
    started: float = field(default_factory=time.monotonic)


class BackgroundSaves:
    """The saves of one run, at most one at a time. All ranks must call each method together, in the main thread."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._save: _Save | None = None

    @property
    def in_flight(self) -> str | None:
        """Tag of the checkpoint that is being written, or None."""
        return None if self._save is None else self._save.target.tag

    def start(self, engine: DeepSpeedEngine, target: Target, loss_state: dict[str, Any] | None) -> None:
        """Copy what this rank writes, and start to write it. No other save may be in flight. Raises as `poll`."""
        assert self._save is None, "call finish first"
        files = CopiedFiles(self._copies)
        store.write_rank(engine, target, loss_state, files)
        self._save = _Save(target, in_thread(lambda: store.finish_rank(target, files), "checkpoint"))

    def poll(self) -> bool:
        """Return whether a checkpoint has become complete since the last call, and log it.

        Raises CheckpointError on every rank, if any rank cannot write. `latest` still names the previous checkpoint.
        """
        save = self._save
        if save is None or not all(done for (done,) in gather_integers([int(save.job.done())])):
            return False
        self._save, written = None, {}
        with store.writing(save.target.folder):
            written = save.job.result()
        if save.publishes:
            logger.info("saved %s: complete %.1f s after its copy", save.target.tag, time.monotonic() - save.started)
            return True
        records = store.join(gather_objects(written))
        job = in_thread(lambda: store.publish(save.target, records), "checkpoint")
        self._save = replace(save, job=job, publishes=True)
        return False

    def finish(self) -> None:
        """Wait until no save is in flight. Raises as `poll`.

        The main thread waits, so an interrupted run keeps the checkpoint in flight.
        """
        while self._save is not None:
            wait([self._save.job])
            self.poll()
