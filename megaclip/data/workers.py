"""Run a function in worker processes, and report every failure of a worker as one DataError.

The workers are forked: they start in milliseconds, import nothing and share the dataset's memory. Each has a connection
of its own to this process, which sends it items and receives their results. A connection ends with the process at its
other end, so the end of a worker is noticed when its next result is taken, and workers end with this process. Processes
share no lock, which a killed worker could leave locked.

A worker notes the row that it reads (`note_row`), so that the error can name it. It writes its Python stacks when it
receives SIGUSR2 (`worker_stacks`).

Pixels are too large for a connection, so workers write them into memory that both processes share (`shared_pixels`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import mmap
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megaclip.data.forking import CheckedForkContext
from megaclip.errors import DataError, first_line

WORKER_TIMEOUT_S = 600.0
"""Largest number of seconds without a result after which a worker counts as dead."""
PREFETCHED = 2
"""Number of items that each worker may have received before their results are taken."""
NAME = "data_worker"
"""Name of the worker processes, for `ps` and `top`."""

_STACK_SIGNAL = signal.SIGUSR2
_STACKS_WAIT_S = 1.0
"""Seconds in which workers write their stacks."""
_CHECK_S = 1.0
"""Seconds between two checks that the process at the other end of a connection exists."""
_DEATH_WAIT_S = 1.0
"""Seconds to wait for the exit code of a worker whose connection has ended."""
_KILL_WAIT_S = 5.0
"""Seconds to wait for the end of a killed worker, which may wait for a disk."""

_timeout_s = WORKER_TIMEOUT_S
_running: weakref.WeakSet[WorkerResults] = weakref.WeakSet()
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


def shared_pixels(shape: tuple[int, ...], file: int = -1) -> torch.Tensor:
    """Return zeros of this shape, uint8, which processes that are forked later share with this one.

    They are no part of /dev/shm, whose size may be small. file: descriptor of an open file of this size that contains
    the zeros. Default: they are in memory. Raises OSError if the system refuses the memory.
    """
    pages = mmap.mmap(file, torch.Size(shape).numel())
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


class WorkerResults:
    """Iterator over `function(item)` for each item, in order.

    `num_workers` processes compute the results ahead of time; 0 computes them in this process. When the result number n
    is taken, at most PREFETCHED * num_workers items behind it have been passed to workers. Results are pickled. Any one
    thread may take the results.

    describe_row: returns a description of the row that a worker has noted, for the error if it dies. Raises DataError
    if the system refuses to start the processes.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        num_workers: int,
        describe_row: Callable[[int], str] = str,
    ) -> None:
        self._function, self._items, self._describe_row = function, iter(items), describe_row
        self._timeout_s = _timeout_s
        self.workers: list[Any] = []
        """Worker processes."""
        self._connections: list[Connection] = []
        """Connections to the workers, in their order. Empty after `close`."""
        self._stacks: list[io.FileIO] = []
        """File in memory of each worker, to which it writes its stacks. Empty after `close`, and on systems without
        such files."""
        self._turns = deque[int]()
        """Worker of each item whose result has not been taken."""
        if num_workers:
            self._start(num_workers)
            for worker in [*range(num_workers)] * PREFETCHED:
                self._pass_on(worker)

    def _start(self, count: int) -> None:
        context = CheckedForkContext()
        self._rows = context.RawArray("q", [-1] * count)
        """Row that each worker has noted last, -1 for none."""
        _running.add(self)
        try:
            if hasattr(os, "memfd_create"):
                self._stacks = [io.FileIO(os.memfd_create("worker-stacks"), "w+") for _ in range(count)]
            for number in range(count):
                connection, of_worker = context.Pipe()
                self._connections.append(connection)
                with of_worker:
                    stacks = self._stacks[number] if self._stacks else None
                    work = functools.partial(_work, self._function, of_worker, os.getpid(), self._rows, number, stacks)
                    worker = context.Process(target=work, daemon=True)
                    worker.start()
                self.workers.append(worker)
        except OSError as error:
            raise DataError(
                f"--workers {count}: cannot start the data workers ({first_line(error)}); set fewer --workers, or "
                "raise the limits on open files (ulimit -n), processes (ulimit -u, docker --pids-limit), or memory"
            ) from None
        finally:
            if len(self.workers) < count:
                self.close()

    def _pass_on(self, worker: int) -> None:
        """Send the next item to a worker. The end of a worker is noticed when its result is taken."""
        for item in self._items:
            self._turns.append(worker)
            with contextlib.suppress(OSError):
                self._connections[worker].send(item)
            return

    def __iter__(self) -> WorkerResults:
        return self

    def __next__(self) -> Any:
        """Return the next result.

        Raises DataError if a worker died or hangs, and RuntimeError, with the traceback, if the function failed in it.
        """
        if not self.workers:
            return self._function(next(self._items))
        if not self._turns:
            self.close()
            raise StopIteration
        worker = self._turns.popleft()
        try:
            self._wait_for_result(worker)
            result, fault = pickle.loads(self._connections[worker].recv_bytes())
        except Exception as error:  # a worker that is killed while it sends causes errors of many types
            raise self._failed(worker, error) from error
        self._pass_on(worker)
        if fault:
            raise RuntimeError(f"a data worker failed:\n{fault}")
        return result

    def _wait_for_result(self, worker: int) -> None:
        """Wait until a worker has begun to send a result or has ended. Raises TimeoutError.

        A process that another thread has forked while the worker was started holds the worker's end of the connection,
        which then does not end with the worker.
        """
        connection, deadline = self._connections[worker], time.monotonic() + self._timeout_s
        while not connection.poll(max(0.0, min(_CHECK_S, deadline - time.monotonic()))):
            if self.workers[worker].exitcode is not None and not connection.poll():
                raise EOFError("it ended without a result")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no result within {self._timeout_s:g} s")

    def close(self) -> None:
        """End the worker processes. Iterating afterwards stops at once."""
        self._items = iter(())
        self._turns.clear()
        self._stacks = []
        while self._connections:
            self._connections.pop().close()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join(_KILL_WAIT_S)

    def reading(self, worker: int) -> str:
        """Return a description of the row that a worker has noted last, or "" if it has noted none."""
        row = int(self._rows[worker])
        return self._describe_row(row) if row >= 0 else ""

    def _failed(self, number: int, error: Exception) -> DataError:
        """Return the error of a worker that died or hangs; it names the row that the worker was reading."""
        worker = self.workers[number]
        worker.join(_DEATH_WAIT_S)
        if (code := worker.exitcode) is None:
            reason = f"is alive, {type(error).__name__}: {first_line(error)}"
        else:
            reason = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with {code}"
        row = self.reading(number)
        return DataError(
            f"a data worker died or hangs (process {worker.pid} {reason}){f'; it was reading {row}' * bool(row)}; if "
            "memory ran out, set fewer --workers"
        )


def _work(
    function: Callable[[Any], Any],
    connection: Connection,
    parent: int,
    rows: Any,
    number: int,
    stacks: io.FileIO | None,
) -> None:
    """Run a worker, until `parent`, the process that has forked it, ends or closes the connection."""
    global _own_row
    with contextlib.suppress(OSError):  # a system without /proc
        Path("/proc/self/comm").write_text(NAME)
    for results in list(_running):  # the other ends of connections, which would otherwise not end with that process
        while results._connections:
            results._connections.pop().close()
    _own_row = functools.partial(rows.__setitem__, number)
    if stacks is not None:
        faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
    torch.set_num_threads(1)  # the threads of the other process are not in this one
    # Bad images are counted, so Pillow's warnings on metadata and size are not needed.
    warnings.filterwarnings("ignore", module="PIL")
    answers = queue.SimpleQueue[bytes]()
    threading.Thread(target=_send, args=(connection, answers), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        while os.getppid() == parent:  # another process that it has forked may hold the connection
            if connection.poll(_CHECK_S):
                answers.put(_answer(function, connection.recv()))


def _answer(function: Callable[[Any], Any], item: Any) -> bytes:
    """Return the pickled result and "", or None and the traceback of what the function has raised.

    The functions of this package return expected errors in their results. The traceback is that of a fault of the code,
    or of a Rust library, whose panic is no Exception.
    """
    content = io.BytesIO()
    try:
        _Pickler(content, pickle.HIGHEST_PROTOCOL).dump((function(item), ""))
        return content.getvalue()
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))


class _Pickler(pickle.Pickler):
    """Pickle tensors as arrays, which takes a tenth of the time of a tensor's own way."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(TypeError):  # NumPy has no bfloat16
                return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _send(connection: Connection, answers: queue.SimpleQueue[bytes]) -> None:
    """Send the answers. A thread, so that a worker computes the next one while nobody receives this one."""
    with contextlib.suppress(OSError):
        while True:
            connection.send_bytes(answers.get())


def worker_stacks() -> str:
    """Return the Python stacks of all workers of this process, of all their threads."""
    asked, texts = list[tuple[str, io.FileIO, int]](), list[str]()
    for results in list(_running):
        for number, (worker, file) in enumerate(zip(results.workers, results._stacks, strict=False)):
            if worker.exitcode is not None:
                continue
            row, start = results.reading(number), os.fstat(file.fileno()).st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, _STACK_SIGNAL)
            header = f"data worker {number}, process {worker.pid}{', last row: ' * bool(row)}{row}"
            asked.append((header, file, start))
    if asked:
        time.sleep(_STACKS_WAIT_S)
    for header, file, start in asked:
        stacks = os.pread(file.fileno(), 1 << 20, start).decode("utf-8", "replace")
        texts.append(f"{header}\n" + (stacks or "it does not answer: it is stopped or waits for a disk\n"))
    return "\n".join(texts)


def kill_workers() -> None:
    """Kill all workers of this process, for a process that is about to end without closing its loaders."""
    for results in list(_running):
        for worker in results.workers:
            worker.kill()
