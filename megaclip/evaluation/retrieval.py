"""Image-text retrieval over all ranks: exact recall at K in both directions, without the whole N x N matrix.

Every rank keeps the features that it encoded. Text features are gathered from all ranks piece by piece. The rank that
has the images computes each tile of similarities once and uses it for both directions. There are two passes: the first
finds the similarity of every right answer, the second counts the wrong candidates ahead of it (`ranking.ahead` defines
ties). Per rank, only its own features and a few scalars per caption grow with the dataset; all other memory fits
`ranking.TILE_BUDGET_MIB`.

An image may have several captions (COCO and Flickr have five); each caption has the id of its image. From image to
text, the rank is that of the image's best caption, and its other captions do not count as wrong candidates. From text
to image, every caption is a query. This is the convention of CLIP_benchmark (LAION), with ties counted against the
model.

`retrieval_examples` collects examples for the evaluation pictures. They are spread evenly over the evaluation set, and
are the same at every evaluation of a run. Ranks exchange only features and ids; the rank that draws the pictures reads
captions and images again from the dataset.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from megaclip.comm.collectives import gather_integers, gather_rows, sum_over_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.data.batch import PADDING_ID
from megaclip.errors import DataError
from megaclip.evaluation.ranking import ahead, nan_is_worst, similarity_tiles, tile_side

RECALL_AT = (1, 5, 10)
_QUERIES, _RETRIEVED = 8, 5
"""Number of captions for which images are retrieved, and number of these images per caption."""


def retrieval(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    image_ids: torch.Tensor,
    text_image_ids: torch.Tensor | None = None,
) -> dict[str, float]:
    """Return recall at 1, 5 and 10 over all ranks: `retrieval_r1_i2t` to `retrieval_r10_t2i`, equal on every rank.

    The arguments are those of `retrieval_ranks`. Image to text is a mean over images, text to image a mean over
    captions.
    """
    ranks = retrieval_ranks(image_features, text_features, image_ids, text_image_ids)
    metrics = {}
    for direction, local in zip(("i2t", "t2i"), ranks, strict=True):
        hits = [(local < k).sum() for k in RECALL_AT]
        *totals, count = sum_over_ranks(torch.stack([*hits, local.new_tensor(len(local))])).tolist()
        for k, total in zip(RECALL_AT, totals, strict=True):
            metrics[f"retrieval_r{k}_{direction}"] = total / count
    return metrics


def retrieval_ranks(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    image_ids: torch.Tensor,
    text_image_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact ranks of this process's images and captions among those of all processes, int64; 0 is the best.

    They are those of each image's best own caption, and of each caption's own image, in the given order without
    padding. Every rank must call it. n and m may differ between ranks and may be 0. Rows with id -1 are padding.

    Args:
        image_features: this rank's image features (n, D), of unit length, any floating dtype.
        text_features: this rank's text features (m, D), of unit length, any floating dtype.
        image_ids: id of each image (n,) int64, unique over all ranks.
        text_image_ids: id of each caption's image (m,) int64; None: `image_ids`, one caption per image.

    Raises:
        DataError: on every rank, if an id is repeated, or there are only padding rows.
    """
    if text_image_ids is None:
        text_image_ids = image_ids
    kept, kept_texts = image_ids != PADDING_ID, text_image_ids != PADDING_ID
    images, ids = image_features[kept], image_ids[kept]
    all_ids = _of_all(ids)
    all_ids = all_ids[all_ids != PADDING_ID]
    if not len(all_ids):
        raise DataError("retrieval requires at least one image with a caption, got only padding rows; check the data")
    if len(all_ids.unique()) < len(all_ids):
        raise DataError("retrieval requires unique image ids over all ranks, got an id twice; remove the copies")
    side = tile_side(images.shape[1])
    visits = _Visits(text_features[kept_texts], text_image_ids[kept_texts], side)
    image_best, text_best = _right_answers(images, ids, visits)

    image_rank, text_rank = torch.zeros_like(ids), torch.zeros_like(visits.ids)
    for place, features in visits:
        of_texts = visits.ids[place]
        for rows, similarities in similarity_tiles(images, features, side):
            wrong = (ids[rows, None] != of_texts) & (of_texts != PADDING_ID)
            image_rank[rows] += ahead(similarities, image_best[rows, None], wrong).sum(dim=1)
            text_rank[place] += ahead(similarities, text_best[place], wrong).sum(dim=0)
    return image_rank, visits.own(sum_over_ranks(text_rank))


def _of_all(rows: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """Return the rows of all ranks, each rank's padded with PADDING_ID to the same multiple of `multiple`."""
    longest = max(1, *(count for (count,) in gather_integers([len(rows)])))
    padding = rows.new_full((longest + -longest % multiple - len(rows), *rows.shape[1:]), PADDING_ID)
    return gather_rows(torch.cat([rows, padding]))


class _Visits:
    """Iterable over the captions of all ranks; one visit gathers an equal piece from every rank.

    It yields `(place, features)`: the features of one visit, and their slice in `ids` and other vectors with one scalar
    per caption of all ranks. Short pieces are padded. Every rank must iterate to the end.
    """

    def __init__(self, features: torch.Tensor, ids: torch.Tensor, side: int) -> None:
        """features: of this rank's captions (m, D). ids: of their images (m,)."""
        self._features, self._world_size = features, group_size()
        self._piece = max(1, side // self._world_size)
        by_rank = _of_all(ids, self._piece).view(self._world_size, -1, self._piece)
        self.ids = by_rank.transpose(0, 1).reshape(-1)
        """Image ids of the captions of all ranks, in the order of the visits, int64."""

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        width = self._piece * self._world_size
        for visit in range(len(self.ids) // width):
            own = self._features[visit * self._piece : (visit + 1) * self._piece]
            features = gather_rows(pad(own, (0, 0, 0, self._piece - len(own))))
            yield slice(visit * width, (visit + 1) * width), features

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part (m,) of a vector in the order of the visits."""
        by_rank = values.view(-1, self._world_size, self._piece)[:, group_rank()]
        return by_rank.reshape(-1)[: len(self._features)]


def _right_answers(images: torch.Tensor, ids: torch.Tensor, visits: _Visits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the similarities of right answers, float64, with -inf instead of NaN.

    They are those of each local image and the best of its captions, (n,), and of each caption of all ranks and its
    image, in the order of `visits.ids`.
    """
    sorted_ids, order = ids.sort()
    image_best = torch.full_like(order, -torch.inf, dtype=torch.float64)
    text_best = torch.zeros_like(visits.ids, dtype=torch.float64)
    for place, features in visits:
        if not len(order):
            continue
        position = torch.searchsorted(sorted_ids, visits.ids[place]).clamp(max=len(order) - 1)
        here = torch.nonzero(sorted_ids[position] == visits.ids[place]).flatten()
        image = order[position[here]]
        similarity = nan_is_worst((images[image].double() * features[here].double()).sum(dim=1))
        image_best.scatter_reduce_(0, image, similarity, reduce="amax")
        text_best[place][here] = similarity
    return image_best, sum_over_ranks(text_best)


@dataclass(frozen=True)
class RetrievalExamples:
    """Similarities of k image-caption pairs, and the images retrieved for q of their captions."""

    ids: np.ndarray
    """Ids of the pairs, (k,) int64."""
    similarities: np.ndarray
    """Similarity of caption i and image j at [i, j], (k, k) float64."""
    queries: np.ndarray
    """Positions in `ids` of the pairs whose captions are queries, (q,) int64."""
    found_ids: np.ndarray
    """Ids of the images most similar to each query, best first, (q, 5) int64, or fewer columns for fewer images."""
    found_similarities: np.ndarray
    """Similarities of the images in `found_ids`, float64."""
    ranks: np.ndarray
    """Rank of each query's own image among all images, (q,) int64; 0 is the best."""
    candidates: int
    """Number of images that were searched."""


def spread(ids: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` of the ids (n,), evenly spaced from the first to the last."""
    count = min(count, len(ids))
    return ids[np.linspace(0, len(ids) - 1, count).astype(np.int64)] if count else ids[:0]


def retrieval_examples(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    image_ids: torch.Tensor,
    text_ids: torch.Tensor,
    count: int,
) -> RetrievalExamples:
    """Collect at most `count` examples from all ranks, evenly spaced by their ids. Every rank must call it.

    Args:
        image_features: this rank's image features (n, D), of unit length.
        text_features: this rank's text features (m, D), of unit length.
        image_ids: id of each image (n,), unique over all ranks; -1 marks padding.
        text_ids: id of each caption's image (m,), unique over all ranks; -1 marks padding. Every image has one.
    """
    kept = image_ids != PADDING_ID
    gathered = _of_all(image_ids[kept])
    is_image = gathered != PADDING_ID
    all_ids = gathered[is_image]
    example_ids = spread(np.sort(all_ids.cpu().numpy()), count)
    chosen_ids = torch.as_tensor(example_ids, device=image_ids.device)
    images, texts = _collect(image_features, image_ids, chosen_ids), _collect(text_features, text_ids, chosen_ids)
    queries = torch.as_tensor(spread(np.arange(len(example_ids)), _QUERIES), device=chosen_ids.device)

    similarities = _of_all(image_features[kept].double() @ texts[queries].T)[is_image].T
    own = (texts[queries] * images[queries]).sum(dim=1)
    is_ahead = ahead(similarities, own[:, None], all_ids != chosen_ids[queries, None])
    found = nan_is_worst(similarities).topk(min(_RETRIEVED, len(all_ids)), dim=1)
    return RetrievalExamples(
        ids=example_ids,
        similarities=(texts @ images.T).cpu().numpy(),
        queries=queries.cpu().numpy(),
        found_ids=all_ids[found.indices].cpu().numpy(),
        found_similarities=found.values.cpu().numpy(),
        ranks=is_ahead.sum(dim=1).cpu().numpy(),
        candidates=len(all_ids),
    )


def _collect(features: torch.Tensor, ids: torch.Tensor, chosen_ids: torch.Tensor) -> torch.Tensor:
    """Return the features (k, D) float64 of the rows with the ids `chosen_ids` (k,), from all ranks."""
    collected = torch.zeros(len(chosen_ids), features.shape[1], dtype=torch.float64, device=features.device)
    place, row = torch.nonzero(chosen_ids[:, None] == ids, as_tuple=True)
    collected[place] = features[row].double()
    return sum_over_ranks(collected)
