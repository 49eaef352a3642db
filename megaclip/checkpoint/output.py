"""Check the output paths of a command before its long work. Paths at which files would be mixed are refused."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaclip.errors import CheckpointError, ConfigError, MegaclipError


def check_output(out_dir: Path, source: Path, *, overwrite: bool) -> None:
    """Check that `out_dir` may be written.

    Args:
        out_dir: directory to write.
        source: directory or file that is exported or imported: RUN/checkpoints, an open_clip directory or a file.
        overwrite: whether `out_dir` may contain files.

    Raises:
        CheckpointError: `out_dir` is a file or below one, contains files, belongs to `source`, contains a run, or
            cannot be read or written.
    """
    target, origin = out_dir.resolve(), source.resolve()
    if target == origin or origin in target.parents or (target / "checkpoints").is_dir():
        raise CheckpointError(f"{out_dir} belongs to {source}, or holds a run; choose another directory")
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is not a directory"
        raise CheckpointError(f"cannot write to {out_dir}: {existing} {reason}; choose another directory")
    try:
        if out_dir.exists() and any(out_dir.iterdir()) and not overwrite:
            raise CheckpointError(f"{out_dir} is not empty; choose another directory, or add --overwrite")
    except OSError as error:
        raise CheckpointError(f"cannot write to {out_dir}: {error}; choose another directory") from None


def prepare_folder(folder: Path) -> None:
    """Make a folder for results, and its parents. Raises ConfigError if no file can be written in it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def prepare_file(path: Path) -> None:
    """Make the folder of a result, and its parents. Raises ConfigError if the file cannot be written."""
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a directory; choose another path")
    prepare_folder(path.parent)


@contextmanager
def writing(path: Path, raises: type[MegaclipError] = ConfigError) -> Iterator[None]:
    """Raise an OSError inside the `with` statement, such as a full disk, as an error that names `path`."""
    try:
        yield
    except OSError as error:
        raise raises(f"cannot write {str(path)!r}: {error.strerror or error}; choose another path") from None
