"""Statistics and gradients of the whole contrastive batch, from local features: tiles x exchange x reduction.

Each rank owns b rows (x, images) and b columns (y, texts) of the B x B similarities, B = W*b. A block is the part of
one rank's rows and one rank's columns. In the statistics pass, and in the gradient pass with the `feature` reduction,
each block is computed once, by the rank that owns its rows: x stays, y moves, and what is found for y's columns goes
home. With the `scalar` reduction the gradient pass moves x and y with their log-normalisers instead, and each rank
forms the whole gradient of its own features: no gradient moves, at 10 products in units of b*B*D instead of 8.

Nothing here knows a loss: scale, shift and weight come from the caller (docs/mathematics.md), one per row or column,
or a number that is the same on every rank. The positives (row i with column i of the global matrix) are left out
throughout.

No autograd: call these from the forward and backward of a `torch.autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megaclip.comm.collectives import gather_rows, reduce_scatter_log_sum_exp, reduce_scatter_rows
from megaclip.comm.ring import Carried, Tensors, circulate
from megaclip.losses.plan import Plan
from megaclip.ops.tiles import accumulation_dtype, tile_grads, tile_stats

Scalars = float | Tensor  # a number or 0-d tensor, the same on every rank; or one value per local row or column, (b,)


class Terms(NamedTuple):
    """One direction of the gradient tile: `weight * exp(scale*s - shift)`, per local row or column."""

    scale: Scalars
    shift: Scalars
    weight: Scalars


class BatchGrads(NamedTuple):
    """Sums over the whole batch for this rank's features, in float32 (float64 for float64 features)."""

    dx: Tensor  # (b, D)
    dy: Tensor  # (b, D)
    row_dot: Tensor  # (b,); zeros unless the plan needs dots
    col_dot: Tensor  # (b,)


def gather_columns(y: Tensor, plan: Plan) -> Tensor | None:
    """What both passes need of the other ranks' columns: (B, D) with the all_gather exchange, None with the ring."""
    return gather_rows(y, **wire(plan)) if plan.exchange == "all_gather" else None


def distributed_stats(
    x: Tensor, y: Tensor, row_scale: Scalars, col_scale: Scalars, *, plan: Plan, y_all: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the whole batch, without the positive, of this rank's rows (b,) and columns (b,).

    `row_lse_i = log sum_{j != i} exp(row_scale_i*s_ij)` over all B columns, `col_lse_j` likewise over all B rows.
    x, y: local features (b, D). y_all: from `gather_columns`.
    """
    values = _PerSample((col_scale,))
    if y_all is None:
        return _ring_stats(x, y, row_scale, values, plan)
    (scale_all,) = values.gathered(plan)
    offset = plan.ranks.rank * len(x)
    row_lse, col_part = tile_stats(x, y_all, row_scale, scale_all, diagonal=offset, **vars(plan.tiles))
    return row_lse, reduce_scatter_log_sum_exp(col_part, group=plan.ranks)


def distributed_grads(x: Tensor, y: Tensor, row: Terms, col: Terms, *, plan: Plan, y_all: Tensor | None) -> BatchGrads:
    """The gradient tile summed over the whole batch, for this rank's rows and columns.

    `P_ij` as in `megaclip.ops.tiles.tile_grads`; `dx_i = sum over all j != i of P_ij y_j`, `dy_j = sum over all i != j
    of P_ij x_i`, and the dots likewise. Unlike a loss's gradient this carries no factor W.
    """
    if plan.reduction == "feature":
        return _ring_feature(x, y, row, col, plan) if y_all is None else _gathered_feature(x, y_all, row, col, plan)
    return _ring_scalar(x, y, row, col, plan) if y_all is None else _gathered_scalar(x, y, y_all, row, col, plan)


def _ring_stats(x: Tensor, y: Tensor, row_scale: Scalars, values: _PerSample, plan: Plan) -> tuple[Tensor, Tensor]:
    """y and its column scale go round; each column's running log-sum-exp follows them home."""
    row_lse = torch.full((len(x),), -torch.inf, dtype=accumulation_dtype(x), device=x.device)
    col_lse = Carried(_merge_log_sum_exp, group=plan.ranks)
    for owner, (y_block, *moved) in circulate((y, *values.vectors), **wire(plan)):
        (col_scale,) = values.joined(moved)
        diagonal = 0 if owner == plan.ranks.rank else None
        row_part, col_part = tile_stats(x, y_block, row_scale, col_scale, diagonal=diagonal, **vars(plan.tiles))
        row_lse = torch.logaddexp(row_lse, row_part)
        col_lse.add((col_part,))
    return row_lse, col_lse.home()[0]


def _ring_feature(x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """y and its terms go round; its gradient follows it home."""
    terms = _PerSample(col)
    dx: Tensor | None = None
    row_dots: Tensors | None = None
    columns = Carried(merge_sums, **wire(plan))
    for owner, (y_block, *moved) in circulate((y, *terms.vectors), **wire(plan)):
        diagonal = 0 if owner == plan.ranks.rank else None
        dx, dy, row_dot, col_dot = _both_sides(x, y_block, row, Terms(*terms.joined(moved)), plan, diagonal, dx)
        row_dots = merge_sums(row_dots, (row_dot,))
        columns.add((dy, col_dot))
    assert dx is not None and row_dots is not None, "a ring has at least one block"
    dy, col_dot = columns.home()
    return BatchGrads(dx, dy, row_dots[0], col_dot)


def _ring_scalar(x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """x and y go round with their terms; each rank adds up the gradients of its own rows and columns."""
    row_terms, col_terms = _PerSample(row), _PerSample(col)
    split = len(row_terms.vectors)
    blocks = circulate((x, y, *row_terms.vectors, *col_terms.vectors), **wire(plan))
    next(blocks)  # this rank's own
    dx, dy, row_dot, col_dot = _both_sides(x, y, row, col, plan, diagonal=0)
    for _, (x_block, y_block, *moved) in blocks:
        others_rows, others_cols = Terms(*row_terms.joined(moved[:split])), Terms(*col_terms.joined(moved[split:]))
        row_dot += _row_side(x, y_block, row, others_cols, plan, diagonal=None, add_to=dx)[1]
        col_dot += _column_side(x_block, y, others_rows, col, plan, diagonal=None, add_to=dy)[1]
    return BatchGrads(dx, dy, row_dot, col_dot)


def _gathered_feature(x: Tensor, y_all: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """This rank's rows against all columns; the columns' gradients are summed over ranks, each rank keeping its own."""
    col_all = Terms(*_PerSample(col).gathered(plan))
    part = _both_sides(x, y_all, row, col_all, plan, diagonal=plan.ranks.rank * len(x))
    dy = reduce_scatter_rows(part.dy, **wire(plan))
    return BatchGrads(part.dx, dy, part.row_dot, reduce_scatter_rows(part.col_dot, group=plan.ranks))


def _gathered_scalar(x: Tensor, y: Tensor, y_all: Tensor, row: Terms, col: Terms, plan: Plan) -> BatchGrads:
    """This rank's rows against all columns for dx, then all rows against this rank's columns for dy."""
    offset = plan.ranks.rank * len(x)
    dx, row_dot = _row_side(x, y_all, row, Terms(*_PerSample(col).gathered(plan)), plan, diagonal=offset)
    x_all, row_all = gather_rows(x, **wire(plan)), Terms(*_PerSample(row).gathered(plan))
    dy, col_dot = _column_side(x_all, y, row_all, col, plan, diagonal=-offset)
    return BatchGrads(dx, dy, row_dot, col_dot)


def _both_sides(
    x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan, diagonal: int | None, add_dx_to: Tensor | None = None
) -> BatchGrads:
    totals = (add_dx_to, None)
    dx, dy, row_dot, col_dot = tile_grads(x, y, *row, *col, diagonal=diagonal, add_to=totals, **_options(plan))
    assert dx is not None and dy is not None, "both sides were asked for"
    return BatchGrads(dx, dy, row_dot, col_dot)


def _row_side(
    x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan, diagonal: int | None, add_to: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx and row_dot only: the columns' owner computes theirs."""
    options = {"need_dy": False, "add_to": (add_to, None), **_options(plan)}
    dx, _, row_dot, _ = tile_grads(x, y, *row, *col, diagonal=diagonal, **options)
    assert dx is not None, "the row side was asked for"
    return dx, row_dot


def _column_side(
    x: Tensor, y: Tensor, row: Terms, col: Terms, plan: Plan, diagonal: int | None, add_to: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy and col_dot only: the rows' owner computes theirs."""
    options = {"need_dx": False, "add_to": (None, add_to), **_options(plan)}
    _, dy, _, col_dot = tile_grads(x, y, *row, *col, diagonal=diagonal, **options)
    assert dy is not None, "the column side was asked for"
    return dy, col_dot


def wire(plan: Plan) -> dict[str, Any]:
    """Who shares features and their gradients, and the dtype these travel in."""
    return {"group": plan.ranks, "payload": plan.payload}


def _options(plan: Plan) -> dict[str, Any]:
    return {"need_dots": plan.need_dots, **vars(plan.tiles)}


class _PerSample:
    """Some values of which only the per-sample ones, (b,), have to follow their features to other ranks."""

    def __init__(self, values: Sequence[Scalars]) -> None:
        self._values = values
        self.vectors: Tensors = tuple(value for value in values if _is_vector(value))

    def joined(self, vectors: Sequence[Tensor]) -> list[Scalars]:
        """All values, with those that moved replaced by another rank's."""
        moved = iter(vectors)
        return [next(moved) if _is_vector(value) else value for value in self._values]

    def gathered(self, plan: Plan) -> list[Scalars]:
        """All values, with the per-sample ones of all ranks, (B,)."""
        return self.joined([gather_rows(vector, group=plan.ranks) for vector in self.vectors])


def _is_vector(value: Scalars) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 1


def merge_sums(total: Tensors | None, part: Tensors) -> Tensors:
    """Elementwise sums, added in place to `total`; None stands for zero."""
    return part if total is None else tuple(old.add_(new) for old, new in zip(total, part, strict=True))


def _merge_log_sum_exp(total: Tensors, part: Tensors) -> Tensors:
    return tuple(torch.logaddexp(old, new) for old, new in zip(total, part, strict=True))
