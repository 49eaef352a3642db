"""The tile operations on CUDA, which launch the kernels of `tiles_triton_kernels.py` for one block after another.

`tiles.py` calls these functions with checked tensors and expanded vectors. `tiles_triton_blocks.py` cuts a call into
blocks of rows and columns whose buffers stay within `tile_budget_mib`, however large the matrix of similarities is:

* Statistics: one kernel per block computes the partial sums of both directions from one product. A second kernel
  merges them into the running log-sum-exp of rows and columns.
* Gradients and sigmoid: one kernel per block writes P, rounded to the dtype of the products, into a buffer that all
  blocks share. Two library products with float32 accumulation then add `P y` to dx and `P^T x` to dy. So accumulators
  of up to 2048 columns need no registers, and the library's products run at full rate.

Precision:

* "bf16" rounds features to bfloat16, "tf32" multiplies float32 features in TF32, "auto" takes features as they are.
* "float32" multiplies float32 features exactly, by the library, into the buffer that P then overwrites.
* P of 16-bit features is rounded to bfloat16 for its two products, and so are float16 features there, because P spans
  more orders of magnitude than float16 can represent. All products accumulate in float32.

The kernels read features in place only if they have the right dtype, contiguous rows and an alignment of 16 bytes.
Other features are staged (copied) block by block. From compute capability 9.0 on a copy engine loads whole tiles; other
GPUs get pointers instead of tensor descriptors.

Set TRITON_INTERPRET=1 before triton is imported to run all of this on the CPU, slowly.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megaclip.ops.tiles_torch import tf32
from megaclip.ops.tiles_triton_blocks import INTERPRETED, Block, TileConfig, Tiling, cdiv, part
from megaclip.ops.tiles_triton_common import _merge_stats_kernel, _tile_limits_kernel
from megaclip.ops.tiles_triton_kernels import _tile_grads_kernel, _tile_sigmoid_kernel, _tile_stats_kernel
from megaclip.ops.types import Accumulators, Ids, TermVectors, TileOptions


def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    *,
    diagonal: int | None,
    ids: Ids | None,
    options: TileOptions,
) -> tuple[Tensor, Tensor]:
    """Return row (m,) and column (n,) log-sum-exp, float32; see `megaclip.ops.tiles.tile_stats`."""
    m = x.shape[0]
    lse = x.new_full((m + y.shape[0],), -math.inf, dtype=torch.float32)
    row_lse, col_lse = lse[:m], lse[m:]
    tiling = Tiling(x, y, "stats", diagonal, ids, options)
    tile = tiling.tile
    with _launching(tiling):
        row_limits, col_limits = _tile_limits(x, y, row_scale, col_scale, None, tile)
        for block in tiling.blocks(4 / tile.block_n + 4 / tile.block_m):
            row_parts = row_lse.new_empty((block.col_tiles, block.m))
            chunks = cdiv(block.row_tiles, block.chunk)
            col_parts = col_lse.new_full((chunks, block.n), -math.inf)
            _tile_stats_kernel[block.grid(chunks)](
                *block.factors,
                part(row_scale, block.rows),
                part(col_scale, block.cols),
                *block.gaps,
                row_limits[block.rows.start // tile.block_m :],
                col_limits[block.cols.start // tile.block_n :],
                row_parts,
                col_parts,
                *block.sizes,
                *(_stride(row_scale), _stride(col_scale)),
                CHUNK=block.chunk,
                NUM_WARPS=tile.num_warps,
                **block.constants,
            )
            _merge_stats(row_parts, part(row_lse, block.rows), col_parts, part(col_lse, block.cols))
            del row_parts, col_parts  # free them before those of the next block are allocated
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return dx (m, D), dy (n, D), row_dot (m,) and col_dot (n,), float32; see `megaclip.ops.tiles.tile_grads`."""
    m = x.shape[0]
    row_dot, col_dot = None, None
    if need_dots:
        dots = x.new_zeros((m + y.shape[0],), dtype=torch.float32)
        row_dot, col_dot = dots[:m], dots[m:]
    tiling = Tiling(x, y, "grads", diagonal, ids, options)
    tile = tiling.tile
    row_shift, col_shift = row.shift.contiguous(), col.shift.contiguous()
    if values is not None:
        values = values[0].to(tiling.p_dtype), values[1].to(tiling.p_dtype)
    products = _GradientProducts(x, y, need_dx, need_dy, add_to, values)
    with _launching(tiling):
        row_limits, col_limits = _tile_limits(x, y, row.scale, col.scale, (row_shift, col_shift), tile)
        for block in tiling.blocks(tiling.p_dtype.itemsize, keeps_tile=True):
            rows, cols = block.rows, block.cols
            row_parts, col_parts = row_limits, col_limits  # the kernel does not write them
            if need_dots:
                row_parts = row_limits.new_empty((block.col_tiles, block.m))
                col_parts = col_limits.new_empty((block.row_tiles, block.n))
            _tile_grads_kernel[block.grid(block.row_tiles)](
                *block.factors,
                block.p_matrix,
                *(part(row.scale, rows), part(row_shift, rows), part(row.weight, rows)),
                *(part(col.scale, cols), part(col_shift, cols), part(col.weight, cols)),
                *block.gaps,
                row_limits[rows.start // tile.block_m :],
                col_limits[cols.start // tile.block_n :],
                row_parts,
                col_parts,
                *block.sizes,
                *(_stride(row.scale), _stride(col.scale), _stride(row.weight), _stride(col.weight)),
                STORES=tile.stores,
                DOTS=need_dots,
                **block.constants,
            )
            products.add(block)
            if row_dot is not None and col_dot is not None:
                row_dot[rows] += row_parts.sum(0)
                col_dot[cols] += col_parts.sum(0)
    return products.dx, products.dy, row_dot, col_dot


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
    """Return row_loss, dx, dy, row_dot and row_sum, float32; see `megaclip.ops.tiles.tile_sigmoid`."""
    row_results = x.new_zeros((3, len(x)), dtype=torch.float32)
    tiling = Tiling(x, y, "sigmoid", diagonal, ids, options)
    products = _GradientProducts(x, y, need_dx, need_dy, add_to)
    with _launching(tiling):
        for block in tiling.blocks(tiling.p_dtype.itemsize, keeps_tile=True):
            row_parts = row_results.new_empty((3, block.col_tiles, block.m))
            _tile_sigmoid_kernel[block.grid(block.row_tiles)](
                *block.factors,
                block.p_matrix,
                scale,
                bias,
                *block.gaps,
                row_parts,
                *block.sizes,
                **block.constants,
            )
            products.add(block)
            row_results[:, block.rows] += row_parts.sum(1)
    row_loss, row_dot, row_sum = row_results
    return row_loss, products.dx, products.dy, row_dot, row_sum


class _GradientProducts:
    """Add P y to dx and P^T x to dy, float32, block after block.

    add_to: the tensors to add to. Where one is None, a new tensor is allocated, and the first block of its rows or
    columns writes instead of adding. values: the matrices to multiply with. None: those of the blocks, of x and y.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        need_dx: bool,
        need_dy: bool,
        add_to: Accumulators,
        values: tuple[Tensor, Tensor] | None = None,
    ):
        new = torch.empty if len(x) and len(y) else torch.zeros  # without rows or columns no block writes
        self._values = values
        self._adds = tuple(total is not None for total in add_to)
        self.dx, self.dy = (
            (new(features.shape, dtype=torch.float32, device=x.device) if total is None else total) if needed else None
            for needed, features, total in zip((need_dx, need_dy), values or (x, y), add_to, strict=True)
        )

    def add(self, block: Block) -> None:
        """Add the products of one block."""
        assert block.p is not None
        adds_dx, adds_dy = self._adds
        x, y = block.x.product, block.y.product
        if self._values is not None:
            x, y = part(self._values[0], block.rows), part(self._values[1], block.cols)
        if self.dx is not None:
            accumulate = adds_dx or block.cols.start > 0
            _add_product(part(self.dx, block.rows), block.p, y, accumulate=accumulate)
        if self.dy is not None:
            accumulate = adds_dy or block.rows.start > 0
            _add_product(part(self.dy, block.cols), block.p.T, x, accumulate=accumulate)


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """Write a @ b to `out` (float32), or add it if `accumulate`."""
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif INTERPRETED:
        torch.addmm(out, a.float(), b.float(), beta=int(accumulate), out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def _merge_stats(row_parts: Tensor, row_lse: Tensor, col_parts: Tensor, col_lse: Tensor) -> None:
    """Merge partial sums (parts, length), given as base-2 logarithms, into row_lse and col_lse (length,)."""
    (rows, m), (cols, n) = row_parts.shape, col_parts.shape
    grid = (cdiv(m, 64) + cdiv(n, 64),)
    _merge_stats_kernel[grid](row_parts, row_lse, col_parts, col_lse, rows, m, cols, n, BLOCK=64, BLOCK_PARTS=32)


def _tile_limits(
    x: Tensor,
    y: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    shifts: tuple[Tensor, Tensor] | None,
    tile: TileConfig,
) -> tuple[Tensor, Tensor]:
    """Return the limits of each tile of x (row_tiles, 4) and y (col_tiles, 4), float32; see `_side_limits`."""
    (m, embedding), n = x.shape, y.shape[0]
    row_tiles, col_tiles = cdiv(m, tile.block_m), cdiv(n, tile.block_n)
    limits = row_scale.new_empty((row_tiles + col_tiles, 4))
    row_limits, col_limits = limits[:row_tiles], limits[row_tiles:]
    if m and n:
        _tile_limits_kernel[(row_tiles + col_tiles,)](
            *(x, y, row_scale, col_scale, *(shifts or (row_scale, col_scale)), row_limits, col_limits),
            *(m, n, row_tiles, *x.stride(), *y.stride()),
            *(_stride(row_scale), _stride(col_scale)),
            D=embedding,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=128,
            HAS_SHIFT=shifts is not None,
            num_warps=8,
        )
    return row_limits, col_limits


def _stride(vector: Tensor) -> int:
    """Return 0 for a number that is repeated, 1 for a vector."""
    return min(vector.stride(0), 1)


@contextlib.contextmanager
def _launching(tiling: Tiling) -> Iterator[None]:
    """Make x's device the current one, where Triton launches, and set whether the library may use TF32."""
    device = torch.cuda.device(tiling.x.device) if tiling.x.is_cuda else contextlib.nullcontext()
    with tf32(not tiling.exact), device:
        yield
