"""Run a function in worker processes with torch's DataLoader, and report every failure of a worker as one DataError.

On Linux the workers are forked: they start in milliseconds, import nothing and share the dataset's memory. If a worker
dies, only the thread that waits for data gets a DataError. torch's own SIGCHLD handler would raise in the middle of a
training step, while the other ranks wait in a collective.

Results travel in shared memory (/dev/shm on Linux). A worker moves them there before it hands them to torch's queue.
The queue would drop a result that does not fit, and the main process would wait until the timeout.
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
"""Seconds without a result after which a worker counts as dead."""
SHARED_MEMORY_ADVICE = (
    "enlarge /dev/shm (docker run --shm-size=16g), or set a smaller train_micro_batch_size_per_gpu, fewer --workers "
    "or --workers 0"
)

_handler_installed = False
_main_thread_waits = False
"""True while the main thread waits for data. The SIGCHLD handler may only raise then."""
_deaths: list[DataError] = []
"""Deaths of this process's workers that the SIGCHLD handler has recorded."""


class _FunctionDataset(Dataset):
    """A function as the map-style dataset that torch's DataLoader requires."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        result = self._function(item)
        if get_worker_info() is None or not hasattr(result, "share_memory_"):
            return result
        try:
            return result.share_memory_()
        except RuntimeError as error:
            return _SharedMemoryFull(first_line(error))


class _SharedMemoryFull(NamedTuple):
    """Sent by a worker instead of a result that does not fit into shared memory."""

    reason: str


def map_in_workers(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    num_workers: int,
    pin_memory: bool = False,
) -> WorkerResults:
    """Return an iterator over `function(item)` for each item, in order.

    `num_workers` processes compute the results ahead of time; 0 computes them in this process. Results with a method
    `share_memory_` (tensors, `Loaded`) are moved to shared memory with it. Call this function in the main thread; any
    one thread may then take the results.
    """
    parallel: dict[str, Any] = {}
    if num_workers > 0:
        context = "fork" if sys.platform == "linux" else None
        parallel = {"timeout": WORKER_TIMEOUT_S, "multiprocessing_context": context}
    loader: DataLoader = DataLoader(
        _FunctionDataset(function),
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        collate_fn=_identity,
        worker_init_fn=_start_worker,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # without it torch draws from the global generator, which changes the training run
        **parallel,
    )
    batches = iter(loader)
    if num_workers > 0:
        _install_handler()
    return WorkerResults(batches)


class WorkerResults:
    """Iterator over the results of the workers."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._deaths_before = len(_deaths)

    def __iter__(self) -> WorkerResults:
        return self

    def __next__(self) -> Any:
        """Return the next result.

        Raises DataError if a worker died, hangs or found shared memory full. An exception that the function
        raised is raised again.
        """
        global _main_thread_waits
        self.check()
        in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            if in_main_thread:
                _main_thread_waits = True
            result = next(self._batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader"):  # torch's prefix for a dead worker; others are exceptions
                raise
            raise _worker_died(error) from error
        finally:
            if in_main_thread:
                _main_thread_waits = False
        if isinstance(result, _SharedMemoryFull):
            raise DataError(f"shared memory is full: a batch does not fit ({result.reason}); {SHARED_MEMORY_ADVICE}")
        return result

    def check(self) -> None:
        """Raise DataError if a worker has died. A main thread calls this while another thread takes the results."""
        if len(_deaths) > self._deaths_before:
            raise _deaths[-1]

    def close(self) -> None:
        """End the worker processes. Iterating afterwards stops at once."""
        self._batches = iter(())


def _worker_died(error: RuntimeError) -> DataError:
    return DataError(f"a data worker died or hangs ({first_line(error)}); if memory ran out, set fewer --workers")


def _install_handler() -> None:
    """Wrap torch's SIGCHLD handler, which raises a RuntimeError at any point of the main thread.

    The wrapper records the error. It raises a DataError only while the main thread waits for data.
    """
    global _handler_installed
    if _handler_installed or threading.current_thread() is not threading.main_thread():
        return
    _handler_installed = True
    torch_handler = signal.getsignal(signal.SIGCHLD)

    def handler(number: int, frame: Any) -> None:
        try:
            if callable(torch_handler):
                torch_handler(number, frame)
        except RuntimeError as error:
            _deaths.append(_worker_died(error))
            if _main_thread_waits:
                raise _deaths[-1] from error

    signal.signal(signal.SIGCHLD, handler)


def _start_worker(_: int) -> None:
    # Ctrl-C reaches every process of the terminal, and SIGUSR1 every process with the rank's command line. The main
    # process ends the workers itself, with SIGTERM.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Bad images are counted. Pillow's warnings on metadata and size add nothing.
    warnings.filterwarnings("ignore", module="PIL")


def _identity(item: Any) -> Any:
    return item
