"""Fork processes beside threads, and fork again if a new process does not run.

A thread of a C++ library that takes the interpreter for the first time holds CPython's lock on thread states for a
moment. A process that is forked in this moment inherits the locked lock. Until Python 3.11 such a process waits for it
inside `os.fork` for ever, and whoever waits for the process's result waits too.
"""

from __future__ import annotations

import os
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

from megaclip.errors import DataError
from megaclip.logging import get_logger

START_WAIT_S = 10.0
"""Seconds that a forked process has to begin its work."""
_ATTEMPTS = 5

_logger = get_logger(__name__)


class _Process(ForkProcess):
    """Process that writes a byte to its parent when it begins its work."""

    _begun: int
    """File descriptor of the pipe to the parent."""

    def run(self) -> None:
        os.write(self._begun, b".")
        os.close(self._begun)
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Popen:
        """Fork the process. Raises DataError if none of five forks begins to run."""
        for _ in range(_ATTEMPTS):
            reader, process._begun = os.pipe()
            child = Popen(process)
            os.close(process._begun)
            try:
                if wait([reader], START_WAIT_S) and os.read(reader, 1):
                    return child
            finally:
                os.close(reader)
            _logger.warning("a forked process did not begin to run within %.0f s; it is forked again", START_WAIT_S)
            child.kill()
            child.wait()
        raise DataError(f"{_ATTEMPTS} forked processes did not begin to run; start the run again or set --workers 0")


class CheckedForkContext(ForkContext):
    """`multiprocessing` context that forks, and forks again if a process does not begin to run."""

    Process = _Process
