"""A few examples for the pictures, collected from all ranks: a small similarity matrix and the best images for some
captions.

The examples are spread evenly over the evaluation set and are the same at every evaluation of a run, so that their
pictures can be compared over time. What is collected is a few features and ids; the words and images themselves are
read again by id from the dataset, on the rank that draws.
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
    """`ids` (k,) int64 of image-caption pairs; `similarities` (k, k) float64, [i, j] of caption i and image j. For
    the first captions of some, `queries` (q,) int64 as positions in `ids`: `found_ids` (q, <= 5) int64 and
    `found_similarities`, the most similar of all `candidates` images, best first, and `ranks` (q,) int64 of the own
    image, 0 the best."""

    ids: np.ndarray
    similarities: np.ndarray
    queries: np.ndarray
    found_ids: np.ndarray
    found_similarities: np.ndarray
    ranks: np.ndarray
    candidates: int


def spread(ids: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the ids (n,), evenly spaced from the first to the last."""
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
    """Collect the examples `example_ids` (k,), each the id of one image and of its caption. Every rank must call it.

    image_features (n, D), text_features (m, D): this rank's, unit length. image_ids (n,), text_ids (m,): the id of
    each row, once over all ranks; -1 is padding.
    """
    wanted = torch.as_tensor(example_ids, device=image_ids.device)
    images = _collect(image_features, image_ids, wanted, group)
    texts = _collect(text_features, text_ids, wanted, group)
    queries = torch.as_tensor(spread(np.arange(len(example_ids)), query_count), device=wanted.device)

    kept = image_ids != PADDING_ID
    own_ids = wanted[queries]
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


def _collect(features: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor, group: Any) -> torch.Tensor:
    """The features (k, D) float64 of the rows with the ids `wanted` (k,), wherever they are."""
    collected = torch.zeros(len(wanted), features.shape[1], dtype=torch.float64, device=features.device)
    place, row = torch.nonzero(wanted[:, None] == ids, as_tuple=True)
    collected[place] = features[row].double()
    return sum_over_ranks(collected, group=group)


def _best(similarities: torch.Tensor, ids: torch.Tensor, count: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest similarities (q, count) over all ranks and their ids, from the local (q, n) and (n,)."""
    missing = max(0, count - len(ids))
    similarities = torch.nn.functional.pad(similarities, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing), value=PADDING_ID)
    local, columns = similarities.topk(count, dim=1)
    everyone = gather_rows(local.T.contiguous(), group=group).T
    everyone_ids = gather_rows(ids[columns].T.contiguous(), group=group).T
    best, columns = everyone.topk(count, dim=1)
    return best, everyone_ids.gather(1, columns)
