"""Code shared by the Triton tile kernels: constants, logits, masks, sums within a thread.

It also holds the two small kernels that run before and after the tile kernels. One computes the limits of each tile,
the other merges partial sums. `tiles_triton_kernels.py` explains the notation.
"""

import os

import triton
import triton.language as tl

# Sums of 2**17 terms exp2(t) stay below float32's maximum 2**128, and exp2(-t) is normal.
EXPONENT_LIMIT = tl.constexpr(110.0)
MASKED = tl.constexpr(-1.0e30)
# Maximum of a row whose entries are all masked: below every real maximum, far above MASKED.
MAXIMUM_FLOOR = tl.constexpr(-1.0e20)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Number of values that `_tile_limits_kernel` writes for each tile of rows or columns.
LIMITS = tl.constexpr(4)
# Number of values per tile of rows about their gaps: first start, last end, number of columns that all rows leave out.
GAP_LIMITS = tl.constexpr(3)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _log2_add(a, b):
    """Return log2(2**a + 2**b) elementwise; -inf is an empty sum."""
    top = tl.maximum(a, b)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top + tl.log2(tl.exp2(a - top) + tl.exp2(b - top))


@triton.jit
def _item_origin(number, rows, cols, GROUP: tl.constexpr):
    """Return row and column of this program's work item `number`, in a grid of rows x cols items.

    Items are numbered down groups of GROUP columns. Programs that run at the same time then read few features, which
    stay in the L2 cache.
    """
    item = tl.program_id(0) + number * tl.num_programs(0)
    group = item // (GROUP * rows)
    width = tl.minimum(cols - group * GROUP, GROUP)
    within = item - group * GROUP * rows
    return within // width, group * GROUP + within % width


@triton.jit
def _dot(x, y, s):
    """Return s + x @ y.T, accumulated in float32; float32 operands are multiplied in TF32."""
    if INTERPRETED:  # NumPy has no bfloat16
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y.T, s, input_precision="tf32")


@triton.jit
def _places(matrix, row0, col0, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of a block (HEIGHT, WIDTH) of a matrix (rows, cols), and whether they are inside of it."""
    i = row0 + tl.arange(0, HEIGHT)
    j = col0 + tl.arange(0, WIDTH)
    # Rows start at multiples of 16 bytes. The compiler needs to know it to move 16 bytes at a time.
    MULTIPLE: tl.constexpr = 128 // matrix[0].dtype.element_ty.primitive_bitwidth
    row_starts = tl.multiple_of(i.to(tl.int64) * matrix[1], MULTIPLE)
    return row_starts[:, None] + j[None, :], (i < rows)[:, None] & (j < cols)[None, :]


@triton.jit
def _load_block(matrix, row0, col0, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, POINTERS: tl.constexpr):
    """Return a block (HEIGHT, WIDTH) of a matrix (rows, cols), with 0 outside of the matrix.

    matrix: a tensor descriptor; with POINTERS, a pointer and the stride of the rows.
    """
    if POINTERS:
        places, inside = _places(matrix, row0, col0, rows, cols, HEIGHT, WIDTH)
        block = tl.load(matrix[0] + places, mask=inside, other=0.0)
    else:
        block = matrix.load([row0, col0])
    return block


@triton.jit
def _store_block(matrix, row0, col0, block, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, POINTERS: tl.constexpr):
    """Write a block (HEIGHT, WIDTH), rounded, to a matrix of so many rows; see `_load_block`.

    With POINTERS it also writes to the padding at the end of each row, so that 16 bytes can be written at a time.
    """
    if POINTERS:
        places, inside = _places(matrix, row0, col0, rows, matrix[1], HEIGHT, WIDTH)
        tl.store(matrix[0] + places, block.to(matrix[0].dtype.element_ty), mask=inside)
    else:
        matrix.store([row0, col0], block.to(matrix.dtype))


@triton.jit
def _add_slice(
    s,
    x,
    y,
    row0,
    col0,
    k0,
    m,
    n,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOADED: tl.constexpr,
    POINTERS: tl.constexpr,
):
    """Add the products of one slice of D, from column k0 on, to the similarities s of a tile.

    With LOADED the similarities are computed already, and are loaded instead.
    """
    if LOADED:
        s = _load_block(x, row0, col0, m, n, BLOCK_M, BLOCK_N, POINTERS)
    else:
        x_block = _load_block(x, row0, k0, m, D, BLOCK_M, BLOCK_K, POINTERS)
        y_block = _load_block(y, col0, k0, n, D, BLOCK_N, BLOCK_K, POINTERS)
        s = _dot(x_block, y_block, s)
    return s


@triton.jit
def _kept(row0, col0, m, n, diagonal, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (BLOCK_M, BLOCK_N): whether an entry is inside (m, n) and off the diagonal i + diagonal == j."""
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = col0 + tl.arange(0, BLOCK_N)
    return (rows < m)[:, None] & (cols < n)[None, :] & (rows[:, None] + diagonal != cols[None, :])


@triton.jit
def _advanced(place, step, ids_ptr, count, limit, INCLUSIVE: tl.constexpr):
    """Return place + step if the ids (count,), ascending, are below the limit up to there, else place.

    With INCLUSIVE they may equal the limit. Steps of all powers of two, the largest first, find the first larger id.
    """
    last = place + step - 1
    value = tl.load(ids_ptr + last, mask=last < count, other=0)
    below = (value <= limit) if INCLUSIVE else (value < limit)
    return tl.where(below & (last < count), place + step, place)


@triton.jit(do_not_specialize=["m", "n", "step"])
def _gaps_kernel(
    row_ids_ptr,  # in: (m,) int64
    col_ids_ptr,  # in: (n,) int64, ascending
    gaps_ptr,  # out: (m, 2) int32, the first column with the id of each row, and the first one after these
    tile_gaps_ptr,  # out: (row_tiles, GAP_LIMITS) int32
    m,
    n,
    step,  # the largest power of two that is not above n
    NO_NEGATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Find the gaps of one tile of rows. Columns with the id NO_NEGATIVE come first, and belong to the gap of all."""
    tile = tl.program_id(0)
    rows = tl.minimum(tile * BLOCK_M + tl.arange(0, BLOCK_M), m - 1)
    ids = tl.load(row_ids_ptr + rows)
    start = tl.zeros((BLOCK_M,), dtype=tl.int32)
    end = start
    blanks = start
    while step > 0:
        start = _advanced(start, step, col_ids_ptr, n, ids, False)
        end = _advanced(end, step, col_ids_ptr, n, ids, True)
        blanks = _advanced(blanks, step, col_ids_ptr, n, NO_NEGATIVE, True)
        step = step // 2
    tl.store(gaps_ptr + 2 * rows, start)
    tl.store(gaps_ptr + 2 * rows + 1, end)
    tl.store(tile_gaps_ptr + tile * GAP_LIMITS, tl.min(start, axis=0))
    tl.store(tile_gaps_ptr + tile * GAP_LIMITS + 1, tl.max(end, axis=0))
    tl.store(tile_gaps_ptr + tile * GAP_LIMITS + 2, tl.max(blanks, axis=0))


@triton.jit
def _tile_gap(tile_gaps_ptr, tile, first_col, HAS_IDS: tl.constexpr):
    """Return, in columns of the block, first start and last end of the gaps of a tile of rows, and where columns start.

    first_col: the column of the gaps at which the block starts.
    """
    start, end, blanks = 0, 0, 0
    if HAS_IDS:
        values = tile_gaps_ptr + tile * GAP_LIMITS
        start, end = tl.load(values) - first_col, tl.load(values + 1) - first_col
        blanks = tl.load(values + 2) - first_col
    return start, end, blanks


@triton.jit
def _masked(t, row0, col0, edges, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_IDS: tl.constexpr):
    """Return t (BLOCK_M, BLOCK_N) with MASKED in place of the entries that are left out.

    These are the entries that `_kept` leaves out and, with HAS_IDS, those in the gap of their row. edges: m, n,
    diagonal, the gaps of the rows, the result of `_tile_gap`, and the column of the gaps at which the block starts.
    """
    m, n, diagonal, gaps_ptr, tile_gap, first_col = edges
    leaves_out = (row0 + diagonal < col0 + BLOCK_N) & (row0 + diagonal + BLOCK_M > col0)
    leaves_out = leaves_out | (row0 + BLOCK_M > m) | (col0 + BLOCK_N > n)
    if HAS_IDS:
        leaves_out = leaves_out | ((tile_gap[0] < col0 + BLOCK_N) & (tile_gap[1] > col0)) | (col0 < tile_gap[2])
    if leaves_out:
        kept = _kept(row0, col0, m, n, diagonal, BLOCK_M, BLOCK_N)
        if HAS_IDS:
            rows = row0 + tl.arange(0, BLOCK_M)
            cols = (col0 + tl.arange(0, BLOCK_N))[None, :]
            start = tl.load(gaps_ptr + 2 * rows, mask=rows < m, other=0)[:, None] - first_col
            end = tl.load(gaps_ptr + 2 * rows + 1, mask=rows < m, other=0)[:, None] - first_col
            # `t == t` gives the gaps the layout of t. Otherwise the mask would change its layout through shared memory,
            # and only one program of the gradients would fit a multiprocessor.
            start, end = tl.where(t == t, start, 0), tl.where(t == t, end, 0)
            kept = kept & ((cols < start) | (cols >= end)) & (cols >= tile_gap[2])
        t = tl.where(kept, t, MASKED)
    return t


@triton.jit
def _tile_scale(row_limits, col_limits):
    """Return the scale that all rows and columns of the tile share, and the largest |s| by Cauchy-Schwarz.

    The scale is 0 if they share none or if it is not positive.
    """
    lowest = tl.minimum(tl.load(row_limits + 1), tl.load(col_limits + 1))
    highest = tl.maximum(tl.load(row_limits + 2), tl.load(col_limits + 2))
    return tl.where(lowest == highest, tl.maximum(lowest, 0.0), 0.0), tl.load(row_limits) * tl.load(col_limits)


@triton.jit
def _is_bounded(t, limit_from_norms):
    """Return whether |t| <= EXPONENT_LIMIT in the whole tile. The tile is read only if the norms do not prove it."""
    bounded = limit_from_norms <= EXPONENT_LIMIT
    if not bounded:
        bounded = tl.max(tl.abs(t)) <= EXPONENT_LIMIT
    return bounded


@triton.jit
def _relative_scale(scale_ptr, stride, index, length, scale2):
    """Return the base-2 scale of each row or column, divided by the scale2 that t = s * scale2 holds already."""
    return tl.load(scale_ptr + index * stride, mask=index < length, other=1.0) * LOG2_E / scale2


@triton.jit
def _fold_rows(e, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Return the part of the column sums of e (BLOCK_M, BLOCK_N) that single threads can add: (NUM_WARPS, 8, BLOCK_N).

    In the accumulator layout of a Hopper matrix product, a thread holds rows r and r + 8 of its warp's 16 (and every
    16 * NUM_WARPS rows below them). The rest of the sum needs shuffles between lanes, which cost as much as the
    exponentials. They run once per chunk.
    """
    folded = tl.reshape(e, (BLOCK_M // (16 * NUM_WARPS), NUM_WARPS, 2, 8, BLOCK_N))
    return tl.sum(tl.sum(folded, axis=2), axis=0)


@triton.jit
def _side_limits(
    tile,
    x_ptr,
    scale_ptr,
    shift_ptr,
    limits_ptr,
    m,
    stride_row,
    stride_col,
    scale_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    """Write the limits of one tile of BLOCK rows: largest norm, smallest and largest scale, largest |shift|*log2(e)."""
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    inside = rows < m
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        offsets = rows[:, None].to(tl.int64) * stride_row + k[None, :] * stride_col
        x = tl.load(x_ptr + offsets, mask=inside[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    limits = limits_ptr + tile * LIMITS
    tl.store(limits, tl.sqrt(tl.max(squares, axis=0)))
    scale = tl.load(scale_ptr + rows * scale_stride, mask=inside, other=0.0)
    tl.store(limits + 1, tl.min(tl.where(inside, scale, float("inf")), axis=0))
    tl.store(limits + 2, tl.max(tl.where(inside, scale, float("-inf")), axis=0))
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + rows, mask=inside, other=0.0)
        tl.store(limits + 3, tl.max(tl.abs(shift), axis=0) * LOG2_E)


@triton.jit(do_not_specialize=["m", "n", "row_tiles"])
def _tile_limits_kernel(
    x_ptr,  # in: (m, D) features, any strides
    y_ptr,  # in: (n, D) features, any strides
    row_scale_ptr,  # in: (m,) float32
    col_scale_ptr,  # in: (n,) float32
    row_shift_ptr,  # in: (m,) float32; shifts are unused without HAS_SHIFT
    col_shift_ptr,  # in: (n,) float32
    row_limits_ptr,  # out: (row_tiles, LIMITS) float32; the last of them only with HAS_SHIFT
    col_limits_ptr,  # out: (col_tiles, LIMITS) float32
    m,
    n,
    row_tiles,
    x_stride_row,
    x_stride_col,
    y_stride_row,
    y_stride_col,
    row_scale_stride,  # 1, or 0 for a number that is repeated
    col_scale_stride,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    """Write the limits of each tile of rows and of columns, which the tile kernels read before any product."""
    tile = tl.program_id(0)
    if tile < row_tiles:
        _side_limits(
            tile,
            x_ptr,
            row_scale_ptr,
            row_shift_ptr,
            row_limits_ptr,
            m,
            x_stride_row,
            x_stride_col,
            row_scale_stride,
            D,
            BLOCK_M,
            BLOCK_K,
            HAS_SHIFT,
        )
    else:
        _side_limits(
            tile - row_tiles,
            y_ptr,
            col_scale_ptr,
            col_shift_ptr,
            col_limits_ptr,
            n,
            y_stride_row,
            y_stride_col,
            col_scale_stride,
            D,
            BLOCK_N,
            BLOCK_K,
            HAS_SHIFT,
        )


@triton.jit
def _merge_side(tile, part_ptr, lse_ptr, parts, length, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Set lse to log(exp(lse) + sum over parts of 2**part), for BLOCK of its elements."""
    cols = tile * BLOCK + tl.arange(0, BLOCK)
    merged = tl.load(lse_ptr + cols, mask=cols < length, other=0.0) * LOG2_E
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        mask = (part < parts)[:, None] & (cols < length)[None, :]
        values = tl.load(part_ptr + part[:, None].to(tl.int64) * length + cols[None, :], mask=mask, other=float("-inf"))
        top = tl.max(values, axis=0)
        top = tl.where(top == float("-inf"), 0.0, top)
        merged = _log2_add(merged, top + tl.log2(tl.sum(tl.exp2(values - top[None, :]), axis=0)))
    tl.store(lse_ptr + cols, merged * LN_2, mask=cols < length)


@triton.jit(do_not_specialize=["row_parts", "m", "col_parts", "n"])
def _merge_stats_kernel(
    row_part_ptr,  # in: (row_parts, m) float32, log2 of partial sums
    row_lse_ptr,  # in/out: (m,) float32, natural log-sum-exp so far
    col_part_ptr,  # in: (col_parts, n) float32
    col_lse_ptr,  # in/out: (n,) float32
    row_parts,
    m,
    col_parts,
    n,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Merge the partial sums of a block into the log-sum-exp of its rows and columns."""
    tile = tl.program_id(0)
    row_programs = tl.cdiv(m, BLOCK)
    if tile < row_programs:
        _merge_side(tile, row_part_ptr, row_lse_ptr, row_parts, m, BLOCK, BLOCK_PARTS)
    else:
        _merge_side(tile - row_programs, col_part_ptr, col_lse_ptr, col_parts, n, BLOCK, BLOCK_PARTS)
