"""The distillation loss: KL divergence between the similarity rows of a teacher and of a student, over the whole batch.

With the student's logits `s_ij = alpha <x_i, y_j>` and the teacher's `t_ij = alpha_t <u_i, v_j>`,

    L = 1/(2B) [sum_i KL(softmax(t_i.) || softmax(s_i.)) + sum_j KL(softmax(t_.j) || softmax(s_.j))]
      = 1/(2B) [sum_i lse(s_i.) - lse(t_i.) + sum_j lse(s_.j) - lse(t_.j)] + sum_ij Q_ij (t_ij - s_ij)
    dL/ds_ij = P_ij - Q_ij,  P_ij = 1/(2B) [softmax(s_i.)_j + softmax(s_.j)_i],  Q the same of t

The gradient is that of open_clip's `DistillClipLoss`, whose value is the cross entropy: larger by the entropy of the
teacher's rows, a constant. The tiles that compute InfoNCE compute this loss too, once for each model. `sum_ij Q_ij
s_ij` follows from the gradient `Q y`, and `sum_ij Q_ij t_ij` from the dots of the teacher's tiles. As in
`megaclip.losses.clip`, the tiles leave out the positives, which are added here per row: P and Q are close to 1 there,
and their difference would be lost.

Shapes: b local samples of W ranks, B = W b, D and E embedding of student and teacher.
"""

import functools

import torch
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import resolve
from megaclip.losses.agreement import check_features
from megaclip.losses.batch_loss import BatchLoss, as_scalar, working_scalar
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.distributed_tiles import BatchGrads, DistributedTiles
from megaclip.losses.sums import FunctionOfSums, LossAndSums, LossInputs
from megaclip.losses.way import Way, make_way
from megaclip.ops.rows import paired_products
from megaclip.ops.types import Terms


class DistillationLoss(BatchLoss):
    """The distillation loss of the whole batch of the ranks of `group`. Default: all ranks of the job.

    It has the contract of `megaclip.losses`: feature gradients are those of the mean times W.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        teacher_image_features: Tensor,
        teacher_text_features: Tensor,
        teacher_logit_scale: Tensor | float,
    ) -> Tensor:
        """Return the mean divergence, equal on all ranks: () float32, float64 for float64 features.

        image_features, text_features: (b, D) of unit length. logit_scale: alpha, (), (1,) or a number.
        teacher_image_features, teacher_text_features: (b, E) of unit length, without gradients, of any floating dtype.
        They are multiplied in the student's format. teacher_logit_scale: as logit_scale.

        Raises DataError, on all ranks, if the features of the ranks do not fit together.
        """
        x, ranks = image_features, resolve(self.group)
        student = LossInputs(x, text_features, as_scalar(logit_scale, x))
        shapes = [tuple(getattr(one, "shape", ())) for one in (teacher_image_features, teacher_text_features)]
        check_features(student, settings=self.settings, ranks=ranks, teacher_shapes=shapes)
        cost = LOSS_COSTS["clip"]
        way = make_way(x, ranks=ranks, settings=self.settings, tiles=self.tiles, cost=cost)
        u, v = (features.detach().to(x.dtype) for features in (teacher_image_features, teacher_text_features))
        teacher = LossInputs(u, v, as_scalar(teacher_logit_scale, x))
        evaluate = functools.partial(_sums, teacher=teacher, way=way)
        loss: Tensor = FunctionOfSums.apply("DistillationLoss", evaluate, *student)
        return loss


class _Softmax:
    """The softmaxes of one model's rows and columns."""

    def __init__(self, inputs: LossInputs, way: Way) -> None:
        self.x, self.y, self._way = inputs.x, inputs.y, way
        self.scale = working_scalar(inputs.logit_scale, self.x)
        self.weight = 1 / (2 * len(self.x))  # W / (2 B), with the factor W of the contract
        lse = DistributedTiles(self.x, self.y, way).stats(self.scale, self.scale)
        self.positives = self.scale * paired_products(self.x, self.y)  # (b,) logits
        self.full_2b = torch.logaddexp(torch.stack(lse), self.positives)  # of all logits, for rows and columns

    def of_positives(self) -> Tensor:
        """Return P of the positives, (b,)."""
        return self.weight * (self.positives - self.full_2b).exp().sum(0)

    def gradients(self, values: tuple[Tensor, Tensor] | None = None, *, need_dots: bool = False) -> BatchGrads:
        """Return the products of P, without the positives, with the features of columns and of rows, or `values`."""
        row, col = (Terms(self.scale, full, self.weight) for full in self.full_2b)
        return DistributedTiles(self.x, self.y, self._way).grads(row, col, values, need_dots=need_dots)


def _sums(inputs: LossInputs, *, teacher: LossInputs, way: Way) -> LossAndSums:
    """Return the loss and the sums of its backward pass."""
    s, t = _Softmax(inputs, way), _Softmax(teacher, way)
    x, q_ii = inputs.x.to(s.scale.dtype), t.of_positives()
    target = t.gradients((inputs.x, inputs.y), need_dots=True)
    assert target.row_dot is not None and target.col_dot is not None, "they are needed"
    expected = t.scale * (target.row_dot.sum() + target.col_dot.sum()) - s.scale * (x * target.dx).sum()
    expected += (q_ii * (t.positives - s.positives)).sum()  # of t - s under Q
    loss = s.weight * (s.full_2b - t.full_2b).sum() + expected
    found, pull = s.gradients(), q_ii - s.of_positives()
    dx, dy = found.dx.sub_(target.dx), found.dy.sub_(target.dy)
    # L is a function of alpha*x, so alpha * dL/d(alpha) = sum_i <x_i, dL/dx_i>.
    d_alpha = (x * dx).sum() - (pull * s.positives).sum() / s.scale
    loss, d_alpha = (sum_over_ranks(torch.stack((loss, d_alpha)), group=way.ranks) / way.ranks.size).unbind()
    return LossAndSums(loss.clone(), dx, dy, pull, s.scale, d_alpha, d_alpha, d_alpha.new_empty(0))
