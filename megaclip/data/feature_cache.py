"""Features of a locked image tower on disk, which training reads instead of the images (--feature-cache).

`engine.feature_cache` writes them. Every rank writes one file, without a header: sample `id` is row id // W of the file
of rank id % W. A row has the bytes of the features, as the loss receives them, and one byte that is 0 for an image that
cannot be used.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megaclip.data.batch import BadSample


@dataclass(frozen=True)
class CachedFeatures:
    """Features of `samples` images in the files of `ranks` ranks. Every process maps the files."""

    folder: Path
    samples: int
    ranks: int
    width: int
    """Number of bytes of the features of an image."""

    def path(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.folder / f"rank{rank}-of-{self.ranks}.bin"

    def rows(self, rank: int) -> int:
        """Return the number of samples in the file of a rank."""
        return len(range(rank, self.samples, self.ranks))

    @property
    def size(self) -> int:
        """Number of bytes of all files."""
        return self.samples * (self.width + 1)

    def is_whole(self) -> bool:
        """Return whether all files exist and have their size."""
        return all(
            self.path(rank).exists() and os.path.getsize(self.path(rank)) == self.rows(rank) * (self.width + 1)
            for rank in range(self.ranks)
        )

    def read(self, sample_id: int) -> np.ndarray:
        """Return the bytes of the features of a sample, (width,) uint8. Raises BadSample if its image is unusable."""
        row, rank = divmod(sample_id, self.ranks)
        found = _mapped(self.path(rank), self.rows(rank), self.width + 1)[row]
        if not found[-1]:
            raise BadSample("bad when the feature cache was written", f"sample {sample_id} of {self.folder}")
        return np.array(found[:-1])

    @staticmethod
    def to_input(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return features (b, D) in `dtype` from their bytes (b, width) uint8, on the same device."""
        return rows.view(dtype).clone()


@functools.cache
def _mapped(path: Path, rows: int, width: int) -> np.ndarray:
    return np.memmap(path, np.uint8, "r", shape=(rows, width))
