"""Operations of the losses per row, outside the tiles: the products of positives, and the last step of a gradient.

Each is a few PyTorch operations with (m, D) float32 temporaries. They would take a tenth of the time of the whole loss
on CUDA. So one kernel there reads and writes every element once (`rows_triton.py`).
"""

import importlib

import torch
from torch import Tensor

from megaclip.ops.tiles import accumulation_dtype


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """Return `s_ii = <x_i, y_i>` (m,) of x, y (m, D): float32, float64 for float64 features."""
    if _has_kernel(x):
        return importlib.import_module("megaclip.ops.rows_triton").paired_products(x, y)
    dtype = accumulation_dtype(x)
    return (x.to(dtype) * y.to(dtype)).sum(dim=1)


def finish_gradient(
    total: Tensor, features: Tensor, partners: Tensor, pull: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of features (m, D) in their dtype, and `<features_i, d_i>` (m,) in the dtype of sums.

    The gradient is `factor * d` with `d_i = total_i - pull_i * partners_i`. The gradient of a temperature follows from
    the products `<features_i, d_i>`.

    total: (m, D), the sum over the tiles, in the dtype of sums. features, partners: (m, D). pull: (m,), the weight of
    each positive. factor: one element.
    """
    if _has_kernel(features):
        kernels = importlib.import_module("megaclip.ops.rows_triton")
        return kernels.finish_gradient(total, features, partners, pull, factor)
    gradient = total - pull[:, None] * partners.to(total.dtype)
    dots = (features.to(total.dtype) * gradient).sum(dim=1)
    return (gradient * factor).to(features.dtype), dots


def _has_kernel(x: Tensor) -> bool:
    """Return whether the Triton kernels run for tensors like x."""
    if not x.is_cuda or x.dtype == torch.float64:
        return False
    try:
        importlib.import_module("megaclip.ops.rows_triton")
    except ImportError:
        return False
    return True
