"""Handle lock files that killed builds leave in the folder of the ops that DeepSpeed compiles on first use.

PyTorch (torch/utils/file_baton.py) creates a file `lock` in an op's folder, keeps it open during the build and deletes
it afterwards. Every other process waits for the deletion, without a limit and without a message. A killed build does
not delete its lock.
"""

import os
import time
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root

from megaclip.logging import get_logger

logger = get_logger(__name__)

PATIENCE_S = 120.0
"""Seconds after which a lock that no process of this host has open counts as left by a killed build, if nothing else
in its folder has changed. Where hosts share the folder, a build of another host changes it more often."""
_QUIET_S = 5.0
"""Seconds of waiting that are not reported, because loading a compiled op holds the lock for less."""
_POLL_S = 0.2


def op_builds_root() -> Path:
    """Return the folder in which, or in whose subfolders, PyTorch has one folder per op."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def delete_abandoned_locks(*, patience_s: float = PATIENCE_S) -> None:
    """Wait for the builds of other programs, and delete the locks of killed ones. The log names each lock.

    Every rank must wait for this call before it loads an op. patience_s: a value for one host alone may be shorter.
    """
    root = op_builds_root()
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        if _is_abandoned(lock, patience_s):
            lock.unlink(missing_ok=True)
            logger.warning("deleted %s: a killed build left it, and every later run would have waited for it", lock)


def _is_abandoned(lock: Path, patience_s: float) -> bool:
    """Wait until the lock is released (return False), or until no process can still hold it (return True)."""
    started, said = time.monotonic(), False
    while lock.exists():
        if _is_quiet(lock, patience_s) and not _is_open_here(lock) and _is_quiet(lock, patience_s):
            return True  # check again: one build may have ended and another started during the check of the processes
        if not said and time.monotonic() - started > _QUIET_S:
            logger.warning(
                "waiting for %s: another program compiles this op, or a killed build left the file; it is deleted when "
                "no process of this host has it open and its folder has not changed for %.0f s",
                lock,
                patience_s,
            )
            said = True
        time.sleep(_POLL_S)
    return False


def _is_quiet(lock: Path, patience_s: float) -> bool:
    """Return whether the lock exists and nothing in its folder has changed for `patience_s` seconds."""
    return lock.exists() and _unchanged_s(lock.parent) >= patience_s


def _unchanged_s(folder: Path) -> float:
    """Return the number of seconds since the last change in a folder."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:  # a file was deleted just now
        return 0.0


def _is_open_here(lock: Path) -> bool:
    """Return whether a process of this host, of the same user, has the file open."""
    path = str(lock.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == path for file in process.open_files()):
                return True
        except (psutil.Error, OSError):  # of another user, or gone
            continue
    return False
