"""The sigmoid loss over the whole batch of all ranks: SigLIP's, in the memory of one tile of logits.

With `z_ij = alpha*s_ij + beta`: `L = 1/B [sum_i softplus(-z_ii) + sum_{i != j} softplus(z_ij)]` (Zhai et al., 2023,
arXiv:2303.15343, equation 1). No entry needs another one, so loss and gradients come from one pass over the tiles, in
the forward; the positives' own terms are added here, per row. All sums, the loss among them, are float32 (float64 for
float64 features).

The reduction contract is ClipLoss's: each rank's backward hands out `W * dL/d(local features)`, and the whole
`dL/d(logit_scale)` and `dL/d(logit_bias)`, which every rank owns.
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
from megaclip.losses.distributed_sigmoid import distributed_sigmoid
from megaclip.losses.plan import Plan
from megaclip.ops.rows import finish_gradient, paired_products
from megaclip.ops.tiles import accumulation_dtype


class SigLipLoss(BatchLoss):
    """SigLIP's loss with every pair of the batch of all ranks; called as open_clip's trainer calls its
    SigLipLoss.

    The settings are those of `BatchLoss`, none of open_clip's constructor; every exchange and reduction is exact.
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
            same shape and dtype.
        logit_scale: the multiplier alpha = exp(log scale) itself, () or (1,), or a number. logit_bias: beta, likewise;
            None is 0.
        output_dict: return {"contrastive_loss": loss}, as open_clip's trainer asks.

        Every rank must call it. Features that do not fit together, on one rank or between ranks, raise ValueError on
        all.
        """
        ranks = resolve(self.group)
        logit_scale = as_scalar(logit_scale, image_features)
        logit_bias = as_scalar(0.0 if logit_bias is None else logit_bias, image_features)
        check_features(image_features, text_features, logit_scale, logit_bias, ranks=ranks)
        plan = self.plan(image_features, ranks, LOSS_COSTS["siglip"])
        loss = _Sigmoid.apply(image_features, text_features, logit_scale, logit_bias, plan)
        return {"contrastive_loss": loss} if output_dict else loss


class _Sigmoid(torch.autograd.Function):
    """Loss and gradients in the forward pass; the backward pass multiplies them by what comes from above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor, plan: Plan) -> Tensor:
        dtype, b = accumulation_dtype(x), len(x)
        alpha, beta = logit_scale.reshape(()).to(dtype), logit_bias.reshape(()).to(dtype)
        negatives = distributed_sigmoid(x, y, alpha, beta, plan=plan)
        s_ii = paired_products(x, y)
        z_ii = alpha * s_ii + beta
        pull = torch.sigmoid(-z_ii)
        local_sums = torch.stack(
            [
                (negatives.row_loss + F.softplus(-z_ii, threshold=50)).sum(),
                (negatives.row_dot - pull * s_ii).sum(),
                (negatives.row_sum - pull).sum(),
            ]
        )
        loss, d_alpha, d_beta = (sum_over_ranks(local_sums, group=plan.ranks) / (b * plan.ranks.size)).unbind()
        ctx.save_for_backward(
            x, y, negatives.dx, negatives.dy, pull, alpha / b, d_alpha, d_beta, logit_scale, logit_bias
        )
        return loss.clone()  # no view: trainers divide losses in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x, y, dx, dy, pull, weight, d_alpha, d_beta, logit_scale, logit_bias = ctx.saved_tensors
        factor = weight * d_loss  # W/B: the contract's factor W is in the weight
        d_features = (finish_gradient(*terms, pull, factor)[0] for terms in ((dx, x, y), (dy, y, x)))
        d_scalars = (
            (gradient * d_loss).to(scalar.dtype).reshape(scalar.shape)
            for gradient, scalar in ((d_alpha, logit_scale), (d_beta, logit_bias))
        )
        return *d_features, *d_scalars, None
