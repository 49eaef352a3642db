"""Sums over the rows that have one id: of the whole batch of all ranks, or of one tensor.

The sums have static shapes and wait for nothing, so CUDA graphs may record them, and one writer per sum, so they are
deterministic.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megaclip.comm.collectives import gather_rows
from megaclip.comm.ring import circulate
from megaclip.losses.way import Way
from megaclip.ops.types import accumulation_dtype


class EqualIds(NamedTuple):
    """Sums over all pairs of the batch that have the id of a local pair, this pair included, in the dtype of sums."""

    x: Tensor  # (b, D)
    y: Tensor  # (b, D)
    number: Tensor  # (b,)
    weighted_x: Tensor  # (b, D), sum of row_weight * x
    weighted_y: Tensor  # (b, D), sum of col_weight * y


def sums_of_equal_ids(
    x: Tensor,
    y: Tensor,
    ids: Tensor,
    row_weight: float | Tensor = 1.0,
    col_weight: float | Tensor = 1.0,
    *,
    way: Way,
    y_all: Tensor | None = None,
) -> EqualIds:
    """Return the sums of the features of all ranks by the ids (b,) of this rank's pairs.

    x, y: local features (b, D). They are sent as `way` specifies, b*D elements of each to every other rank, once.
    Weights: numbers, or both vectors (b,). y_all: the columns of all ranks, if they are gathered already.
    """
    vectors = (row_weight, col_weight) if isinstance(row_weight, Tensor) else ()
    if way.exchange == "all_gather":
        rows = gather_rows(x, group=way.ranks, payload=way.payload)
        columns = gather_rows(y, group=way.ranks, payload=way.payload) if y_all is None else y_all
        others = (gather_rows(vector, group=way.ranks) for vector in (ids, *vectors))
        blocks: Iterable[tuple[Tensor, ...]] = [(rows, columns, *others)]
    else:
        blocks = (block for _, block in circulate((x, y, ids, *vectors), group=way.ranks, payload=way.payload))
    totals: list[Tensor] = []
    for x_block, y_block, block_ids, *weights in blocks:
        weighted = [weight[:, None] * block for weight, block in zip(weights, (x_block, y_block), strict=False)]
        parts = segment_sums((x_block, y_block, torch.ones_like(x_block[:, :1]), *weighted), block_ids, ids)
        totals = [total.add_(part) for total, part in zip(totals, parts, strict=True)] if totals else parts
    x_sum, y_sum, count, *weighted = totals
    return EqualIds(x_sum, y_sum, count[:, 0], *(weighted or (row_weight * x_sum, col_weight * y_sum)))


def segment_sums(matrices: Sequence[Tensor], ids: Tensor, wanted: Tensor) -> list[Tensor]:
    """Return the sums of the rows of each matrix (n, D), n >= 1, that have each id of `wanted` (k,): (k, D).

    ids: (n,) int64. An id that no row has gives 0. The sums have the dtype of sums of features.
    """
    ordered, order = ids.sort(stable=True)
    places = torch.searchsorted(ordered, ordered)
    # A sum is stored at the first place of its id. The segments of the other places are empty.
    ends = torch.searchsorted(ordered, ordered, side="right")
    lengths = torch.where(places == torch.arange(len(ids), device=ids.device), ends - places, 0)
    found = torch.searchsorted(ordered, wanted).clamp_max(len(ids) - 1)
    missing = (ordered[found] != wanted)[:, None]
    sums = []
    for matrix in matrices:
        rows = matrix[order].to(accumulation_dtype(matrix))
        totals = torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, unsafe=True)
        sums.append(totals[found].masked_fill_(missing, 0))
        del rows, totals  # frees them before those of the next matrix are allocated
    return sums
