"""Run a function in worker processes with torch's DataLoader, and report every failure of a worker as one DataError.

On Linux the workers are forked: they start in milliseconds, import nothing and share the dataset's memory. If a worker
dies, only the thread that waits for data gets a DataError. torch's own SIGCHLD handler would raise in the middle of a
training step, while the other ranks wait in a collective.

A worker notes the row that it reads (`note_row`), so that the error can name it. It writes its Python stacks when it
receives SIGUSR2 (`worker_stacks`).

Results are passed through a pipe, as bytes. torch would move each tensor to /dev/shm, which may be full. The main
process would connect to a thread of the worker for each of them, and wait until it gets the worker's interpreter lock.
Pixels are too large for a pipe, so workers write them into memory that both processes share (shared_memory.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

from megaclip.data.forking import CheckedForkContext, leave_stop_signals_to_parent
from megaclip.errors import DataError, first_line

WORKER_TIMEOUT_S = 600.0
"""Largest number of seconds without a result after which a worker counts as dead."""
PREFETCHED = 2
"""Number of items that each worker may have received before their results are taken."""

_STACK_SIGNAL = signal.SIGUSR2
_STACKS_WAIT_S = 1.0
"""Seconds within which a worker must write its stacks."""
_DEATH_WAIT_S = 1.0
"""Seconds to wait for the exit code of a worker whose connection is broken."""
_RAISED_BY_FUNCTION = "in DataLoader worker process"
"""Text in torch's message of an exception that the function raised in a worker."""

_timeout_s = WORKER_TIMEOUT_S
_handler_installed = False
_waiting: WorkerResults | None = None
"""Results that the main thread is waiting for. The SIGCHLD handler may raise only while it waits."""
_running: weakref.WeakSet[WorkerResults] = weakref.WeakSet()
_stack_file: int | None = None
"""File descriptor of the file in memory to which the workers of this process write their stacks."""
_own_row: Any = None
"""In a worker: function that sets the row that it reads, in memory shared with the main process."""


def set_worker_timeout(seconds: float) -> None:
    """Set the time without a result after which workers that are started later count as dead."""
    global _timeout_s
    _timeout_s = seconds


def note_row(row: int) -> None:
    """Note the row that this process is about to read. It has no effect outside of a worker."""
    if _own_row is not None:
        _own_row(row)


class _FunctionDataset(Dataset):
    """A function as the map-style dataset that torch's DataLoader requires."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        result = self._function(item)
        if get_worker_info() is None:
            return result
        content = io.BytesIO()
        _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(result)
        return content.getvalue()


class _Pickler(pickle.Pickler):
    """Pickle tensors as arrays, which takes a tenth of the time of a tensor's own way."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, torch.Tensor) else NotImplemented


def map_in_workers(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    num_workers: int,
    describe_row: Callable[[int], str] = str,
) -> WorkerResults:
    """Return an iterator over `function(item)` for each item, in order.

    `num_workers` processes compute the results ahead of time; 0 computes them in this process. When the result number n
    is taken, at most PREFETCHED * num_workers items behind it have been passed to workers. Results are pickled. Call
    this function in the main thread; any one thread may then take the results.

    describe_row: returns a description of the row that a worker has noted, for the error if it dies.

    Raises DataError if the system refuses to start the processes.
    """
    parallel: dict[str, Any] = {}
    rows: Any = []
    with _start_errors(num_workers):
        if num_workers > 0:
            context = CheckedForkContext()
            parallel = {
                "timeout": _timeout_s,
                "multiprocessing_context": context,
                "prefetch_factor": PREFETCHED,
            }
            rows = context.RawArray("q", [-1] * num_workers)
            _open_stack_file()
            _install_handler()
        loader: DataLoader = DataLoader(
            _FunctionDataset(function),
            batch_size=None,
            sampler=items,
            num_workers=num_workers,
            collate_fn=_identity,
            worker_init_fn=functools.partial(_start_worker, rows),
            generator=torch.Generator(),  # without it torch draws from the global one, which changes the training run
            **parallel,
        )
        batches = iter(loader)
    return WorkerResults(batches, rows, describe_row)


@contextlib.contextmanager
def _start_errors(num_workers: int) -> Iterator[None]:
    """Raise DataError if the body cannot start the worker processes, and end those that it has started."""
    try:
        yield
    except OSError as error:
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            traceback.clear_frames(error.__traceback__)  # deletes torch's iterator, which shows a second traceback
        finally:
            sys.unraisablehook = hook
        raise DataError(
            f"--workers {num_workers}: cannot start the data workers ({first_line(error)}); set fewer --workers, or "
            "raise the limits on open files (ulimit -n), processes (ulimit -u, docker --pids-limit), memory or /dev/shm"
        ) from None


class WorkerResults:
    """Iterator over the results of the workers.

    rows: the row that each worker has noted last, -1 for none; empty without workers. describe_row: as for
    `map_in_workers`.
    """

    def __init__(self, batches: Iterator[Any], rows: Any, describe_row: Callable[[int], str]) -> None:
        self._batches = batches
        self._rows = rows
        self._describe_row = describe_row
        self.workers: list[Any] = list(getattr(batches, "_workers", []))
        """Worker processes."""
        _running.add(self)

    def __iter__(self) -> WorkerResults:
        return self

    def __next__(self) -> Any:
        """Return the next result.

        Raises DataError if a worker died or hangs. An exception that the function raised is raised again.
        """
        global _waiting
        try:
            result = self._take()
        except Exception as error:
            _waiting = None
            if isinstance(error, StopIteration) or not self.workers or _RAISED_BY_FUNCTION in str(error):
                raise
            # A worker that is killed while it sends or receives causes errors of many types in this process.
            raise self._failed(error) from error
        return result

    def _take(self) -> Any:
        global _waiting
        in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            if in_main_thread:
                _waiting = self
            self._raise_death()  # raised for a worker that died before the handler could raise
            result = next(self._batches)
            return pickle.loads(result) if self.workers else result
        finally:
            if in_main_thread:
                _waiting = None

    def check(self) -> None:
        """Raise DataError if a worker has died. A main thread calls this while another thread takes the results."""
        try:
            self._raise_death()
        except RuntimeError as death:
            raise self._failed(death) from None

    def _raise_death(self) -> None:
        """Raise RuntimeError if a worker has died. It checks exit codes, so no death is missed between two waits."""
        if getattr(self._batches, "_shutdown", True):  # torch has ended the workers itself, perhaps with a signal
            return
        for worker in self.workers:
            if code := worker.exitcode:
                how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with {code}"
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}")

    def close(self) -> None:
        """End the worker processes. Iterating afterwards stops at once."""
        # The workers are ended explicitly, because the traceback of a caught error may keep torch's iterator alive.
        end_workers = getattr(self._batches, "_shutdown_workers", lambda: None)
        self._batches = iter(())
        end_workers()

    def reading(self, worker: int) -> str:
        """Return a description of the row that a worker has noted last, or "" if it has noted none."""
        row = int(self._rows[worker])
        return self._describe_row(row) if row >= 0 else ""

    def _failed(self, error: Exception) -> DataError:
        """Return the error of a worker that died or hangs; it names the rows that such workers were reading."""
        deadline = time.monotonic() + _DEATH_WAIT_S
        while not (dead := [n for n, worker in enumerate(self.workers) if worker.exitcode is not None]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        rows = [text for n in dead or range(len(self.workers)) if (text := self.reading(n))]
        where = f"; {'it was' if len(rows) == 1 else 'they were'} reading {', '.join(rows[:3])}" if rows else ""
        reason = first_line(error)
        if not reason.startswith("DataLoader"):  # the message of torch for a worker that is dead or timed out
            reason = f"{type(error).__name__}: {reason}"
        return DataError(f"a data worker died or hangs ({reason}){where}; if memory ran out, set fewer --workers")


def worker_stacks() -> str:
    """Return the Python stacks of all workers of this process, of all their threads."""
    if _stack_file is None:
        return ""
    texts = []
    for results in list(_running):
        for number, worker in enumerate(results.workers):
            if worker.exitcode is not None:
                continue
            row, start = results.reading(number), os.fstat(_stack_file).st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, _STACK_SIGNAL)
            stacks = _written_after(start) or "it does not answer: it is stopped or waits for a disk\n"
            texts.append(f"data worker {number}, process {worker.pid}{', last row: ' * bool(row)}{row}\n{stacks}")
    return "\n".join(texts)


def kill_workers() -> None:
    """Kill all workers of this process, for a process that is about to end without closing its loaders."""
    for results in list(_running):
        for worker in results.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def _open_stack_file() -> None:
    global _stack_file
    if _stack_file is None and hasattr(os, "memfd_create"):
        _stack_file = os.memfd_create("worker-stacks")
        fcntl.fcntl(_stack_file, fcntl.F_SETFL, fcntl.fcntl(_stack_file, fcntl.F_GETFL) | os.O_APPEND | os.O_NONBLOCK)


def _written_after(start: int) -> str:
    """Return the text in the stack file behind byte `start`, when a worker has written it completely.

    The stack of the main thread is the last one. It ends with the function with which this process began, because the
    worker was forked, or with dots if it is deep.
    """
    assert _stack_file is not None
    main = threading.main_thread().ident
    first = list(traceback.walk_stack(sys._current_frames()[main]))[-1][0].f_code.co_name if main else ""
    deadline = time.monotonic() + _STACKS_WAIT_S
    while True:
        text = os.pread(_stack_file, 1 << 20, start).decode("utf-8", "replace")
        whole = "Current thread" in text and text.endswith((f" in {first}\n", "...\n"))
        if whole or time.monotonic() > deadline:
            return text
        time.sleep(0.02)


def _install_handler() -> None:
    """Wrap torch's SIGCHLD handler, which can raise a RuntimeError anywhere in the main thread.

    The wrapper raises only while the main thread waits for data. It must be installed before the first worker starts.
    """
    global _handler_installed
    if _handler_installed or threading.current_thread() is not threading.main_thread():
        return
    _handler_installed = True
    _set_SIGCHLD_handler()
    torch_handler = signal.getsignal(signal.SIGCHLD)

    def handler(number: int, frame: Any) -> None:
        with contextlib.suppress(RuntimeError):
            if callable(torch_handler):
                torch_handler(number, frame)
        if _waiting is not None:
            _waiting._raise_death()

    signal.signal(signal.SIGCHLD, handler)


def _start_worker(rows: Any, number: int) -> None:
    global _own_row
    _own_row = functools.partial(rows.__setitem__, number)
    if _stack_file is not None:
        faulthandler.register(_STACK_SIGNAL, file=_stack_file, all_threads=True)
    leave_stop_signals_to_parent()  # again, because torch has installed its own handler in the worker
    # Bad images are counted, so Pillow's warnings on metadata and size are not needed.
    warnings.filterwarnings("ignore", module="PIL")


def _identity(item: Any) -> Any:
    return item
