"""Interface of the sources of image-text pairs, and the files that they read, with limits of their size."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megaclip.data.batch import BadSample, RawSample
from megaclip.errors import shortened

MAX_BYTES = {"image": 256 << 20, "caption": 1 << 20}
"""Largest size of an image file, and of a text file, a JSON file or a caption in a table."""


class Source(Protocol):
    """Members of image-text pairs of any kind of storage. Rows are read by number, 0..len-1, in any order."""

    kind: str
    shard_sizes: np.ndarray
    """Number of samples per shard, (S,) int64. The order permutes shards, then windows of samples."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> RawSample:
        """Return the undecoded sample. Raises BadSample."""

    def captions(self, row: int) -> tuple[str, ...]:
        """Return only the caption of a sample, or its captions. Raises BadSample."""

    def shard_name(self, row: int) -> str:
        """Return the name of the file that holds `row`, for messages."""

    def manifest(self) -> list[list[Any]]:
        """Return [name, bytes, samples] per file. A resumed run requires an equal manifest."""

    @property
    def columns(self) -> dict[str, str]:
        """Columns, extensions or fields that images ("image") and captions ("caption") come from, for a report."""

    @property
    def problems(self) -> dict[str, int]:
        """Number of problems that were found when the source was opened, by kind."""


def counted(names: Counter[str]) -> str:
    """Return names with their counts for a report, the most frequent first."""
    return ", ".join(f"{name} ({count:,})" for name, count in names.most_common())


def check_size(what: str, size: int, key: str) -> None:
    """Raise BadSample for an "image" or "caption" with too many bytes. key: origin of the sample."""
    if size > MAX_BYTES[what]:
        raise BadSample(f"{what} too large", f"{key}: {size} bytes; expected at most {MAX_BYTES[what]:,}")


def read_file(path: str | os.PathLike, what: str, key: str, where: str = "") -> bytes:
    """Return the bytes of an "image" or "caption" file. Raises BadSample if it is missing, too large, or a device.

    key, where: origin of the sample, and places that were searched, for the message.
    """
    try:
        if not os.path.isfile(path):  # a device or a pipe could block or never end
            raise BadSample(f"missing {what}", f"{key}: {shortened(os.fspath(path))!r} is not a file{where}")
        check_size(what, os.path.getsize(path), key)
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise BadSample(f"missing {what}", f"{key}: {error}") from error
