"""Which hosts are alive: each launcher adds beats to its key in the store, and watches those of the others.

torch's agents notice a lost host only when a rank of another host fails, which takes minutes if no host is notified.
"""

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from torch.distributed import PrefixStore

SILENCE_S = 15
"""Seconds of silence after which another host, or the store, is lost."""


class Pulse:
    """The beats of this host and of the hosts that it runs ranks with.

    Args:
        store: the store of the launchers.
        run_id: identifier of the run.
        on_lost_store: called in a thread when the store has not answered for `SILENCE_S`.
    """

    def __init__(self, store: Any, run_id: str, on_lost_store: Callable[[], object]) -> None:
        self._store = PrefixStore(f"megaclip.{run_id}.beats", store)
        self._own_store = PrefixStore(f"megaclip.{run_id}.beats", store.clone())  # other threads do not block it
        self._own, self._on_lost_store = uuid.uuid4().hex, on_lost_store
        self._ends = threading.Event()
        self._looked_at = 0.0
        self.hosts: dict[str, str] = {}
        """Names of the hosts that run ranks, by their keys. Empty before the first attempt."""
        self._beats: dict[str, tuple[bytes, int]] = {}
        """Last beat of each host, and for how many looks it has not changed."""

    def meet(self, attempt: Any, number: int, count: int) -> None:
        """Exchange the names of the hosts of an attempt.

        attempt: the store of the attempt. number, count: index of this host, and number of hosts.
        """
        if not self.hosts:
            self._store.add(self._own, 1)  # the others read it from now on
            threading.Thread(target=self._run, name="beats", daemon=True).start()
        attempt.set(f"host/{number}", json.dumps([self._own, socket.gethostname()]))
        names = attempt.multi_get([f"host/{other}" for other in range(count)])
        self.hosts, self._beats = dict(map(json.loads, names)), {}

    def lost_hosts(self) -> list[str]:
        """Return the names of the hosts that are silent. Time in which this process is suspended does not count."""
        if time.monotonic() - self._looked_at >= 1.0:
            self._looked_at = time.monotonic()
            for key, beat in zip(self.hosts, self._store.multi_get(list(self.hosts)), strict=True):
                last, looks = self._beats.get(key, (beat, 0))
                self._beats[key] = (beat, looks + 1 if beat == last else 0)
        return [name for key, name in self.hosts.items() if self._beats.get(key, (b"", 0))[1] >= SILENCE_S]

    def end(self) -> None:
        """Stop the beats."""
        self._ends.set()

    def _run(self) -> None:
        """Run in the thread. The main thread may wait for a lost store for minutes."""
        with ThreadPoolExecutor(1) as pool:
            while not self._ends.wait(1.0):
                beat = pool.submit(self._own_store.add, self._own, 1)
                if not wait([beat], SILENCE_S).done or beat.exception() is not None:
                    self._on_lost_store()
