"""The distillation loss: KL divergence between the similarity rows of a teacher and of a student, over the whole batch.

With the student's logits `s_ij = alpha <x_i, y_j>` and the teacher's `t_ij = alpha_t <u_i, v_j>`,

    L = 1/(2B) [sum_i KL(softmax(t_i.) || softmax(s_i.)) + sum_j KL(softmax(t_.j) || softmax(s_.j))]
    KL of row i = sum_j softmax(t_i.)_j (t_ij - s_ij) - lse(t_i.) + lse(s_i.)
    dL/ds_ij = 1/(2B) [softmax(s_i.)_j + softmax(s_.j)_i - softmax(t_i.)_j - softmax(t_.j)_i]

The gradient is that of open_clip's `DistillClipLoss`, whose value is the cross entropy: larger by the entropy of the
teacher's rows, a constant. The forward pass computes the statistics of rows and columns in one pass over
tiles, the backward pass the gradients in another. No B x B matrix is kept. Between ranks the features of texts travel
around a ring, and the statistics and gradients of the columns behind them.

Shapes: b local samples of W ranks, B = W b, D and E embedding of student and teacher.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import RankGroup, by_node, resolve
from megaclip.comm.ring import Carried, Tensors, circulate
from megaclip.losses.batch_loss import as_scalar, working_scalar
from megaclip.losses.first_order import first_order
from megaclip.losses.sums import gradient_of_scalar
from megaclip.ops.tiles_distillation import (
    Pair,
    divergence,
    merged,
    tile_distillation_grads,
    tile_distillation_stats,
)
from megaclip.ops.types import TileOptions, accumulation_dtype

TILES = TileOptions(tile_budget_mib=512, implementation="torch")
"""Default options. Tiles of 128 MiB took 1.7 times as long (B = 32,768, H100), because they are many small kernels. The
Triton kernels have not run on a GPU yet."""


class DistillationLoss(nn.Module):
    """The distillation loss of the whole batch of the ranks of `group`. Default: all ranks of the job.

    It has the contract of `megaclip.losses`: feature gradients are those of the mean times W.
    """

    def __init__(self, *, group: Any = None, tiles: TileOptions = TILES) -> None:
        super().__init__()
        self.group, self.tiles = group, tiles

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
        """
        student = image_features, text_features, as_scalar(logit_scale, image_features)
        teacher = teacher_image_features, teacher_text_features, as_scalar(teacher_logit_scale, image_features)
        loss: Tensor = _Distillation.apply(by_node(resolve(self.group)), self.tiles, *student, *teacher)
        return loss


def _merge(one: Tensors, other: Tensors) -> Tensors:
    return (merged(torch.stack((one[0], other[0]), dim=1)),)


def _sum(arrived: Tensors, part: Tensors) -> Tensors:
    return tuple(own.add_(other) for own, other in zip(part, arrived, strict=True))


def _blocks(student: Pair, teacher: Pair, ranks: RankGroup, *more: Tensor) -> Any:
    """Yield both models' rows of this rank with the columns of each rank in turn, and more values of the columns."""
    for _, (y, v, *others) in circulate((student.cols, teacher.cols, *more), group=ranks):
        yield student._replace(cols=y), teacher._replace(cols=v), others


class _Distillation(torch.autograd.Function):
    """The loss with the statistics pass in the forward and the gradient pass in the backward."""

    @staticmethod
    def forward(ctx: Any, ranks: RankGroup, tiles: TileOptions, *tensors: Tensor) -> Tensor:
        student, teacher = _pairs(tensors)
        row_parts = list[Tensor]()
        carried = Carried(_merge, group=ranks)
        for own, other, _ in _blocks(student, teacher, ranks):
            row_part, col_part = tile_distillation_stats(own, other, options=tiles)
            row_parts.append(row_part)
            carried.add((col_part,))
        row, (col,) = merged(torch.stack(row_parts, dim=1)), carried.home()
        ctx.ranks, ctx.tiles = ranks, tiles
        ctx.save_for_backward(*tensors, row, col)
        batch = ranks.size * len(student.rows)
        return sum_over_ranks(divergence(row).sum() + divergence(col).sum(), group=ranks) / (2 * batch)

    @staticmethod
    @first_order("DistillationLoss")
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, row, own_col = ctx.saved_tensors
        (student, teacher), ranks = _pairs(tensors), ctx.ranks
        dx = torch.zeros_like(student.rows, dtype=accumulation_dtype(student.rows))
        carried = Carried(_sum, group=ranks)
        for own, other, (col,) in _blocks(student, teacher, ranks, own_col):
            carried.add((tile_distillation_grads(own, other, row, col, dx=dx, options=ctx.tiles),))
        (dy,) = carried.home()
        factor = d_loss / (2 * len(dx))  # W / (2 B): the engine averages over W ranks
        x = student.rows.to(dx.dtype)
        d_alpha = sum_over_ranks((x * dx).sum() * factor, group=ranks) / ranks.size
        dx, dy = (gradient * (factor * student.scale) for gradient in (dx, dy))
        dtype = student.rows.dtype
        return None, None, dx.to(dtype), dy.to(dtype), gradient_of_scalar(d_alpha, tensors[2]), None, None, None


def _pairs(tensors: Any) -> tuple[Pair, Pair]:
    """Return student and teacher in the student's dtype, with scales () in the dtype of sums."""
    x, y, alpha, u, v, alpha_t = tensors
    return Pair(x, y, working_scalar(alpha, x)), Pair(u.to(x.dtype), v.to(x.dtype), working_scalar(alpha_t, x))
