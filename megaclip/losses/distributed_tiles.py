"""Statistics and gradients of the whole contrastive batch, from local features, for every exchange and reduction.

Each rank owns b rows (x, images) and b columns (y, texts) of the B x B similarities, B = W*b. A block is the part of
one rank's rows and one rank's columns.

* The statistics pass, and the gradient pass with the `feature` reduction: the rank that owns the rows of a block
  computes it once. x stays, y is sent, and the results for the columns return to their owner.
* The gradient pass with the `scalar` reduction: x and y are sent with their log-normalisers. Each rank computes the
  whole gradient of its own features. No gradient is sent. Both passes together cost 10 b*B*D operations instead of 8
  (per rank; a multiplication or an addition is one).

With a payload dtype, the similarities of one block must be equal in both passes. Otherwise the probabilities do not sum
to 1: at a scale of 100, rounding a similarity in one pass only changes its exponential by up to 22 %. With the
reduction `feature` x is never rounded, because it is never sent. With `scalar` x and y are sent, so both are rounded in
every block and in both passes, including the rank's own block.

This module is independent of the loss. Scale, shift and weight come from the caller (docs/mathematics.md): one value
per row or column, or a number that is equal on all ranks. The positives (row i with column i of the global matrix) are
excluded. Autograd cannot differentiate these functions: call them in the forward and backward of a
`torch.autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megaclip.comm.collectives import gather_rows, reduce_scatter_log_sum_exp, reduce_scatter_rows
from megaclip.comm.ring import Carried, Tensors, circulate
from megaclip.losses.plan import Plan
from megaclip.ops.tiles import tile_grads, tile_stats
from megaclip.ops.types import Scalars, Terms


class BatchGrads(NamedTuple):
    """Sums over the whole batch for this rank's features, in float32 (float64 for float64 features)."""

    dx: Tensor  # (b, D)
    dy: Tensor  # (b, D)
    row_dot: Tensor | None  # (b,); None unless the plan needs dots
    col_dot: Tensor | None  # (b,)


def gather_columns(y: Tensor, plan: Plan) -> Tensor | None:
    """Return the columns of all ranks, (B, D), with the all_gather exchange, and None with the ring."""
    return gather_rows(y, **transfer_arguments(plan)) if plan.exchange == "all_gather" else None


def distributed_stats(
    x: Tensor, y: Tensor, row_scale: Scalars, col_scale: Scalars, *, plan: Plan, y_all: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over the whole batch of this rank's rows (b,) and columns (b,), without the positives.

    `row_lse_i = log sum_{j != i} exp(row_scale_i*s_ij)` over all B columns, and
    `col_lse_j = log sum_{i != j} exp(col_scale_j*s_ij)` over all B rows.

    x, y: local features (b, D). Scales: one value per local row or column (b,), or a number that is equal on all ranks.
    y_all: the result of `gather_columns`.
    """
    x, y = _as_sent(x, y, plan)
    values = _PerSample((col_scale,))
    if y_all is None:
        return _ring_stats(x, y, row_scale, values, plan)
    (scale_all,) = values.gathered(plan)
    offset = plan.ranks.rank * len(x)
    row_lse, col_part = tile_stats(x, y_all, row_scale, scale_all, diagonal=offset, options=plan.tiles)
    return row_lse, reduce_scatter_log_sum_exp(col_part, group=plan.ranks)


def distributed_grads(x: Tensor, y: Tensor, row: Terms, col: Terms, *, plan: Plan, y_all: Tensor | None) -> BatchGrads:
    """Return the gradient tile summed over the whole batch, for this rank's rows and columns.

    With `P_ij` of `megaclip.ops.tiles.tile_grads`: `dx_i = sum over all j != i of P_ij y_j` and `dy_j = sum over all
    i != j of P_ij x_i`. The dots are sums over the whole batch too. The results carry no factor W.

    x, y: local features (b, D). row, col: per local row or column (b,), or numbers that are equal on all ranks. y_all:
    the result of `gather_columns`.
    """
    x, y = _as_sent(x, y, plan)
    if plan.reduction == "feature":
        return _ring_feature(x, y, row, col, plan) if y_all is None else _gathered_feature(x, y_all, row, col, plan)
    return _ring_scalar(x, y, row, col, plan) if y_all is None else _gathered_scalar(x, y, y_all, row, col, plan)


def _as_sent(x: Tensor, y: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return x and y, rounded to the payload dtype if the features of both sides are sent."""
    if plan.payload is None or plan.reduction == "feature" or plan.ranks.size == 1:
        return x, y
    return x.to(plan.payload).to(x.dtype), y.to(plan.payload).to(y.dtype)


def _ring_stats(x: Tensor, y: Tensor, row_scale: Scalars, values: _PerSample, plan: Plan) -> tuple[Tensor, Tensor]:
    """Send y and its scale around the ring. Each column's log-sum-exp is sent with them and returns to its owner."""
    row_lse: Tensor | None = None
    col_lse = Carried(_merge_log_sum_exp, group=plan.ranks)
    for owner, (y_block, *moved) in circulate((y, *values.vectors), **transfer_arguments(plan)):
        (col_scale,) = values.joined(moved)
        diagonal = 0 if owner == plan.ranks.rank else None
        row_part, col_part = tile_stats(x, y_block, row_scale, col_scale, diagonal=diagonal, options=plan.tiles)
        row_lse = row_part if row_lse is None else torch.logaddexp(row_lse, row_part)
        col_lse.add((col_part,))
    assert row_lse is not None, "a ring has at least one block"
    return row_lse, col_lse.home()[0]


def _ring_feature(x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """Send y and its terms around the ring. Its gradient is sent with it and returns to its owner."""
    terms = _PerSample(col)
    dx: Tensor | None = None
    row_dots: Tensors | None = None
    columns = Carried(merge_sums, **transfer_arguments(plan))
    for owner, (y_block, *moved) in circulate((y, *terms.vectors), **transfer_arguments(plan)):
        diagonal = 0 if owner == plan.ranks.rank else None
        dx, dy, row_dot, col_dot = _both_sides(x, y_block, row, Terms(*terms.joined(moved)), plan, diagonal, dx)
        row_dots = merge_sums(row_dots, _given(row_dot))
        columns.add((dy, *_given(col_dot)))
    assert dx is not None and row_dots is not None, "a ring has at least one block"
    dy, *col_dots = columns.home()
    return BatchGrads(dx, dy, *(row_dots or (None,)), *(col_dots or (None,)))


def _ring_scalar(x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """Send x and y with their terms around the ring; each rank sums the gradients of its own rows and columns."""
    row_terms, col_terms = _PerSample(row), _PerSample(col)
    split = len(row_terms.vectors)
    blocks = circulate((x, y, *row_terms.vectors, *col_terms.vectors), **transfer_arguments(plan))
    next(blocks)  # this rank's own
    dx, dy, row_dot, col_dot = _both_sides(x, y, row, col, plan, diagonal=0)
    for _, (x_block, y_block, *moved) in blocks:
        others_rows, others_cols = Terms(*row_terms.joined(moved[:split])), Terms(*col_terms.joined(moved[split:]))
        more_rows = _row_side(x, y_block, row, others_cols, plan, diagonal=None, dx=dx)[1]
        more_cols = _column_side(x_block, y, others_rows, col, plan, diagonal=None, dy=dy)[1]
        merge_sums(_given(row_dot, col_dot), _given(more_rows, more_cols))
    return BatchGrads(dx, dy, row_dot, col_dot)


def _gathered_feature(x: Tensor, y_all: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """Compute this rank's rows with all columns; reduce-scatter the gradients of the columns."""
    col_all = Terms(*_PerSample(col).gathered(plan))
    part = _both_sides(x, y_all, row, col_all, plan, diagonal=plan.ranks.rank * len(x))
    dy = reduce_scatter_rows(part.dy, **transfer_arguments(plan))
    col_dot = None if part.col_dot is None else reduce_scatter_rows(part.col_dot, group=plan.ranks)
    return BatchGrads(part.dx, dy, part.row_dot, col_dot)


def _gathered_scalar(x: Tensor, y: Tensor, y_all: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """Compute this rank's rows with all columns for dx, then all rows with this rank's columns for dy."""
    offset = plan.ranks.rank * len(x)
    dx, row_dot = _row_side(x, y_all, row, Terms(*_PerSample(col).gathered(plan)), plan, diagonal=offset)
    x_all, row_all = gather_rows(x, **transfer_arguments(plan)), Terms(*_PerSample(row).gathered(plan))
    dy, col_dot = _column_side(x_all, y, row_all, col, plan, diagonal=-offset)
    return BatchGrads(dx, dy, row_dot, col_dot)


def _both_sides(
    x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan, diagonal: int | None, dx: Tensor | None = None
) -> BatchGrads:
    """Compute one block. dx: tensor to which the gradient of its rows is added."""
    dx, dy, row_dot, col_dot = tile_grads(x, y, row, col, diagonal=diagonal, add_to=(dx, None), **_options(plan))
    assert dx is not None and dy is not None, "both sides are computed"
    return BatchGrads(dx, dy, row_dot, col_dot)


def _row_side(
    x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan, diagonal: int | None, dx: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return dx and row_dot of a block whose columns belong to another rank. dx: tensor to add to."""
    options = {"need_dy": False, "add_to": (dx, None), **_options(plan)}
    dx, _, row_dot, _ = tile_grads(x, y, row, col, diagonal=diagonal, **options)
    assert dx is not None, "the row side is computed"
    return dx, row_dot


def _column_side(
    x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan, diagonal: int | None, dy: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return dy and col_dot of a block whose rows belong to another rank. dy: tensor to add to."""
    options = {"need_dx": False, "add_to": (None, dy), **_options(plan)}
    _, dy, _, col_dot = tile_grads(x, y, row, col, diagonal=diagonal, **options)
    assert dy is not None, "the column side is computed"
    return dy, col_dot


def transfer_arguments(plan: Plan) -> dict[str, Any]:
    """Return the group and the payload dtype for collectives of features and their gradients."""
    return {"group": plan.ranks, "payload": plan.payload}


def _options(plan: Plan) -> dict[str, Any]:
    """Return the keyword arguments of `tile_grads` that are equal for all blocks."""
    return {"need_dots": plan.need_dots, "options": plan.tiles}


class _PerSample:
    """Values of one direction. Vectors, (b,), are sent with the features; numbers are equal on all ranks."""

    def __init__(self, values: Sequence[Scalars]) -> None:
        self._values = values
        self.vectors: Tensors = tuple(value for value in values if _is_vector(value))

    def joined(self, vectors: Sequence[Tensor]) -> list[Scalars]:
        """Return all values, with the vectors replaced by those of another rank."""
        moved = iter(vectors)
        return [next(moved) if _is_vector(value) else value for value in self._values]

    def gathered(self, plan: Plan) -> list[Scalars]:
        """Return all values, with the vectors gathered from all ranks, (B,)."""
        return self.joined([gather_rows(vector, group=plan.ranks) for vector in self.vectors])


def _is_vector(value: Scalars) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 1


def _given(*tensors: Tensor | None) -> Tensors:
    """Return the tensors that are not None."""
    return tuple(tensor for tensor in tensors if tensor is not None)


def merge_sums(total: Tensors | None, part: Tensors) -> Tensors:
    """Add `part` to `total` elementwise, in place; None is zero."""
    return part if total is None else tuple(old.add_(new) for old, new in zip(total, part, strict=True))


def _merge_log_sum_exp(total: Tensors, part: Tensors) -> Tensors:
    return tuple(torch.logaddexp(old, new) for old, new in zip(total, part, strict=True))
