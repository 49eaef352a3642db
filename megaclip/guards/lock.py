"""Lock a run's folder for one run. docs/operations.md describes the rules.

The first rank takes the lock before it changes anything in the folder, and holds it until the run ends. The lock is a
lease of the package filelock, the file `.lock`: its holder touches it every 5 s, and another host may take it after
30 s without a change. On the same host a lease also ends with its process. The file `lock.json` names the holder.

A holder that has lost the lease, because it was stopped (SIGSTOP) or could not reach the folder, ends at once without
saving, because the other run now owns the folder.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from filelock import SoftFileLease, Timeout

from megaclip.errors import BusyError
from megaclip.files import write_atomically
from megaclip.logging import get_logger

logger = get_logger(__name__)

LOCK = "lock.json"
_LEASE = ".lock"
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of the holder."""
SILENCE_S = 30.0
"""Seconds without a heartbeat after which a holder on another host counts as gone."""


class RunLock:
    """The lock on a run's folder. `take` it before the folder changes; `release` it when the run has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "id": uuid.uuid4().hex,
        }
        self._is_released = threading.Event()
        self._lease = SoftFileLease(
            folder / _LEASE,
            lease_duration=SILENCE_S,
            heartbeat_interval=HEARTBEAT_S,
            on_compromise=self._lost,
            thread_local=False,
        )

    def take(self) -> None:
        """Take the lock. The folder must exist.

        Raises:
            BusyError: another run holds it. The message names its host, its process and its start.
            OSError: the folder cannot be written to.
        """
        try:
            self._lease.acquire(timeout=2 * SILENCE_S, poll_interval=0.2, cancel_check=self._other_is_alive())
        except Timeout:
            raise self._in_use() from None
        write_atomically(self._folder / LOCK, json.dumps(self._record))

    def release(self) -> None:
        """Delete the files, unless another run has taken the lock."""
        self._is_released.set()
        if self._lease.is_locked:
            if self._holder().get("id") == self._record["id"]:
                (self._folder / LOCK).unlink(missing_ok=True)
            self._lease.release()

    def _other_is_alive(self) -> Callable[[], bool]:
        """Return a function that returns whether the holder of the lock is known to exist."""
        beats: list[tuple[tuple[int, int, int] | None, float]] = []

        def is_alive() -> bool:
            holder = self._holder()
            if not beats and holder.get("host") != self._record["host"]:
                text = "%s was locked by process %s on host %s; waiting up to %.0f s for its next heartbeat"
                logger.info(text, self._folder, holder.get("pid"), holder.get("host"), SILENCE_S)
            beats.append((self._beat(), time.monotonic()))
            (first, began), (last, now) = beats[0], beats[-1]
            if last is not None and last == first and last[-1] == 0 and now - began > HEARTBEAT_S:
                # A power cut leaves an empty lease, which filelock takes for that of a live run. A new lease is empty
                # for a moment.
                (self._folder / _LEASE).unlink(missing_ok=True)
            return _is_of_this_host(holder) or (last is not None and last != first)

        return is_alive

    def _beat(self) -> tuple[int, int, int] | None:
        """Return the file of the lease, the time of its last change and its bytes, or None if it is gone."""
        try:
            status = (self._folder / _LEASE).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _lost(self, loss: Any) -> None:
        """Run in the lease's thread when the lease is lost: end this process if another run owns the folder."""
        logger.warning("the lock of %s cannot be renewed (%s); another run may take it", self._folder, loss.reason)
        while self._holder().get("id") in (None, self._record["id"]):
            if self._is_released.wait(HEARTBEAT_S):
                return
        logger.error("%s; this run ends without saving", self._in_use())
        os._exit(1)

    def _holder(self) -> dict[str, Any]:
        """Return the record of the run that holds the lock; empty if there is none or it is damaged."""
        path = self._folder / LOCK
        try:
            record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _in_use(self) -> BusyError:
        holder = {"host": "unknown", "pid": "unknown", "since": "a moment ago"} | self._holder()
        return BusyError(
            f"{str(self._folder)!r} is in use by another run: host {holder['host']}, process {holder['pid']}, since "
            f"{holder['since']}; wait until it ends, end it with  kill -USR1 {holder['pid']}  on that host, or choose "
            "another --name"
        )


def _is_of_this_host(holder: dict[str, Any]) -> bool:
    """Return whether the holder is a process of this host that has not ended, even if it is stopped."""
    if holder.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(holder["pid"])
        return process.create_time() == holder["started"] and process.status() != psutil.STATUS_ZOMBIE
    except (KeyError, TypeError, ValueError, psutil.Error):
        return False
