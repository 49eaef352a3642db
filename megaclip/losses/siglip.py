"""SigLIP's sigmoid loss over the whole batch of all ranks, with one tile of logits in memory at a time.

With `z_ij = alpha*s_ij + beta`: `L = 1/B [sum_i softplus(-z_ii) + sum_{i != j} softplus(z_ij)]` (Zhai et al., 2023,
arXiv:2303.15343, equation 1). The entries are independent of each other, so the forward pass computes loss and
gradients in one pass over the tiles. The terms of the positives are added here, per row. The loss and all sums are
float32 (float64 for float64 features).

With ids="mask" the second sum leaves out the entries whose pairs have equal ids. With ids="positive" these entries have
the term softplus(-z_ij) of a positive. Negatives add softplus(z) of their logits.

The reduction contract is that of `megaclip.losses.clip`: the backward pass of each rank returns
`W * dL/d(local features)`, and the whole `dL/d(logit_scale)` and `dL/d(logit_bias)`.
"""

import torch
import torch.nn.functional as F

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import RankGroup
from megaclip.errors import DataError
from megaclip.losses.batch_loss import SummedLoss, working_scalar
from megaclip.losses.compiled_operation import register_loss
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_tiles import DistributedTiles
from megaclip.losses.negatives import Negatives
from megaclip.losses.segments import sums_of_equal_ids
from megaclip.losses.sums import LossAndSums, LossInputs
from megaclip.losses.way import Way
from megaclip.ops.rows import paired_products


class SigLipLoss(SummedLoss):
    """SigLIP's loss of every pair of the batch of all ranks, with the call signature of open_clip's SigLipLoss.

    The constructor takes the arguments of `BatchLoss`, not those of open_clip's SigLipLoss.
    """

    cost = LOSS_COSTS["siglip"]

    def checked_way(self, inputs: LossInputs, *, ranks: RankGroup, gradients: bool) -> Way:
        way = super().checked_way(inputs, ranks=ranks, gradients=gradients)
        if inputs.weights is not None:
            raise DataError("weights are given to SigLipLoss, whose terms belong to single entries; use ClipLoss")
        return way

    def plain_sums(self, inputs: LossInputs, *, way: Way, gradients: bool) -> LossAndSums:
        x, y, ids = inputs.x, inputs.y, inputs.ids
        assert inputs.logit_bias is not None, "used_bias makes a tensor of it"
        alpha, beta = working_scalar(inputs.logit_scale, x), working_scalar(inputs.logit_bias, x)
        masked = (ids, ids) if ids is not None and self.settings.ids == "mask" else None
        row_loss, dx, dy, row_dot, row_sum = DistributedTiles(x, y, way, ids=masked).sigmoid(alpha, beta)
        d_negatives = alpha.new_empty(0)
        if inputs.negatives is not None:
            more = Negatives(inputs, way).sigmoid_sums(alpha, beta)
            d_negatives = more.dy
            dx, row_loss = dx + more.dx, row_loss + more.row_loss
            row_dot, row_sum = row_dot + more.row_dot, row_sum + more.row_sum
        s_ii = paired_products(x, y)
        if ids is not None and self.settings.ids == "positive":
            # softplus(-z) = softplus(z) - z, for the entries that the tiles took as negatives.
            sums = sums_of_equal_ids(x, y, ids, way=way)
            others_x, others_y = sums.x - x.to(alpha.dtype), sums.y - y.to(alpha.dtype)
            dots, count = (x.to(alpha.dtype) * others_y).sum(1), sums.number - 1
            dx, dy = dx - others_y, dy - others_x
            row_loss, row_dot, row_sum = row_loss - alpha * dots - beta * count, row_dot - dots, row_sum - count
        z_ii = alpha * s_ii + beta
        pull = torch.sigmoid(-z_ii)
        local_sums = torch.stack(
            [
                (row_loss + F.softplus(-z_ii, threshold=50)).sum(),
                (row_dot - pull * s_ii).sum(),
                (row_sum - pull).sum(),
            ]
        )
        loss, d_alpha, d_beta = (sum_over_ranks(local_sums, group=way.ranks) / (len(x) * way.ranks.size)).unbind()
        # The factor is W/B, with the factor W of the contract.
        return LossAndSums(loss.clone(), dx, dy, pull, alpha / len(x), d_alpha, d_beta, d_negatives)


SigLipLoss.operation = register_loss("siglip_loss", SigLipLoss)
