"""Operations of the losses per row, outside the tiles: the products of positives, and the last step of a gradient.

Each consists of a few PyTorch operations with (m, D) float32 temporaries. On CUDA these would take a tenth of the time
of the whole loss. So on CUDA one kernel reads and writes every element once (`rows_triton.py`).
"""

import importlib
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.ops.tiles import reason_without_kernels
from megaclip.ops.types import accumulation_dtype


class SoftmaxPairs(NamedTuple):
    """Terms that the positives add to InfoNCE, in the dtype of sums."""

    losses: Tensor
    """(m,) weight * (row_full_i + col_full_i - 2 z_ii), with z_ii the logit of the positive and equal weights."""
    full_2m: Tensor
    """(2, m) row_full and col_full, the log-sum-exp over negatives and positive."""
    pull: Tensor
    """(m,) weight * (2 - p_ii - q_ii), with the probabilities of the positive in its row and in its column."""


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """Return `s_ii = <x_i, y_i>` (m,) of x, y (m, D): float32, float64 for float64 features."""
    if kernels := _kernels(x):
        return kernels.paired_products(x, y)
    dtype = accumulation_dtype(x)
    return (x.to(dtype) * y.to(dtype)).sum(dim=1)


def softmax_pairs(
    x: Tensor, y: Tensor, row_lse: Tensor, col_lse: Tensor, scale: Tensor, weight: float | Tensor
) -> SoftmaxPairs:
    """Return the terms of the positives `z_ii = scale * <x_i, y_i>`, without cancellation when p_ii is near 1.

    x, y: (m, D). row_lse, col_lse: (m,), the log-sum-exp over the negatives, in the dtype of sums. scale: one element
    of that dtype. weight: that of all rows and columns, or (2, m), those of the rows and those of the columns.
    """
    if isinstance(weight, float) and (kernels := _kernels(x)):
        return SoftmaxPairs(*kernels.softmax_pairs(x, y, row_lse, col_lse, scale, weight))
    positive = scale * paired_products(x, y)
    gaps_2m = torch.stack((row_lse, col_lse)) - positive
    losses_2m = F.softplus(gaps_2m, threshold=50)  # PyTorch's default threshold, 20, is not exact in float64
    losses, pull = ((weight * values_2m).sum(0) for values_2m in (losses_2m, torch.sigmoid(gaps_2m)))
    return SoftmaxPairs(losses, positive + losses_2m, pull)


def finish_gradient(
    total: Tensor, features: Tensor, partners: Tensor, pull: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of features (m, D) in their dtype, and `<features_i, d_i>` (m,) in the dtype of sums.

    The gradient is `factor * d` with `d_i = total_i - pull_i * partners_i`. The gradient of a temperature follows from
    the products `<features_i, d_i>`.

    total: (m, D), the sum over the tiles, in the dtype of sums. features, partners: (m, D). pull: (m,), the weight of
    each positive. factor: one element.
    """
    if kernels := _kernels(features):
        return kernels.finish_gradient(total, features, partners, pull, factor)
    gradient = total - pull[:, None] * partners.to(total.dtype)
    dots = (features.to(total.dtype) * gradient).sum(dim=1)
    return (gradient * factor).to(features.dtype), dots


def finish_gradients(
    total_x: Tensor,
    total_y: Tensor,
    x: Tensor,
    y: Tensor,
    pull: Tensor,
    factor: Tensor,
    upstream: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and y (m, D), and `<x_i, d_i>` (m,), as `finish_gradient` does, in one kernel.

    upstream: one element by which the factor is multiplied.
    places: (m,) int64, the row of total_x, total_y and pull that belongs to row i of the features. Default: row i.
    """
    if kernels := _kernels(x):
        return kernels.finish_gradients(total_x, total_y, x, y, pull, factor, upstream, places)
    if places is not None:
        total_x, total_y, pull = total_x[places], total_y[places], pull[places]
    if upstream is not None:
        factor = factor * upstream
    dx, dots = finish_gradient(total_x, x, y, pull, factor)
    return dx, finish_gradient(total_y, y, x, pull, factor)[0], dots


def _kernels(x: Tensor) -> ModuleType | None:
    """Return the module of Triton kernels if they run for tensors like x."""
    if not x.is_cuda or x.dtype == torch.float64 or reason_without_kernels(x.device):
        return None
    return importlib.import_module("megaclip.ops.rows_triton")
