"""The tile operations in plain PyTorch: any device, any floating dtype, no compilation.

`tiles.py` calls these with checked tensors and vectors already expanded. The matrix of similarities is never formed:
both sides are cut into square-ish tiles so that all buffers of one tile together stay below `tile_budget_mib`.

Products. float64 stays float64. float32 is multiplied in float32 unless `precision="tf32"` allows TF32 on CUDA.
bfloat16 is multiplied as it is, with float32 results (`out_dtype`, CUDA only; other devices multiply in float32, which
is exact for these inputs), and on CUDA the gradient weights P are rounded to bfloat16 for their two products. float16
is multiplied in float32: P spans more orders of magnitude than float16 can hold.

Shapes: m rows, n columns, D embedding; `_mn` is one tile of logits.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Tile-sized buffers alive at once, counted in elements of the accumulation dtype.
_STATS_BUFFERS = 3  # s, its scaled copy, the exponentials inside logsumexp
_GRADS_BUFFERS = 4  # s, the row part, the column part, a product with s


def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    *,
    diagonal: int | None,
    precision: str,
    tile_budget_mib: float,
) -> tuple[Tensor, Tensor]:
    """Row (m,) and column (n,) log-sum-exp; see `megaclip.ops.tiles.tile_stats`. row_scale (m,), col_scale (n,)."""
    row_lse = torch.full_like(row_scale, -math.inf)
    col_lse = torch.full_like(col_scale, -math.inf)
    x, y = _operands(x, y, precision)
    side = _tile_side(tile_budget_mib, _STATS_BUFFERS, row_lse.dtype)
    with _tf32(precision == "tf32"):
        for rows, cols in _tiles(len(x), len(y), side):
            offset = None if diagonal is None else diagonal + rows.start - cols.start
            s_mn = _product(x[rows], y[cols].T)
            row_part = torch.logsumexp(_leave_out(s_mn * row_scale[rows, None], offset, -math.inf), dim=1)
            col_part = torch.logsumexp(_leave_out(s_mn * col_scale[None, cols], offset, -math.inf), dim=0)
            row_lse[rows] = torch.logaddexp(row_lse[rows], row_part)
            col_lse[cols] = torch.logaddexp(col_lse[cols], col_part)
    return row_lse, col_lse


def tile_grads(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    row_shift: Tensor,
    row_weight: Tensor,
    col_scale: Tensor,
    col_shift: Tensor,
    col_weight: Tensor,
    *,
    diagonal: int | None,
    need_dx: bool,
    need_dy: bool,
    need_dots: bool,
    add_to: tuple[Tensor | None, Tensor | None],
    precision: str,
    tile_budget_mib: float,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """dx (m, D), dy (n, D), row_dot (m,), col_dot (n,), as `tiles.tile_grads` says. Vectors are (m,) or (n,)."""
    dx, dy = _accumulators(x, y, row_scale, need_dx, need_dy, add_to)
    row_dot, col_dot = torch.zeros_like(row_scale), torch.zeros_like(col_scale)
    x, y = _operands(x, y, precision)
    side = _tile_side(tile_budget_mib, _GRADS_BUFFERS, row_dot.dtype)
    with _tf32(precision == "tf32"):
        for rows, cols in _tiles(len(x), len(y), side):
            offset = None if diagonal is None else diagonal + rows.start - cols.start
            s_mn = _product(x[rows], y[cols].T)
            p_mn = _weights(s_mn, row_scale[rows, None], row_shift[rows, None], row_weight[rows, None], offset)
            if need_dots:
                row_dot[rows] += (p_mn * s_mn).sum(1)
            col_mn = _weights(s_mn, col_scale[None, cols], col_shift[None, cols], col_weight[None, cols], offset)
            if need_dots:
                col_dot[cols] += (col_mn * s_mn).sum(0)
            _add_products(dx, dy, p_mn.add_(col_mn).to(x.dtype), x, y, rows, cols)
    return dx, dy, row_dot, col_dot


def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    diagonal: int | None,
    need_dx: bool,
    need_dy: bool,
    add_to: tuple[Tensor | None, Tensor | None],
    precision: str,
    tile_budget_mib: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """row_loss, dx, dy, row_dot, row_sum, as `tiles.tile_sigmoid` says. scale and bias are (1,)."""
    dx, dy = _accumulators(x, y, scale, need_dx, need_dy, add_to)
    row_loss, row_dot, row_sum = scale.new_zeros((3, len(x))).unbind()
    x, y = _operands(x, y, precision)
    with _tf32(precision == "tf32"):
        for rows, cols in _tiles(len(x), len(y), _tile_side(tile_budget_mib, _GRADS_BUFFERS, scale.dtype)):
            offset = None if diagonal is None else diagonal + rows.start - cols.start
            s_mn = _product(x[rows], y[cols].T)
            z_mn = _leave_out(s_mn * scale + bias, offset, -math.inf)
            row_loss[rows] += torch.nn.functional.softplus(z_mn, threshold=50).sum(1)
            p_mn = z_mn.sigmoid_()
            row_sum[rows] += p_mn.sum(1)
            row_dot[rows] += (p_mn * s_mn).sum(1)
            _add_products(dx, dy, p_mn.to(x.dtype), x, y, rows, cols)
    return row_loss, dx, dy, row_dot, row_sum


def _accumulators(
    x: Tensor, y: Tensor, like: Tensor, need_dx: bool, need_dy: bool, add_to: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """What dx and dy are added to, in the dtype of `like`; None for a side that is not needed."""
    dx, dy = (
        (like.new_zeros(features.shape) if total is None else total) if needed else None
        for needed, features, total in ((need_dx, x, add_to[0]), (need_dy, y, add_to[1]))
    )
    return dx, dy


def _add_products(
    dx: Tensor | None, dy: Tensor | None, p_mn: Tensor, x: Tensor, y: Tensor, rows: slice, cols: slice
) -> None:
    """Add one tile's `P y` to dx and `P^T x` to dy."""
    if dx is not None:
        dx[rows] += _product(p_mn, y[cols])
    if dy is not None:
        dy[cols] += _product(p_mn.T, x[rows])


def _weights(s_mn: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, offset: int | None) -> Tensor:
    """`weight * exp(scale*s - shift)` (m, n) for one direction, zero on the diagonal `offset`."""
    return _leave_out((s_mn * scale).sub_(shift).exp_().mul_(weight), offset, 0.0)


def _leave_out(tile_mn: Tensor, offset: int | None, value: float) -> Tensor:
    """Put `value` in place where `i + offset == j`; an offset outside the tile touches nothing."""
    if offset is not None and -len(tile_mn) < offset < tile_mn.shape[1]:
        tile_mn.diagonal(offset).fill_(value)
    return tile_mn


def _operands(x: Tensor, y: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """x and y in the dtype in which they are multiplied (see the module docstring)."""
    if x.dtype == torch.float64:
        return x, y
    if precision == "bf16" or (precision == "auto" and x.dtype == torch.bfloat16):
        x, y = x.bfloat16(), y.bfloat16()
        return (x, y) if x.is_cuda else (x.float(), y.float())
    return x.float(), y.float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and returned in float32 (float64 for float64)."""
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """TF32 products on CUDA inside the block exactly when `allowed`, whatever the process's own setting."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _tile_side(tile_budget_mib: float, buffers: int, dtype: torch.dtype) -> int:
    """Rows (and columns) of a square tile whose buffers fit the budget; at least 1, above 64 a multiple of 64."""
    side = math.isqrt(int(tile_budget_mib * 2**20) // (buffers * dtype.itemsize))
    return max(1, side if side < 64 else side // 64 * 64)


def _tiles(m: int, n: int, side: int) -> Iterator[tuple[slice, slice]]:
    """Row and column spans of all tiles, row by row. A short side lends its room to the long one."""
    row_side = min(m, side)
    col_side = min(n, side * side // max(row_side, 1))
    row_side = min(m, side * side // max(col_side, 1))
    for row in range(0, m, max(row_side, 1)):
        for col in range(0, n, max(col_side, 1)):
            yield slice(row, min(row + row_side, m)), slice(col, min(col + col_side, n))
