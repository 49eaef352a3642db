"""Collect examples for the evaluation pictures: a small similarity matrix, and the best images for some captions.

The examples are spread evenly over the evaluation set. They are the same at every evaluation of a run, so that the
pictures can be compared over time. Ranks exchange only features and ids; the rank that draws the pictures reads
captions and images again from the dataset.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megaclip.comm.collectives import gather_rows, sum_over_ranks
from megaclip.data.batch import PADDING_ID
from megaclip.evaluation.ranking import ahead, nan_is_worst

RETRIEVED = 5


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
    example_ids: np.ndarray,
    *,
    query_count: int = 8,
    group: Any = None,
) -> RetrievalExamples:
    """Collect examples from all ranks. Every rank must call it.

    Args:
        image_features: this rank's image features (n, D), of unit length.
        text_features: this rank's text features (m, D), of unit length.
        image_ids: id of each image (n,), unique over all ranks; -1 marks padding.
        text_ids: id of each caption's image (m,), unique over all ranks; -1 marks padding.
        example_ids: ids of the examples (k,), each of one image and its caption.
        query_count: number of captions for which images are retrieved.
    """
    chosen_ids = torch.as_tensor(example_ids, device=image_ids.device)
    images = _collect(image_features, image_ids, chosen_ids, group)
    texts = _collect(text_features, text_ids, chosen_ids, group)
    queries = torch.as_tensor(spread(np.arange(len(example_ids)), query_count), device=chosen_ids.device)

    kept = image_ids != PADDING_ID
    own_ids = chosen_ids[queries]
    similarities = texts[queries] @ image_features[kept].double().T
    own = (texts[queries] * images[queries]).sum(dim=1)
    is_ahead = ahead(similarities, own[:, None], image_ids[kept] != own_ids[:, None])
    ranks = sum_over_ranks(is_ahead.sum(dim=1), group=group)
    candidates = int(sum_over_ranks(kept.sum(), group=group))
    found_similarities, found_ids = _best(
        nan_is_worst(similarities), image_ids[kept], min(RETRIEVED, candidates), group
    )
    return RetrievalExamples(
        ids=example_ids,
        similarities=(texts @ images.T).cpu().numpy(),
        queries=queries.cpu().numpy(),
        found_ids=found_ids.cpu().numpy(),
        found_similarities=found_similarities.cpu().numpy(),
        ranks=ranks.cpu().numpy(),
        candidates=candidates,
    )


def _collect(features: torch.Tensor, ids: torch.Tensor, chosen_ids: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the features (k, D) float64 of the rows with the ids `chosen_ids` (k,), from all ranks."""
    collected = torch.zeros(len(chosen_ids), features.shape[1], dtype=torch.float64, device=features.device)
    place, row = torch.nonzero(chosen_ids[:, None] == ids, as_tuple=True)
    collected[place] = features[row].double()
    return sum_over_ranks(collected, group=group)


def _best(similarities: torch.Tensor, ids: torch.Tensor, count: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` highest similarities (q, count) over all ranks, and their ids.

    similarities (q, n) and ids (n,): those of this rank.
    """
    missing = max(0, count - len(ids))
    similarities = torch.nn.functional.pad(similarities, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing), value=PADDING_ID)
    local, columns = similarities.topk(count, dim=1)
    gathered = gather_rows(local.T.contiguous(), group=group).T
    gathered_ids = gather_rows(ids[columns].T.contiguous(), group=group).T
    best, columns = gathered.topk(count, dim=1)
    return best, gathered_ids.gather(1, columns)
