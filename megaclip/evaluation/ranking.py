"""Exact ranks from similarities, one bounded tile at a time; what zero-shot classification and retrieval share.

A query's rank is the number of wrong candidates that are not clearly below its right answer: 0 is a hit at 1, 4 a
hit at 5. **Ties count against the model** (the rank is pessimistic): a model that maps everything to one point
scores 0, not 1, and so does one whose features are NaN, because a comparison with NaN is never "clearly below".

Similarities are float64 products of the given features, and two that differ by less than `TIE_TOLERANCE` are tied.
So ranks do not depend on tile sizes, batch sizes or the number of ranks: rounding moves a float64 similarity of
unit vectors by about 1e-15, far less than the tolerance, and the tolerance is far less than the spacing of float32
features.
"""

import math
from collections.abc import Iterator

import torch

TIE_TOLERANCE = 1e-10

# Per element of a tile: the float64 similarity, that of the tile before (alive until it is replaced), and five masks.
_TILE_BYTES = 8 + 8 + 5
# Per element of an operand: as it came (float32), and its float64 copy.
_OPERAND_BYTES = 4 + 8


def tile_side(feature_dim: int, tile_budget_mib: float) -> int:
    """Rows (and columns) of the largest square tile that fits the budget together with its two operands; at least 1."""
    budget = tile_budget_mib * 2**20
    operands = _OPERAND_BYTES * feature_dim  # the larger root of _TILE_BYTES * side^2 + 2 * operands * side = budget
    side = (math.sqrt(operands**2 + _TILE_BYTES * budget) - operands) / _TILE_BYTES
    return max(1, int(side))


def similarity_tiles(rows: torch.Tensor, columns: torch.Tensor, side: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield `(slice of rows, similarities (<= side, n) float64)` for rows (m, D) against columns (n, D)."""
    columns_64 = columns.double()
    for start in range(0, len(rows), side):
        piece = slice(start, min(start + side, len(rows)))
        yield piece, rows[piece].double() @ columns_64.T


def ahead(similarities: torch.Tensor, right_answer: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Which candidates stand ahead of the right answer, ties and NaN included; bool, the shape of `similarities`.

    similarities: (m, n) float64; right_answer: (m, 1) or (1, n) float64, the similarity to beat; wrong: (m, n)
    bool, False where the candidate is itself a right answer.
    """
    return wrong & ~(similarities < right_answer - TIE_TOLERANCE)


def nan_is_worst(similarities: torch.Tensor) -> torch.Tensor:
    """The similarities with NaN as -inf, for places that look for the highest: NaN would win there."""
    return similarities.masked_fill(similarities.isnan(), -math.inf)
