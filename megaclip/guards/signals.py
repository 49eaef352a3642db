"""Stop a run early by a signal: complete the step, save a checkpoint and exit.

SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 to one rank is enough. After each step all ranks exchange the signals that they have
received (`StopSignals.received_by_any_rank`). If any rank has received one, all ranks save a checkpoint and exit.

- A second signal of the same kind ends a rank at once, without saving. A second SIGUSR1 has no effect.
- The ranks of other hosts may receive the same signal later. So a rank that is saving or has completed its last step
  ignores a first signal. SIGTERM still ends such a rank if another rank of its host has exited.

The exit code is 128 + the number of the signal (docs/operations.md). The deepspeed launcher, `pdsh -S` and srun return
it. When the first rank exits with it, they end the other ranks. All ranks have saved by then.

When the deepspeed launcher receives Ctrl-C or SIGTERM, or when a rank has died, it sends SIGTERM to each rank and its
data workers, and SIGKILL 30 s later. (After Ctrl-C the terminal has also sent SIGINT to every rank.)

When its launcher is gone (the agent of `megaclip launch` or `torchrun`, or DeepSpeed's `launch.py`), a rank would keep
training and occupy its GPU. So it sends itself SIGTERM (`end_with_launcher`). On one host, `launch.py` does not notice
the end of `deepspeed`, which has started it. Its ranks then send themselves SIGUSR1, which has no effect on ranks that
are already saving, as after Ctrl-C in a terminal.

When a rank has died, the other ranks may wait for it in a collective forever. So a rank exits at once on SIGTERM if
another rank of its host is missing. The main thread may be blocked in that collective. A second thread therefore
handles such signals: it reads the signal numbers that Python's C-level handler writes to a socket.
"""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

import megaclip
from megaclip.comm.collectives import gather_integers
from megaclip.comm.groups import ranks_of_this_node
from megaclip.errors import STOP_SIGNALS
from megaclip.logging import get_logger

logger = get_logger(__name__)

_POLL_S = 1.0


class StopSignals:
    """Context manager that records the stop signals that this rank receives. Use it in the main thread.

    The signal handlers stay installed until the process ends, unless an exception leaves the context.
    """

    def __init__(self) -> None:
        self._first_signal = 0
        """Number of the first stop signal that this rank has received. 0: none was received."""
        self._launcher = os.getppid()
        self.run_is_ending = False
        """True once the run is about to save and exit, or has done its last step, which `Run` records."""

    def __enter__(self) -> "StopSignals":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.siginterrupt(number, False)  # because libraries may not handle interrupted system calls
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.shutdown(socket.SHUT_WR)  # ends the thread even if forked processes hold copies of the socket
        self._writer.close()

    def received_by_any_rank(self) -> signal.Signals | None:
        """Return the signal that stops the run, the same on all ranks, or None. All ranks must call it together."""
        first_signals = gather_integers([self._first_signal])
        stop_signal = next((signal.Signals(number) for (number,) in first_signals if number), None)
        self.run_is_ending = stop_signal is not None
        return stop_signal

    def _record(self, number: int, _: FrameType | None) -> None:
        self._first_signal = self._first_signal or number

    def _watch(self) -> None:
        """Run in the second thread. It also reads signals that have other handlers, such as SIGCHLD of data workers."""
        seen: set[int] = set()
        with self._reader:
            while numbers := self._reader.recv(1):
                number = numbers[0]
                if number not in STOP_SIGNALS:
                    continue
                is_second = number in seen and number != signal.SIGUSR1
                if is_second or (number == signal.SIGTERM and _is_a_local_rank_missing(self._launcher)):
                    os._exit(128 + number)
                if not seen and not self.run_is_ending:
                    logger.info("%s: saving and stopping after this step", signal.Signals(number).name)
                seen.add(number)


def _is_a_local_rank_missing(launcher: int) -> bool:
    """Return whether a rank of this host has exited: its parent, the launcher, has fewer children than it started.

    If the launcher itself is gone, the ranks save (`end_with_launcher`), so the answer is False.
    """
    ranks = ranks_of_this_node()
    if ranks is None or os.getppid() != launcher:
        return False
    try:
        children = psutil.Process(launcher).children()
        missing = sum(child.status() != psutil.STATUS_ZOMBIE for child in children) < ranks
    except psutil.NoSuchProcess:  # a child or the launcher exited during this check
        missing = True
    return missing and os.getppid() == launcher


def end_with_launcher() -> None:
    """Start a thread that sends this process SIGTERM when its launcher, its first parent, has ended.

    It does nothing without a launcher: a rank that a shell has started may continue after the shell ends.
    """
    if ranks_of_this_node() is not None:
        process, parent = megaclip.PROCESS_AND_PARENT
        launcher = parent if process == os.getpid() else os.getppid()
        threading.Thread(target=_watch, args=(launcher, _command_of(launcher)), name="launcher", daemon=True).start()


def _command_of(launcher: int) -> int | None:
    """Return the process `deepspeed` that has started the launcher on this host, or None if another program has."""
    try:
        parent = psutil.Process(launcher).parent()
        words = parent.cmdline()[:3] if parent is not None else []
    except psutil.Error:
        return None
    names = {Path(word).name for word in words}
    return parent.pid if parent is not None and names & {"deepspeed", "deepspeed.launcher.runner"} else None


def _watch(launcher: int, command: int | None) -> None:
    while os.getppid() == launcher:
        if command is not None and _parent_of(launcher) not in (command, None):  # None if the launcher has just ended
            logger.warning("`deepspeed`, process %d, has ended; this rank saves, if it trains, and ends", command)
            os.kill(os.getpid(), signal.SIGUSR1)
            command = None
        time.sleep(_POLL_S)
    logger.warning("the launcher, process %d, has ended; this rank saves, if it trains, and ends", launcher)
    os.kill(os.getpid(), signal.SIGTERM)


def _parent_of(process: int) -> int | None:
    """Return the parent of a process, or None if the process is gone."""
    try:
        return psutil.Process(process).ppid()
    except psutil.Error:
        return None
