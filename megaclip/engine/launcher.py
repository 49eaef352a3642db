"""End a rank when its launcher is gone.

Nobody waits for such a rank: the command has returned, with exit code 0 if it is `deepspeed` and its `launch.py` was
killed. The rank would train on, hold its GPU, and nobody would end it if another rank died. It therefore sends itself
SIGTERM. If it trains, all ranks save after the step (`megaclip.engine.stop`), else it ends at once.
"""

import os
import signal
import threading
import time

import megaclip
from megaclip.comm.groups import ranks_of_this_node
from megaclip.logging import get_logger

logger = get_logger(__name__)

_POLL_S = 1.0


def end_with_launcher() -> None:
    """Start a thread that sends this process SIGTERM when its launcher, its first parent, has ended.

    It has no effect without a launcher: a rank that a shell has started may outlive the shell.
    """
    if ranks_of_this_node() is not None:
        process, parent = megaclip.PROCESS_AND_PARENT
        launcher = parent if process == os.getpid() else os.getppid()
        threading.Thread(target=_watch, args=(launcher,), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    logger.warning("the launcher, process %d, has ended; this rank saves, if it trains, and ends", launcher)
    os.kill(os.getpid(), signal.SIGTERM)
