"""Fork processes while threads run, and fork again if a new process does not start to run.

When a thread of a C++ library enters the interpreter for the first time, it briefly holds CPython's lock on thread
states. A process that is forked at this moment inherits the lock as locked. Until Python 3.11 such a process waits for
the lock inside `os.fork` forever, and so does every process that waits for its result.

A forked process has the signal handlers of its parent, and writes the signals that it receives to the parent's wakeup
socket. The parent would treat a signal to the process as a signal to itself. So stop signals are blocked from before
the fork until the process has installed its own handlers.
"""

from __future__ import annotations

import signal
import socket
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

from megaclip.errors import STOP_SIGNALS, DataError
from megaclip.logging import get_logger

START_WAIT_S = 10.0
"""Seconds within which a forked process must start its work."""
_ATTEMPTS = 5

_logger = get_logger(__name__)


class _Process(ForkProcess):
    """Process that sends a byte to its parent when it starts its work, and ends if the parent has given it up."""

    _begun: socket.socket
    """Connection to the parent."""

    def run(self) -> None:
        signal.set_wakeup_fd(-1)
        # SIGINT and SIGUSR1 are also sent to this process when its parent receives them. SIGTERM ends it.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        try:
            with self._begun:
                self._begun.sendall(b".")
        except BrokenPipeError:
            return
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Popen:
        """Fork the process. Raises DataError if none of five forks begins to run."""
        for _ in range(_ATTEMPTS):
            receiver, process._begun = socket.socketpair()
            with receiver:
                before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
                try:
                    with process._begun:
                        child = Popen(process)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                receiver.settimeout(START_WAIT_S)
                try:
                    begun = receiver.recv(1)
                except TimeoutError:
                    receiver.shutdown(socket.SHUT_RD)  # from now on the process cannot send its byte and does not begin
                    begun = receiver.recv(1)
                if begun:
                    return child
            _logger.warning("a forked process did not start to run within %.0f s; it is forked again", START_WAIT_S)
            child.kill()
            child.wait()
        raise DataError(f"{_ATTEMPTS} forked processes did not start to run; start the run again or set --workers 0")


class CheckedForkContext(ForkContext):
    """`multiprocessing` context that forks, and forks again if a process does not start to run."""

    Process = _Process
