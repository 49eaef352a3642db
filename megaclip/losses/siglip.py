"""SigLIP's sigmoid loss over the whole batch of all ranks, with one tile of logits in memory at a time.

With `z_ij = alpha*s_ij + beta`: `L = 1/B [sum_i softplus(-z_ii) + sum_{i != j} softplus(z_ij)]` (Zhai et al., 2023,
arXiv:2303.15343, equation 1). The entries are independent of each other, so the forward pass computes loss and
gradients in one pass over the tiles. The terms of the positives are added here, per row. The loss and all sums are
float32 (float64 for float64 features).

The reduction contract is that of `megaclip.losses.clip`: the backward pass of each rank returns
`W * dL/d(local features)`, and the whole `dL/d(logit_scale)` and `dL/d(logit_bias)`.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import RankGroup, resolve
from megaclip.losses.agreement import check_features
from megaclip.losses.batch_loss import as_scalar, working_scalar
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_sigmoid import distributed_sigmoid
from megaclip.losses.graph_operation import in_graph, register_loss
from megaclip.losses.plan import Plan
from megaclip.losses.small_batches import RecordableLoss
from megaclip.losses.sums import LossAndSums, function_of_sums
from megaclip.ops.rows import paired_products


class SigLipLoss(RecordableLoss):
    """SigLIP's loss of every pair of the batch of all ranks, with the call signature of open_clip's SigLipLoss.

    The constructor takes the arguments of `BatchLoss`, not those of open_clip's SigLipLoss.
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

        Arguments and errors are those of `ClipLoss`, except logit_bias: beta as (), (1,) or a number. None: 0.
        """
        logit_scale = as_scalar(logit_scale, image_features)
        logit_bias = as_scalar(0.0 if logit_bias is None else logit_bias, image_features)
        if torch.compiler.is_compiling():
            loss = in_graph(self, siglip_loss, image_features, text_features, logit_scale, logit_bias)
        else:
            plan = self._checked_plan(image_features, text_features, logit_scale, logit_bias, resolve(self.group))
            evaluate = functools.partial(self.sums, plan=plan)
            loss = _Sigmoid.apply(image_features, text_features, logit_scale, logit_bias, evaluate)
        return {"contrastive_loss": loss} if output_dict else loss

    def evaluate(
        self,
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        *,
        ranks: RankGroup,
        gradients: bool,
    ) -> LossAndSums:
        """Return the loss and the sums of its backward pass; see `GraphLoss`."""
        assert logit_bias is not None, "forward makes a tensor of it"
        plan = self._checked_plan(x, y, logit_scale, logit_bias, ranks)
        return self.sums(x, y, logit_scale, logit_bias, plan=plan)

    def plain_sums(
        self, x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, *, plan: Plan
    ) -> LossAndSums:
        assert logit_bias is not None, "forward makes a tensor of it"
        return _evaluate(x, y, logit_scale, logit_bias, plan)

    def _checked_plan(self, x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor, ranks: RankGroup) -> Plan:
        check_features(x, y, logit_scale, logit_bias, settings=self.settings, ranks=ranks)
        return self.plan(x, ranks, LOSS_COSTS["siglip"])


siglip_loss = register_loss("siglip_loss", SigLipLoss)
_Sigmoid = function_of_sums("SigLipLoss")


def _evaluate(x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor, plan: Plan) -> LossAndSums:
    b = len(x)
    alpha, beta = working_scalar(logit_scale, x), working_scalar(logit_bias, x)
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
    # The factor is W/B, with the factor W of the contract.
    return LossAndSums(loss.clone(), negatives.dx, negatives.dy, pull, alpha / b, d_alpha, d_beta)
