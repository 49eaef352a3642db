"""Compute exact ranks of right answers by similarity, one tile at a time, for zero-shot classification and retrieval.

The rank of a query is the number of wrong candidates that are not clearly less similar than its right answer. Rank 0 is
a hit at 1, rank 4 a hit at 5. **Ties count against the model**: a model that maps everything to one point scores 0, not
1. A model with NaN features also scores 0, because no comparison with NaN is true.

Similarities are float64 products of the given features. Two similarities are tied if they differ by less than
`TIE_TOLERANCE`. Rounding changes a float64 similarity of unit vectors by about 1e-15, which is far less than the
tolerance; the tolerance is far less than the spacing of float32 features. So ranks do not depend on tile sizes, batch
sizes or the number of processes.
"""

import math
from collections.abc import Iterator

import torch

TIE_TOLERANCE = 1e-10
"""Largest difference of two similarities that counts as a tie."""
TILE_BUDGET_MIB = 128.0
"""Memory for one tile of similarities with its operands, in MiB."""

# Bytes per element of a tile: its float64 similarity, that of the previous tile (not yet freed), and five masks.
_TILE_BYTES = 8 + 8 + 5
# Bytes per element of an operand: the float32 original and its float64 copy.
_OPERAND_BYTES = 4 + 8


def tile_side(feature_dim: int) -> int:
    """Return the side of the largest square tile that fits TILE_BUDGET_MIB with its two operands; at least 1."""
    budget = TILE_BUDGET_MIB * 2**20
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
    """Return the wrong candidates that rank ahead of the right answer, ties and NaN included: (m, n) bool.

    Args:
        similarities: (m, n) float64.
        right_answer: similarity of the right answer, (m, 1) or (1, n) float64.
        wrong: (m, n) bool, False where the candidate itself is a right answer.
    """
    return wrong & ~(similarities < right_answer - TIE_TOLERANCE)


def nan_is_worst(similarities: torch.Tensor) -> torch.Tensor:
    """Replace NaN by -inf, for searches of the highest similarity, in which NaN would count as the highest."""
    return similarities.masked_fill(similarities.isnan(), -math.inf)
