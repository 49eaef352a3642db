"""End a rank when its launcher is gone.

Nobody waits for such a rank: the command has returned, with exit code 0 if it is `deepspeed` and its `launch.py` was
killed. The rank would train on, hold its GPU, and nobody would end it if another rank died. It therefore sends itself
SIGTERM. If it trains, all ranks save after the step (`megaclip.engine.stop`), else it ends at once.
"""

import os
import signal
import threading
import time

from megaclip.comm.groups import ranks_of_this_node
from megaclip.logging import get_logger

logger = get_logger(__name__)

_POLL_S = 1.0


def end_with_launcher(launcher: int | None) -> None:
    """Start a thread that sends this process SIGTERM when its launcher has ended.

    It has no effect without a launcher: a rank that a shell has started may outlive the shell.
    launcher: process id of the launcher. None: the parent of this process.
    """
    if ranks_of_this_node() is not None:
        process = os.getppid() if launcher is None else launcher
        threading.Thread(target=_watch, args=(process,), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    logger.warning("the launcher, process %d, has ended; this rank saves, if it trains, and ends", launcher)
    os.kill(os.getpid(), signal.SIGTERM)
