"""Triton kernels of `rows.py`: each program handles some whole rows and reads and writes every element once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaclip.ops.tiles_triton_kernels import _log1p

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


@triton.jit(do_not_specialize=["m", "weight"])
def _softmax_pairs_kernel(
    x_ptr,  # in: (m, D) features
    y_ptr,  # in: (m, D) features
    row_lse_ptr,  # in: (m,) float32
    col_lse_ptr,  # in: (m,) float32
    scale_ptr,  # in: (1,) float32
    losses_ptr,  # out: (m,) float32
    full_ptr,  # out: (2, m) float32
    pull_ptr,  # out: (m,) float32
    weight,
    m,
    x_row,
    x_col,
    y_row,
    y_col,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute the terms of the positives; see `megaclip.ops.rows.softmax_pairs`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inside = rows < m
    mask = inside[:, None] & (cols < D)[None, :]
    x = _load(x_ptr, rows, cols, x_row, x_col, mask)
    y = _load(y_ptr, rows, cols, y_row, y_col, mask)
    positive = tl.load(scale_ptr) * tl.sum(x * y, axis=1)
    row_loss, row_missing = _softplus_and_sigmoid(tl.load(row_lse_ptr + rows, mask=inside, other=0.0) - positive)
    col_loss, col_missing = _softplus_and_sigmoid(tl.load(col_lse_ptr + rows, mask=inside, other=0.0) - positive)
    tl.store(losses_ptr + rows, weight * (row_loss + col_loss), mask=inside)
    tl.store(full_ptr + rows, positive + row_loss, mask=inside)
    tl.store(full_ptr + m + rows, positive + col_loss, mask=inside)
    tl.store(pull_ptr + rows, weight * (row_missing + col_missing), mask=inside)


@triton.jit
def _softplus_and_sigmoid(z):
    """Return log(1 + exp(z)) and 1 / (1 + exp(-z)); both keep their digits where exp(z) is small."""
    u = tl.exp(-tl.abs(z))
    return tl.maximum(z, 0.0) + _log1p(u), tl.where(z < 0.0, u, 1.0) / (1.0 + u)


@triton.jit(do_not_specialize=["m", "tiles"])
def _finish_gradients_kernel(
    total_x_ptr,  # in: (m, D) float32, contiguous
    total_y_ptr,  # in: (m, D) float32, contiguous
    x_ptr,  # in: (m, D) features
    y_ptr,  # in: (m, D) features
    pull_ptr,  # in: (m,) float32
    factor_ptr,  # in: (1,) float32
    upstream_ptr,  # in: (1,) float32, a second factor; unused without HAS_UPSTREAM
    places_ptr,  # in: (m,) int64, rows of total_x, total_y and pull; unused without HAS_PLACES
    dx_ptr,  # out: (m, D) features' dtype, contiguous
    dy_ptr,  # out: (m, D) features' dtype, contiguous
    dots_ptr,  # out: (m,) float32
    m,
    tiles,  # programs of one side
    x_row,
    x_col,
    y_row,
    y_col,
    HAS_UPSTREAM: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute d = total - pull * partners and gradient = factor * d, of x and then of y; dots_i = <x_i, d_i>.

    A launch with `tiles` programs computes the side of x only.
    """
    tile = tl.program_id(0)
    is_x = tile < tiles
    rows = (tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inside = rows < m
    mask = inside[:, None] & (cols < D)[None, :]
    x = _load(x_ptr, rows, cols, x_row, x_col, mask)
    y = _load(y_ptr, rows, cols, y_row, y_col, mask)
    places = rows
    if HAS_PLACES:
        places = tl.load(places_ptr + rows, mask=inside, other=0)
    pull = tl.load(pull_ptr + places, mask=inside, other=0.0)[:, None]
    factor = tl.load(factor_ptr)
    if HAS_UPSTREAM:
        factor *= tl.load(upstream_ptr)
    entries = rows[:, None] * D + cols[None, :]
    totals = places[:, None] * D + cols[None, :]
    if is_x:
        d = tl.load(total_x_ptr + totals, mask=mask, other=0.0) - pull * y
        tl.store(dots_ptr + rows, tl.sum(x * d, axis=1), mask=inside)
        tl.store(dx_ptr + entries, (d * factor).to(dx_ptr.dtype.element_ty), mask=mask)
    else:
        d = tl.load(total_y_ptr + totals, mask=mask, other=0.0) - pull * x
        tl.store(dy_ptr + entries, (d * factor).to(dy_ptr.dtype.element_ty), mask=mask)


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """See `megaclip.ops.rows.paired_products`."""
    out = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(_paired_products_kernel, x, x, y, out, len(x), *x.stride(), *y.stride())
    return out


def softmax_pairs(
    x: Tensor, y: Tensor, row_lse: Tensor, col_lse: Tensor, scale: Tensor, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `megaclip.ops.rows.SoftmaxPairs`."""
    # Separate tensors, not rows of one: compiled code assumes that results of operations are aligned to 16 bytes.
    losses, pull = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    full_2m = torch.empty((2, len(x)), dtype=torch.float32, device=x.device)
    arguments = (x, y, row_lse.contiguous(), col_lse.contiguous(), scale, losses, full_2m, pull, weight)
    _launch(_softmax_pairs_kernel, x, *arguments, len(x), *x.stride(), *y.stride())
    return losses, full_2m, pull


def finish_gradient(
    total: Tensor, features: Tensor, partners: Tensor, pull: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """See `megaclip.ops.rows.finish_gradient`."""
    gradient, _, dots = finish_gradients(total, total, features, partners, pull, factor, sides=1)
    return gradient, dots


def finish_gradients(
    total_x: Tensor,
    total_y: Tensor,
    x: Tensor,
    y: Tensor,
    pull: Tensor,
    factor: Tensor,
    upstream: Tensor | None = None,
    places: Tensor | None = None,
    *,
    sides: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `megaclip.ops.rows.finish_gradients`. With sides=1 the gradient of x stands in for that of y."""
    totals = total_x.contiguous(), total_y.contiguous()
    pull, factor = pull.to(torch.float32).contiguous(), factor.to(torch.float32)
    second = factor if upstream is None else upstream.to(torch.float32)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy = torch.empty_like(dx) if sides == 2 else dx
    dots = torch.empty(len(x), dtype=torch.float32, device=x.device)
    rows = x if places is None else places.contiguous()
    arguments = (*totals, x, y, pull, factor, second, rows, dx, dy, dots, len(x), _tiles(x))
    given = (upstream is not None, places is not None)
    _launch(_finish_gradients_kernel, x, *arguments, *x.stride(), *y.stride(), *given, sides=sides)
    return dx, dy, dots


def _block(embedding: int) -> tuple[int, int]:
    """Return the rows and columns of the block of one program."""
    cols = triton.next_power_of_2(embedding)
    return max(1, _ELEMENTS // cols), cols


def _tiles(x: Tensor) -> int:
    """Return the number of programs over the rows of x."""
    return triton.cdiv(len(x), _block(x.shape[1])[0])


def _launch(kernel, like: Tensor, *arguments: Tensor | int | float, sides: int = 1) -> None:
    """Run `kernel` over all rows of `like`, on its device, once for each side."""
    if len(like) == 0:
        return
    rows, cols = _block(like.shape[1])
    with torch.cuda.device_of(like):
        kernel[(sides * _tiles(like),)](*arguments, D=like.shape[1], ROWS=rows, COLS=cols)
