"""Heartbeats of hosts that share a folder: each host rewrites its file `beat_NAME.json` at intervals.

Clocks are not compared: a host is alive if its heartbeat has changed recently.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaclip.checkpoint.durable import read_text
from megaclip.hosts.hostfile import Host

_RECORD_BYTES = 1024
"""Size of the file of a heartbeat."""


class Heartbeats:
    """The heartbeat of this host, and those of all hosts.

    folder: shared by all hosts. hosts: all hosts. own: this host.
    beat_s, silence_s: seconds as in `megaclip.hosts.member.Times`.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host], own: Host, *, beat_s: float, silence_s: float) -> None:
        self._folder, self._hosts, self._own = folder, hosts, own
        self._beat_s, self._silence_s = beat_s, silence_s
        self.id = f"{os.getpid()}-{time.time_ns()}"
        """Identifier of this process in its heartbeats."""
        self._seen: dict[str, tuple[tuple[str, int], float]] = {}
        """Id and number of the last heartbeat, and the time when they changed, by host."""
        self._looked_at = 0.0
        """Time when this process last read the heartbeats."""
        self._last_read: dict[str, dict[str, Any]] = {}
        """Last heartbeat that could be read, by host."""

    @contextlib.contextmanager
    def beating(self, state: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Write this host's heartbeats in a thread until the body of the `with` statement ends; then delete the file.

        state: returns what a heartbeat contains besides its id and its number.
        """
        ends = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(ends, state), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
            with contextlib.suppress(OSError):
                self._path(self._own).unlink()

    def _beat_until(self, ends: threading.Event, state: Callable[[], dict[str, Any]]) -> None:
        beats = 0
        while True:
            beats += 1
            with contextlib.suppress(OSError):  # a folder that cannot be written to for a while
                _overwrite(self._path(self._own), {"id": self.id, "beats": beats, **state()})
            if ends.wait(self._beat_s):
                return

    def alive(self) -> dict[str, dict[str, Any]]:
        """Return the newest heartbeat of each host that is alive, by name."""
        alive, now = {}, time.monotonic()
        # Time in which this process read no heartbeats does not count as silence: all hosts may have been stopped.
        unseen_s = max(0.0, now - self._looked_at - self._beat_s)
        self._looked_at = now
        self._seen = {name: (mark, changed_at + unseen_s) for name, (mark, changed_at) in self._seen.items()}
        for host in self._hosts:
            beat = self._newest(host)
            if beat is None:
                continue
            mark = (str(beat.get("id")), int(beat.get("beats", 0)))
            before, changed_at = self._seen.get(host.name, (None, -1e9))
            if before is None:
                self._seen[host.name] = (mark, -1e9)  # it may be an earlier file
            elif before != mark:
                self._seen[host.name] = (mark, now)
                changed_at = now
            if now - changed_at < self._silence_s:
                alive[host.name] = beat
        return alive

    def _newest(self, host: Host) -> dict[str, Any] | None:
        """Return a host's heartbeat, or None if there is no such file.

        If the file cannot be read at present, return the last heartbeat that could be read. A host counts as lost only
        if its heartbeat does not change for `silence_s`.
        """
        path = self._path(host)
        if (beat := read_record(path)) is not None:
            self._last_read[host.name] = beat
        elif _is_missing(path):
            self._last_read.pop(host.name, None)
        return self._last_read.get(host.name)

    def _path(self, host: Host) -> Path:
        return self._folder / f"beat_{host.name}.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file cannot be read or holds none."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _overwrite(path: Path, content: dict[str, Any]) -> None:
    """Write a record of fixed size in place, so that a full disk does not end the heartbeat."""
    text = json.dumps(content).ljust(_RECORD_BYTES - 1) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, text.encode(), 0)
    finally:
        os.close(descriptor)


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
