"""Triton kernels of the tile operations: one matrix product per tile, and everything else in its epilogue.

`tiles_triton.py` launches them. It cuts the work into blocks, stages features and merges the partial results.

Notation: a *block* is the work of one launch, (m, D) rows x and (n, D) columns y. A *tile* is BLOCK_M x BLOCK_N logits
of it. They stay in registers and are never written as logits. All kernels are deterministic: every partial result has
one writer, and there are no atomic operations.

Logits are in base 2: t_ij = scale * s_ij * log2(e). There are two paths. A uniform branch selects one per tile at run
time:

* *Bounded*: all rows and columns of the tile share one scale, and |t| <= EXPONENT_LIMIT in the tile. The norms of its
  rows and columns prove that (Cauchy-Schwarz), or else the tile is read. Then exp2(t) and its sums are ordinary float32
  numbers: no maximum is needed, and one exponential serves rows and columns. Unit features with a scale up to 76 always
  take this path. At scale 100 a tile takes it if all its cosines are between -0.76 and 0.76.
* *General*: any scales. The kernel first takes the maxima of the tile's rows and columns. Rows and columns have
  separate exponentials.

Masked entries (the diagonal, equal ids, and everything outside the block) get the logit MASKED before the exponential.
It is a large negative *finite* number, because products such as exp(t) * t must give 0, not NaN.
"""

import triton
import triton.language as tl

from megaclip.ops.tiles_triton_common import (
    EXPONENT_LIMIT,
    LIMITS,
    LN_2,
    LOG2_E,
    MASKED,
    MAXIMUM_FLOOR,
    _add_slice,
    _fold_rows,
    _is_bounded,
    _item_origin,
    _log2_add,
    _masked,
    _relative_scale,
    _store_block,
    _tile_gap,
    _tile_scale,
)


@triton.jit(do_not_specialize=["m", "n", "diagonal", "first_col"])
def _tile_stats_kernel(
    # in: (m, D) bfloat16, float16 or float32 features, descriptor with block (BLOCK_M, BLOCK_K); with POINTERS, as for
    # the other matrices, pointer and row stride. With LOADED: the similarities s (m, n)
    x,
    y,  # in: (n, D) features of that dtype, descriptor with block (BLOCK_N, BLOCK_K)
    row_scale_ptr,  # in: (m,) float32
    col_scale_ptr,  # in: (n,) float32
    gaps_ptr,  # in: (m, 2) int32, the gap of each row: its columns from the first number on are left out, to the second
    tile_gaps_ptr,  # in: (row_tiles, GAP_LIMITS) int32; both are unused without HAS_IDS
    row_limits_ptr,  # in: (row_tiles, LIMITS) float32, from `_tile_limits_kernel`
    col_limits_ptr,  # in: (col_tiles, LIMITS) float32
    row_part_ptr,  # out: (col_tiles, m) float32, log2 of each row's sum over one column tile
    # in/out: (row_chunks, n) float32, log2 of each column's sum over one chunk of row tiles; -inf on entry
    col_part_ptr,
    m,
    n,
    diagonal,
    first_col,  # the column of the gaps at which the block starts
    row_scale_stride,  # 1, or 0 for a number that is repeated
    col_scale_stride,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    LOADED: tl.constexpr,
    POINTERS: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """Compute the partial sums of row and column log-sum-exp of every tile. Persistent: a program runs many tiles."""
    K_TILES: tl.constexpr = 1 if LOADED else (D + BLOCK_K - 1) // BLOCK_K
    row_tiles = tl.cdiv(m, BLOCK_M)
    col_tiles = tl.cdiv(n, BLOCK_N)
    row_chunks = tl.cdiv(row_tiles, CHUNK)
    my_items = tl.cdiv(row_chunks * col_tiles - tl.program_id(0), tl.num_programs(0))
    col_sums = tl.zeros((NUM_WARPS, 8, BLOCK_N), dtype=tl.float32)
    s = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    row_tile = tl.program_id(0)
    col_tile = tl.program_id(0)
    # One loop over tiles and slices of D, so that the loads of the next tile run during the epilogue of this one.
    for index in range(my_items * CHUNK * K_TILES):
        k = index % K_TILES
        step = (index // K_TILES) % CHUNK
        if k == 0:
            row_chunk, col_tile = _item_origin(index // (K_TILES * CHUNK), row_chunks, col_tiles, GROUP)
            row_tile = row_chunk * CHUNK + step
        row0 = row_tile * BLOCK_M
        col0 = col_tile * BLOCK_N
        s = _add_slice(s, x, y, row0, col0, k * BLOCK_K, m, n, D, BLOCK_M, BLOCK_N, BLOCK_K, LOADED, POINTERS)
        if k == K_TILES - 1:
            tile_gap = _tile_gap(tile_gaps_ptr, tl.minimum(row_tile, row_tiles - 1), first_col, HAS_IDS)
            row_limits = row_limits_ptr + tl.minimum(row_tile, row_tiles - 1) * LIMITS
            scale, similarity = _tile_scale(row_limits, col_limits_ptr + col_tile * LIMITS)
            scale2 = tl.where(scale > 0.0, scale, 1.0) * LOG2_E
            t = s * scale2
            bounded = scale > 0.0
            if bounded:
                bounded = _is_bounded(t, scale2 * similarity)
            rows = row0 + tl.arange(0, BLOCK_M)
            cols = col0 + tl.arange(0, BLOCK_N)
            row_part = row_part_ptr + col_tile.to(tl.int64) * m + rows
            col_part = col_part_ptr + (row_tile // CHUNK).to(tl.int64) * n + cols
            edges = (m, n, diagonal, gaps_ptr, tile_gap, first_col)
            t = _masked(t, row0, col0, edges, BLOCK_M, BLOCK_N, HAS_IDS)
            if bounded:
                e = tl.exp2(t)
                tl.store(row_part, tl.log2(tl.sum(e, axis=1)), mask=rows < m)
                col_sums += _fold_rows(e, BLOCK_M, BLOCK_N, NUM_WARPS)
            else:
                # t is s * scale2: with the scale that the tile shares, or with LOG2_E if it shares none.
                kept = t > 0.5 * MASKED
                row_scale = _relative_scale(row_scale_ptr, row_scale_stride, rows, m, scale2)
                col_scale = _relative_scale(col_scale_ptr, col_scale_stride, cols, n, scale2)
                row_t = tl.where(kept, t * row_scale[:, None], MASKED)
                col_t = tl.where(kept, t * col_scale[None, :], MASKED)
                row_top = tl.maximum(tl.max(row_t, axis=1), MAXIMUM_FLOOR)
                row_sum = tl.sum(tl.exp2(row_t - row_top[:, None]), axis=1)
                tl.store(row_part, row_top + tl.log2(row_sum), mask=rows < m)
                col_top = tl.maximum(tl.max(col_t, axis=0), MAXIMUM_FLOOR)
                col_sum = tl.sum(tl.exp2(col_t - col_top[None, :]), axis=0)
                # Only this program writes here, and each element has one thread: both updates have one layout.
                before = tl.load(col_part, mask=cols < n, other=float("-inf"))
                tl.store(col_part, _log2_add(before, col_top + tl.log2(col_sum)), mask=cols < n)
            if step == CHUNK - 1:
                sums = tl.sum(tl.sum(col_sums, axis=1), axis=0)
                col_sums = tl.zeros((NUM_WARPS, 8, BLOCK_N), dtype=tl.float32)
                before = tl.load(col_part, mask=cols < n, other=float("-inf"))
                tl.store(col_part, _log2_add(before, tl.log2(sums)), mask=cols < n)
            s = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def _halves(tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the left and right half of a tile (HEIGHT, WIDTH). In the accumulator layout no value changes threads."""
    return tl.split(tl.permute(tl.reshape(tile, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _store_tile(
    matrix,
    row0,
    col0,
    p,
    m,
    STORES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POINTERS: tl.constexpr,
):
    """Write p (BLOCK_M, BLOCK_N), rounded: in one piece, or in two halves that need half the shared memory."""
    if STORES == 1:
        _store_block(matrix, row0, col0, p, m, BLOCK_M, BLOCK_N, POINTERS)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = _halves(p, BLOCK_M, BLOCK_N)
        _store_block(matrix, row0, col0, left, m, BLOCK_M, HALF, POINTERS)
        _store_block(matrix, row0, col0 + HALF, right, m, BLOCK_M, HALF, POINTERS)


@triton.jit(do_not_specialize=["m", "n", "diagonal", "first_col"])
def _tile_grads_kernel(
    # in: (m, D) bfloat16, float16 or float32 features, descriptor with block (BLOCK_M, BLOCK_K); with POINTERS, as for
    # the other matrices, pointer and row stride. With LOADED: the similarities s (m, n)
    x,
    y,  # in: (n, D) features of that dtype, descriptor with block (BLOCK_N, BLOCK_K)
    p_matrix,  # out: (m, n) P, descriptor with block (BLOCK_M, BLOCK_N // STORES); may be the buffer of s
    row_scale_ptr,  # in: (m,) float32
    row_shift_ptr,  # in: (m,) float32
    row_weight_ptr,  # in: (m,) float32
    col_scale_ptr,  # in: (n,) float32
    col_shift_ptr,  # in: (n,) float32
    col_weight_ptr,  # in: (n,) float32
    gaps_ptr,  # in: (m, 2) int32, the gap of each row: its columns from the first number on are left out, to the second
    tile_gaps_ptr,  # in: (row_tiles, GAP_LIMITS) int32; both are unused without HAS_IDS
    row_limits_ptr,  # in: (row_tiles, LIMITS) float32, from `_tile_limits_kernel`
    col_limits_ptr,  # in: (col_tiles, LIMITS) float32
    row_part_ptr,  # out: (col_tiles, m) float32, row_dot over one column tile; unused without DOTS
    col_part_ptr,  # out: (row_tiles, n) float32, col_dot over one row tile
    m,
    n,
    diagonal,
    first_col,  # the column of the gaps at which the block starts
    row_scale_stride,  # 1, or 0 for a number that is repeated; the next three strides too
    col_scale_stride,
    row_weight_stride,
    col_weight_stride,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STORES: tl.constexpr,
    LOADED: tl.constexpr,
    POINTERS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    DOTS: tl.constexpr,
):
    """Compute P of every tile, and the partial sums of row_dot and col_dot. Persistent."""
    K_TILES: tl.constexpr = 1 if LOADED else (D + BLOCK_K - 1) // BLOCK_K
    row_tiles = tl.cdiv(m, BLOCK_M)
    col_tiles = tl.cdiv(n, BLOCK_N)
    my_tiles = tl.cdiv(row_tiles * col_tiles - tl.program_id(0), tl.num_programs(0))
    s = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    row_tile = tl.program_id(0)
    col_tile = tl.program_id(0)
    for index in range(my_tiles * K_TILES):
        k = index % K_TILES
        if k == 0:
            row_tile, col_tile = _item_origin(index // K_TILES, row_tiles, col_tiles, GROUP)
        row0 = row_tile * BLOCK_M
        col0 = col_tile * BLOCK_N
        s = _add_slice(s, x, y, row0, col0, k * BLOCK_K, m, n, D, BLOCK_M, BLOCK_N, BLOCK_K, LOADED, POINTERS)
        if k == K_TILES - 1:
            # All loads come first, because the last products of the tile are still running.
            rows = row0 + tl.arange(0, BLOCK_M)
            cols = col0 + tl.arange(0, BLOCK_N)
            row_shift = tl.load(row_shift_ptr + rows, mask=rows < m, other=0.0) * LOG2_E
            col_shift = tl.load(col_shift_ptr + cols, mask=cols < n, other=0.0) * LOG2_E
            row_weight = tl.load(row_weight_ptr + rows * row_weight_stride, mask=rows < m, other=0.0)
            col_weight = tl.load(col_weight_ptr + cols * col_weight_stride, mask=cols < n, other=0.0)
            tile_gap = _tile_gap(tile_gaps_ptr, row_tile, first_col, HAS_IDS)
            row_limits = row_limits_ptr + row_tile * LIMITS
            col_limits = col_limits_ptr + col_tile * LIMITS
            scale, similarity = _tile_scale(row_limits, col_limits)
            shift_limit = tl.maximum(tl.load(row_limits + 3), tl.load(col_limits + 3))
            scale2 = tl.where(scale > 0.0, scale, 1.0) * LOG2_E
            t = s * scale2
            bounded = (scale > 0.0) & (shift_limit <= EXPONENT_LIMIT)
            if bounded:
                bounded = _is_bounded(t, scale2 * similarity)
            edges = (m, n, diagonal, gaps_ptr, tile_gap, first_col)
            t = _masked(t, row0, col0, edges, BLOCK_M, BLOCK_N, HAS_IDS)
            row_part = row_part_ptr + col_tile.to(tl.int64) * m + rows
            col_part = col_part_ptr + row_tile.to(tl.int64) * n + cols
            if bounded:
                e = tl.exp2(t)
                row_factor = row_weight * tl.exp2(-row_shift)
                col_factor = col_weight * tl.exp2(-col_shift)
                if DOTS:
                    es = e * t
                    tl.store(row_part, row_factor * tl.sum(es, axis=1) / scale2, mask=rows < m)
                    tl.store(col_part, col_factor * tl.sum(es, axis=0) / scale2, mask=cols < n)
                p = e * (row_factor[:, None] + col_factor[None, :])
                _store_tile(p_matrix, row0, col0, p, m, STORES, BLOCK_M, BLOCK_N, POINTERS)
            else:
                # t is s * scale2: with the scale that the tile shares, or with LOG2_E if it shares none.
                kept = t > 0.5 * MASKED
                row_scale = _relative_scale(row_scale_ptr, row_scale_stride, rows, m, scale2)
                col_scale = _relative_scale(col_scale_ptr, col_scale_stride, cols, n, scale2)
                row_p = row_weight[:, None] * tl.exp2(t * row_scale[:, None] - row_shift[:, None])
                col_p = col_weight[None, :] * tl.exp2(t * col_scale[None, :] - col_shift[None, :])
                row_p = tl.where(kept, row_p, 0.0)
                col_p = tl.where(kept, col_p, 0.0)
                if DOTS:
                    tl.store(row_part, tl.sum(row_p * t, axis=1) / scale2, mask=rows < m)
                    tl.store(col_part, tl.sum(col_p * t, axis=0) / scale2, mask=cols < n)
                _store_tile(p_matrix, row0, col0, row_p + col_p, m, STORES, BLOCK_M, BLOCK_N, POINTERS)
            s = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def _join_log1p(a, b):
    """Return (1 + a) * (1 + b) - 1 without cancellation."""
    return a + b + a * b


@triton.jit
def _log1p(q):
    """Return log(1 + q) for q >= 0, accurate for small q."""
    series = q * (1.0 - q * (0.5 - q * (0.33333333 - q * 0.25)))
    return tl.where(q < 0.01, series, tl.log2(1.0 + q) * LN_2)


@triton.jit
def _fold_columns(e, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the part of the row sums of e (HEIGHT, WIDTH) that single threads can add: (HEIGHT, 8)."""
    return tl.sum(tl.reshape(e, (HEIGHT, WIDTH // 8, 8)), axis=1)


@triton.jit
def _sigmoid_piece(
    s,
    sums,
    p_matrix,
    row0,
    col0,
    edges,
    scale2,
    bias2,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    POINTERS: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """Write P of one piece of a tile, s (HEIGHT, WIDTH), and add its sums to `sums`, four tensors (HEIGHT, 8)."""
    q, above, dot, total = sums
    z = s * scale2 + bias2
    z = _masked(z, row0, col0, edges, HEIGHT, WIDTH, HAS_IDS)
    u = tl.exp2(-tl.abs(z))
    root = tl.rsqrt(1.0 + u)
    p = root * root * tl.where(z > 0.0, 1.0, u)
    _store_block(p_matrix, row0, col0, p, edges[0], HEIGHT, WIDTH, POINTERS)
    q = _join_log1p(q, tl.reduce(tl.reshape(u, (HEIGHT, WIDTH // 8, 8)), 1, _join_log1p))
    above += _fold_columns(tl.maximum(z, 0.0), HEIGHT, WIDTH)
    dot += _fold_columns(p * z, HEIGHT, WIDTH)
    total += _fold_columns(p, HEIGHT, WIDTH)
    return q, above, dot, total


@triton.jit(do_not_specialize=["m", "n", "diagonal", "first_col"])
def _tile_sigmoid_kernel(
    # in: (m, D) bfloat16, float16 or float32 features, descriptor with block (BLOCK_M, BLOCK_K); with POINTERS, as for
    # the other matrices, pointer and row stride. With LOADED: the similarities s (m, n)
    x,
    y,  # in: (n, D) features of that dtype, descriptor with block (BLOCK_N, BLOCK_K)
    p_matrix,  # out: (m, n) P = sigmoid(z), descriptor with block (BLOCK_M, BLOCK_N // 4); may be the buffer of s
    scale_ptr,  # in: (1,) float32
    bias_ptr,  # in: (1,) float32
    gaps_ptr,  # in: (m, 2) int32, the gap of each row: its columns from the first number on are left out, to the second
    tile_gaps_ptr,  # in: (row_tiles, GAP_LIMITS) int32; both are unused without HAS_IDS
    row_part_ptr,  # out: (3, col_tiles, m) float32: sums over one column tile of softplus(z), P * s and P
    m,
    n,
    diagonal,
    first_col,  # the column of the gaps at which the block starts
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    LOADED: tl.constexpr,
    POINTERS: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """Compute the sigmoid loss and P of every tile, with z = scale * s + bias. Persistent.

    softplus(z) = max(z, 0) + log1p(u) with u = exp(-|z|). The logarithm is taken once for up to 32 entries of a row, of
    the product of their (1 + u) <= 2. Only one exponential and one reciprocal square root per entry remain.
    """
    K_TILES: tl.constexpr = 1 if LOADED else (D + BLOCK_K - 1) // BLOCK_K
    row_tiles = tl.cdiv(m, BLOCK_M)
    col_tiles = tl.cdiv(n, BLOCK_N)
    my_tiles = tl.cdiv(row_tiles * col_tiles - tl.program_id(0), tl.num_programs(0))
    scale2 = tl.load(scale_ptr) * LOG2_E
    bias2 = tl.load(bias_ptr) * LOG2_E
    s = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    row_tile = tl.program_id(0)
    col_tile = tl.program_id(0)
    for index in range(my_tiles * K_TILES):
        k = index % K_TILES
        if k == 0:
            row_tile, col_tile = _item_origin(index // K_TILES, row_tiles, col_tiles, GROUP)
        row0 = row_tile * BLOCK_M
        col0 = col_tile * BLOCK_N
        s = _add_slice(s, x, y, row0, col0, k * BLOCK_K, m, n, D, BLOCK_M, BLOCK_N, BLOCK_K, LOADED, POINTERS)
        if k == K_TILES - 1:
            zeros = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
            sums = (zeros, zeros, zeros, zeros)
            edges = (m, n, diagonal, gaps_ptr, _tile_gap(tile_gaps_ptr, row_tile, first_col, HAS_IDS), first_col)
            # Four pieces, one after another, need a quarter of the registers.
            HALF: tl.constexpr = BLOCK_N // 2
            PIECE: tl.constexpr = BLOCK_N // 4
            left, right = _halves(s, BLOCK_M, BLOCK_N)
            s0, s1 = _halves(left, BLOCK_M, HALF)
            s2, s3 = _halves(right, BLOCK_M, HALF)
            sums = _sigmoid_piece(
                s0, sums, p_matrix, row0, col0, edges, scale2, bias2, BLOCK_M, PIECE, POINTERS, HAS_IDS
            )
            sums = _sigmoid_piece(
                s1, sums, p_matrix, row0, col0 + PIECE, edges, scale2, bias2, BLOCK_M, PIECE, POINTERS, HAS_IDS
            )
            sums = _sigmoid_piece(
                s2, sums, p_matrix, row0, col0 + 2 * PIECE, edges, scale2, bias2, BLOCK_M, PIECE, POINTERS, HAS_IDS
            )
            sums = _sigmoid_piece(
                s3, sums, p_matrix, row0, col0 + 3 * PIECE, edges, scale2, bias2, BLOCK_M, PIECE, POINTERS, HAS_IDS
            )
            q, above, dot, total = sums
            row_sum = tl.sum(total, axis=1)
            row_dot = (tl.sum(dot, axis=1) - bias2 * row_sum) / scale2
            row_loss = tl.sum(_log1p(q), axis=1) + tl.sum(above, axis=1) * LN_2
            rows = row0 + tl.arange(0, BLOCK_M)
            row_part = row_part_ptr + col_tile.to(tl.int64) * m + rows
            stride = col_tiles.to(tl.int64) * m
            tl.store(row_part, row_loss, mask=rows < m)
            tl.store(row_part + stride, row_dot, mask=rows < m)
            tl.store(row_part + 2 * stride, row_sum, mask=rows < m)
            s = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
