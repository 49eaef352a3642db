"""Read members of remote tar shards: from the host's cache of whole shards, or else by ranges of bytes.

The order of the samples is known, so the cache needs no guess. At any time it holds the shards that are needed next, as
many as fit: one process per host downloads them in the order of their use, and first deletes those that are not among
them. The data workers never wait for it: a member whose shard is not in the cache is read by its range.

Every rank starts such a process. The one that gets the lock on the folder works; if it ends, another one takes over.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megaclip.data.forking import CheckedForkContext
from megaclip.data.remote import RemoteFile, download
from megaclip.errors import DataError, os_reason
from megaclip.files import write_atomically
from megaclip.logging import get_logger

SUFFIX = ".shard"
"""End of the names of the cached files."""
_DOWNLOADS = 8
_POLL_S = 0.2
_AFTER_ERROR_S = 30.0
"""Seconds until a shard that could not be downloaded is tried again."""
_READ_AHEAD = 8 << 10
"""Bytes that are read after a member, because the caption usually follows the image."""
_CHECKED_FOR_S = 60.0
"""Seconds after which a shard that is read by ranges is checked for changes again."""

_logger = get_logger(__name__)


@dataclasses.dataclass
class RemoteShards:
    """Bytes of a list of remote shards."""

    files: list[RemoteFile]
    cache: Path | None = None
    """Folder of the cached shards, or None if there is no cache."""
    _checked: dict[int, float] = dataclasses.field(default_factory=dict)
    _held: tuple[int, int, bytes] = (-1, 0, b"")
    """Shard and offset of the bytes that were read last, and these bytes."""

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Return the bytes of a member. Raises DataError if they cannot be read or the shard has changed."""
        file = self.files[shard]
        if self.cache is not None:
            path = self.cache / (file.cache_name + SUFFIX)
            # Not kept open: the disk space of a deleted file is free when the last process has closed it.
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as cached:  # else it is read by range
                if os.fstat(cached.fileno()).st_size == file.size:
                    return os.pread(cached.fileno(), size, offset)
        held, start, content = self._held
        if held != shard or not start <= offset <= offset + size <= start + len(content):
            start, content = offset, file.read(offset, min(offset + size + _READ_AHEAD, file.size))
            now = time.monotonic()
            if now > self._checked.get(shard, -_CHECKED_FOR_S) + _CHECKED_FOR_S:
                file.require_unchanged()
                self._checked[shard] = now
            self._held = (shard, start, content)
        return content[offset - start : offset - start + size]


def _limit(folder: Path, limit: int | None) -> int:
    return shutil.disk_usage(folder).total // 2 if limit is None else limit


def bytes_to_come(folder: Path, limit: int | None, sizes: list[int]) -> int:
    """Return the bytes that a cache of shards of these sizes may still add to an existing folder. limit: as there."""
    held = sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))
    return max(0, min(_limit(folder, limit), sum(sizes)) - held)


class ShardCache:
    """The process that keeps the next shards of a training run in a folder."""

    def __init__(
        self,
        folder: Path,
        limit: int | None,
        files: dict[int, RemoteFile],
        shards_from: Callable[[int], Iterator[tuple[int, int]]],
        position: int,
    ) -> None:
        """limit: bytes in the folder. Default: half of its disk. files: number of a shard -> the shard. shards_from: as
        `SampleOrder.shards_from`. position: as for `advance`. Raises DataError if the folder cannot be used."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._limit = _limit(folder, limit)
        except OSError as error:
            raise DataError(f"--shard-cache {folder}: {error.strerror or error}; give a writable folder") from error
        self._folder, self._files, self._shards_from, self._parent = folder, files, shards_from, os.getpid()
        self._names = {shard: file.cache_name + SUFFIX for shard, file in files.items()}
        self._running: dict[concurrent.futures.Future, int] = {}
        self._failed: dict[int, float] = {}
        """Shard that could not be downloaded -> when it is tried again."""
        self._has_warned = False
        context = CheckedForkContext()
        self._position = context.RawValue("q", position)
        self._process: Any = context.Process(target=self._run, daemon=True)
        self._process.start()

    def advance(self, position: int) -> None:
        """Set the first position whose samples are still needed."""
        self._position.value = position

    def close(self) -> None:
        """End the process. The files stay for the next run."""
        self._process.kill()
        self._process.join()

    # All other methods run in the process.

    def _run(self) -> None:
        """Download and delete shards until the parent process has ended."""
        try:
            self._wait_for_lock()
        except OSError as error:  # some file systems have no locks
            text = "--shard-cache %s cannot be locked: %s; samples are read one by one; give a folder on a local disk"
            _logger.warning(text, self._folder, os_reason(error))
            return
        with concurrent.futures.ThreadPoolExecutor(_DOWNLOADS) as pool:
            while True:
                began = time.monotonic()
                try:
                    self._update(pool)
                except OSError as error:  # tried again; workers read by range meanwhile
                    if not self._has_warned:
                        self._has_warned = True
                        _logger.warning("shard cache %s: %s", self._folder, os_reason(error))
                pause = max(_POLL_S, 5 * (time.monotonic() - began))  # an update of very many shards takes longer
                if self._running:
                    concurrent.futures.wait(self._running, pause, concurrent.futures.FIRST_COMPLETED)
                else:
                    time.sleep(pause)
                self._end_with_parent()

    def _wait_for_lock(self) -> None:
        """Take the lock on the folder. Warn if a run on other shards has it."""
        # Made here, in the forked process, and kept: a deleted lock is released.
        self._lock, holder = FileLock(self._folder / "lock", fallback_to_soft=False), self._folder / "holder"
        run = hashlib.sha256(" ".join(self._names.values()).encode()).hexdigest()
        while True:
            try:
                self._lock.acquire(timeout=0)
                break
            except Timeout:
                time.sleep(_POLL_S)
                self._end_with_parent()
            if not self._has_warned and holder.exists() and holder.read_text() != run:
                self._has_warned = True
                _logger.warning(
                    "--shard-cache %s is used by a run on other data, and samples of this run are read one by one "
                    "until it ends; give each run its own folder",
                    self._folder,
                )
        self._has_warned = False
        for left in self._folder.glob(f".*{SUFFIX}.*.tmp"):  # of a process that was killed
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it serves a warning only, and a full disk has room when shards are deleted
            write_atomically(holder, run)

    def _end_with_parent(self) -> None:
        if os.getppid() != self._parent:
            os._exit(0)  # threads may wait for the network

    def _update(self, pool: concurrent.futures.Executor) -> None:
        """Collect finished downloads, delete the files that are not needed next, and start downloads."""
        now = time.monotonic()
        for future in [future for future in self._running if future.done()]:
            shard = self._running.pop(future)
            if error := future.exception():
                self._failed[shard] = now + _AFTER_ERROR_S
                reason = os_reason(error) if isinstance(error, OSError) else error
                _logger.warning("shard cache %s: %s is not in it: %s", self._folder, self._files[shard], reason)
        wanted = self._wanted()
        found = {entry.name: entry.stat().st_size for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX)}
        sizes = {self._names[shard]: self._files[shard].size for shard in wanted}
        present = {name for name, size in found.items() if sizes.get(name) == size}  # others are not needed, or cut off
        for name in found.keys() - present:
            (self._folder / name).unlink(missing_ok=True)
        running = set(self._running.values())
        for shard in wanted:
            if len(self._running) >= _DOWNLOADS:
                return
            name = self._names[shard]
            if name not in present and shard not in running and self._failed.get(shard, 0.0) <= now:
                self._running[pool.submit(download, self._files[shard], self._folder / name)] = shard

    def _wanted(self) -> list[int]:
        """Return the shards that are needed next, in the order of their use, as many as fit.

        Downloads that are no longer among them still take their room.
        """
        chosen = dict.fromkeys(self._running.values())
        room = self._limit - sum(self._files[shard].size for shard in chosen)
        here, seen = self._position.value, set[int]()
        for begin, shard in self._shards_from(here):
            if shard in seen or shard not in self._files:
                continue
            seen.add(shard)
            if shard not in chosen and (size := self._files[shard].size) > room:
                if begin <= here and not self._has_warned:
                    self._has_warned = True
                    _logger.warning(
                        "--shard-cache-gb: %.3f GB do not hold the shards of a window of samples; samples of the "
                        "others are read one by one; set a larger limit",
                        self._limit / 1e9,
                    )
                if size <= self._limit:
                    break
            elif shard not in chosen:
                chosen[shard] = None
                room -= size
            if len(seen) == len(self._files):
                break
        return list(chosen)
