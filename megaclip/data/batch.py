"""Data types of this package: a raw sample of a source, and the batches that the loaders yield.

Shapes: b samples of this rank, H x W pixels, L tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from typing import Any

import torch

PADDING_ID = -1
"""Id of a padding row of an evaluation batch. Training batches have no such rows."""


class BadSample(Exception):
    """Raised for an unusable sample, which is counted under `kind`.

    detail: the sample (`RawSample.key`), if it is known, and the problem. shard: file of the sample, if it is known.
    """

    def __init__(self, kind: str, detail: str, shard: str = "") -> None:
        super().__init__(kind, detail, shard)  # the arguments of a copy in another process
        self.kind, self.detail, self.shard = kind, detail, shard

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class WeightedKey:
    """One key of --caption-key."""

    name: str = ""
    """Column, or extensions and fields. Empty: the usual names."""
    weight: float | None = None
    """Weight among the keys that a sample has. None: the keys are taken in turn."""


@dataclasses.dataclass(frozen=True)
class Captions:
    """Captions of one image, at least one. For a labelled image the number of its class."""

    texts: tuple[str, ...]
    """All captions, key by key in the order of --caption-key. Training takes one at a time, an evaluation all."""
    shares: tuple[tuple[WeightedKey, int], ...] = ()
    """The keys that the sample has, each with its number of captions, if --caption-key gives several; else empty."""

    def number(self, seed: int, epoch: int, sample_id: int) -> int:
        """Return the number of the caption that training takes in this epoch, by (seed, epoch, id) only.

        Of several keys, one is drawn by the weights of those that the sample has, or they are taken in turn. Of several
        captions under a key, each epoch takes the next one.
        """
        first, count, turn = 0, len(self.texts), epoch + sample_id
        if len(self.shares) > 1:
            weights = [key.weight for key, _ in self.shares if key.weight is not None]
            if weights:
                drawn = digest(f"{seed} {epoch} {sample_id}".encode()) % 2**53 / 2**53  # in [0, 1)
                ends = list(itertools.accumulate(weight / max(weights) for weight in weights))
                number = bisect.bisect_right(ends[:-1], drawn * ends[-1])
            else:
                turn, number = divmod(turn, len(self.shares))
            first, count = sum(count for _, count in self.shares[:number]), self.shares[number][1]
        return first + turn % count


@dataclasses.dataclass(frozen=True)
class RawSample:
    """An undecoded sample."""

    image: bytes
    """Encoded image file."""
    captions: Captions
    key: str
    """Origin of the sample for messages: shard and name, or table, row and file."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Extra fields by name: the bytes of a member or the cell of a table; None where it is missing."""
    id_cell: str | None = None
    """Content of the column that --id-key names, as text; None without such a column."""

    @property
    def caption(self) -> str:
        """The caption, or all captions, one per line."""
        return "\n".join(self.captions.texts)

    @property
    def lines(self) -> list[str]:
        """Captions on the lines of `caption`, without empty ones."""
        return [line.strip() for line in self.caption.splitlines() if line.strip()]


def digest(content: bytes) -> int:
    """Return a signed 64-bit digest, equal in every process and version."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


@dataclasses.dataclass
class Batch:
    """Image-text pairs."""

    images: torch.Tensor
    """Pixels (b, 3, H, W) uint8, cropped and resized. `ImageTransform.normalise` turns them into the model's input."""
    tokens: torch.Tensor
    """Token ids (b, L) int64."""


@dataclasses.dataclass
class TrainBatch(Batch):
    """Image-text pairs of a training step."""

    pair_ids: torch.Tensor
    """Ids (b,) int64 by which megaclip.same_ids recognises equal pairs: digests of what --id-key names."""
    fields: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Extra fields of the samples, (b, ...) each."""


@dataclasses.dataclass
class EvaluationBatch(Batch):
    """Image-text pairs with their ids; bad samples and rows without a sample are padding. `tokens` (m, L) has all m
    captions of the images, at least one per row."""

    ids: torch.Tensor
    """Rows in the dataset (b,) int64, dense and stable. PADDING_ID marks padding."""
    image_digests: torch.Tensor
    """Digest of each image's file (b,) int64, by which equal images are recognised; 0 where the id is PADDING_ID."""
    caption_rows: torch.Tensor
    """Row of the image of each caption (m,) int64, ascending."""
    caption_lines: torch.Tensor
    """Number of lines of a text that is one caption, (b,) int64; 1 for images with several captions."""


@dataclasses.dataclass
class LabelledBatch:
    """Images and their class numbers."""

    images: torch.Tensor
    """Pixels (b, 3, H, W) uint8, cropped and resized. `ImageTransform.normalise` turns them into the model's input."""
    labels: torch.Tensor
    """Class numbers (b,) int64; -1 where the id is PADDING_ID."""
    ids: torch.Tensor
    """Rows in the dataset (b,) int64. PADDING_ID marks padding."""
