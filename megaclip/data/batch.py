"""What flows through the data room: one raw sample from a source, one batch to the model.

Shapes: b samples of this rank, H x W pixels, L tokens.
"""

from __future__ import annotations

import dataclasses

import torch

PADDING_ID = -1
"""The id of a row that only fills up a rank's evaluation batch; it never occurs in training."""


class BadSample(Exception):
    """One sample cannot be used; the loader counts it under `kind` and takes a substitute, so users never see this.

    detail: which sample (`RawSample.key`), where that is known, and what is wrong with it.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclasses.dataclass(frozen=True)
class RawSample:
    """An undecoded sample."""

    image: bytes
    """The encoded image file."""
    caption: str
    """The caption, or all captions, one per line; of a labelled image, the number of its class."""
    key: str
    """Where it came from (shard and name, or table, row and file), for messages."""
    alternatives: tuple[str, ...] = ()
    """The captions one by one, where the source keeps several for an image: training takes one of them at a time."""


class _Tensors:
    def pin_memory(self):
        """The same batch in page-locked memory; torch's DataLoader calls this."""
        return type(self)(**{name: tensor.pin_memory() for name, tensor in vars(self).items()})

    def share_memory_(self):
        """The same batch, moved to shared memory; RuntimeError if that is full."""
        for tensor in vars(self).values():
            tensor.share_memory_()
        return self


@dataclasses.dataclass
class Batch(_Tensors):
    """Image-text pairs."""

    images: torch.Tensor
    """(b, 3, H, W) uint8, cropped and resized; `ImageTransform.normalise` makes the model's input of them."""
    tokens: torch.Tensor
    """(b, L) int64."""
    ids: torch.Tensor
    """(b,) int64: the rows in the dataset, dense and stable."""


@dataclasses.dataclass
class LabelledBatch(_Tensors):
    """Images with the number of their class."""

    images: torch.Tensor
    """(b, 3, H, W) uint8, cropped and resized; `ImageTransform.normalise` makes the model's input of them."""
    labels: torch.Tensor
    """(b,) int64; -1 where the id is PADDING_ID."""
    ids: torch.Tensor
    """(b,) int64."""
