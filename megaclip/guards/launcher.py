"""End a rank when its launcher is gone: the agent of `megaclip launch` or `torchrun`, or DeepSpeed's `launch.py`.

The rank would keep training and occupy its GPU. It therefore sends itself SIGTERM (`megaclip.guards.signals`,
docs/operations.md). On one host, `launch.py` does not notice the end of `deepspeed`, which has started it. Its ranks
then send themselves SIGUSR1, which has no effect on ranks that are already saving, as after Ctrl-C in a terminal.
"""

import os
import signal
import threading
import time
from pathlib import Path

import psutil

import megaclip
from megaclip.comm.groups import ranks_of_this_node
from megaclip.logging import get_logger

logger = get_logger(__name__)

_POLL_S = 1.0


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
