"""Worker processes: torch's DataLoader, told what to do by small work items and made to fail in one clear error.

Workers are forked on Linux, so they start in milliseconds, import nothing and share the dataset's memory. A worker that
dies ends the run in a DataError: torch notices through SIGCHLD wherever the main process is, also in the middle of a
training step.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megaclip.errors import DataError

WORKER_TIMEOUT_S = 600.0
"""A worker that gives nothing for so long is taken for dead."""

_watching = False


class _Work(Dataset):
    """A function of a work item in the shape that torch's workers want."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        return self._function(item)


def map_in_workers(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    num_workers: int,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
) -> Iterator[Any]:
    """`function(item)` for each item, in order, computed ahead of time by `num_workers` processes (0: in this one)."""
    parallel: dict[str, Any] = {}
    if num_workers > 0:
        context = "fork" if sys.platform == "linux" else None
        parallel = {"prefetch_factor": prefetch_factor, "timeout": WORKER_TIMEOUT_S, "multiprocessing_context": context}
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
    return _with_clear_errors(batches)


def _with_clear_errors(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if "DataLoader" not in str(error):
                raise
            raise _died(error) from error
        yield batch


def _died(error: RuntimeError) -> DataError:
    reason = str(error).strip().split("\n")[0]
    return DataError(f"a data worker died or hangs ({reason}); out of memory? try fewer --workers")


def _watch_workers() -> None:
    """torch's SIGCHLD handler raises a RuntimeError in whatever the main thread is doing; make that a DataError."""
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
            raise _died(error) from error

    signal.signal(signal.SIGCHLD, handler)


def _begin_worker(_: int) -> None:
    # Ctrl-C reaches every process of the terminal; the main process ends the workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is wrong with an image is counted; Pillow's remarks on metadata and size are noise.
    warnings.filterwarnings("ignore", module="PIL")


def _as_it_is(item: Any) -> Any:
    return item
