"""InfoNCE over the whole batch of all ranks: CLIP's loss, in the memory of one tile of logits.

`L = 1/(2B) sum_i [softplus(row_lse_i - alpha*s_ii) + softplus(col_lse_i - alpha*s_ii)]`, where the log-sum-exps leave
the positive out (docs/mathematics.md). The forward pass takes one statistics pass over the batch, the backward pass one
gradient pass; the positives' own terms are added here, per row.

The reduction contract. Data-parallel engines average parameter gradients over ranks. So each rank's backward hands out
`W * dL/d(local features)`, and for logit_scale, which every rank owns, the whole `dL/d(logit_scale)`: after averaging,
both are exact.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import resolve
from megaclip.losses.agreement import check_features
from megaclip.losses.batch_loss import BatchLoss, as_scalar
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_tiles import Terms, distributed_grads, distributed_stats, gather_columns
from megaclip.losses.plan import Plan
from megaclip.ops.rows import finish_gradient, paired_products
from megaclip.ops.tiles import accumulation_dtype


class ClipLoss(BatchLoss):
    """CLIP's loss with every sample of every rank as a negative; called as open_clip's trainer calls its ClipLoss.

    The settings are those of `BatchLoss`, none of open_clip's constructor.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The global mean loss, the same number on every rank: () float32, float64 for float64 features.

        image_features, text_features: (b, D) of unit length, bfloat16, float16, float32 or float64; all ranks have the
            same shape and dtype. logit_scale: the multiplier alpha = exp(log scale) itself, () or (1,), or
            a number.
        logit_bias: cancels in a softmax; it changes nothing and receives a zero gradient.
        output_dict: return {"contrastive_loss": loss}, as open_clip's trainer asks.

        Every rank must call it. Features that do not fit together, on one rank or between ranks, raise ValueError on
        all.
        """
        ranks = resolve(self.group)
        logit_scale = as_scalar(logit_scale, image_features)
        check_features(image_features, text_features, logit_scale, ranks=ranks)
        plan = self.plan(image_features, ranks, LOSS_COSTS["clip"])
        loss = _InfoNCE.apply(image_features, text_features, logit_scale, plan)
        if isinstance(logit_bias, Tensor):
            loss = loss + 0.0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss


class _InfoNCE(torch.autograd.Function):
    """The statistics pass forward, the gradient pass backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, logit_scale: Tensor, plan: Plan) -> Tensor:
        alpha = logit_scale.reshape(()).to(accumulation_dtype(x))
        y_all = gather_columns(y, plan)
        row_lse, col_lse = distributed_stats(x, y, alpha, alpha, plan=plan, y_all=y_all)
        positive = alpha * paired_products(x, y)
        # How far the negatives' sums, of the rows and of the columns, lie above the positive.
        gap_2b = torch.stack((row_lse, col_lse)) - positive
        terms_2b = F.softplus(gap_2b, threshold=50)  # PyTorch's own switch to v at 20 is not float64-exact
        ctx.plan = plan
        ctx.save_for_backward(x, y, y_all, logit_scale, gap_2b, positive + terms_2b)
        return sum_over_ranks(terms_2b.sum(), group=plan.ranks) / (2 * len(x) * plan.ranks.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        plan: Plan = ctx.plan
        x, y, y_all, logit_scale, gap_2b, (row_full, col_full) = ctx.saved_tensors
        alpha = logit_scale.reshape(()).to(gap_2b.dtype)
        weight = 1 / (2 * len(x))  # W/(2B): the contract's factor W is in it; alpha follows when the sums are complete
        row = Terms(scale=alpha, shift=row_full, weight=weight)
        col = Terms(scale=alpha, shift=col_full, weight=weight)
        negatives = distributed_grads(x, y, row, col, plan=plan, y_all=y_all)

        # The positive's share, 1 - p_ii, as a sigmoid: a difference would lose it when p_ii is near 1.
        pull = weight * torch.sigmoid(gap_2b).sum(0)
        factor = alpha * d_loss
        dx, dots = finish_gradient(negatives.dx, x, y, pull, factor)
        dy, _ = finish_gradient(negatives.dy, y, x, pull, factor)
        # L is a function of alpha*x: alpha * dL/d(alpha) = sum_i <x_i, dL/dx_i>, and the dots lack their alpha still.
        local_d_alpha = dots.sum() / plan.ranks.size
        d_alpha = sum_over_ranks(local_d_alpha, group=plan.ranks) * d_loss
        return dx, dy, d_alpha.to(logit_scale.dtype).reshape(logit_scale.shape), None
