"""Triton kernels of `rows.py`: each program takes some whole rows and reads and writes every element once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # elements of the block of rows of one program


@triton.jit
def _load(ptr, rows, cols, row_stride, col_stride, mask):
    """Return the entries (ROWS, COLS) of a matrix of features in float32, with 0 outside the mask."""
    return tl.load(ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["m"])
def _paired_products_kernel(
    x_ptr,  # in: (m, D) features
    y_ptr,  # in: (m, D) features
    out_ptr,  # out: (m,) float32
    m,
    x_row,
    x_col,
    y_row,
    y_col,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute out_i = <x_i, y_i>."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < m)[:, None] & (cols < D)[None, :]
    x = _load(x_ptr, rows, cols, x_row, x_col, mask)
    y = _load(y_ptr, rows, cols, y_row, y_col, mask)
    tl.store(out_ptr + rows, tl.sum(x * y, axis=1), mask=rows < m)


@triton.jit(do_not_specialize=["m"])
def _finish_gradient_kernel(
    total_ptr,  # in: (m, D) float32, contiguous
    features_ptr,  # in: (m, D) features
    partners_ptr,  # in: (m, D) features
    pull_ptr,  # in: (m,) float32
    factor_ptr,  # in: (1,) float32
    gradient_ptr,  # out: (m, D) features' dtype, contiguous
    dots_ptr,  # out: (m,) float32
    m,
    features_row,
    features_col,
    partners_row,
    partners_col,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute d = total - pull * partners, gradient = factor * d and dots_i = <features_i, d_i>."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < m)[:, None] & (cols < D)[None, :]
    d = tl.load(total_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
    features = _load(features_ptr, rows, cols, features_row, features_col, mask)
    partners = _load(partners_ptr, rows, cols, partners_row, partners_col, mask)
    pull = tl.load(pull_ptr + rows, mask=rows < m, other=0.0)
    d -= pull[:, None] * partners
    tl.store(dots_ptr + rows, tl.sum(features * d, axis=1), mask=rows < m)
    gradient = (d * tl.load(factor_ptr)).to(gradient_ptr.dtype.element_ty)
    tl.store(gradient_ptr + rows[:, None] * D + cols[None, :], gradient, mask=mask)


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """See `megaclip.ops.rows.paired_products`."""
    out = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(_paired_products_kernel, x, x, y, out, len(x), *x.stride(), *y.stride())
    return out


def finish_gradient(
    total: Tensor, features: Tensor, partners: Tensor, pull: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """See `megaclip.ops.rows.finish_gradient`."""
    total, pull = total.contiguous(), pull.to(torch.float32).contiguous()
    factor = factor.to(torch.float32).reshape(1)
    gradient = torch.empty(features.shape, dtype=features.dtype, device=features.device)
    dots = torch.empty(len(features), dtype=torch.float32, device=features.device)
    tensors = (total, features, partners, pull, factor, gradient, dots)
    _launch(_finish_gradient_kernel, features, *tensors, len(features), *features.stride(), *partners.stride())
    return gradient, dots


def _launch(kernel, like: Tensor, *arguments: Tensor | int) -> None:
    """Run `kernel` over all rows of `like`, on its device."""
    m, embedding = like.shape
    if m == 0:
        return
    cols = triton.next_power_of_2(embedding)
    rows = max(1, _ELEMENTS // cols)
    with torch.cuda.device_of(like):
        kernel[(triton.cdiv(m, rows),)](*arguments, D=embedding, ROWS=rows, COLS=cols)
