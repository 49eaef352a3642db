"""Parts of a source: the rows for training and those that are held out for validation."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from megaclip.data.batch import RawSample
from megaclip.data.source import Source
from megaclip.data.tables import Table


def held_out_rows(source: Source, fraction: float) -> np.ndarray:
    """Return which rows are held out, (len,) bool: by a hash of the image path, or else of the row number."""
    paths = source.image_paths() if isinstance(source, Table) else None
    keys = (str(row).encode() for row in range(len(source))) if paths is None else paths
    hashes = np.fromiter(map(zlib.crc32, keys), np.int64, len(source))
    return hashes < fraction * 2**32


class PartOfSource:
    """Some rows of a source, in their order."""

    def __init__(self, source: Source, rows: np.ndarray, name: str) -> None:
        """rows: (n,) int64, ascending. name: name of the part, for the checksum."""
        self._source, self._rows = source, rows
        self.kind, self.account, self.columns = source.kind, source.account, source.columns
        self.checksum = f"{source.checksum} {name}"
        ends = np.cumsum(source.shard_sizes)
        self.shard_sizes = np.diff(np.searchsorted(rows, ends), prepend=0)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, row: int) -> RawSample:
        return self._source.read(int(self._rows[row]))

    def captions(self, row: int) -> tuple[str, ...]:
        return self._source.captions(int(self._rows[row]))

    def shard_name(self, row: int) -> str:
        return self._source.shard_name(int(self._rows[row]))

    def manifest(self) -> list[list[Any]]:
        return self._source.manifest()
