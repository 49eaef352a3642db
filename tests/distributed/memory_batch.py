"""A `StepBatch` of tensors in memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megaclip.comm.groups import resolve
from megaclip.models import OpenClipText, TextConfig
from megaclip.models.packing import Pieces
from megaclip.step.batch import DeviceFeed, Tower
from megaclip.step.caption_chunks import CaptionChunks


class MemoryBatch:
    """Samples of one step. pixels: one (_, 3, H, W) uint8 tensor per chunk; tokens: (b, L), divided into `text_chunks`.

    cut: the text tower for which captions are sorted and cut, on all ranks. None: captions keep their padding.
    """

    def __init__(
        self,
        pixels: Sequence[Tensor],
        tokens: Tensor,
        feed: DeviceFeed,
        *,
        text_chunks: int,
        cut: TextConfig | OpenClipText | None = None,
        tensor_ranks: int = 1,
    ) -> None:
        self._pixels, self._tokens, self._feed, self._text_chunks = list(pixels), tokens, feed, text_chunks
        whole = CaptionChunks.whole(tokens, text_chunks)
        self.captions = (
            whole
            if cut is None
            else CaptionChunks.cut(tokens, text_chunks, cut, tensor_ranks=tensor_ranks, ranks=resolve())
        )

    def rows(self) -> int:
        return len(self._tokens)

    def chunk_count(self, tower: Tower) -> int:
        return len(self._pixels) if tower is Tower.IMAGE else self._text_chunks

    def chunks(self, tower: Tower, *, read_once: int, again: bool) -> Iterator[Tensor]:
        chunks = self._pixels if tower is Tower.IMAGE else list(self.captions)
        return self._feed.inputs(tower, chunks[read_once if again else 0 :])

    def pieces(self, chunk: int) -> Pieces | None:
        return self.captions.pieces_of(chunk)

    def order(self, tower: Tower) -> Tensor | None:
        return None if tower is Tower.IMAGE else self.captions.order

    def blank(self, tower: Tower) -> Tensor:
        like = self._pixels[0] if tower is Tower.IMAGE else self._tokens
        (row,) = self._feed.inputs(tower, [torch.zeros_like(like[:1])])
        return row

    def agree(self) -> None:
        pass
