"""A step's batch from tensors in memory, and an engine without DeepSpeed, for the gradient cache."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megaclip.comm.groups import resolve
from megaclip.models import DualEncoder, OpenClipText, TextConfig
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
        fields: dict[str, Tensor] | None = None,
    ) -> None:
        self._fields = fields or {}
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

    def fields(self) -> dict[str, Tensor]:
        return self._fields

    def tokens(self) -> Tensor:
        return self._tokens

    def blank(self, tower: Tower) -> Tensor:
        like = self._pixels[0] if tower is Tower.IMAGE else self._tokens
        (row,) = self._feed.inputs(tower, [torch.zeros_like(like[:1])])
        return row

    def agree(self) -> None:
        pass


class PlainEngine:
    """A model with the methods of a DeepSpeed engine that the gradient cache calls, without DeepSpeed."""

    device = torch.device("cpu")
    optimizer = None

    def __init__(self, model: DualEncoder) -> None:
        self.module = model
        self.rows = {"image": 0, "text": 0}
        """Number of samples that each tower has encoded."""
        self.text_positions = 0
        """Number of token positions that the text tower has computed."""
        model.visual.register_forward_pre_hook(lambda _, inputs: self._count_images(*inputs))
        model.text.register_forward_pre_hook(lambda _, inputs: self._count_texts(*inputs))

    def _count_images(self, pixels: Tensor) -> None:
        self.rows["image"] += len(pixels)

    def _count_texts(self, tokens: Tensor, pieces: Pieces | None = None) -> None:
        self.rows["text"] += len(tokens)
        self.text_positions += tokens.numel() if pieces is None else sum(rows * length for rows, length in pieces)

    def __call__(self, *inputs: Any) -> tuple[Tensor | None, ...]:
        return self.module(*inputs)

    def backward(self, loss: Tensor, **_: object) -> None:
        loss.backward()

    def set_gradient_accumulation_boundary(self, _: bool) -> None: ...

    def zero_offload_optimizer(self) -> None: ...

    def zero_optimization_stage(self) -> int:
        return 1


def cross_entropy(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Return a loss of one rank's features."""
    return torch.nn.functional.cross_entropy(scale * images @ texts.T, torch.arange(len(images)))
