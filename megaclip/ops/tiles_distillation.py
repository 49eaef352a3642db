"""Tiles of two similarity matrices at once, a student's and a teacher's: statistics and gradients.

The distillation loss compares the softmax of each row and column of the student's logits s with that of the teacher's
logits t. Both operations compute a tile of products for s and for t, use both and discard them. What follows the
products runs in PyTorch, or in the Triton kernels of `tiles_distillation_triton.py`. docs/mathematics.md has the
formulas.

Features are multiplied as `tiles_torch` describes. Both models have features of one dtype.

*Statistics* of rows or columns are one tensor (3, n) in the dtype of sums: the log-sum-exps of the student's and of the
teacher's logits, and the mean of t - s under the teacher's softmax. Statistics (3, parts, n) are those of parts of the
entries.

Shapes: m rows, n columns, D and E embedding of student and teacher; `_mn` is one tile of products or logits.
"""

import importlib
from itertools import groupby
from operator import itemgetter
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megaclip.ops.tiles import implementation_for, require_implementation
from megaclip.ops.tiles_torch import operands, product, tf32, tile_side, tiles
from megaclip.ops.types import TileOptions, accumulation_dtype


class Pair(NamedTuple):
    """Features of the rows and columns of one model, and the factor of their products."""

    rows: Tensor
    cols: Tensor
    scale: Tensor


def divergence(statistics: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of the student's softmax from the teacher's, for statistics (3, n)."""
    student, teacher, difference = statistics
    return difference - teacher + student


def merged(parts: Tensor) -> Tensor:
    """Return the statistics (3, n) over the entries of all parts (3, parts, n)."""
    student, teacher, difference = parts
    total = teacher.logsumexp(0)
    return torch.stack((student.logsumexp(0), total, (difference * (teacher - total).exp()).sum(0)))


def tile_distillation_stats(student: Pair, teacher: Pair, *, options: TileOptions) -> tuple[Tensor, Tensor]:
    """Return the statistics of the rows (3, m) and of the columns (3, n)."""
    kernels, row, col = _kernels(student, options), list[Tensor](), list[Tensor]()
    statistics = _statistics if kernels is None else kernels.statistics
    (x, y), (u, v), side = _prepared(student, teacher, options)
    scales = student.scale, teacher.scale
    with tf32(options.precision == "tf32"):
        for rows, spans in groupby(tiles(len(x), len(y), side), itemgetter(0)):
            parts = [statistics(product(x[rows], y[c].T), product(u[rows], v[c].T), *scales) for _, c in spans]
            of_rows, of_cols = zip(*parts, strict=True)
            row.append(merged(torch.cat(of_rows, dim=1)))
            col = [merged(torch.cat([*(before[:, None] for before in col), torch.cat(of_cols, dim=2)], dim=1))]
    return torch.cat(row, dim=1), col[0]


def tile_distillation_grads(
    student: Pair, teacher: Pair, row: Tensor, col: Tensor, *, dx: Tensor, options: TileOptions
) -> Tensor:
    """Add the gradient of the sum of all divergences to dx (m, D), and return that of the columns, dy (n, D).

    Both lack the factor `student.scale`. row, col: statistics over the whole batch of these rows and columns. Only the
    log-sum-exps are read.
    """
    kernels, dy = _kernels(student, options), dx.new_zeros(student.cols.shape)
    weights = _weights if kernels is None else kernels.weights
    (x, y), (u, v), side = _prepared(student, teacher, options)
    scales = student.scale, teacher.scale
    with tf32(options.precision == "tf32"):
        for rows, cols in tiles(len(x), len(y), side):
            of_both = product(x[rows], y[cols].T), product(u[rows], v[cols].T)
            p_mn = weights(*of_both, *scales, row[:, rows], col[:, cols], x.dtype)
            del of_both
            dx[rows] += product(p_mn, y[cols])
            dy[cols] += product(p_mn.T, x[rows])
    return dy


def _kernels(student: Pair, options: TileOptions) -> ModuleType | None:
    """Return the module of the Triton kernels if they run."""
    require_implementation(options.implementation, student.rows.device, student.rows.dtype)
    name = implementation_for(options, student.rows)
    return importlib.import_module("megaclip.ops.tiles_distillation_triton") if name == "triton" else None


def _prepared(student: Pair, teacher: Pair, options: TileOptions) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], int]:
    """Return the features of both models in the dtype of their products, and the side of a tile."""
    own, other = (operands(model.rows, model.cols, options.precision) for model in (student, teacher))
    buffers = 6 if _kernels(student, options) is None else 3  # alive at once, in the dtype of sums
    return own, other, tile_side(options.tile_budget_mib, buffers, accumulation_dtype(student.rows))


def _statistics(s_mn: Tensor, t_mn: Tensor, s_scale: Tensor, t_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics of a tile's rows (3, 1, m) and columns (3, 1, n), from products and the scales ().

    log_softmax is one kernel, and logsumexp several.
    """
    s_mn.mul_(s_scale)
    t_mn.mul_(t_scale)
    both = []
    for dim in (1, 0):
        s_log, t_log = s_mn.log_softmax(dim), t_mn.log_softmax(dim)
        student, teacher = (a.select(dim, 0) - b.select(dim, 0) for a, b in ((s_mn, s_log), (t_mn, t_log)))
        difference = s_log.neg_().add_(t_log).mul_(t_log.exp_()).sum(dim)
        both.append(torch.stack((student, teacher, difference + teacher - student))[:, None])
    return both[0], both[1]


def _weights(
    s_mn: Tensor, t_mn: Tensor, s_scale: Tensor, t_scale: Tensor, row: Tensor, col: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the divergences of rows and columns with respect to the student's logits, (m, n).

    The softmaxes of both directions are one exponential: exp(s - row) + exp(s - col).
    """
    s_row, t_row, s_col, t_col = row[0, :, None], row[1, :, None], col[0], col[1]
    p_mn = torch.logaddexp(-s_row, -s_col).add_(s_mn.mul_(s_scale)).exp_()
    return p_mn.sub_(torch.logaddexp(-t_row, -t_col).add_(t_mn.mul_(t_scale)).exp_()).to(dtype)
