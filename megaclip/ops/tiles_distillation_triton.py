"""Triton kernels of `tiles_distillation.py`: each reads the student's and the teacher's products of a tile once.

Both functions have the arguments and results of those in `tiles_distillation.py`. The products (m, n) are float32 and
contiguous. The kernels are deterministic: every partial result has one writer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaclip.ops.tiles_triton_common import MASKED

BLOCK_M, BLOCK_N, WARPS = 32, 128, 4
"""Entries that a program holds at a time, and the warps of a program."""
CHUNK = 16
"""Blocks of rows that a program reads one after the other. It writes one part of its columns' statistics for them."""


@triton.jit
def _logits(products, scale, rows, cols, m, n):
    """Return a block of logits (BLOCK_M, BLOCK_N), with MASKED outside of the tile."""
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    places = rows.to(tl.int64)[:, None] * n + cols[None, :]
    return tl.where(inside, tl.load(products + places, mask=inside, other=0.0) * scale, MASKED)


@triton.jit
def _block_statistics(s, t, AXIS: tl.constexpr):
    """Return the statistics over one axis of a block: both log-sum-exps, and the mean of t - s."""
    s_top, t_top = tl.max(s, axis=AXIS), tl.max(t, axis=AXIS)
    s_sum = tl.sum(tl.exp(s - tl.expand_dims(s_top, AXIS)), axis=AXIS)
    weights = tl.exp(t - tl.expand_dims(t_top, AXIS))
    t_sum = tl.sum(weights, axis=AXIS)
    return s_top + tl.log(s_sum), t_top + tl.log(t_sum), tl.sum(weights * (t - s), axis=AXIS) / t_sum


@triton.jit
def _log_add(a, b):
    """Return log(exp(a) + exp(b)) elementwise, for finite values."""
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _store(parts, part, count, places, length, student, teacher, difference):
    """Write statistics to a tensor (3, count, length) as its part `part`."""
    inside = places < length
    parts += part.to(tl.int64) * length + places
    tl.store(parts, student, mask=inside)
    tl.store(parts + count.to(tl.int64) * length, teacher, mask=inside)
    tl.store(parts + 2 * count.to(tl.int64) * length, difference, mask=inside)


@triton.jit(do_not_specialize=["m"])
def _statistics_kernel(
    s_ptr,  # in: (m, n) float32, the student's products
    t_ptr,  # in: (m, n) float32, the teacher's products
    s_scale_ptr,  # in: (1,) float32
    t_scale_ptr,  # in: (1,) float32
    row_ptr,  # out: (3, blocks of columns, m) float32
    col_ptr,  # out: (3, chunks of rows, n) float32
    m,
    n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute the statistics of a chunk of rows and a block of columns."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    s_scale, t_scale = tl.load(s_scale_ptr), tl.load(t_scale_ptr)
    student = tl.full((BLOCK_N,), MASKED, dtype=tl.float32)
    teacher = tl.full((BLOCK_N,), MASKED, dtype=tl.float32)
    difference = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for step in range(tl.minimum(CHUNK, tl.cdiv(m, BLOCK_M) - chunk * CHUNK)):
        rows = (chunk * CHUNK + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        s = _logits(s_ptr, s_scale, rows, cols, m, n)
        t = _logits(t_ptr, t_scale, rows, cols, m, n)
        of_rows = _block_statistics(s, t, 1)
        _store(row_ptr, block, tl.num_programs(1), rows, m, of_rows[0], of_rows[1], of_rows[2])
        of_cols = _block_statistics(s, t, 0)
        total = _log_add(teacher, of_cols[1])
        difference = difference * tl.exp(teacher - total) + of_cols[2] * tl.exp(of_cols[1] - total)
        student, teacher = _log_add(student, of_cols[0]), total
    _store(col_ptr, chunk, tl.num_programs(0), cols, n, student, teacher, difference)


@triton.jit(do_not_specialize=["m", "row_stride", "col_stride"])
def _weights_kernel(
    s_ptr,  # in: (m, n) float32, the student's products
    t_ptr,  # in: (m, n) float32, the teacher's products
    s_scale_ptr,  # in: (1,) float32
    t_scale_ptr,  # in: (1,) float32
    row_ptr,  # in: (2 or more, m) float32 with unit stride along m, the log-sum-exps of the rows
    col_ptr,  # in: (2 or more, n) float32, those of the columns
    p_ptr,  # out: (m, n) in any floating dtype
    m,
    n,
    row_stride,
    col_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gradient with respect to the student's logits, of one block."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    s = _logits(s_ptr, tl.load(s_scale_ptr), rows, cols, m, n)
    t = _logits(t_ptr, tl.load(t_scale_ptr), rows, cols, m, n)
    s_row = tl.load(row_ptr + rows, mask=rows < m, other=0.0)[:, None]
    t_row = tl.load(row_ptr + row_stride + rows, mask=rows < m, other=0.0)[:, None]
    s_col = tl.load(col_ptr + cols, mask=cols < n, other=0.0)[None, :]
    t_col = tl.load(col_ptr + col_stride + cols, mask=cols < n, other=0.0)[None, :]
    p = tl.exp(s - s_row) - tl.exp(t - t_row) + (tl.exp(s - s_col) - tl.exp(t - t_col))
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    places = rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(p_ptr + places, p.to(p_ptr.dtype.element_ty), mask=inside)


def statistics(s_mn: Tensor, t_mn: Tensor, s_scale: Tensor, t_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics of the rows (3, parts, m) and of the columns (3, parts, n)."""
    (m, n), blocks = s_mn.shape, (triton.cdiv(len(s_mn), CHUNK * BLOCK_M), triton.cdiv(s_mn.shape[1], BLOCK_N))
    row, col = s_mn.new_empty(3, blocks[1], m), s_mn.new_empty(3, blocks[0], n)
    with torch.cuda.device_of(s_mn):
        _statistics_kernel[blocks](
            s_mn, t_mn, s_scale, t_scale, row, col, m, n, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CHUNK=CHUNK, num_warps=WARPS
        )
    return row, col


def weights(
    s_mn: Tensor, t_mn: Tensor, s_scale: Tensor, t_scale: Tensor, row: Tensor, col: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient with respect to the student's logits, (m, n)."""
    (m, n), p_mn = s_mn.shape, torch.empty_like(s_mn, dtype=dtype)
    arguments = (s_mn, t_mn, s_scale, t_scale, row, col, p_mn, m, n, row.stride(0), col.stride(0))
    with torch.cuda.device_of(s_mn):
        _weights_kernel[triton.cdiv(m, BLOCK_M), triton.cdiv(n, BLOCK_N)](
            *arguments, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=WARPS
        )
    return p_mn
