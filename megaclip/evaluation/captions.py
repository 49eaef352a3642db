"""Several captions per image: which captions of a set of image-caption pairs belong to one image.

Two layouts are in use for COCO and Flickr, and both are understood: one pair per caption, with the image repeated
(equal bytes are one image), and one pair per image, its captions on lines of their own (CLIP_benchmark's tar
shards). Every rank reads its share of the pairs once and keeps those captions; only a 64-bit digest per pair
crosses between ranks.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megaclip.comm.collectives import gather_integers
from megaclip.comm.groups import group_rank, group_size
from megaclip.data.batch import PADDING_ID, BadSample
from megaclip.evaluation.encoder import Encode


class PairSource(Protocol):
    """What is needed of `data.PairDataset`: pairs by id, from 0 to len - 1."""

    def __len__(self) -> int: ...

    def read(self, sample_id: int, /) -> Any: ...


@dataclass(frozen=True)
class CaptionGroups:
    """Which image each caption belongs to, an image being known by the smallest id of its pairs.

    image_of_pair: (N,) int64, over all pairs, the same on every rank. texts: this rank's captions, and for each the
    image_ids (m,) int64 it belongs to; leading_ids (m,) int64 holds that id for one caption per image and -1 for
    the others.
    """

    image_of_pair: torch.Tensor
    texts: list[str]
    image_ids: torch.Tensor
    leading_ids: torch.Tensor

    def image_ids_of(self, pair_ids: torch.Tensor) -> torch.Tensor:
        """The pair ids (b,) where the pair stands for its image, -1 at copies of an earlier image and at padding."""
        leading = self.image_of_pair.to(pair_ids.device)[pair_ids.clamp(min=0)] == pair_ids
        return pair_ids.masked_fill(~leading, PADDING_ID)

    def of_images(self, present: torch.Tensor) -> "CaptionGroups":
        """Without the captions of images that are not `present` (n,) bool by id: those that could not be decoded."""
        kept = [image < len(present) and bool(present[image]) for image in self.image_ids.tolist()]
        return CaptionGroups(
            self.image_of_pair,
            list(itertools.compress(self.texts, kept)),
            self.image_ids[torch.tensor(kept, dtype=torch.bool)],
            self.leading_ids[torch.tensor(kept, dtype=torch.bool)],
        )


def group_captions(dataset: PairSource, *, group: Any = None) -> CaptionGroups:
    """Read all pairs once, over all ranks, and group their captions by image. Every rank must call it."""
    captions: dict[int, list[str]] = {}
    digests: list[int] = []
    for pair in range(group_rank(group), len(dataset), group_size(group)):
        try:
            sample = dataset.read(pair)
        except BadSample:  # the loader counts it and leaves it out; it is an image of its own without captions
            digests.append(_digest(b"unreadable", pair))
            continue
        digests.append(_digest(sample.image))
        captions[pair] = [line.strip() for line in sample.caption.splitlines() if line.strip()] or [""]
    image_of_pair = _first_of_its_kind(_interleaved(digests, len(dataset), group))
    texts, image_ids, leading_ids = [], [], []
    for pair, lines in captions.items():
        image = int(image_of_pair[pair])
        texts += lines
        image_ids += [image] * len(lines)
        leading_ids += [pair if pair == image else PADDING_ID, *[PADDING_ID] * (len(lines) - 1)]
    integers = torch.int64
    return CaptionGroups(
        image_of_pair, texts, torch.tensor(image_ids, dtype=integers), torch.tensor(leading_ids, dtype=integers)
    )


def encode_captions(
    encode: Encode,
    texts: Sequence[str],
    tokenizer: Callable[[list[str]], torch.Tensor],
    *,
    batch_size: int = 256,
    group: Any = None,
) -> torch.Tensor:
    """Text features (m, D) of this rank's texts. Ranks may have different numbers; all call `encode` equally often."""
    longest = max(count for (count,) in gather_integers([len(texts)], group=group))
    features = []
    for start in range(0, longest, batch_size):
        rows = min(batch_size, longest - start)
        batch = list(texts[start : start + rows])
        # As many rows on every rank: tensor-parallel ranks encode their rows together.
        _, text_features = encode(tokens=tokenizer(batch + [""] * (rows - len(batch))))
        assert text_features is not None, "encode(tokens=...) returns text features"
        features.append(text_features[: len(batch)])
    return torch.cat(features)


def _digest(content: bytes, number: int = 0) -> int:
    """A 64-bit digest."""
    digest = hashlib.blake2b(content, digest_size=8, salt=number.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little", signed=True)


def _interleaved(values: list[int], count: int, group: Any) -> torch.Tensor:
    """(count,) int64 on every rank, from each rank's every W-th element."""
    per_rank = -(-count // group_size(group))
    everyone = gather_integers(values + [0] * (per_rank - len(values)), group=group)
    return torch.tensor(everyone).T.reshape(-1)[:count]


def _first_of_its_kind(values: torch.Tensor) -> torch.Tensor:
    """For each of the values (n,), the smallest index that holds the same value."""
    _, kinds = values.unique(return_inverse=True)
    indices = torch.arange(len(values), device=values.device)
    first = torch.full_like(indices, len(values)).scatter_reduce_(0, kinds, indices, reduce="amin")
    return first[kinds]
