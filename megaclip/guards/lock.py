"""Lock a run's folder for one run: the file `lock.json` in the folder names the run that uses it.

The first rank takes the lock before it changes anything in the folder, and holds it until the run ends. The file
contains the host, the process and the start time of its holder. A thread of the holder touches the file every 5 s.
Another run decides by these rules whether the holder still exists:

- On the same host: the process exists, has the same start time, and has not exited. The lock of a killed holder is free
  at once.
- On another host: the file's modification time changes within 30 s. No clocks are compared. If the holder's host is
  gone, the lock is free after these 30 s.

A holder that was only stopped (SIGSTOP, a lost network connection) finds the record of another run when it continues.
It ends at once, without saving, because the other run now owns the folder.

If two runs read the file at the same moment, an operating-system lock on `.lock.guard` lets only one of them proceed.
If the file system has no such locks, both may write their record. The run whose record is overwritten ends within 5 s.

Every holder creates a new file, which replaces the previous one, and touches only its own. So a holder that was stopped
just before a heartbeat cannot touch the file of the run that has taken its folder.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from megaclip.errors import BusyError
from megaclip.files import replacing
from megaclip.logging import get_logger

logger = get_logger(__name__)

LOCK = "lock.json"
_GUARD = ".lock.guard"
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of the holder."""
SILENCE_S = 30.0
"""Seconds without a heartbeat after which a holder on another host counts as gone."""
_FACTS = ("host", "machine", "pid", "started", "since", "id")
"""Keys of the record in the file."""


class RunLock:
    """The lock on a run's folder. `take` it before the folder changes; `release` it when the run has ended."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._record = {**_this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "id": uuid.uuid4().hex}
        self._file = -1
        """Descriptor of this holder's file."""
        self._is_released = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take the lock. The folder must exist.

        Raises:
            BusyError: another run holds it. The message names its host, its process and its start.
            OSError: the folder cannot be written to.
        """
        if (holder := _read(self._path)) is not None and not _is_gone(holder, self._path):
            raise _in_use(self._path.parent, holder)
        with _guarded(self._path.with_name(_GUARD)):
            now = _read(self._path)
            if now is not None and (holder is None or now["id"] != holder["id"]):  # another run took it first
                raise _in_use(self._path.parent, now)
            self._create()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Delete the file, unless another run has taken the lock."""
        self._is_released.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        os.close(self._file)
        holder = _read(self._path)
        if holder is not None and holder["id"] == self._record["id"]:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _create(self) -> None:
        """Replace an earlier holder's file by one with this process's record."""
        with replacing(self._path) as own:
            own.write_text(json.dumps(self._record), encoding="utf-8")
            self._file = os.open(own, os.O_WRONLY | os.O_CLOEXEC)

    def _beat(self) -> None:
        """Run in the thread: touch the file, and end this process if another run owns the folder."""
        while not self._is_released.wait(HEARTBEAT_S):
            holder = _read(self._path)
            if holder is not None and holder["id"] != self._record["id"]:
                logger.error("%s; this run ends without saving", _in_use(self._path.parent, holder))
                os._exit(1)
            with contextlib.suppress(OSError):  # the folder cannot be written to at present
                os.utime(self._file)


def _this_process() -> dict[str, Any]:
    """Return the facts by which another process identifies this process."""
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
    }


def _machine() -> str:
    """Return an identifier of this start of the operating system and of this container's process numbers."""
    facts = []
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts) or f"{socket.gethostname()} {psutil.boot_time()}"


def _read(path: Path) -> dict[str, Any] | None:
    """Return the record of the holder, with the time of its heartbeat, or None without a lock or if it is damaged."""
    try:
        with path.open(encoding="utf-8") as file:
            record = json.load(file)
            return {**{key: record[key] for key in _FACTS}, "beat": os.fstat(file.fileno()).st_mtime_ns}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_gone(holder: dict[str, Any], path: Path) -> bool:
    """Return whether the holder of the lock no longer exists, by the rules at the top of this module."""
    if holder["machine"] == _machine():
        return _start_of(holder["pid"]) != holder["started"]
    logger.info(
        "%s was locked by process %d on host %s; waiting up to %.0f s for its next heartbeat",
        path.parent,
        holder["pid"],
        holder["host"],
        SILENCE_S,
    )
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = _read(path)
        if now is None:
            return True  # released
        if (now["id"], now["beat"]) != (holder["id"], holder["beat"]):
            return False
    return True


def _start_of(pid: int) -> str:
    """Return when a process of this machine started, in a form that no clock adjustment changes; "" if it is gone."""
    try:
        if not Path("/proc/self/stat").exists():
            return str(psutil.Process(pid).create_time())
        # "PID (NAME) STATE ...": the name may contain any character. The start time is field 22, in clock ticks after
        # boot.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except (OSError, psutil.Error):
        return ""


def _in_use(folder: Path, holder: dict[str, Any]) -> BusyError:
    return BusyError(
        f"{str(folder)!r} is in use by another run: host {holder['host']}, process {holder['pid']}, since "
        f"{holder['since']}; wait until it ends, end it with  kill -USR1 {holder['pid']}  on that host, or choose "
        "another --name"
    )


@contextlib.contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """Hold an operating-system lock on `path`, or no lock if the file system does not support locks."""
    lock = FileLock(path, timeout=SILENCE_S, fallback_to_soft=False)
    try:
        lock.acquire()
    except (OSError, TimeoutError) as error:
        logger.info("cannot lock %s (%s): two runs that start at the same moment may end each other", path, error)
    try:
        yield
    finally:
        lock.release()
