"""Sums of the sigmoid loss over the whole contrastive batch, from local features: loss and gradients in one pass.

The entries are independent of each other, so there is no statistics pass. Each block of the B x B similarities gives
its losses and gradients at once. Exchange and reduction are those of `distributed_tiles`:

* `feature`: the rank that owns the rows of a block computes it once, and dy is sent to the owner of the columns.
* `scalar`: x and y are sent. Each rank computes the blocks of its rows for dx, and those of its columns for dy. No
  gradient is sent. It costs 8 b*B*D operations instead of 6 (per rank; a multiplication or an addition is one).

The positives (row i with column i of the global matrix) are excluded. Autograd cannot differentiate these functions.
"""

from typing import NamedTuple

from torch import Tensor

from megaclip.comm.collectives import gather_rows, reduce_scatter_rows
from megaclip.comm.ring import Carried, circulate
from megaclip.losses.distributed_tiles import merge_sums, transfer_arguments
from megaclip.losses.plan import Plan
from megaclip.ops.tiles import tile_sigmoid


class BatchSigmoid(NamedTuple):
    """Results of `megaclip.ops.tiles.tile_sigmoid` for this rank's features, summed over the batch."""

    row_loss: Tensor  # (b,)
    dx: Tensor  # (b, D)
    dy: Tensor  # (b, D)
    row_dot: Tensor  # (b,)
    row_sum: Tensor  # (b,)


def distributed_sigmoid(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, plan: Plan) -> BatchSigmoid:
    """Return the sums of the sigmoid loss over the negatives of this rank's rows and columns.

    x, y: local features (b, D). scale, bias: one element each. The results carry no factor W.
    """
    gathered = plan.exchange == "all_gather"
    if plan.reduction == "feature":
        return (_gathered_feature if gathered else _ring_feature)(x, y, scale, bias, plan)
    return (_gathered_scalar if gathered else _ring_scalar)(x, y, scale, bias, plan)


def _gathered_feature(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    y_all = gather_rows(y, **transfer_arguments(plan))
    part = _both_sides(x, y_all, scale, bias, plan, diagonal=plan.ranks.rank * len(x))
    return part._replace(dy=reduce_scatter_rows(part.dy, **transfer_arguments(plan)))


def _gathered_scalar(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    offset = plan.ranks.rank * len(x)
    rows = _row_side(x, gather_rows(y, **transfer_arguments(plan)), scale, bias, plan, diagonal=offset)
    dy = _column_side(gather_rows(x, **transfer_arguments(plan)), y, scale, bias, plan, diagonal=-offset)
    return BatchSigmoid(rows.row_loss, rows.dx, dy, rows.row_dot, rows.row_sum)


def _ring_feature(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    """Send y around the ring. Its gradient is sent with it and returns to its owner."""
    dx: Tensor | None = None
    rows: tuple[Tensor, ...] | None = None
    columns = Carried(merge_sums, **transfer_arguments(plan))
    for owner, (y_block,) in circulate((y,), **transfer_arguments(plan)):
        part = _both_sides(x, y_block, scale, bias, plan, diagonal=0 if owner == plan.ranks.rank else None, dx=dx)
        columns.add((part.dy,))
        dx, rows = part.dx, merge_sums(rows, (part.row_loss, part.row_dot, part.row_sum))
        del part  # frees dy of this block before that of the next block is allocated
    assert dx is not None and rows is not None, "a ring has at least one block"
    row_loss, row_dot, row_sum = rows
    return BatchSigmoid(row_loss, dx, columns.home()[0], row_dot, row_sum)


def _ring_scalar(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    """Send x and y around the ring; each rank sums the gradients of its own rows and columns."""
    blocks = circulate((x, y), **transfer_arguments(plan))
    next(blocks)  # this rank's own
    total = _both_sides(x, y, scale, bias, plan, diagonal=0)
    for _, (x_block, y_block) in blocks:
        rows = _row_side(x, y_block, scale, bias, plan, diagonal=None, dx=total.dx)
        _column_side(x_block, y, scale, bias, plan, diagonal=None, dy=total.dy)
        merge_sums((total.row_loss, total.row_dot, total.row_sum), (rows.row_loss, rows.row_dot, rows.row_sum))
    return total


class _RowSide(NamedTuple):
    """Row part of `BatchSigmoid`."""

    row_loss: Tensor
    dx: Tensor
    row_dot: Tensor
    row_sum: Tensor


def _both_sides(
    x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan, diagonal: int | None, dx: Tensor | None = None
) -> BatchSigmoid:
    """Compute one block. dx: tensor to which the gradient of its rows is added."""
    row_loss, dx, dy, row_dot, row_sum = tile_sigmoid(
        x, y, scale, bias, diagonal=diagonal, add_to=(dx, None), options=plan.tiles
    )
    assert dx is not None and dy is not None, "both sides are computed"
    return BatchSigmoid(row_loss, dx, dy, row_dot, row_sum)


def _row_side(
    x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan, diagonal: int | None, dx: Tensor | None = None
) -> _RowSide:
    """Compute the row part of a block whose columns belong to another rank."""
    row_loss, dx, _, row_dot, row_sum = tile_sigmoid(
        x, y, scale, bias, diagonal=diagonal, need_dy=False, add_to=(dx, None), options=plan.tiles
    )
    assert dx is not None, "the row side is computed"
    return _RowSide(row_loss, dx, row_dot, row_sum)


def _column_side(
    x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan, diagonal: int | None, dy: Tensor | None = None
) -> Tensor:
    """Return dy of a block whose rows belong to another rank."""
    _, _, dy, _, _ = tile_sigmoid(
        x, y, scale, bias, diagonal=diagonal, need_dx=False, add_to=(None, dy), options=plan.tiles
    )
    assert dy is not None, "the column side is computed"
    return dy
