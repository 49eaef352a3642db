"""Find or make the index of data files: a file that is made once, and that all processes map into memory.

The index lies in the folder `.megaclip` in the common folder of the data files or, if that is read-only or remote, in
the user's cache. Its name is a fingerprint of the names, sizes and modification times (of remote files: versions) of
the data files, and of the settings that it depends on. A JSON file beside it, which is written last, describes it. If
several processes open the same files, one process makes the index and the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from megaclip.data.remote import RemoteFile, user_cache
from megaclip.errors import DataError, os_errors_as
from megaclip.files import replacing
from megaclip.logging import get_logger

INDEX_FOLDER = ".megaclip"
_LOCK_POLL_S = 0.2

_logger = get_logger(__name__)


def open_index(
    paths: Sequence[Path] | Sequence[RemoteFile],
    settings: list[Any],
    suffix: str,
    make: Callable[[Path, list[str], list[int]], dict[str, Any]],
) -> tuple[Path, dict[str, Any]]:
    """Return the path of the index of these files, and its description. Makes it if there is none.

    settings: JSON values that the index depends on.
    make: function of (path, names of the files relative to their common folder, their sizes in bytes) that writes the
        index and returns its description.

    Raises DataError if a file cannot be read or the index cannot be written.
    """
    places = [Path(str(path)) for path in paths]  # of remote files, only compared
    root = Path(os.path.commonpath([place.parent for place in places]))
    names = [str(place.relative_to(root)) for place in places]
    sizes, versions = list[int](), list[int | str]()
    for path in paths:
        if isinstance(path, RemoteFile):
            sizes.append(path.size)
            versions.append(path.version)
            continue
        with reading(path):
            stat = path.stat()
            sizes.append(stat.st_size)
            versions.append(stat.st_mtime_ns)
    facts = [*settings, *zip(names, sizes, versions, strict=True)]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24] + suffix
    folders = [] if isinstance(paths[0], RemoteFile) else [root / INDEX_FOLDER]
    with contextlib.suppress(OSError):  # of a user without a home folder
        folders.append(user_cache() / hashlib.sha256(os.fsencode(root)).hexdigest()[:16])
    for folder in folders:
        if description := _description(folder / name):
            return folder / name, description
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(folder) and os.access(folder, os.W_OK):
            break
    else:
        raise DataError(
            f"the index of {paths[0]} cannot be written to {' or '.join(map(str, folders)) or 'a home folder'}; make "
            "one of these folders writable, or set XDG_CACHE_HOME to a writable folder"
        )
    index = folder / name
    with _locked(index.with_suffix(".lock")):
        if description := _description(index):  # another process may have made the index meanwhile
            return index, description
        with os_errors_as(DataError, f"cannot write the index {index}", "free some space, or check the disk"):
            with replacing(index, durable=False) as unfinished:
                description = make(unfinished, names, sizes)
            with replacing(index.with_suffix(".json"), durable=False) as unfinished:
                text = json.dumps(description)
                check = {"bytes": index.stat().st_size, "crc32": zlib.crc32(text.encode())}
                unfinished.write_text(json.dumps(check | {"description": description}))
    return index, json.loads(text)


def _description(index: Path) -> dict[str, Any] | None:
    """Return the description of an index, or None if there is none, or, with a warning, if it does not fit the index.

    An array file that is shorter than its header states would be mapped into memory, and reading past its end would
    kill the process (SIGBUS). A full disk or an interrupted copy leaves such a file.
    """
    path = index.with_suffix(".json")
    if not os.path.exists(path):  # pathlib raises an error for a folder that this user may not search
        return None
    try:
        found = json.loads(path.read_text())
        if found["bytes"] != (size := index.stat().st_size):
            raise ValueError(f"it has {size} bytes, expected {found['bytes']}")
        if found["crc32"] != zlib.crc32(json.dumps(found["description"]).encode()):
            raise ValueError(f"the checksum of {path.name} is wrong")
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("the index %s is damaged and is rebuilt: %s", index, error)
        return None
    return found["description"]


def reading(path: Path | RemoteFile) -> contextlib.AbstractContextManager[None]:
    """Raise an OSError inside the `with` statement as a DataError that names the shard."""
    return os_errors_as(DataError, f"cannot read {path}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, or no lock if the file system does not support locks.

    The lock only saves work: processes that make the same index write equal files and rename them into place. The
    operating system releases the lock of a process that was killed.
    """
    # A soft lock of the library, which is only a file, would outlive a process that was killed on another machine.
    lock = FileLock(path, poll_interval=_LOCK_POLL_S, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        _logger.info("cannot lock %s (%s): every process makes the index itself", path, error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # before the release: FileLock tries again if the file that it locked was deleted
        lock.release()
