"""Write files so that they survive a power cut, read them, and compute their checksums.

A file is on the disk only after `fsync` of the file, and its name only after `fsync` of its folder. Without them a
power cut may leave a name with an empty file. The functions here return after both.
"""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from megaclip.files import sync_folder

_BLOCK_BYTES = 4 * 2**20
"""Number of bytes that are read at a time."""


class FileRecord(BaseModel):
    """Size and checksum of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: int = Field(ge=0)
    """Size in bytes."""
    crc32: str = Field(pattern="^[0-9a-f]{8}$")
    """CRC-32 (that of zlib and gzip) in hexadecimal. It detects accidental damage, not deliberate changes."""


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8. Raises OSError unless it is a regular one: a named pipe would never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a regular file")
    return path.read_text(encoding="utf-8")


def save_tensors(content: Any, path: Path) -> FileRecord:
    """Write `content` with `torch.save`; the file and its name are on the disk when the function returns.

    The checksum is computed from the bytes in memory while they are written. Raises OSError if they cannot be written.
    """
    with path.open("wb", buffering=_BLOCK_BYTES) as stream:
        output = _CheckedOutput(stream)
        torch.save(content, output)  # type: ignore[arg-type]
        if output.error is not None:
            raise output.error
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path.parent)
    return FileRecord(size=output.size, crc32=f"{output.crc32:08x}")


class _CheckedOutput:
    """Binary output stream that computes the CRC-32 of what it writes.

    It stores the first error instead of raising it, because torch.save ends the process if an exception passes through
    its C++ writer, and hides the reason in other cases.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self.error is None:
            try:
                self._stream.write(view)
            except OSError as problem:
                self.error = problem
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: `save_tensors` flushes the stream."""


def checksum(path: Path) -> FileRecord:
    """Return the size and the checksum of a file, which is read in blocks."""
    size = crc32 = 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            crc32 = zlib.crc32(block[:count], crc32)
            size += count
    return FileRecord(size=size, crc32=f"{crc32:08x}")


def sync_files(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileRecord]:
    """Make files below `folder`, and all folders there, survive a power cut; return the files' records by name.

    names: paths relative to `folder`, with slashes. None: all files, except those whose names begin with a dot.
    """
    below = list(folder.rglob("*"))
    found = [path for path in below if path.is_file() and path.name[0] != "."]
    if names is not None:
        found = [folder / name for name in names]
    records = {}
    for path in sorted(found):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        records[path.relative_to(folder).as_posix()] = checksum(path)
    for parent in (folder, *filter(Path.is_dir, below)):
        sync_folder(parent)
    return records


def make_folders(folder: Path) -> None:
    """Create `folder` and its missing parents, so that their names survive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)
