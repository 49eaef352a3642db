"""Negatives of the sigmoid loss over the whole contrastive batch, from local features: one pass, loss and gradients.

The sigmoid of an entry needs no other entry, so there is no statistics pass: each block of the B x B similarities gives
its losses and gradients at once. Exchange and reduction are `distributed_tiles`': with `feature` each block is computed
once, by the rank that owns its rows, and dy travels; with `scalar` x and y travel, each rank computes the blocks of its
rows and those of its columns, and keeps of each the side that is its own: no gradient moves, at twice the products.

The positives (row i with column i of the global matrix) are left out throughout. No autograd.
"""

from typing import NamedTuple

from torch import Tensor

from megaclip.comm.collectives import gather_rows, reduce_scatter_rows
from megaclip.comm.ring import Carried, circulate
from megaclip.losses.distributed_tiles import merge_sums
from megaclip.losses.plan import Plan
from megaclip.ops.tiles import tile_sigmoid


class BatchSigmoid(NamedTuple):
    """Sums over all columns (or rows) of the batch for this rank's features, as `megaclip.ops.tiles.tile_sigmoid`."""

    row_loss: Tensor  # (b,)
    dx: Tensor  # (b, D)
    dy: Tensor  # (b, D)
    row_dot: Tensor  # (b,)
    row_sum: Tensor  # (b,)


def distributed_sigmoid(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, plan: Plan) -> BatchSigmoid:
    """Everything the sigmoid loss needs of the negatives of this rank's rows and columns.

    x, y: local features (b, D); scale, bias: one element each. Like `distributed_grads` it carries no factor W.
    """
    gathered = plan.exchange == "all_gather"
    if plan.reduction == "feature":
        return (_gathered_feature if gathered else _ring_feature)(x, y, scale, bias, plan)
    return (_gathered_scalar if gathered else _ring_scalar)(x, y, scale, bias, plan)


def _gathered_feature(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    y_all = gather_rows(y, group=plan.ranks)
    part = _block(x, y_all, scale, bias, plan, diagonal=plan.ranks.rank * len(x))
    return part._replace(dy=reduce_scatter_rows(part.dy, group=plan.ranks))


def _gathered_scalar(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    offset = plan.ranks.rank * len(x)
    rows = _block(x, gather_rows(y, group=plan.ranks), scale, bias, plan, diagonal=offset)
    columns = _block(gather_rows(x, group=plan.ranks), y, scale, bias, plan, diagonal=-offset)
    return rows._replace(dy=columns.dy)


def _ring_feature(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    """y goes round; its gradient follows it home."""
    rows: tuple[Tensor, ...] | None = None
    columns = Carried(merge_sums, group=plan.ranks)
    for owner, (y_block,) in circulate((y,), group=plan.ranks):
        part = _block(x, y_block, scale, bias, plan, diagonal=0 if owner == plan.ranks.rank else None)
        columns.add((part.dy,))
        rows = merge_sums(rows, (part.row_loss, part.dx, part.row_dot, part.row_sum))
    assert rows is not None, "a ring has at least one block"
    row_loss, dx, row_dot, row_sum = rows
    return BatchSigmoid(row_loss, dx, columns.home()[0], row_dot, row_sum)


def _ring_scalar(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan) -> BatchSigmoid:
    """x and y go round; each rank adds up the gradients of its own rows and columns."""
    total: tuple[Tensor, ...] | None = None
    for owner, (x_block, y_block) in circulate((x, y), group=plan.ranks):
        if owner == plan.ranks.rank:
            part = _block(x, y, scale, bias, plan, diagonal=0)
        else:
            columns = _block(x_block, y, scale, bias, plan, diagonal=None)
            part = _block(x, y_block, scale, bias, plan, diagonal=None)._replace(dy=columns.dy)
        total = merge_sums(total, part)
    assert total is not None, "a ring has at least one block"
    return BatchSigmoid(*total)


def _block(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, plan: Plan, *, diagonal: int | None) -> BatchSigmoid:
    return BatchSigmoid(*tile_sigmoid(x, y, scale, bias, diagonal=diagonal, **vars(plan.tiles)))
