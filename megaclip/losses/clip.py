"""CLIP's loss: InfoNCE over the whole batch of all ranks, with one tile of logits in memory at a time.

`L = 1/(2B) sum_i [softplus(row_lse_i - alpha*s_ii) + softplus(col_lse_i - alpha*s_ii)]`, where the log-sum-exps exclude
the positive (docs/mathematics.md). The forward pass computes the statistics in one pass over the batch, and the
backward pass computes the gradients in another. The terms of the positives are added here, per row.

The reduction contract: data-parallel engines average parameter gradients over ranks. So the backward pass of each rank
returns `W * dL/d(local features)`. Every rank has logit_scale, so each rank returns the whole `dL/d(logit_scale)`. Both
are exact after averaging.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import RankGroup
from megaclip.losses.batch_loss import SummedLoss, working_scalar
from megaclip.losses.compiled_operation import register_loss
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_tiles import distributed_grads, distributed_stats, gather_columns
from megaclip.losses.first_order import first_order
from megaclip.losses.sums import LossAndSums, gradient_of_scalar
from megaclip.losses.way import Way
from megaclip.ops.rows import finish_gradient, finish_gradients, softmax_pairs
from megaclip.ops.types import Terms


class ClipLoss(SummedLoss):
    """CLIP's loss with every sample of every rank as a negative, with the call signature of open_clip's ClipLoss.

    The constructor takes the arguments of `BatchLoss`, not those of open_clip's ClipLoss.
    """

    cost = LOSS_COSTS["clip"]

    def used_bias(self, logit_bias: Tensor | float | None, features: Tensor) -> None:
        return None

    def differentiable(
        self, x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, *, way: Way
    ) -> Tensor:
        needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, y, logit_scale))
        if needs_gradients and self.records(x, way):
            return super().differentiable(x, y, logit_scale, None, way=way)
        return _InfoNCE.apply(x, y, logit_scale, way)

    def evaluate(
        self,
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        ranks: RankGroup,
        gradients: bool,
    ) -> LossAndSums:
        if gradients:
            return super().evaluate(x, y, logit_scale, None, ranks=ranks, gradients=True)
        alpha, way = working_scalar(logit_scale, x), self.checked_way(x, y, logit_scale, None, ranks=ranks)
        (loss,) = _means_over_ranks(_forward_pass(x, y, alpha, way).loss, way=way)
        return LossAndSums(loss, *(alpha,) * 6)  # the caller uses only the loss

    def plain_sums(
        self, x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, *, way: Way
    ) -> LossAndSums:
        alpha = working_scalar(logit_scale, x)
        forward = _forward_pass(x, y, alpha, way)
        dx, dy = _backward_pass(x, y, alpha, forward, way)
        _, dots = finish_gradient(dx, x, y, forward.pull, alpha)
        loss, d_alpha = _means_over_ranks(forward.loss, dots.sum(), way=way)
        return LossAndSums(loss, dx, dy, forward.pull, alpha, d_alpha, torch.zeros_like(alpha))


ClipLoss.operation = register_loss("clip_loss", ClipLoss)


class _Forward(NamedTuple):
    """Results of the statistics pass."""

    loss: Tensor  # (), the mean over this rank's rows and columns
    y_all: Tensor | None  # (B, D), the columns of all ranks, with the all_gather exchange
    full_2b: Tensor  # log-sum-exp of all, for rows and columns
    pull: Tensor  # (b,), weights of the positives' gradients, without factor alpha


def _weight(x: Tensor) -> float:
    """Return W/(2B), the weight of a row or column, with the factor W of the contract."""
    return 1 / (2 * len(x))


def _forward_pass(x: Tensor, y: Tensor, alpha: Tensor, way: Way) -> _Forward:
    y_all = gather_columns(y, way)
    row_lse, col_lse = distributed_stats(x, y, alpha, alpha, way=way, y_all=y_all)
    pairs = softmax_pairs(x, y, row_lse, col_lse, alpha, _weight(x))
    return _Forward(pairs.losses.sum(), y_all, pairs.full_2m, pairs.pull)


def _backward_pass(x: Tensor, y: Tensor, alpha: Tensor, forward: _Forward, way: Way) -> tuple[Tensor, Tensor]:
    """Return the sums over the negatives dx, dy (b, D), without factor alpha."""
    weight = alpha.new_full((), _weight(x))  # alpha is multiplied in after the sums
    row_full, col_full = forward.full_2b
    row = Terms(scale=alpha, shift=row_full, weight=weight)
    col = Terms(scale=alpha, shift=col_full, weight=weight)
    negatives = distributed_grads(x, y, row, col, way=way, y_all=forward.y_all)
    return negatives.dx, negatives.dy


def _means_over_ranks(*values: Tensor, way: Way) -> tuple[Tensor, ...]:
    """Return the mean of each value () over ranks, with one collective for all."""
    if way.ranks.size == 1:
        return values
    means = sum_over_ranks(torch.stack(values), group=way.ranks) / way.ranks.size
    return tuple(mean.clone() for mean in means)  # a loss must not be a view


class _InfoNCE(torch.autograd.Function):
    """InfoNCE with the statistics pass in the forward and the gradient pass in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, logit_scale: Tensor, way: Way) -> Tensor:
        alpha = working_scalar(logit_scale, x)
        forward = _forward_pass(x, y, alpha, way)
        ctx.way = way
        ctx.save_for_backward(x, y, logit_scale, *forward[1:])
        (loss,) = _means_over_ranks(forward.loss, way=way)
        return loss

    @staticmethod
    @first_order("ClipLoss")
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, y, logit_scale, *forward = ctx.saved_tensors
        alpha = working_scalar(logit_scale, x)
        kept = _Forward(d_loss, *forward)
        totals = _backward_pass(x, y, alpha, kept, ctx.way)
        dx, dy, dots = finish_gradients(*totals, x, y, kept.pull, alpha, d_loss)
        # L is a function of alpha*x, so alpha * dL/d(alpha) = sum_i <x_i, dL/dx_i>. The dots lack this factor alpha.
        (d_alpha,) = _means_over_ranks(dots.sum(), way=ctx.way)
        return dx, dy, gradient_of_scalar(d_alpha * d_loss, logit_scale), None
