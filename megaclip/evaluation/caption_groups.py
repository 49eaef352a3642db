"""Group the captions of image-caption pairs by image, for datasets with several captions per image.

Two layouts of COCO and Flickr are supported. Either there is one pair per caption, and the image is repeated (equal
bytes are one image): every evaluation groups these (`first_equal_image`). Or there is one pair per image, with one
caption per line (CLIP_benchmark's tar shards) or a list of captions. For all of these captions, `group_captions` lets
every rank read its share of the pairs once and keep their captions. Ranks exchange only a 64-bit digest per pair.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megaclip.comm.collectives import gather_integers, gather_rows, raise_on_all_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data.batch import PADDING_ID, BadSample
from megaclip.data.reading import check_caption
from megaclip.evaluation.encoder import Encode


class PairSource(Protocol):
    """Interface of `data.PairDataset` that evaluation uses: pairs with ids from 0 to len - 1."""

    def __len__(self) -> int: ...

    def read(self, sample_id: int, /) -> Any: ...


@dataclass(frozen=True)
class CaptionGroups:
    """Image of every caption. The id of an image is the smallest id of its pairs."""

    image_of_pair: torch.Tensor
    """Image id of every pair of the dataset, (N,) int64, equal on every rank."""
    texts: list[str]
    """This rank's m captions."""
    image_ids: torch.Tensor
    """Image id of each caption in `texts`, (m,) int64."""
    leading_ids: torch.Tensor
    """`image_ids` for the first caption of each image, -1 for its other captions, (m,) int64."""

    def image_ids_of(self, pair_ids: torch.Tensor) -> torch.Tensor:
        """Return `pair_ids` (b,) with -1 for padding and for repetitions of an image of an earlier pair."""
        leading = self.image_of_pair.to(pair_ids.device)[pair_ids.clamp(min=0)] == pair_ids
        return pair_ids.masked_fill(~leading, PADDING_ID)

    def of_images(self, present: torch.Tensor) -> "CaptionGroups":
        """Return a copy without the captions of images that could not be decoded.

        present: (n,) bool, True at the ids of decoded images.
        """
        kept = [image < len(present) and bool(present[image]) for image in self.image_ids.tolist()]
        return CaptionGroups(
            self.image_of_pair,
            list(itertools.compress(self.texts, kept)),
            self.image_ids[torch.tensor(kept, dtype=torch.bool)],
            self.leading_ids[torch.tensor(kept, dtype=torch.bool)],
        )


def group_captions(dataset: PairSource, *, group: Any = None) -> CaptionGroups:
    """Read all pairs once, over all ranks, and group their captions by image. Every rank must call it.

    Raises DataError on every rank if one of them cannot read its pairs.
    """
    captions: dict[int, list[str]] = {}
    digests: list[int] = []
    with raise_on_all_ranks(group=group):
        for pair in range(group_rank(group), len(dataset), group_size(group)):
            try:
                sample = dataset.read(pair)
                check_caption(sample)
            except BadSample:  # counted here as a separate image without captions; the loader reports it
                digests.append(pair)
                continue
            digests.append(sample.image_digest)
            captions[pair] = sample.lines or [""]
    image_of_pair = _first_equal(_interleave(digests, len(dataset), group))
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
    batch_size: int,
    group: Any = None,
) -> torch.Tensor:
    """Return text features (m, D) of this rank's m texts.

    Ranks may have different numbers of texts; every rank calls `encode` the same number of times. Texts of similar
    length are encoded together, because a batch takes as long as its longest text.
    """
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    most = max(count for (count,) in gather_integers([len(texts)], group=group))
    features = []
    for start in range(0, most, batch_size):
        rows = min(batch_size, most - start)
        batch = [texts[index] for index in by_length[start : start + rows]]
        # The same number of rows on every rank: tensor-parallel ranks encode their rows together.
        _, text_features = encode(tokens=tokenizer(batch + [""] * (rows - len(batch))))
        assert text_features is not None, "encode(tokens=...) returns text features"
        features.append(text_features[: len(batch)])
    in_order = torch.cat(features)
    return in_order[torch.tensor(by_length, dtype=torch.int64, device=in_order.device).argsort()]


def first_equal_image(pair_ids: torch.Tensor, digests: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """Return the id of each pair's image, the smallest id of all pairs with an equal image, (n,) int64.

    Every rank must call it, with equally many rows.

    pair_ids: (n,) int64, unique over all ranks; padding has PADDING_ID and keeps it. digests: (n,) int64.
    """
    gathered = gather_rows(torch.stack([pair_ids, digests], dim=1), group=group)
    all_ids, all_digests = gathered[gathered[:, 0] != PADDING_ID].unbind(1)
    order = all_ids.argsort()
    places = torch.searchsorted(all_ids[order], pair_ids).clamp(max=len(order) - 1)
    image_ids = all_ids[order][_first_equal(all_digests[order])]
    return torch.where(pair_ids == PADDING_ID, PADDING_ID, image_ids[places]) if len(order) else pair_ids


def _interleave(values: list[int], count: int, group: Any) -> torch.Tensor:
    """Return the values of all ranks, (count,) int64, on every rank; rank r has the elements r, r + W, r + 2W, ..."""
    per_rank = -(-count // group_size(group))
    everyone = gather_integers(values + [0] * (per_rank - len(values)), group=group)
    return torch.tensor(everyone).T.reshape(-1)[:count]


def _first_equal(values: torch.Tensor) -> torch.Tensor:
    """Return, for each of the values (n,), the smallest index of an equal value."""
    _, distinct = values.unique(return_inverse=True)
    indices = torch.arange(len(values), device=values.device)
    first = torch.full_like(indices, len(values)).scatter_reduce_(0, distinct, indices, reduce="amin")
    return first[distinct]
