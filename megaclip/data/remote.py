"""Read files of object stores and web servers with fsspec: list them, read ranges of bytes, and copy whole files.

Credentials come from the backends' own configuration. A URL may contain secrets too (user names, the signature in the
query of a presigned URL), so messages and records contain `public(url)` only.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from megaclip.data.patterns import expand_braces
from megaclip.errors import DataError, first_line, os_errors_as, public
from megaclip.files import replacing

SCHEMES = {
    "s3": ("s3", "s3fs"),
    "gs": ("gs", "gcsfs"),
    "hf": ("hf", "huggingface_hub"),
    "http": ("http", "aiohttp"),
    "https": ("http", "aiohttp"),
    "abfs": ("abfs", "adlfs"),
    "abfss": ("abfs", "adlfs"),
}
"""Scheme of a URL -> the extra of this package that installs its backend, and the backend."""
BLOCK_BYTES = 8 << 20
"""Largest number of bytes that are read with one request."""
THREADS = 32
"""Number of files that are looked up or indexed at the same time."""

_ATTEMPTS, _FIRST_PAUSE_S = 8, 0.2
"""Number of attempts of a request. The pause doubles after each, so that a store may fail for 25 seconds."""
_SILENCE_S = 30
"""Seconds without a byte after which a request counts as failed."""
_FEW_FILES = 8
"""Number of files of a folder that are looked up one by one."""
_SMALL_BLOCK, _FIRST_BLOCK, _LONG_GAP = 64 << 10, 512 << 10, 1 << 20
"""Bytes that ReadAhead reads after a long gap, half of those that it reads first, and the length of a long gap. A
request takes about as long as the transfer of a long gap."""
_VERSION_KEYS = ("ETag", "etag", "generation", "blob_id", "LastModified", "last_modified", "Last-Modified", "updated")

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of an object store or web server, as it was when it was looked up."""

    url: str
    """Its URL, perhaps with secrets."""
    size: int
    """Number of bytes."""
    version: str
    """ETag, generation, or else the date of the last change; "" if the store has none of these."""

    def __str__(self) -> str:
        return public(self.url)

    @property
    def name(self) -> str:
        """Last part of the path, without secrets."""
        return str(self).rpartition("/")[2]

    @functools.cached_property
    def cache_name(self) -> str:
        """File name of a local copy of this version."""
        return hashlib.sha256(f"{self} {self.size} {self.version}".encode()).hexdigest()[:32]

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`. Raises DataError if they cannot be read after several attempts."""

        def once() -> bytes:
            system, path = _open(self.url)
            content = system.cat_file(path, start=start, end=end)
            if len(content) == self.size != end - start:
                raise DataError("the server ignores ranges of bytes, which reading requires: copy the data elsewhere")
            if len(content) != end - start:
                raise OSError(f"{len(content)} of {end - start} bytes were received")
            return content

        return retried(once, f"bytes {start} to {end} of {self}") if end > start else b""

    def require_unchanged(self) -> None:
        """Raise DataError if the file is another one than when it was looked up."""
        now = look_up(self.url)
        if (now.size, now.version) != (self.size, self.version):
            raise DataError(
                f"{self} has changed since the run began: it had {self.size} bytes and version {self.version!r}, now "
                f"{now.size} bytes and version {now.version!r}; restore it, or start a new run"
            )


@dataclasses.dataclass
class ReadAhead:
    """Reader of a file that is read from front to back, with gaps, as headers of a tar file are.

    Blocks grow while the gaps are short, up to one sequential read. After a long gap they are small.
    """

    file: RemoteFile
    _start: int = 0
    _content: bytes = b""
    _block: int = _FIRST_BLOCK

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset`, fewer at the end of the file. Raises DataError."""
        end = min(offset + size, self.file.size)
        held = self._start + len(self._content)
        if not self._start <= offset <= end <= held:
            is_near = self._start <= offset <= held + _LONG_GAP
            self._block = min(2 * self._block, BLOCK_BYTES) if is_near else _SMALL_BLOCK
            self._start = offset
            self._content = self.file.read(offset, min(max(end, offset + self._block), self.file.size))
        return self._content[offset - self._start : end - self._start]


def is_remote(spec: str | os.PathLike) -> bool:
    """Return whether data are named by a URL that this module reads."""
    return isinstance(spec, str) and spec.partition("://")[0].lower() in SCHEMES and "://" in spec


def retried(attempt: Callable[[], _T], what: str) -> _T:
    """Return `attempt()`. After an error that may pass, it is called again, with growing pauses.

    Raises DataError, without secrets. what: what is read, for the message.
    """
    for number in range(_ATTEMPTS):
        if number:
            time.sleep(_FIRST_PAUSE_S * 2 ** (number - 1) * random.uniform(0.75, 1.25))
        try:
            return attempt()
        except DataError as error:
            raise DataError(f"cannot read {what}: {error}") from None
        except Exception as error:  # every backend has its own types; they are not chained, as they may show secrets
            failure: BaseException = error
            if isinstance(error, FileNotFoundError) and type(error.__cause__).__module__.startswith("aiohttp"):
                failure = error.__cause__ or error  # fsspec's HTTP backend reports every failure as a missing file
            status = getattr(failure, "status", None)
            if isinstance(failure, FileNotFoundError) or status in (404, 410):
                raise DataError(f"cannot read {what}: it does not exist") from FileNotFoundError(what)
            reason = f"{type(failure).__name__}: {public(first_line(failure))}"
            if isinstance(failure, PermissionError) or status in (401, 403):
                raise DataError(
                    f"cannot read {what}: {reason}; check the credentials that the backend finds"
                ) from PermissionError(what)
    raise DataError(f"cannot read {what} after {_ATTEMPTS} attempts: {reason}") from OSError(reason)


def look_up(url: str, *, fresh: bool = True) -> RemoteFile:
    """Return the file of a URL with its size and version. Raises DataError if it is missing or cannot be read.

    fresh: do not use what a listing of its folder has returned.
    """

    def once() -> dict[str, Any]:
        system, path = _open(url)
        if fresh:
            system.invalidate_cache()
        return system.info(path)

    info = retried(once, public(url))
    if info.get("size") is None or info.get("type") == "directory":
        raise DataError(f"{public(url)} is a folder, or its server does not report its size; give a file")
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    return RemoteFile(url, int(info["size"]), version.strip('"'))


def look_up_all(urls: Sequence[str]) -> list[RemoteFile]:
    """Return the files of many URLs, in this order. Raises DataError if one is missing."""
    _list_folders(urls)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        files = list(pool.map(functools.partial(look_up, fresh=False), urls))
    if unknown := next((file for file in files if _is_http(file.url) and "?" in file.url and not file.version), None):
        raise DataError(
            f"{unknown} has a query, and its server sends neither an ETag nor a date, so two such files cannot be told "
            "apart; copy the data elsewhere"
        )
    return files


def find_files(spec: str) -> list[RemoteFile]:
    """Return the files of a URL with braces or a glob, ordered as by `patterns`. Raises DataError if one is missing."""
    _open(spec)[0].invalidate_cache()  # of listings
    urls = []
    for url in expand_braces(spec):
        has_glob = any(character in public(url) for character in "*[?")  # without the query of a web server
        urls += _glob(url) if has_glob else [url]
    if not urls:
        raise DataError(f"data {public(spec)!r}: no file matches") from FileNotFoundError()
    return look_up_all(urls)


def files_in(spec: str) -> list[str] | None:
    """Return the sorted URLs of the files in a folder, or None if a URL names files. Raises DataError."""
    url = public(spec)
    if "." in url.partition("://")[2].partition("/")[2].rpartition("/")[2]:
        return None
    _open(spec)[0].invalidate_cache()
    place = spec.partition("?")[0] if _is_http(spec) else spec  # with its user name and password
    return [name for name in _glob(place.rstrip("/") + "/*") if "." in name.rpartition("/")[2][1:]]


def copied(files: Sequence[RemoteFile]) -> list[Path]:
    """Return copies of whole files in one folder of the user's cache. Only the first call downloads them.

    files: with different names. Raises DataError.
    """
    with os_errors_as(DataError, f"cannot copy {files[0]} to the user's cache"):
        versions = " ".join(file.cache_name for file in files)
        folder = user_cache() / "files" / hashlib.sha256(versions.encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            path = folder / file.name
            if not path.exists() or path.stat().st_size != file.size:
                download(file, path)
    return [folder / file.name for file in files]


def download(file: RemoteFile, path: Path) -> None:
    """Copy a file. `path` is the whole file or none, also after a power cut. Raises DataError or OSError."""
    with replacing(path) as unfinished:
        with unfinished.open("wb") as stream:
            for start in range(0, file.size, BLOCK_BYTES):
                stream.write(file.read(start, min(start + BLOCK_BYTES, file.size)))
        file.require_unchanged()


def user_cache() -> Path:
    """Return the folder of this package in the user's cache. Raises OSError for a user without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megaclip"
    except RuntimeError:
        raise OSError("there is no home folder; set XDG_CACHE_HOME to a writable folder") from None


def _is_http(url: str) -> bool:
    return url.lower().startswith("http")


def _open(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and its path there. Raises DataError if its backend is not installed."""
    scheme = url.partition("://")[0].lower()
    extra, backend = SCHEMES[scheme]
    options: dict[str, Any] = {}
    try:
        if _is_http(url):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
            options["client_kwargs"] = {"timeout": timeout}
        if scheme == "s3":  # `retried` counts the attempts
            config = {"connect_timeout": _SILENCE_S, "read_timeout": _SILENCE_S, "retries": {"total_max_attempts": 1}}
            options["config_kwargs"] = config
        system, path = fsspec.core.url_to_fs(url, **options)
        if scheme == "s3":
            system.retries = 1
        return system, path
    except ImportError:
        raise DataError(
            f"{scheme}:// requires the package {backend}, which is not installed; pip install 'megaclip[{extra}]'"
        ) from None


def _glob(url: str) -> list[str]:
    """Return the sorted URLs that match a glob, with the query of a web server's glob. Raises DataError."""
    pattern, mark, query = url.partition("?") if _is_http(url) else (url, "", "")

    def once() -> list[str]:
        system, path = _open(pattern)
        return sorted(system.unstrip_protocol(name) + mark + query for name in system.glob(path))

    return retried(once, public(url))


def _list_folders(urls: Sequence[str]) -> None:
    """List the folders of many files, so that an object store answers their look-ups from one request in 1,000."""
    for folder, count in Counter(url.rpartition("/")[0] for url in urls).items():
        if count >= _FEW_FILES and not _is_http(folder):
            system, path = _open(folder)
            try:
                system.ls(path, detail=True)
            except Exception:  # without the right to list, each file is looked up
                return
