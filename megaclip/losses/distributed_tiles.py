"""Statistics and gradients of the whole contrastive batch, from local features, for every exchange and reduction.

Each rank owns b rows (x, images) and b columns (y, texts) of the B x B similarities, B = W*b. A block is the part of
one rank's rows and one rank's columns.

* The statistics pass, and the gradient pass with the `feature` reduction: the rank that owns the rows of a block
  computes it once. x stays, y is sent, and the results for the columns return to their owner.
* The gradient pass with the `scalar` reduction: x and y are sent with their log-normalisers. Each rank computes the
  blocks of its rows for dx, and those of its columns for dy. No gradient is sent. Both passes together cost 10 b*B*D
  operations instead of 8 (per rank; a multiplication or an addition is one).

The entries of the sigmoid loss are independent of each other, so it has no statistics pass and no log-normalisers: the
gradient pass returns its loss too. It costs 6 b*B*D operations, or 8 with the `scalar` reduction.

With a payload dtype, the similarities of one block must be equal in both passes. Otherwise the probabilities do not sum
to 1: at a scale of 100, rounding a similarity in one pass only changes its exponential by up to 22 %. With the
reduction `feature` x is never rounded, because it is never sent. With `scalar` x and y are sent, so both are rounded in
every block and in both passes, including the rank's own block. The sigmoid loss has one pass, and rounds only what is
sent.

This module is independent of the loss. Scale, shift and weight come from the caller (docs/mathematics.md): one value
per row or column, or a number that is equal on all ranks. The positives (row i with column i of the global matrix) are
excluded, and with ids the entries whose row and column have equal ids. With `positives=False` the columns are not the
partners of the rows: nothing is excluded as a positive, and each rank has n columns, with n equal on all ranks.
Autograd cannot differentiate these functions: call them in the forward and backward of a `torch.autograd.Function`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megaclip.comm.collectives import gather_rows, reduce_scatter_log_sum_exp, reduce_scatter_rows
from megaclip.comm.ring import Carried, Tensors, circulate
from megaclip.losses.way import Way
from megaclip.ops.tiles import tile_grads, tile_sigmoid, tile_stats
from megaclip.ops.types import Ids, Limits, Scalars, Terms


class BatchGrads(NamedTuple):
    """Sums over the whole batch for this rank's features, in float32 (float64 for float64 features)."""

    dx: Tensor  # (b, D)
    dy: Tensor  # (b, D)
    row_dot: Tensor | None  # (b,); None unless the way needs dots
    col_dot: Tensor | None  # (b,)


class BatchSigmoid(NamedTuple):
    """Results of `megaclip.ops.tiles.tile_sigmoid` for this rank's features, summed over the batch."""

    row_loss: Tensor  # (b,)
    dx: Tensor  # (b, D)
    dy: Tensor  # (b, D)
    row_dot: Tensor  # (b,)
    row_sum: Tensor  # (b,)


_Gradients = tuple[Any, Any, Tensors, Tensors]
"""dx (m, D) and dy (n, D), None where they are not needed; further sums per row, (m,) each, and per column, (n,)."""
_Tile = Callable[..., _Gradients]
"""Gradients of one block: a function of x, y, the values of the rows and of the columns, and options of a tile."""


def gather_columns(y: Tensor, way: Way) -> Tensor | None:
    """Return the columns of all ranks, (B, D), with the all_gather exchange, and None with the ring."""
    return gather_rows(y, **_transfer(way)) if way.exchange == "all_gather" else None


def distributed_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    col_scale: Scalars,
    *,
    way: Way,
    y_all: Tensor | None = None,
    ids: Ids | None = None,
    limits: Limits | None = None,
    positives: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over the whole batch of this rank's rows (b,) and columns (b,), without the positives.

    `row_lse_i = log sum_{j != i} exp(row_scale_i*s_ij)` over all B columns, and
    `col_lse_j = log sum_{i != j} exp(col_scale_j*s_ij)` over all B rows.

    x, y: local features (b, D). Scales: one value per local row or column (b,), or a number that is equal on all ranks.
    y_all: the result of `gather_columns`, if it exists. limits: those of the local rows and columns.
    ids: those of the local rows and columns, in ascending order; those of a positive are equal. None excludes positives
    only.
    """
    x, y = _as_sent(x, y, way)
    (row_ids, col_ids), (row_limits, col_limits) = ids or (None, None), limits or (None, None)
    own, values = (row_ids, row_limits), _PerSample((col_scale, col_ids, col_limits))
    if way.exchange == "ring":
        return _ring_stats(x, y, row_scale, values, way, own, positives)
    y_all = gather_rows(y, **_transfer(way)) if y_all is None else y_all
    gathered = values.gathered(way)
    offset = way.ranks.rank * len(x) if positives and ids is None else None  # equal ids include the positives
    parts = []
    for part in _runs(y_all, ids):
        col_scale, *others = (_part(value, part) for value in gathered)
        options: dict[str, Any] = {"diagonal": offset, "options": way.tiles, **_pairs(own, others)}
        parts.append(tile_stats(x, y_all[part], row_scale, col_scale, **options))
    rows, cols = zip(*parts, strict=True)
    return functools.reduce(torch.logaddexp, rows), reduce_scatter_log_sum_exp(_joined(cols), group=way.ranks)


def distributed_grads(
    x: Tensor,
    y: Tensor,
    row: Terms,
    col: Terms,
    *,
    way: Way,
    y_all: Tensor | None = None,
    ids: Ids | None = None,
    limits: Limits | None = None,
    positives: bool = True,
    values: tuple[Tensor, Tensor] | None = None,
) -> BatchGrads:
    """Return the gradient tile summed over the whole batch, for this rank's rows and columns.

    With `P_ij` of `megaclip.ops.tiles.tile_grads`: `dx_i = sum over all j != i of P_ij y_j` and `dy_j = sum over all
    i != j of P_ij x_i`. The dots are sums over the whole batch too. The results carry no factor W.

    x, y: local features (b, D). row, col: per local row or column (b,), or numbers that are equal on all ranks. y_all,
    ids, limits: as in `distributed_stats`. values: (b, C) each, the matrices that P is multiplied with instead of x and
    y: `dx = P values[1]`, `dy = P^T values[0]`. They are sent with the features, so y_all is None.
    """
    width = x.shape[1]
    if values is not None:
        x, y = (torch.cat(pair, dim=1) for pair in zip((x, y), values, strict=True))

    def tile(x: Tensor, y: Tensor, row: Sequence[Scalars], col: Sequence[Scalars], **options: Any) -> _Gradients:
        options |= {"need_dots": way.need_dots, "options": way.tiles}
        if values is not None:
            options["values"] = x[:, width:], y[:, width:]
            x, y = x[:, :width], y[:, :width]
        dx, dy, row_dot, col_dot = tile_grads(x, y, Terms(*row), Terms(*col), **options)
        return dx, dy, _given(row_dot), _given(col_dot)

    dx, dy, row_dots, col_dots = _gradients(tile, *_as_sent(x, y, way), row, col, way, y_all, ids, limits, positives)
    return BatchGrads(dx, dy, *(row_dots or (None,)), *(col_dots or (None,)))


def distributed_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    way: Way,
    ids: Ids | None = None,
    positives: bool = True,
) -> BatchSigmoid:
    """Return the sums of the sigmoid loss over the negatives of this rank's rows and columns.

    x, y: local features (b, D). scale, bias: one element each. ids: as in `distributed_stats`. The results carry no
    factor W.
    """

    def tile(x: Tensor, y: Tensor, row: Sequence[Scalars], col: Sequence[Scalars], **options: Any) -> _Gradients:
        row_loss, dx, dy, row_dot, row_sum = tile_sigmoid(x, y, scale, bias, options=way.tiles, **options)
        return dx, dy, (row_loss, row_dot, row_sum), ()

    dx, dy, (row_loss, row_dot, row_sum), _ = _gradients(tile, x, y, (), (), way, None, ids, None, positives)
    return BatchSigmoid(row_loss, dx, dy, row_dot, row_sum)


def _gradients(
    tile: _Tile,
    x: Tensor,
    y: Tensor,
    row: Sequence[Scalars],
    col: Sequence[Scalars],
    way: Way,
    y_all: Tensor | None,
    ids: Ids | None,
    limits: Limits | None,
    positives: bool,
) -> _Gradients:
    """Return the results of `tile` for this rank's rows and columns, summed over the whole batch."""
    (row_ids, col_ids), (row_limits, col_limits) = ids or (None, None), limits or (None, None)
    rows, cols = _PerSample((*row, row_ids, row_limits)), _PerSample((*col, col_ids, col_limits))

    def run(x: Tensor, y: Tensor, row: Sequence[Any], col: Sequence[Any], **options: Any) -> _Gradients:
        if not positives or ids is not None:
            options["diagonal"] = None
        return tile(x, y, row[:-2], col[:-2], **_pairs(row[-2:], col[-2:]), **options)

    def by_runs(x: Tensor, y: Tensor, row: Sequence[Any], col: Sequence[Any], **options: Any) -> _Gradients:
        dx, row_sums, parts = None, None, []
        for part in _runs(y, ids):
            values = [_part(value, part) for value in col]
            dx, dy, more_rows, col_sums = run(x, y[part], row, values, add_to=(dx, None), **options)
            row_sums = _merge_sums(row_sums, more_rows)
            parts.append((dy, *col_sums))
        dy, *sums = (_joined(pieces) for pieces in zip(*parts, strict=True))
        return dx, dy, row_sums or (), tuple(sums)

    if way.exchange == "all_gather":
        gathered = _gathered_feature if way.reduction == "feature" else _gathered_scalar
        return gathered(run if ids is None else by_runs, x, y, rows, cols, way, y_all)
    return (_ring_feature if way.reduction == "feature" else _ring_scalar)(run, x, y, rows, cols, way)


def _runs(columns: Tensor, ids: Ids | None) -> list[slice]:
    """Return the columns of each rank, whose ids ascend, if columns of all ranks have ids; else all columns."""
    length = len(columns) if ids is None else max(len(ids[1]), 1)
    return [slice(start, start + length) for start in range(0, max(len(columns), 1), length)]


def _part(value: Any, part: slice) -> Any:
    return value[part] if _is_vector(value) else value


def _joined(pieces: tuple[Any, ...]) -> Any:
    return pieces[0] if len(pieces) == 1 or pieces[0] is None else torch.cat(pieces)


def _as_sent(x: Tensor, y: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """Return x and y, rounded to the payload dtype if the features of both sides are sent."""
    if way.payload is None or way.reduction == "feature" or way.ranks.size == 1:
        return x, y
    return x.to(way.payload).to(x.dtype), y.to(way.payload).to(y.dtype)


def _ring_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    values: _PerSample,
    way: Way,
    own: Sequence[Tensor | None],
    positives: bool,
) -> tuple[Tensor, Tensor]:
    """Send y and its scale around the ring. Each column's log-sum-exp is sent with them and returns to its owner."""
    row_lse: Tensor | None = None
    col_lse = Carried(_merge_log_sum_exp, group=way.ranks)
    for owner, (y_block, *moved) in circulate((y, *values.vectors), **_transfer(way)):
        col_scale, *others = values.joined(moved)
        diagonal = 0 if positives and own[0] is None and owner == way.ranks.rank else None
        options: dict[str, Any] = {"diagonal": diagonal, "options": way.tiles, **_pairs(own, others)}
        row_part, col_part = tile_stats(x, y_block, row_scale, col_scale, **options)
        row_lse = row_part if row_lse is None else torch.logaddexp(row_lse, row_part)
        col_lse.add((col_part,))
    assert row_lse is not None, "a ring has at least one block"
    return row_lse, col_lse.home()[0]


def _ring_feature(tile: _Tile, x: Tensor, y: Tensor, rows: _PerSample, cols: _PerSample, way: Way) -> _Gradients:
    """Send y and its values around the ring. Its gradient is sent with it and returns to its owner."""
    dx: Tensor | None = None
    row_sums: Tensors | None = None
    columns = Carried(_merge_sums, **_transfer(way))
    for owner, (y_block, *moved) in circulate((y, *cols.vectors), **_transfer(way)):
        diagonal = 0 if owner == way.ranks.rank else None
        dx, dy, more_rows, col_sums = tile(
            x, y_block, rows.values, cols.joined(moved), diagonal=diagonal, add_to=(dx, None)
        )
        row_sums = _merge_sums(row_sums, more_rows)
        columns.add((dy, *col_sums))
        del dy, col_sums  # frees dy of this block before that of the next block is allocated
    assert row_sums is not None, "a ring has at least one block"
    own = columns.home()
    return dx, own[0], row_sums, own[1:]


def _ring_scalar(tile: _Tile, x: Tensor, y: Tensor, rows: _PerSample, cols: _PerSample, way: Way) -> _Gradients:
    """Send x and y with their values around the ring; each rank sums the gradients of its own rows and columns."""
    split = len(rows.vectors)
    blocks = circulate((x, y, *rows.vectors, *cols.vectors), **_transfer(way))
    next(blocks)  # this rank's own
    dx, dy, row_sums, col_sums = tile(x, y, rows.values, cols.values, diagonal=0)
    for _, (x_block, y_block, *moved) in blocks:
        others_rows, others_cols = rows.joined(moved[:split]), cols.joined(moved[split:])
        _, _, more_rows, _ = tile(x, y_block, rows.values, others_cols, need_dy=False, add_to=(dx, None))
        _, _, _, more_cols = tile(x_block, y, others_rows, cols.values, need_dx=False, add_to=(None, dy))
        _merge_sums((*row_sums, *col_sums), (*more_rows, *more_cols))
    return dx, dy, row_sums, col_sums


def _gathered_feature(
    tile: _Tile, x: Tensor, y: Tensor, rows: _PerSample, cols: _PerSample, way: Way, y_all: Tensor | None
) -> _Gradients:
    """Compute this rank's rows with all columns; reduce-scatter the gradients of the columns."""
    y_all = gather_columns(y, way) if y_all is None else y_all
    dx, dy, row_sums, col_sums = tile(x, y_all, rows.values, cols.gathered(way), diagonal=way.ranks.rank * len(x))
    dy = reduce_scatter_rows(dy, **_transfer(way))
    return dx, dy, row_sums, tuple(reduce_scatter_rows(sums, group=way.ranks) for sums in col_sums)


def _gathered_scalar(
    tile: _Tile, x: Tensor, y: Tensor, rows: _PerSample, cols: _PerSample, way: Way, y_all: Tensor | None
) -> _Gradients:
    """Compute this rank's rows with all columns for dx, then all rows with this rank's columns for dy."""
    offset = way.ranks.rank * len(x)
    y_all = gather_columns(y, way) if y_all is None else y_all
    dx, _, row_sums, _ = tile(x, y_all, rows.values, cols.gathered(way), diagonal=offset, need_dy=False)
    del y_all  # frees it before the rows are gathered, if no other pass needs it
    x_all = gather_rows(x, **_transfer(way))
    _, dy, _, col_sums = tile(x_all, y, rows.gathered(way), cols.values, diagonal=-offset, need_dx=False)
    return dx, dy, row_sums, col_sums


def _transfer(way: Way) -> dict[str, Any]:
    """Return the group and the payload dtype for collectives of features and their gradients."""
    return {"group": way.ranks, "payload": way.payload}


class _PerSample:
    """Values of one direction. Vectors, (b,), are sent with the features; numbers, and None, are equal on all ranks."""

    def __init__(self, values: Sequence[Scalars | None]) -> None:
        self.values = values
        self.vectors: Tensors = tuple(value for value in values if _is_vector(value))

    def joined(self, vectors: Sequence[Tensor]) -> list[Any]:
        """Return all values, with the vectors replaced by those of another rank."""
        moved = iter(vectors)
        return [next(moved) if _is_vector(value) else value for value in self.values]

    def gathered(self, way: Way) -> list[Any]:
        """Return all values, with the vectors gathered from all ranks, (B,)."""
        return self.joined([gather_rows(vector, group=way.ranks) for vector in self.vectors])


def _pairs(rows: Sequence[Tensor | None], cols: Sequence[Tensor | None]) -> dict[str, Any]:
    """Return the arguments ids and limits of a tile, of its rows and of its columns, that are given."""
    named = zip(("ids", "limits"), rows, cols, strict=True)
    return {name: (row, col) for name, row, col in named if row is not None and col is not None}


def _is_vector(value: Scalars | None) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 1


def _given(*tensors: Tensor | None) -> Tensors:
    """Return the tensors that are not None."""
    return tuple(tensor for tensor in tensors if tensor is not None)


def _merge_sums(total: Tensors | None, part: Tensors) -> Tensors:
    """Add `part` to `total` elementwise, in place; None is zero."""
    return part if total is None else tuple(old.add_(new) for old, new in zip(total, part, strict=True))


def _merge_log_sum_exp(total: Tensors, part: Tensors) -> Tensors:
    return tuple(torch.logaddexp(old, new) for old, new in zip(total, part, strict=True))
