"""Check the output paths of a command before its long work."""

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from megaclip.errors import ConfigError, MegaclipError, os_errors_as


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


def writing(path: Path, raises: type[MegaclipError] = ConfigError) -> AbstractContextManager[None]:
    """Raise an OSError inside the `with` statement, such as a full disk, as an error that names `path`."""
    return os_errors_as(raises, f"cannot write {str(path)!r}", "choose another path")
