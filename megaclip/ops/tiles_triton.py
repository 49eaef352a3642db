"""The tile operations on CUDA: launchers of the kernels in `tiles_triton_kernels.py`, block by block
(`tiles_triton_blocks.py`).

`tiles.py` calls these with checked tensors. A call is cut into blocks of rows and columns whose buffers stay within
`tile_budget_mib`, however large the matrix of similarities is:

* statistics: one kernel per block takes both directions' partial sums from one product; a second one merges them into
  the running log-sum-exp of rows and columns.
* gradients, sigmoid: one kernel per block writes P, rounded to the product's dtype, into a buffer that all blocks
  share; two library products with float32 accumulation then add `P y` to dx and `P^T x` to dy. So the wide
  accumulators (up to 2048 columns) never meet the register file, and the library runs them at its full rate.

Precision: "bf16" rounds features to bfloat16; "tf32" multiplies float32 features in TF32; "float32" multiplies them
exactly, with the library, into the same buffer that P then overwrites; "auto" takes features as they are. With 16-bit
features P is rounded to bfloat16 for its two products (and so are float16 features there: P spans more orders of
magnitude than float16 holds). All accumulate in float32. Features that the copy engine cannot read in place (another
dtype, rows not contiguous or not aligned to 16 bytes) are staged block by block.

Set TRITON_INTERPRET=1 before triton is imported to run all of this on the CPU, slowly.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megaclip.ops.tiles_triton_blocks import INTERPRETED, Block, TileConfig, Tiling, cdiv, part
from megaclip.ops.tiles_triton_common import _merge_stats_kernel, _tile_limits_kernel
from megaclip.ops.tiles_triton_kernels import _tile_grads_kernel, _tile_sigmoid_kernel, _tile_stats_kernel

Scalars = float | Tensor  # a number, or one value per row or per column


def tile_stats(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    col_scale: Scalars,
    *,
    diagonal: int | None = None,
    precision: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor]:
    """Row (m,) and column (n,) log-sum-exp, float32; see `megaclip.ops.tiles.tile_stats`."""
    m = x.shape[0]
    lse = x.new_full((m + y.shape[0],), -math.inf, dtype=torch.float32)
    row_lse, col_lse = lse[:m], lse[m:]
    tiling = Tiling(x, y, "stats", precision, diagonal, tile_budget_mib)
    tile = tiling.tile
    row_scale, col_scale = _vector(row_scale, x), _vector(col_scale, y)
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
            del row_parts, col_parts  # before the next block's are allocated
    return row_lse, col_lse


def tile_grads(
    x: Tensor,
    y: Tensor,
    row_scale: Scalars,
    row_shift: Scalars,
    row_weight: Scalars,
    col_scale: Scalars,
    col_shift: Scalars,
    col_weight: Scalars,
    *,
    diagonal: int | None = None,
    need_dx: bool = True,
    need_dy: bool = True,
    need_dots: bool = True,
    add_to: tuple[Tensor | None, Tensor | None] = (None, None),
    precision: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """dx (m, D), dy (n, D), row_dot (m,), col_dot (n,), float32; see `megaclip.ops.tiles.tile_grads`.

    need_dots=False leaves row_dot and col_dot at zero and is faster: `sum(x * dx)` is the sum of both.
    """
    m = x.shape[0]
    dots = x.new_zeros((m + y.shape[0],), dtype=torch.float32)
    row_dot, col_dot = dots[:m], dots[m:]
    tiling = Tiling(x, y, "grads", precision, diagonal, tile_budget_mib)
    tile = tiling.tile
    row_scale, row_shift, row_weight = (_vector(value, x) for value in (row_scale, row_shift, row_weight))
    col_scale, col_shift, col_weight = (_vector(value, y) for value in (col_scale, col_shift, col_weight))
    row_shift, col_shift = row_shift.contiguous(), col_shift.contiguous()
    products = _GradientProducts(x, y, need_dx, need_dy, add_to)
    with _launching(tiling):
        row_limits, col_limits = _tile_limits(x, y, row_scale, col_scale, (row_shift, col_shift), tile)
        for block in tiling.blocks(tiling.p_dtype.itemsize, keeps_tile=True):
            rows, cols = block.rows, block.cols
            row_parts, col_parts = row_dot, col_dot  # not written
            if need_dots:
                row_parts = row_dot.new_empty((block.col_tiles, block.m))
                col_parts = col_dot.new_empty((block.row_tiles, block.n))
            _tile_grads_kernel[block.grid(block.row_tiles)](
                *block.factors,
                block.p_descriptor,
                *(part(row_scale, rows), part(row_shift, rows), part(row_weight, rows)),
                *(part(col_scale, cols), part(col_shift, cols), part(col_weight, cols)),
                row_limits[rows.start // tile.block_m :],
                col_limits[cols.start // tile.block_n :],
                row_parts,
                col_parts,
                *block.sizes,
                *(_stride(row_scale), _stride(col_scale), _stride(row_weight), _stride(col_weight)),
                STORES=tile.stores,
                DOTS=need_dots,
                **block.constants,
            )
            products.add(block)
            if need_dots:
                row_dot[rows] += row_parts.sum(0)
                col_dot[cols] += col_parts.sum(0)
    return products.dx, products.dy, row_dot, col_dot


def tile_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    diagonal: int | None = None,
    need_dx: bool = True,
    need_dy: bool = True,
    add_to: tuple[Tensor | None, Tensor | None] = (None, None),
    precision: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """row_loss (m,), dx (m, D), dy (n, D), row_dot (m,), row_sum (m,), float32, of the sigmoid loss's negatives in
    one pass.

    With `z_ij = scale*s_ij + bias`, `P_ij = sigmoid(z_ij)`: `row_loss_i = sum_j softplus(z_ij)`, `dx = P y`, `dy =
    P^T x`, `row_dot_i = sum_j P_ij*s_ij`, `row_sum_i = sum_j P_ij` (SigLIP, equation 1, without its positives and its
    factor 1/B).
    """
    row_results = x.new_zeros((3, len(x)), dtype=torch.float32)
    tiling = Tiling(x, y, "sigmoid", precision, diagonal, tile_budget_mib)
    scale, bias = _vector(scale, x[:1]), _vector(bias, x[:1])
    products = _GradientProducts(x, y, need_dx, need_dy, add_to)
    with _launching(tiling):
        for block in tiling.blocks(tiling.p_dtype.itemsize, keeps_tile=True):
            row_parts = row_results.new_empty((3, block.col_tiles, block.m))
            _tile_sigmoid_kernel[block.grid(block.row_tiles)](
                *block.factors,
                block.p_descriptor,
                scale,
                bias,
                row_parts,
                *block.sizes,
                **block.constants,
            )
            products.add(block)
            row_results[:, block.rows] += row_parts.sum(1)
    row_loss, row_dot, row_sum = row_results
    return row_loss, products.dx, products.dy, row_dot, row_sum


class _GradientProducts:
    """dx += P y and dy += P^T x, block after block, float32."""

    def __init__(self, x: Tensor, y: Tensor, need_dx: bool, need_dy: bool, add_to: tuple[Tensor | None, Tensor | None]):
        """add_to: accumulators; where there is none, the first block of a row or column writes instead of adding."""
        new = torch.empty if len(x) and len(y) else torch.zeros  # zeros: no block will come
        self._adds = tuple(total is not None for total in add_to)
        self.dx, self.dy = (
            (new(features.shape, dtype=torch.float32, device=x.device) if total is None else total) if needed else None
            for needed, features, total in ((need_dx, x, add_to[0]), (need_dy, y, add_to[1]))
        )

    def add(self, block: Block) -> None:
        """Add one block's products."""
        assert block.p is not None
        adds_dx, adds_dy = self._adds
        if self.dx is not None:
            accumulate = adds_dx or block.cols.start > 0
            _add_product(part(self.dx, block.rows), block.p, block.y.product, accumulate=accumulate)
        if self.dy is not None:
            accumulate = adds_dy or block.rows.start > 0
            _add_product(part(self.dy, block.cols), block.p.T, block.x.product, accumulate=accumulate)


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """out (float32) = a @ b, added to what it holds if `accumulate`."""
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif INTERPRETED:
        torch.addmm(out, a.float(), b.float(), beta=int(accumulate), out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def _merge_stats(row_parts: Tensor, row_lse: Tensor, col_parts: Tensor, col_lse: Tensor) -> None:
    """Merge base-2 logarithms of partial sums (parts, length) into row_lse and col_lse (length,)."""
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
    """(row_tiles, 4) and (col_tiles, 4) float32: what the tile kernels need to know of each tile of x and y."""
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


def _vector(value: Scalars, like: Tensor) -> Tensor:
    """A number, or one value per row of `like`, as a float32 vector; one number is repeated with stride 0."""
    count = like.shape[0]
    if not isinstance(value, Tensor):
        return like.new_full((1,), value, dtype=torch.float32).expand(count)
    value = value.to(like.device, torch.float32)
    if value.shape == (count,) and value.stride() in ((0,), (1,)):
        return value
    return value.reshape(-1).expand(count) if value.numel() == 1 else value.reshape(count).contiguous()


def _stride(vector: Tensor) -> int:
    """0 where one number stands for all, else 1."""
    return min(vector.stride(0), 1)


@contextlib.contextmanager
def _launching(tiling: Tiling) -> Iterator[None]:
    """Make x's device the current one (Triton launches there), and set what the library may round float32 products
    to."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not tiling.exact
    try:
        with torch.cuda.device(tiling.x.device) if tiling.x.is_cuda else contextlib.nullcontext():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
