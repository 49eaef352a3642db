"""CLIP's loss, InfoNCE over the whole batch of all ranks, in the memory of one tile of logits.

`L = 1/(2B) sum_i [softplus(row_lse_i - alpha*s_ii) + softplus(col_lse_i - alpha*s_ii)]`, where the log-sum-exps leave
the positive out (docs/mathematics.md). The forward pass makes one pass over the batch for the statistics, the backward
pass one for the gradients. The positives' own terms are added here, per row.

The reduction contract: data-parallel engines average parameter gradients over ranks. So the backward pass of each rank
returns `W * dL/d(local features)`. Every rank has logit_scale, so each returns the whole `dL/d(logit_scale)`. Both are
exact after averaging.
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
from megaclip.losses.distributed_tiles import distributed_grads, distributed_stats, gather_columns
from megaclip.losses.plan import Plan
from megaclip.ops.rows import finish_gradient, paired_products
from megaclip.ops.tiles import Terms, accumulation_dtype


class ClipLoss(BatchLoss):
    """CLIP's loss with every sample of every rank as a negative, with the call signature of open_clip's ClipLoss.

    The constructor takes the arguments of `BatchLoss`, and none of open_clip's.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the mean loss of the whole batch, equal on all ranks: () float32, float64 for float64 features.

        image_features, text_features: (b, D) of unit length, bfloat16, float16, float32 or float64; one shape and dtype
            on all ranks.
        logit_scale: the multiplier alpha, the exponential of the log scale: (), (1,) or a number.
        logit_bias: has no effect, because it cancels in a softmax. It receives a zero gradient.
        output_dict: return {"contrastive_loss": loss}, as open_clip's trainer expects.

        Every rank must call it. Raises DataError, a ValueError, on all ranks if features do not fit together, on one
        rank or between ranks.
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
    """InfoNCE with the statistics pass in the forward and the gradient pass in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, logit_scale: Tensor, plan: Plan) -> Tensor:
        alpha = logit_scale.reshape(()).to(accumulation_dtype(x))
        y_all = gather_columns(y, plan)
        row_lse, col_lse = distributed_stats(x, y, alpha, alpha, plan=plan, y_all=y_all)
        positive = alpha * paired_products(x, y)
        # Log-sum-exp of the negatives minus the logit of the positive, for rows and columns.
        gap_2b = torch.stack((row_lse, col_lse)) - positive
        terms_2b = F.softplus(gap_2b, threshold=50)  # PyTorch's default threshold, 20, is not exact in float64
        ctx.plan = plan
        ctx.save_for_backward(x, y, y_all, logit_scale, gap_2b, positive + terms_2b)
        return sum_over_ranks(terms_2b.sum(), group=plan.ranks) / (2 * len(x) * plan.ranks.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        plan: Plan = ctx.plan
        x, y, y_all, logit_scale, gap_2b, (row_full, col_full) = ctx.saved_tensors
        alpha = logit_scale.reshape(()).to(gap_2b.dtype)
        weight = 1 / (2 * len(x))  # W/(2B), with the factor W of the contract; alpha is multiplied in after the sums
        row = Terms(scale=alpha, shift=row_full, weight=weight)
        col = Terms(scale=alpha, shift=col_full, weight=weight)
        negatives = distributed_grads(x, y, row, col, plan=plan, y_all=y_all)

        # Weight of the positive, 1 - p_ii, as a sigmoid: the difference loses all digits when p_ii is near 1.
        pull = weight * torch.sigmoid(gap_2b).sum(0)
        factor = alpha * d_loss
        dx, dots = finish_gradient(negatives.dx, x, y, pull, factor)
        dy, _ = finish_gradient(negatives.dy, y, x, pull, factor)
        # L is a function of alpha*x: alpha * dL/d(alpha) = sum_i <x_i, dL/dx_i>. The dots are without the factor alpha.
        local_d_alpha = dots.sum() / plan.ranks.size
        d_alpha = sum_over_ranks(local_d_alpha, group=plan.ranks) * d_loss
        return dx, dy, d_alpha.to(logit_scale.dtype).reshape(logit_scale.shape), None
