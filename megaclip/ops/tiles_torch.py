"""The tile operations in plain PyTorch: any device, any floating-point dtype, no compilation.

`tiles.py` calls these functions with checked tensors and expanded vectors. The matrix of similarities is never formed.
Both sides are cut into nearly square tiles, so that the buffers of one tile together stay below `tile_budget_mib`.

Products:

* float64 features are multiplied in float64.
* float32 features are multiplied in float32, or in TF32 on CUDA with `precision="tf32"`.
* bfloat16 features on CUDA are multiplied as they are, with float32 results (`out_dtype`). The gradient weights P are
  rounded to bfloat16 for their two products. Other devices multiply in float32, which is exact for bfloat16 features.
* float16 features are multiplied in float32, because P spans more orders of magnitude than float16 can represent.

Shapes: m rows, n columns, D embedding; `_mn` is one tile of logits.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megaclip.ops.types import NO_NEGATIVE, Accumulators, Ids, Limits, TermVectors, TileOptions

# Number of tile-sized buffers alive at once, in the dtype of sums.
_STATS_BUFFERS = 3  # s, its scaled copy, the exponentials inside logsumexp; with ids, a byte per entry in addition
_GRADS_BUFFERS = 4  # s, the row part, the column part, a product with s


def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    *,
    diagonal: int | None,
    ids: Ids | None,
    options: TileOptions,
    limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:
    """Return row (m,) and column (n,) log-sum-exp; see `megaclip.ops.tiles.tile_stats`."""
    row_lse = torch.full_like(row_scale, -math.inf)
    col_lse = torch.full_like(col_scale, -math.inf)
    x, y = operands(x, y, options.precision)
    side = tile_side(options.tile_budget_mib, _STATS_BUFFERS, row_lse.dtype)
    with tf32(options.precision == "tf32"):
        for rows, cols, left_out, s_mn in _similarities(x, y, diagonal, ids, side):
            row_mn = left_out.fill(s_mn * row_scale[rows, None], -math.inf)
            col_mn = left_out.fill(s_mn * col_scale[None, cols], -math.inf)
            if limits is not None:
                row_mn.masked_fill_(s_mn > limits[0][rows, None], -math.inf)
                col_mn.masked_fill_(s_mn > limits[1][None, cols], -math.inf)
            row_part, col_part = torch.logsumexp(row_mn, dim=1), torch.logsumexp(col_mn, dim=0)
            row_lse[rows] = torch.logaddexp(row_lse[rows], row_part)
            col_lse[cols] = torch.logaddexp(col_lse[cols], col_part)
    return row_lse, col_lse


def tile_grads(
    x: Tensor,
    y: Tensor,
    row: TermVectors,
    col: TermVectors,
    *,
    diagonal: int | None,
    ids: Ids | None,
    values: tuple[Tensor, Tensor] | None,
    need_dx: bool,
    need_dy: bool,
    need_dots: bool,
    add_to: Accumulators,
    options: TileOptions,
    limits: Limits | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return dx (m, D), dy (n, D), row_dot (m,) and col_dot (n,); see `megaclip.ops.tiles.tile_grads`."""
    values = values or (x, y)
    dx, dy = _accumulators(*values, row.scale, need_dx, need_dy, add_to)
    row_dot, col_dot = (torch.zeros_like(terms.scale) if need_dots else None for terms in (row, col))
    values = operands(*values, options.precision)
    x, y = operands(x, y, options.precision)
    side = tile_side(options.tile_budget_mib, _GRADS_BUFFERS, row.scale.dtype)
    with tf32(options.precision == "tf32"):
        for rows, cols, left_out, s_mn in _similarities(x, y, diagonal, ids, side):
            p_mn = _weights(s_mn, left_out, *(value[rows, None] for value in row))
            if limits is not None:
                p_mn.masked_fill_(s_mn > limits[0][rows, None], 0.0)
            if row_dot is not None:
                row_dot[rows] += (p_mn * s_mn).sum(1)
            col_mn = _weights(s_mn, left_out, *(value[None, cols] for value in col))
            if limits is not None:
                col_mn.masked_fill_(s_mn > limits[1][None, cols], 0.0)
            if col_dot is not None:
                col_dot[cols] += (col_mn * s_mn).sum(0)
            _add_products(dx, dy, p_mn.add_(col_mn).to(x.dtype), *values, rows, cols)
    return dx, dy, row_dot, col_dot


def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    diagonal: int | None,
    ids: Ids | None,
    need_dx: bool,
    need_dy: bool,
    add_to: Accumulators,
    options: TileOptions,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return row_loss, dx, dy, row_dot and row_sum; scale, bias (1,). See `megaclip.ops.tiles.tile_sigmoid`."""
    dx, dy = _accumulators(x, y, scale, need_dx, need_dy, add_to)
    row_loss, row_dot, row_sum = scale.new_zeros((3, len(x))).unbind()
    x, y = operands(x, y, options.precision)
    side = tile_side(options.tile_budget_mib, _GRADS_BUFFERS, scale.dtype)
    with tf32(options.precision == "tf32"):
        for rows, cols, left_out, s_mn in _similarities(x, y, diagonal, ids, side):
            z_mn = left_out.fill(s_mn * scale + bias, -math.inf)
            row_loss[rows] += torch.nn.functional.softplus(z_mn, threshold=50).sum(1)
            p_mn = z_mn.sigmoid_()
            row_sum[rows] += p_mn.sum(1)
            row_dot[rows] += (p_mn * s_mn).sum(1)
            _add_products(dx, dy, p_mn.to(x.dtype), x, y, rows, cols)
    return row_loss, dx, dy, row_dot, row_sum


class _LeftOut(NamedTuple):
    """Entries of one tile that are left out."""

    offset: int | None
    """Those with `i + offset == j`. An offset outside the tile leaves nothing out."""
    equal_mn: Tensor | None
    """True where the ids are equal."""

    def fill(self, tile_mn: Tensor, value: float) -> Tensor:
        """Write `value` in place of the entries."""
        if self.offset is not None and -len(tile_mn) < self.offset < tile_mn.shape[1]:
            tile_mn.diagonal(self.offset).fill_(value)
        return tile_mn if self.equal_mn is None else tile_mn.masked_fill_(self.equal_mn, value)


def _similarities(
    x: Tensor, y: Tensor, diagonal: int | None, ids: Ids | None, side: int
) -> Iterator[tuple[slice, slice, _LeftOut, Tensor]]:
    """Yield the row span, the column span, the entries to leave out and the similarities `s_mn` of every tile."""
    for rows, cols in tiles(len(x), len(y), side):
        offset = None if diagonal is None else diagonal + rows.start - cols.start
        equal_mn = None
        if ids is not None:
            row_ids, col_ids = ids[0][rows, None], ids[1][None, cols]
            equal_mn = (row_ids == col_ids).logical_or_(col_ids == NO_NEGATIVE)
        yield rows, cols, _LeftOut(offset, equal_mn), product(x[rows], y[cols].T)


def _accumulators(
    x: Tensor, y: Tensor, like: Tensor, need_dx: bool, need_dy: bool, add_to: Accumulators
) -> Accumulators:
    """Return the tensors to which dx and dy are added, new ones in the dtype of `like`; None for an unneeded side."""
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
        dx[rows] += product(p_mn, y[cols])
    if dy is not None:
        dy[cols] += product(p_mn.T, x[rows])


def _weights(s_mn: Tensor, left_out: _LeftOut, scale: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
    """Return `weight * exp(scale*s - shift)` (m, n) for one direction, with zeros where entries are left out."""
    return left_out.fill((s_mn * scale).sub_(shift).exp_().mul_(weight), 0.0)


def operands(x: Tensor, y: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return x and y in the dtype of their product, as the module docstring describes it."""
    if x.dtype == torch.float64:
        return x, y
    if precision == "bf16" or (precision == "auto" and x.dtype == torch.bfloat16):
        x, y = x.bfloat16(), y.bfloat16()
        return (x, y) if x.is_cuda else (x.float(), y.float())
    return x.float(), y.float()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, accumulated in float32 (float64 for float64)."""
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Set whether CUDA products may use TF32, and restore the setting of the process at the end."""
    matmul = torch.backends.cuda.matmul
    is_new = hasattr(matmul, "fp32_precision")  # torch >= 2.9, where allow_tf32 raises if fp32_precision was set
    name, value = ("fp32_precision", "tf32" if allowed else "ieee") if is_new else ("allow_tf32", allowed)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def tile_side(tile_budget_mib: float, buffers: int, dtype: torch.dtype) -> int:
    """Return the side of a square tile whose buffers fit the budget: at least 1, a multiple of 64 from 64 on."""
    side = math.isqrt(int(tile_budget_mib * 2**20) // (buffers * dtype.itemsize))
    return max(1, side if side < 64 else side // 64 * 64)


def tiles(m: int, n: int, side: int) -> Iterator[tuple[slice, slice]]:
    """Yield the row and column spans of all tiles, row by row. If one side is short, tiles are longer on the other."""
    row_side = min(m, side)
    col_side = min(n, side * side // max(row_side, 1))
    row_side = min(m, side * side // max(col_side, 1))
    for row in range(0, m, max(row_side, 1)):
        for col in range(0, n, max(col_side, 1)):
            yield slice(row, min(row + row_side, m)), slice(col, min(col + col_side, n))
