"""Write files that other processes read: a reader sees a whole file, the old one or the new one."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` when the body of the `with` statement ends.

    The new file is in the same folder, and its name begins with a dot. It is deleted if an error occurs.

    durable: the file and its name are on the disk when the `with` statement ends. A power cut then leaves the old file
        or the new one. Otherwise it may leave an empty file under the name.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # process ids are not unique between hosts
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, as `replacing` does. The new text is on the disk at the end."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
