"""Worker processes: torch's DataLoader, told what to do by small work items and made to fail in one clear error.

Workers are forked on Linux, so they start in milliseconds, import nothing and share the dataset's memory. A worker that
dies is a DataError for whoever waits for data, and never an interruption of anything else: torch's SIGCHLD handler
would raise in the middle of a training step, while the other ranks wait in a collective.

Results travel in shared memory (/dev/shm on Linux). A worker puts them there itself, before torch's queue would: what
the queue's thread cannot place it drops, and whoever waits would wait until the time is out.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from megaclip.errors import DataError, first_line

WORKER_TIMEOUT_S = 600.0
"""A worker that gives nothing for so long is taken for dead."""
SHARED_MEMORY_ADVICE = (
    "give /dev/shm more (docker run --shm-size=16g), or take a smaller train_micro_batch_size_per_gpu, fewer --workers "
    "or --workers 0"
)

_watching = False
_main_waits = False
"""Whether the main thread is waiting for data: then, and only then, the signal may interrupt it."""
_deaths: list[DataError] = []
"""Of this process's workers, as the signal told of them."""


class _Work(Dataset):
    """A function of a work item in the shape that torch's workers want."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        result = self._function(item)
        if get_worker_info() is None or not hasattr(result, "share_memory_"):
            return result
        try:
            return result.share_memory_()
        except RuntimeError as error:
            return _NotShared(first_line(error))


class _NotShared(NamedTuple):
    """What a worker hands back instead of a result that found no shared memory."""

    reason: str


def map_in_workers(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    num_workers: int,
    pin_memory: bool = False,
) -> WorkerResults:
    """`function(item)` for each item, in order, computed ahead of time by `num_workers` processes (0: in this one).

    Results with a method `share_memory_` (tensors, `Loaded`) are moved to shared memory by it.
    To be called in the main thread; the results may be taken in any one thread.
    """
    parallel: dict[str, Any] = {}
    if num_workers > 0:
        context = "fork" if sys.platform == "linux" else None
        parallel = {"timeout": WORKER_TIMEOUT_S, "multiprocessing_context": context}
    loader: DataLoader = DataLoader(
        _Work(function),
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_begin_worker,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or torch would draw from the global generator, and change the training run
        **parallel,
    )
    batches = iter(loader)
    if num_workers > 0:
        _watch_workers()
    return WorkerResults(batches)


class WorkerResults:
    """An iterator over what the workers computed."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._deaths_before = len(_deaths)

    def __iter__(self) -> WorkerResults:
        return self

    def __next__(self) -> Any:
        """The next result; raises DataError when a worker died, hangs or found no shared memory, and what the function
        raised."""
        global _main_waits
        self.check()
        in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            if in_main_thread:
                _main_waits = True
            result = next(self._batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader"):  # torch's own words for a death; "Caught ..." is an exception
                raise
            raise _died(error) from error
        finally:
            if in_main_thread:
                _main_waits = False
        if isinstance(result, _NotShared):
            raise DataError(
                f"no room in shared memory for what a data worker read ({result.reason}); {SHARED_MEMORY_ADVICE}"
            )
        return result

    def check(self) -> None:
        """Raise DataError if a worker has died meanwhile: for a main thread that waits while another takes results."""
        if len(_deaths) > self._deaths_before:
            raise _deaths[-1]

    def close(self) -> None:
        """End the worker processes; iterating afterwards stops at once."""
        self._batches = iter(())


def _died(error: RuntimeError) -> DataError:
    return DataError(f"a data worker died or hangs ({first_line(error)}); out of memory? try fewer --workers")


def _watch_workers() -> None:
    """torch's SIGCHLD handler raises a RuntimeError in whatever the main thread is doing; let it raise, a DataError,
    only where that thread waits for data."""
    global _watching
    if _watching or threading.current_thread() is not threading.main_thread():
        return
    _watching = True
    of_torch = signal.getsignal(signal.SIGCHLD)

    def handler(number: int, frame: Any) -> None:
        try:
            if callable(of_torch):
                of_torch(number, frame)
        except RuntimeError as error:
            _deaths.append(_died(error))
            if _main_waits:
                raise _deaths[-1] from error

    signal.signal(signal.SIGCHLD, handler)


def _begin_worker(_: int) -> None:
    # Ctrl-C reaches every process of the terminal, SIGUSR1 every one with the rank's command line: the main process
    # ends the workers itself, by SIGTERM.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What is wrong with an image is counted; Pillow's remarks on metadata and size are noise.
    warnings.filterwarnings("ignore", module="PIL")


def _as_it_is(item: Any) -> Any:
    return item
