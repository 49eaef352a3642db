"""The tile operations on CUDA: launchers of the kernels in `tiles_triton_kernels.py`.

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
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megaclip.ops.tiles_triton_kernels import (
    _merge_stats_kernel,
    _tile_grads_kernel,
    _tile_limits_kernel,
    _tile_sigmoid_kernel,
    _tile_stats_kernel,
)

Scalars = float | Tensor  # a number, or one value per row or per column

_INTERPRETED = not isinstance(_tile_stats_kernel, triton.JITFunction)
# No row of a block meets this diagonal.
_NO_DIAGONAL = 1 << 30


@dataclass(frozen=True)
class TileConfig:
    """Shape and launch parameters of one kernel's tiles."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    group: int = 8  # column tiles that neighbouring programs share
    stores: int = 1  # pieces in which the gradients' kernel writes a tile of P


# Measured on an H200. Two programs share a multiprocessor, so that one's epilogue hides behind the other's products;
# 32 KiB per stage and a piece of P fill their shared memory. The sigmoid's epilogue, in pieces, is better off alone.
_TILES = {
    ("bf16", "stats"): TileConfig(128, 128, 64, num_warps=4, num_stages=3, programs_per_sm=2),
    ("bf16", "grads"): TileConfig(128, 128, 64, num_warps=4, num_stages=3, programs_per_sm=2, stores=2),
    ("bf16", "sigmoid"): TileConfig(128, 256, 64, num_warps=8, num_stages=3),
    ("tf32", "stats"): TileConfig(128, 128, 32, num_warps=4, num_stages=3, programs_per_sm=2),
    ("tf32", "grads"): TileConfig(128, 128, 32, num_warps=8, num_stages=3),
    ("tf32", "sigmoid"): TileConfig(128, 128, 32, num_warps=8, num_stages=3),
    ("float32", "stats"): TileConfig(64, 128, 64, num_warps=4, num_stages=2),
    ("float32", "grads"): TileConfig(64, 128, 64, num_warps=4, num_stages=2),
    ("float32", "sigmoid"): TileConfig(64, 128, 64, num_warps=4, num_stages=2),
}
_INTERPRETER_TILE = TileConfig(32, 64, 32, num_warps=2, num_stages=1, group=2, stores=2)
_INTERPRETER_PROGRAMS = 3


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
    row_lse = x.new_full((len(x),), -math.inf, dtype=torch.float32)
    col_lse = x.new_full((len(y),), -math.inf, dtype=torch.float32)
    plan = _Plan(x, y, "stats", precision, diagonal, tile_budget_mib)
    tile = plan.tile
    row_scale, col_scale = _vector(row_scale, x), _vector(col_scale, y)
    with _launching(plan):
        row_limits, col_limits = _tile_limits(x, y, row_scale, col_scale, None, tile)
        for block in plan.blocks(4 / tile.block_n + 4 / tile.block_m):
            row_parts = row_lse.new_empty((block.col_tiles, block.m))
            chunks = _cdiv(block.row_tiles, block.chunk)
            col_parts = col_lse.new_full((chunks, block.n), -math.inf)
            _tile_stats_kernel[block.grid(chunks)](
                *block.factors,
                _part(row_scale, block.rows),
                _part(col_scale, block.cols),
                row_limits[block.rows.start // tile.block_m :],
                col_limits[block.cols.start // tile.block_n :],
                row_parts,
                col_parts,
                *block.sizes,
                CHUNK=block.chunk,
                NUM_WARPS=tile.num_warps,
                **block.constants,
            )
            _merge_stats(row_parts, _part(row_lse, block.rows), col_parts, _part(col_lse, block.cols))
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
    precision: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """dx (m, D), dy (n, D), row_dot (m,), col_dot (n,), float32; see `megaclip.ops.tiles.tile_grads`.

    need_dots=False leaves row_dot and col_dot at zero and is faster: `sum(x * dx)` is the sum of both.
    """
    row_dot, col_dot = (t.new_zeros((len(t),), dtype=torch.float32) for t in (x, y))
    plan = _Plan(x, y, "grads", precision, diagonal, tile_budget_mib)
    tile = plan.tile
    row_scale, row_shift, row_weight = (_vector(value, x) for value in (row_scale, row_shift, row_weight))
    col_scale, col_shift, col_weight = (_vector(value, y) for value in (col_scale, col_shift, col_weight))
    products = _GradientProducts(x if need_dx else None, y if need_dy else None, empty=not len(x) or not len(y))
    with _launching(plan):
        row_limits, col_limits = _tile_limits(x, y, row_scale, col_scale, (row_shift, col_shift), tile)
        for block in plan.blocks(plan.p_dtype.itemsize, keeps_tile=True):
            rows, cols = block.rows, block.cols
            row_parts, col_parts = row_dot, col_dot  # not written
            if need_dots:
                row_parts = row_dot.new_empty((block.col_tiles, block.m))
                col_parts = col_dot.new_empty((block.row_tiles, block.n))
            _tile_grads_kernel[block.grid(block.row_tiles)](
                *block.factors,
                block.p_descriptor,
                *(_part(row_scale, rows), _part(row_shift, rows), _part(row_weight, rows)),
                *(_part(col_scale, cols), _part(col_shift, cols), _part(col_weight, cols)),
                row_limits[rows.start // tile.block_m :],
                col_limits[cols.start // tile.block_n :],
                row_parts,
                col_parts,
                *block.sizes,
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
    precision: str = "auto",
    tile_budget_mib: float = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """row_loss (m,), dx (m, D), dy (n, D), row_dot (m,), row_sum (m,), float32, of the sigmoid loss's negatives in
    one pass.

    With `z_ij = scale*s_ij + bias`, `P_ij = sigmoid(z_ij)`: `row_loss_i = sum_j softplus(z_ij)`, `dx = P y`, `dy =
    P^T x`, `row_dot_i = sum_j P_ij*s_ij`, `row_sum_i = sum_j P_ij` (SigLIP, equation 1, without its positives and its
    factor 1/B).
    """
    row_results = x.new_zeros((3, len(x)), dtype=torch.float32)
    plan = _Plan(x, y, "sigmoid", precision, diagonal, tile_budget_mib)
    scale, bias = _vector(scale, x[:1]), _vector(bias, x[:1])
    products = _GradientProducts(x, y, empty=not len(x) or not len(y))
    with _launching(plan):
        for block in plan.blocks(plan.p_dtype.itemsize, keeps_tile=True):
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
    assert products.dx is not None and products.dy is not None
    row_loss, row_dot, row_sum = row_results
    return row_loss, products.dx, products.dy, row_dot, row_sum


class _Plan:
    """How one call is cut into blocks, and the buffers the blocks share."""

    def __init__(self, x: Tensor, y: Tensor, kernel: str, precision: str, diagonal: int | None, tile_budget_mib: float):
        self.x, self.y = x, y
        if precision == "auto":
            precision = "float32" if x.dtype == torch.float32 else "bf16"
            self.dtype = x.dtype
        else:
            self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        # float16 has too few exponents for P.
        self.p_dtype = torch.bfloat16 if self.dtype == torch.float16 else self.dtype
        self.exact = precision == "float32"
        self.tile = _INTERPRETER_TILE if _INTERPRETED else _TILES[precision, kernel]
        self.stores = 4 if kernel == "sigmoid" else self.tile.stores
        self.diagonal = diagonal
        self.budget_bytes = tile_budget_mib * 2**20

    def blocks(self, bytes_per_entry: float, *, keeps_tile: bool = False) -> Iterator["_Block"]:
        """Blocks in row-major order. bytes_per_entry: what a kernel writes for each entry of a block (P or partial
        sums).

        keeps_tile: the blocks need the buffer of P; exact products need it anyway, for the logits.
        """
        (m, depth), n = self.x.shape, len(self.y)
        if m == 0 or n == 0:
            return
        bytes_per_entry += 4 if self.exact and not keeps_tile else 0
        row_bytes, col_bytes = (
            sum(depth * dtype.itemsize for dtype in {self.dtype, self.p_dtype} if not _readable(side, dtype))
            for side in (self.x, self.y)
        )
        col_bytes *= 2  # a block's columns are staged while those of the block before are still held
        # side**2 * bytes_per_entry + side * (row_bytes + col_bytes) = budget
        half = (row_bytes + col_bytes) / (2 * bytes_per_entry)
        side = math.sqrt(half**2 + self.budget_bytes / bytes_per_entry) - half
        rows_per_block = self._even(m, side)
        room = self.budget_bytes - rows_per_block * row_bytes
        cols_per_block = self._even(n, room / (rows_per_block * bytes_per_entry + col_bytes))
        buffer = None
        if self.exact or keeps_tile:
            buffer = self.x.new_empty(min(rows_per_block, m) * _aligned(min(cols_per_block, n)), dtype=self.p_dtype)
        for row0 in range(0, m, rows_per_block):
            rows = slice(row0, min(row0 + rows_per_block, m))
            x = _Side(_part(self.x, rows), self)
            for col0 in range(0, n, cols_per_block):
                cols = slice(col0, min(col0 + cols_per_block, n))
                yield _Block(self, rows, cols, x, _Side(_part(self.y, cols), self), buffer)

    def _even(self, total: int, limit: float) -> int:
        """A block length of at most `limit` (but at least one quantum) that cuts `total` evenly."""
        quantum = max(self.tile.block_m, self.tile.block_n)
        limit = max(quantum, int(limit) // quantum * quantum)
        return _cdiv(_cdiv(total, _cdiv(total, limit)), quantum) * quantum


class _Side:
    """Rows of x or y as the kernels and the library products take them."""

    def __init__(self, features: Tensor, plan: _Plan):
        self.kernel = _staged(features, plan.dtype)
        self.product = _staged(features, plan.p_dtype) if plan.p_dtype != plan.dtype else self.kernel


class _Block:
    """One launch: rows x cols of a plan, with the arguments that all kernels share."""

    def __init__(self, plan: _Plan, rows: slice, cols: slice, x: _Side, y: _Side, buffer: Tensor | None):
        tile = plan.tile
        self.rows, self.cols, self.x, self.y = rows, cols, x, y
        self.m, self.n = x.kernel.shape[0], y.kernel.shape[0]
        self.p: Tensor | None = None
        if buffer is not None:
            pitch = _aligned(self.n)
            self.p = buffer[: self.m * pitch].view(self.m, pitch)[:, : self.n]
            self.p_descriptor = TensorDescriptor.from_tensor(self.p, [tile.block_m, tile.block_n // plan.stores])
        if plan.exact:
            torch.mm(x.kernel, y.kernel.T, out=self.p)
            logits = TensorDescriptor.from_tensor(self.p, [tile.block_m, tile.block_n])
            self.factors = (logits, logits)
        else:
            self.factors = (
                TensorDescriptor.from_tensor(x.kernel, [tile.block_m, tile.block_k]),
                TensorDescriptor.from_tensor(y.kernel, [tile.block_n, tile.block_k]),
            )
        diagonal = _NO_DIAGONAL if plan.diagonal is None else plan.diagonal + rows.start - cols.start
        diagonal = max(-_NO_DIAGONAL, min(diagonal, _NO_DIAGONAL))
        self.programs = _program_count(plan.x.device, tile)
        self.row_tiles, self.col_tiles = _cdiv(self.m, tile.block_m), _cdiv(self.n, tile.block_n)
        # Row tiles per work item of the statistics: four share one column reduction, if there is work enough for all.
        self.chunk = 4 if self.row_tiles * self.col_tiles >= 16 * self.programs else 1
        self.sizes = (self.m, self.n, diagonal)
        self.constants = dict(
            D=plan.x.shape[1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP=tile.group,
            LOADED=plan.exact,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def grid(self, item_rows: int) -> tuple[int]:
        """A persistent grid for item_rows x col_tiles work items."""
        return (min(self.programs, item_rows * self.col_tiles),)


class _GradientProducts:
    """dx += P y and dy += P^T x, block after block, float32."""

    def __init__(self, x: Tensor | None, y: Tensor | None, *, empty: bool):
        """x, y: the sides whose gradient is needed. empty: no block will come."""
        new = torch.zeros if empty else torch.empty
        self.dx = None if x is None else new(x.shape, dtype=torch.float32, device=x.device)
        self.dy = None if y is None else new(y.shape, dtype=torch.float32, device=y.device)

    def add(self, block: _Block) -> None:
        """Add one block's products; the first block of a row or column writes instead."""
        assert block.p is not None
        if self.dx is not None:
            _add_product(_part(self.dx, block.rows), block.p, block.y.product, accumulate=block.cols.start > 0)
        if self.dy is not None:
            _add_product(_part(self.dy, block.cols), block.p.T, block.x.product, accumulate=block.rows.start > 0)


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """out (float32) = a @ b, added to what it holds if `accumulate`."""
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif _INTERPRETED:
        torch.addmm(out, a.float(), b.float(), beta=int(accumulate), out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def _merge_stats(row_parts: Tensor, row_lse: Tensor, col_parts: Tensor, col_lse: Tensor) -> None:
    """Merge base-2 logarithms of partial sums (parts, length) into row_lse and col_lse (length,)."""
    (rows, m), (cols, n) = row_parts.shape, col_parts.shape
    grid = (_cdiv(m, 64) + _cdiv(n, 64),)
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
    row_tiles, col_tiles = _cdiv(m, tile.block_m), _cdiv(n, tile.block_n)
    limits = row_scale.new_empty((row_tiles + col_tiles, 4))
    row_limits, col_limits = limits[:row_tiles], limits[row_tiles:]
    if m and n:
        _tile_limits_kernel[(row_tiles + col_tiles,)](
            *(x, y, row_scale, col_scale, *(shifts or (row_scale, col_scale)), row_limits, col_limits),
            *(m, n, row_tiles, *x.stride(), *y.stride()),
            D=embedding,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=128,
            HAS_SHIFT=shifts is not None,
            num_warps=8,
        )
    return row_limits, col_limits


def _vector(value: Scalars, like: Tensor) -> Tensor:
    """A number, or one value per row of `like`, as a contiguous float32 vector."""
    count = like.shape[0]
    if not isinstance(value, Tensor):
        return like.new_full((count,), value, dtype=torch.float32)
    if value.dtype == torch.float32 and value.shape == (count,) and value.is_contiguous():
        return value
    return value.to(like.device, torch.float32).reshape(-1)[:count].expand(count).contiguous()


def _readable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the copy engine can read x where it is."""
    return x.dtype == dtype and x.stride(1) == 1 and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _staged(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x itself if the copy engine can read it, else a copy that it can."""
    if _readable(x, dtype):
        return x
    copy = x.new_empty((len(x), _aligned(x.shape[1])), dtype=dtype)[:, : x.shape[1]]
    return copy.copy_(x)


def _part(vector: Tensor, span: slice) -> Tensor:
    """vector[span], without the cost of slicing where that is all of it."""
    return vector if span.stop - span.start == vector.shape[0] else vector[span]


def _cdiv(a: int, b: int) -> int:
    """a / b, rounded up (triton.cdiv takes microseconds on the host)."""
    return -(-a // b)


def _aligned(length: int) -> int:
    """length, rounded up so that rows of any dtype start at multiples of 16 bytes."""
    return _cdiv(length, 16) * 16


def _program_count(device: torch.device, tile: TileConfig) -> int:
    """The size of a persistent grid."""
    if _INTERPRETED:
        return _INTERPRETER_PROGRAMS
    return _multiprocessors(device) * tile.programs_per_sm


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextlib.contextmanager
def _launching(plan: _Plan) -> Iterator[None]:
    """Make x's device the current one (Triton launches there), and set what the library may round float32 products
    to."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not plan.exact
    try:
        with torch.cuda.device(plan.x.device) if plan.x.is_cuda else contextlib.nullcontext():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
