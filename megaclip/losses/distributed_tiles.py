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
per local row or column (b,), or a number that is equal on all ranks. Autograd cannot differentiate the results: compute
them in the forward and backward of a `torch.autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megaclip.comm.collectives import gather_rows, reduce_scatter_log_sum_exp, reduce_scatter_rows
from megaclip.comm.groups import RankGroup
from megaclip.comm.ring import Carried, Tensors, circulate
from megaclip.losses.way import Way
from megaclip.ops.tiles import tile_grads, tile_sigmoid, tile_stats
from megaclip.ops.types import Ids, Limits, Scalars, Terms


class BatchGrads(NamedTuple):
    """Sums over the whole batch for this rank's features, in float32 (float64 for float64 features)."""

    dx: Tensor  # (b, D)
    dy: Tensor  # (b, D)
    row_dot: Tensor | None  # (b,); None unless they are needed
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
_Blocks = Iterator[tuple[Tensor, list[Any], int | None]]
"""Blocks of columns with their values, and the column of the positive of the first row, or None."""
_Tile = Callable[..., _Gradients]
"""Gradients of one block: a function of x, y, the values of the rows and of the columns, and options of a tile."""


class DistributedTiles:
    """The tiles of the rows and the columns of all ranks. Positives (row i with column i of the global matrix) are left
    out, and with ids the entries whose row and column have equal ids.

    x, y: local features (b, D). ids: those of the local rows and columns, in ascending order; those of a positive are
    equal. limits: those of the local rows and columns. y_all: the columns of all ranks, (B, D), if they are gathered.
    positives: False if the columns are no partners of the rows. Nothing is then left out as a positive, and each rank
    has n columns, with n equal on all ranks.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        way: Way,
        *,
        y_all: Tensor | None = None,
        ids: Ids | None = None,
        limits: Limits | None = None,
        positives: bool = True,
    ) -> None:
        self._x, self._y, self._way, self.y_all = x, y, way, y_all
        (row_ids, col_ids), (row_limits, col_limits) = ids or (None, None), limits or (None, None)
        self._left_out = (row_ids, row_limits), (col_ids, col_limits)
        self._has_diagonal = positives and ids is None  # equal ids include the positives
        self._transfer: dict[str, Any] = {"group": way.ranks, "payload": way.payload}
        """Arguments of collectives of features and their gradients."""

    def stats(self, row_scale: Scalars, col_scale: Scalars) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp over the whole batch of this rank's rows (b,) and columns (b,), without the positives.

        `row_lse_i = log sum_{j != i} exp(row_scale_i*s_ij)` over all B columns, and
        `col_lse_j = log sum_{i != j} exp(col_scale_j*s_ij)` over all B rows. The all_gather exchange keeps `y_all`.
        """
        x, y = self._as_sent(self._x, self._y)
        if self._way.exchange == "all_gather" and self.y_all is None:
            self.y_all = gather_rows(y, **self._transfer)
        rows, cols = self._values((row_scale,), (col_scale,))
        row_lse: Tensor | None = None
        columns = self._returned(_merge_log_sum_exp, reduce_scatter_log_sum_exp)
        for y_block, values, diagonal in self._blocks(y, cols, self.y_all):
            options = self._options(rows.values, values, diagonal)
            row_part, col_part = tile_stats(x, y_block, row_scale, values[0], **options)
            row_lse = row_part if row_lse is None else torch.logaddexp(row_lse, row_part)
            columns.add((col_part,))
        assert row_lse is not None, "there is at least one block"
        return row_lse, columns.home()[0]

    def grads(
        self, row: Terms, col: Terms, values: tuple[Tensor, Tensor] | None = None, *, need_dots: bool = False
    ) -> BatchGrads:
        """Return the gradient tile summed over the whole batch, for this rank's rows and columns.

        With `P_ij` of `megaclip.ops.tiles.tile_grads`: `dx_i = sum over all j != i of P_ij y_j` and `dy_j = sum over
        all i != j of P_ij x_i`. The dots are sums over the whole batch too. The results carry no factor W.

        values: (b, C) each, the matrices that P is multiplied with instead of x and y: `dx = P values[1]`,
        `dy = P^T values[0]`. They are sent with the features, so `y_all` is not used.
        """
        x, y, y_all, width = self._x, self._y, self.y_all, self._x.shape[1]
        if values is not None:
            x, y = (torch.cat(pair, dim=1) for pair in zip((x, y), values, strict=True))
            y_all = None

        def tile(x: Tensor, y: Tensor, row: Sequence[Scalars], col: Sequence[Scalars], **options: Any) -> _Gradients:
            options["need_dots"] = need_dots
            if values is not None:
                options["values"] = x[:, width:], y[:, width:]
                x, y = x[:, :width], y[:, :width]
            dx, dy, *dots = tile_grads(x, y, Terms(*row), Terms(*col), **options)
            row_dots, col_dots = (() if dot is None else (dot,) for dot in dots)
            return dx, dy, row_dots, col_dots

        x, y = self._as_sent(x, y)
        dx, dy, row_dots, col_dots = self._gradients(tile, x, y, row, col, y_all)
        return BatchGrads(dx, dy, *(row_dots or (None,)), *(col_dots or (None,)))

    def sigmoid(self, scale: Tensor, bias: Tensor) -> BatchSigmoid:
        """Return the sums of the sigmoid loss over the negatives of this rank's rows and columns.

        scale, bias: one element each. The results carry no factor W.
        """

        def tile(x: Tensor, y: Tensor, row: Sequence[Scalars], col: Sequence[Scalars], **options: Any) -> _Gradients:
            row_loss, dx, dy, row_dot, row_sum = tile_sigmoid(x, y, scale, bias, **options)
            return dx, dy, (row_loss, row_dot, row_sum), ()

        dx, dy, (row_loss, row_dot, row_sum), _ = self._gradients(tile, self._x, self._y, (), (), self.y_all)
        return BatchSigmoid(row_loss, dx, dy, row_dot, row_sum)

    def _gradients(
        self, tile: _Tile, x: Tensor, y: Tensor, row: Sequence[Scalars], col: Sequence[Scalars], y_all: Tensor | None
    ) -> _Gradients:
        """Return the results of `tile` for this rank's rows and columns, summed over the whole batch."""

        def run(
            x: Tensor, y: Tensor, row: Sequence[Any], col: Sequence[Any], diagonal: int | None = None, **options: Any
        ) -> _Gradients:
            return tile(x, y, row[:-2], col[:-2], **self._options(row, col, diagonal), **options)

        rows, cols = self._values(row, col)
        if self._way.reduction == "feature":
            return self._feature(run, x, rows, self._blocks(y, cols, y_all))
        if self._way.exchange == "ring":
            return self._ring_scalar(run, x, y, rows, cols)
        return self._gathered_scalar(run, x, y, rows, cols, self._blocks(y, cols, y_all))

    def _feature(self, tile: _Tile, x: Tensor, rows: _PerSample, blocks: _Blocks) -> _Gradients:
        """Compute this rank's rows with all columns. The gradients of the columns return to their owners."""
        dx: Tensor | None = None
        row_sums: Tensors | None = None
        columns = self._returned(_merge_sums, reduce_scatter_rows)
        for y_block, values, diagonal in blocks:
            dx, dy, more_rows, col_sums = tile(x, y_block, rows.values, values, diagonal=diagonal, add_to=(dx, None))
            row_sums = _merge_sums(row_sums, more_rows)
            columns.add((dy, *col_sums))
            del dy, col_sums  # frees dy of this block before that of the next block is allocated
        assert row_sums is not None, "there is at least one block"
        own = columns.home()
        return dx, own[0], row_sums, own[1:]

    def _ring_scalar(self, tile: _Tile, x: Tensor, y: Tensor, rows: _PerSample, cols: _PerSample) -> _Gradients:
        """Send x and y with their values around the ring; each rank sums the gradients of its own rows and columns."""
        split = len(rows.vectors)
        blocks = circulate((x, y, *rows.vectors, *cols.vectors), **self._transfer)
        next(blocks)  # this rank's own
        dx, dy, row_sums, col_sums = tile(x, y, rows.values, cols.values, diagonal=0)
        for _, (x_block, y_block, *moved) in blocks:
            others_rows, others_cols = rows.joined(moved[:split]), cols.joined(moved[split:])
            _, _, more_rows, _ = tile(x, y_block, rows.values, others_cols, need_dy=False, add_to=(dx, None))
            _, _, _, more_cols = tile(x_block, y, others_rows, cols.values, need_dx=False, add_to=(None, dy))
            _merge_sums((*row_sums, *col_sums), (*more_rows, *more_cols))
        return dx, dy, row_sums, col_sums

    def _gathered_scalar(
        self, tile: _Tile, x: Tensor, y: Tensor, rows: _PerSample, cols: _PerSample, blocks: _Blocks
    ) -> _Gradients:
        """Compute this rank's rows with all columns for dx, then all rows with this rank's columns for dy."""
        ranks, dx, row_sums = self._way.ranks, None, None
        for y_block, values, diagonal in blocks:
            options: dict[str, Any] = {"diagonal": diagonal, "need_dy": False, "add_to": (dx, None)}
            dx, _, more_rows, _ = tile(x, y_block, rows.values, values, **options)
            row_sums = _merge_sums(row_sums, more_rows)
            del y_block  # frees the columns before the rows are gathered, if no other pass needs them
        assert row_sums is not None, "there is at least one block"
        x_all, diagonal = gather_rows(x, **self._transfer), -ranks.rank * len(x)
        _, dy, _, col_sums = tile(x_all, y, rows.gathered(ranks), cols.values, diagonal=diagonal, need_dx=False)
        return dx, dy, row_sums, col_sums

    def _blocks(self, y: Tensor, cols: _PerSample, y_all: Tensor | None) -> _Blocks:
        """Yield the columns of all ranks block by block: features, values, and the diagonal of the positives or None.

        A block has the columns of one rank, or all gathered columns if they have no ids: ids ascend within a rank only.
        """
        ranks = self._way.ranks
        if self._way.exchange == "ring":
            for owner, (y_block, *moved) in circulate((y, *cols.vectors), **self._transfer):
                yield y_block, cols.joined(moved), 0 if owner == ranks.rank else None
            return
        y_all = gather_rows(y, **self._transfer) if y_all is None else y_all
        count, values = len(y_all) if cols.values[-2] is None else len(y), cols.gathered(ranks)
        for start in range(0, len(y_all), count):
            part = slice(start, start + count)
            block_values = [value[part] if _is_vector(value) else value for value in values]
            yield y_all[part], block_values, ranks.rank * len(y) - start

    def _returned(self, merge: Callable[..., Tensors], reduce: Callable[..., Tensor]) -> Carried | _Gathered:
        """Return what collects the results for the blocks of columns and returns them to the columns' owners."""
        is_ring = self._way.exchange == "ring"
        return Carried(merge, **self._transfer) if is_ring else _Gathered(reduce, **self._transfer)

    def _as_sent(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and y, rounded to the payload dtype if the features of both sides are sent."""
        way = self._way
        if way.payload is None or way.reduction == "feature" or way.ranks.size == 1:
            return x, y
        return x.to(way.payload).to(x.dtype), y.to(way.payload).to(y.dtype)

    def _values(self, row: Sequence[Scalars], col: Sequence[Scalars]) -> tuple[_PerSample, _PerSample]:
        """Return the values of the rows and of the columns, with their ids and limits as the last two."""
        rows, cols = self._left_out
        return _PerSample((*row, *rows)), _PerSample((*col, *cols))

    def _options(self, rows: Sequence[Any], cols: Sequence[Any], diagonal: int | None) -> dict[str, Any]:
        """Return the options of the tile of rows and columns with these values."""
        named = zip(("ids", "limits"), rows[-2:], cols[-2:], strict=True)
        pairs = {name: (row, col) for name, row, col in named if row is not None}
        return {"diagonal": diagonal if self._has_diagonal else None, "options": self._way.tiles, **pairs}


class _Gathered:
    """Results for the gathered columns, block after block, with the interface of `Carried`."""

    def __init__(self, reduce: Callable[..., Tensor], group: RankGroup, payload: torch.dtype | None) -> None:
        self._reduce, self._group, self._payload = reduce, group, payload
        self._parts: list[Tensors] = []

    def add(self, part: Tensors) -> None:
        self._parts.append(part)

    def home(self) -> Tensors:
        """Return the results for this rank's columns, (b, ...), reduced over ranks."""
        parts, self._parts = self._parts, []
        whole = [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        del parts  # frees them before the results are reduced
        of_matrices = {} if self._payload is None else {"payload": self._payload}
        return tuple(self._reduce(each, group=self._group, **(of_matrices if each.dim() > 1 else {})) for each in whole)


class _PerSample:
    """Values of one direction. Vectors, (b,), are sent with the features; numbers, and None, are equal on all ranks."""

    def __init__(self, values: Sequence[Scalars | None]) -> None:
        self.values = values
        self.vectors: Tensors = tuple(value for value in values if _is_vector(value))

    def joined(self, vectors: Sequence[Tensor]) -> list[Any]:
        """Return all values, with the vectors replaced by those of another rank."""
        moved = iter(vectors)
        return [next(moved) if _is_vector(value) else value for value in self.values]

    def gathered(self, ranks: RankGroup) -> list[Any]:
        """Return all values, with the vectors gathered from all ranks, (B,)."""
        return self.joined([gather_rows(vector, group=ranks) for vector in self.vectors])


def _is_vector(value: Scalars | None) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 1


def _merge_sums(total: Tensors | None, part: Tensors) -> Tensors:
    """Add `part` to `total` elementwise, in place; None is zero."""
    return part if total is None else tuple(old.add_(new) for old, new in zip(total, part, strict=True))


def _merge_log_sum_exp(total: Tensors, part: Tensors) -> Tensors:
    return tuple(torch.logaddexp(old, new) for old, new in zip(total, part, strict=True))
