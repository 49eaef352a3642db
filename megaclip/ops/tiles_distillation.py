"""Tiles of two similarity matrices at once, a student's and a teacher's, in PyTorch: statistics and gradients.

The distillation loss compares the softmax of each row and column of the student's logits s with that of the teacher's
logits t. Both operations compute a tile of s and of t, use both and discard them. docs/mathematics.md has the formulas.

Features are multiplied as `tiles_torch` describes. Both models have features of one dtype.

Shapes: m rows, n columns, D and E embedding of student and teacher; `_mn` is one tile of logits.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from megaclip.ops.tiles_torch import operands, product, tf32, tile_side, tiles
from megaclip.ops.types import TileOptions, accumulation_dtype

_BUFFERS = 6
"""Number of tile-sized buffers alive at once, in the dtype of sums."""


class Statistics(NamedTuple):
    """Statistics of rows or columns, one value each, in the dtype of sums."""

    student: Tensor
    """Log-sum-exp of the student's logits."""
    teacher: Tensor
    """Log-sum-exp of the teacher's logits."""
    difference: Tensor
    """Mean of t - s under the teacher's softmax."""

    def divergence(self) -> Tensor:
        """Return the Kullback-Leibler divergence of the student's softmax from the teacher's."""
        return self.difference - self.teacher + self.student


class Pair(NamedTuple):
    """Features of the rows and columns of one model, and the factor of their products."""

    rows: Tensor
    cols: Tensor
    scale: Tensor


def merged(*parts: Statistics) -> Statistics:
    """Return the statistics over the entries of all parts."""
    student, teacher, difference = (torch.stack(values) for values in zip(*parts, strict=True))
    total = teacher.logsumexp(0)
    return Statistics(student.logsumexp(0), total, (difference * (teacher - total).exp()).sum(0))


def tile_distillation_stats(student: Pair, teacher: Pair, *, options: TileOptions) -> tuple[Statistics, Statistics]:
    """Return the statistics of the rows (m,) and of the columns (n,)."""
    row: dict[int, list[Statistics]] = defaultdict(list)
    col: dict[int, list[Statistics]] = defaultdict(list)
    (x, y), (u, v), side = _prepared(student, teacher, options)
    with tf32(options.precision == "tf32"):
        for rows, cols in tiles(len(x), len(y), side):
            s_mn = product(x[rows], y[cols].T).mul_(student.scale)
            t_mn = product(u[rows], v[cols].T).mul_(teacher.scale)
            row[rows.start].append(_statistics(s_mn, t_mn, 1))
            col[cols.start].append(_statistics(s_mn, t_mn, 0))
    return _joined(row), _joined(col)


def _joined(parts: dict[int, list[Statistics]]) -> Statistics:
    """Return the statistics of all rows, or all columns. parts: those of their entries in each tile, by first row."""
    whole = [merged(*of_rows) for of_rows in parts.values()]
    return Statistics(*(torch.cat(values) for values in zip(*whole, strict=True)))


def tile_distillation_grads(
    student: Pair, teacher: Pair, row: Statistics, col: Statistics, *, dx: Tensor, options: TileOptions
) -> Tensor:
    """Add the gradient of the sum of all divergences to dx (m, D), and return that of the columns, dy (n, D).

    Both lack the factor `student.scale`. row, col: statistics over the whole batch of these rows and columns.
    """
    dy = dx.new_zeros(student.cols.shape)
    (x, y), (u, v), side = _prepared(student, teacher, options)
    with tf32(options.precision == "tf32"):
        for rows, cols in tiles(len(x), len(y), side):
            s_mn = product(x[rows], y[cols].T).mul_(student.scale)
            t_mn = product(u[rows], v[cols].T).mul_(teacher.scale)
            shifts = row.student[rows, None], col.student[cols], row.teacher[rows, None], col.teacher[cols]
            p_mn = _weights(s_mn, t_mn, *shifts).to(x.dtype)
            dx[rows] += product(p_mn, y[cols])
            dy[cols] += product(p_mn.T, x[rows])
    return dy


def _prepared(student: Pair, teacher: Pair, options: TileOptions) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], int]:
    """Return the features of both models in the dtype of their products, and the side of a tile."""
    own, other = (operands(model.rows, model.cols, options.precision) for model in (student, teacher))
    return own, other, tile_side(options.tile_budget_mib, _BUFFERS, accumulation_dtype(student.rows))


def _statistics(s_mn: Tensor, t_mn: Tensor, dim: int) -> Statistics:
    """Return the statistics of one tile. log_softmax is one kernel, and logsumexp several."""
    s_log, t_log = s_mn.log_softmax(dim), t_mn.log_softmax(dim)
    student, teacher = (a.select(dim, 0) - b.select(dim, 0) for a, b in ((s_mn, s_log), (t_mn, t_log)))
    difference = s_log.neg_().add_(t_log).mul_(t_log.exp_()).sum(dim)
    return Statistics(student, teacher, difference + teacher - student)


def _weights(s_mn: Tensor, t_mn: Tensor, s_row: Tensor, s_col: Tensor, t_row: Tensor, t_col: Tensor) -> Tensor:
    """Return the gradient of the divergences of rows and columns with respect to the student's logits.

    The softmaxes of both directions are one exponential: exp(s - row) + exp(s - col).
    """
    p_mn = torch.logaddexp(-s_row, -s_col).add_(s_mn).exp_()
    return p_mn.sub_(torch.logaddexp(-t_row, -t_col).add_(t_mn).exp_())
