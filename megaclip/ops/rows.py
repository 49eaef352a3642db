"""What a loss does per row, outside the tiles: the positives, and the last touches on a gradient.

Each is a handful of PyTorch operations over (m, D) float32 temporaries; on CUDA one kernel reads and writes every
element once instead (`rows_triton.py`), because at the speed of the tiles these operations would be a tenth of the
whole loss.
"""

import importlib

import torch
from torch import Tensor

from megaclip.ops.tiles import accumulation_dtype


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """`s_ii = <x_i, y_i>` (m,) of x, y (m, D): float32, float64 for float64 features."""
    if _has_kernel(x):
        return importlib.import_module("megaclip.ops.rows_triton").paired_products(x, y)
    dtype = accumulation_dtype(x)
    return (x.to(dtype) * y.to(dtype)).sum(dim=1)


def finish_gradient(
    total: Tensor, features: Tensor, partners: Tensor, pull: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of features, and what it says about the temperature.

    `d_i = total_i - pull_i * partners_i` is the gradient without its factor: total (m, D) what the tiles left, in the
    dtype of sums, pull (m,) the positive's share. Returns `factor * d` (m, D) in the features' dtype and
    `<features_i, d_i>` (m,) in the dtype of sums. features, partners (m, D); factor one element.
    """
    if _has_kernel(features):
        kernels = importlib.import_module("megaclip.ops.rows_triton")
        return kernels.finish_gradient(total, features, partners, pull, factor)
    gradient = total - pull[:, None] * partners.to(total.dtype)
    dots = (features.to(total.dtype) * gradient).sum(dim=1)
    return (gradient * factor).to(features.dtype), dots


def _has_kernel(x: Tensor) -> bool:
    """Whether the Triton kernels run for tensors like x."""
    if not x.is_cuda or x.dtype == torch.float64:
        return False
    try:
        importlib.import_module("megaclip.ops.rows_triton")
    except ImportError:
        return False
    return True
