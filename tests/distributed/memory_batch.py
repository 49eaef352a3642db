"""A `StepBatch` around tensors that are in memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megaclip.engine.step_batch import DeviceFeed, Tower


class MemoryBatch:
    """Samples of one step. pixels: one (_, 3, H, W) uint8 tensor per chunk; tokens: (b, L), cut into `text_chunks`."""

    def __init__(self, pixels: Sequence[Tensor], tokens: Tensor, feed: DeviceFeed, *, text_chunks: int) -> None:
        self._chunks = {Tower.IMAGE: list(pixels), Tower.TEXT: list(tokens.chunk(text_chunks))}
        self._feed = feed

    def rows(self) -> int:
        return sum(map(len, self._chunks[Tower.TEXT]))

    def chunk_count(self, tower: Tower) -> int:
        return len(self._chunks[tower])

    def chunks(self, tower: Tower, *, again: bool) -> Iterator[Tensor]:
        return self._feed.inputs(tower, self._chunks[tower])

    def blank(self, tower: Tower) -> Tensor:
        (row,) = self._feed.inputs(tower, [torch.zeros_like(self._chunks[tower][0][:1])])
        return row

    def agree(self) -> None:
        pass
