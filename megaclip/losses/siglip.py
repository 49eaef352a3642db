"""SigLIP's sigmoid loss over the whole batch of all ranks, with one tile of logits in memory at a time.

With `z_ij = alpha*s_ij + beta`: `L = 1/B [sum_i softplus(-z_ii) + sum_{i != j} softplus(z_ij)]` (Zhai et al., 2023,
arXiv:2303.15343, equation 1). The entries are independent of each other, so the forward pass computes loss and
gradients in one pass over the tiles. The terms of the positives are added here, per row. The loss and all sums are
float32 (float64 for float64 features).

The reduction contract is that of `megaclip.losses.clip`: the backward pass of each rank returns
`W * dL/d(local features)`, and the whole `dL/d(logit_scale)` and `dL/d(logit_bias)`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.losses.batch_loss import SummedLoss, working_scalar
from megaclip.losses.compiled_operation import register_loss
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_tiles import distributed_sigmoid
from megaclip.losses.sums import LossAndSums
from megaclip.losses.way import Way
from megaclip.ops.rows import paired_products


class SigLipLoss(SummedLoss):
    """SigLIP's loss of every pair of the batch of all ranks, with the call signature of open_clip's SigLipLoss.

    The constructor takes the arguments of `BatchLoss`, not those of open_clip's SigLipLoss.
    """

    cost = LOSS_COSTS["siglip"]

    def plain_sums(
        self, x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, *, way: Way
    ) -> LossAndSums:
        assert logit_bias is not None, "used_bias makes a tensor of it"
        b = len(x)
        alpha, beta = working_scalar(logit_scale, x), working_scalar(logit_bias, x)
        negatives = distributed_sigmoid(x, y, alpha, beta, way=way)
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
        loss, d_alpha, d_beta = (sum_over_ranks(local_sums, group=way.ranks) / (b * way.ranks.size)).unbind()
        # The factor is W/B, with the factor W of the contract.
        return LossAndSums(loss.clone(), negatives.dx, negatives.dy, pull, alpha / b, d_alpha, d_beta)


SigLipLoss.operation = register_loss("siglip_loss", SigLipLoss)
