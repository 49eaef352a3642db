"""Cut a call of the Triton tiles into blocks that stay within the tile budget, and prepare the launch arguments.

A block is the work of one launch: some rows of x and some rows of y. All blocks share one buffer for P, or for exact
logits, which P overwrites. Features that the kernels cannot read in place are staged for one block at a time.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megaclip.ops.tiles_triton_common import GAP_LIMITS, _gaps_kernel
from megaclip.ops.tiles_triton_kernels import _tile_stats_kernel
from megaclip.ops.types import NO_NEGATIVE, Ids, TileOptions

INTERPRETED = not isinstance(_tile_stats_kernel, triton.JITFunction)
# A diagonal outside of every block.
_NO_DIAGONAL = 1 << 30


@dataclass(frozen=True)
class TileConfig:
    """Shape and launch parameters of the tiles of one kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    group: int = 8  # number of column tiles that neighbouring programs share
    stores: int = 1  # number of pieces in which the gradient kernel writes a tile of P


# For Hopper, measured on an H200. Two programs share a multiprocessor, so that the epilogue of one runs during the
# products of the other; 32 KiB per stage and a piece of P fill the shared memory. The sigmoid kernel is faster with one
# program.
TILES = {
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
# For other GPUs, which have 99 KiB of shared memory or more. Chosen from the compilers' reports (shared memory, spilled
# registers, width of copies), not measured.
SMALL_TILES = TILES | {
    ("bf16", "stats"): TileConfig(128, 128, 64, num_warps=8, num_stages=3),
    ("bf16", "grads"): TileConfig(128, 128, 64, num_warps=8, num_stages=3, stores=2),
    ("bf16", "sigmoid"): TileConfig(128, 128, 64, num_warps=8, num_stages=3),
    ("tf32", "stats"): TileConfig(128, 128, 32, num_warps=8, num_stages=3),
    ("tf32", "grads"): TileConfig(128, 128, 32, num_warps=8, num_stages=3, stores=2),
    ("float32", "grads"): TileConfig(64, 128, 64, num_warps=8, num_stages=2),
}
# For B200, whose threads hold whole rows of a tile: only half as many columns fit into the registers. Also chosen from
# the compilers' reports.
B200_TILES = SMALL_TILES | {
    ("bf16", "stats"): TileConfig(128, 64, 64, num_warps=8, num_stages=3),
    ("bf16", "grads"): TileConfig(128, 64, 64, num_warps=8, num_stages=3),
    ("tf32", "stats"): TileConfig(128, 64, 32, num_warps=8, num_stages=3),
    ("tf32", "grads"): TileConfig(128, 64, 32, num_warps=8, num_stages=3),
}
_INTERPRETER_TILES = dict.fromkeys(TILES, TileConfig(32, 64, 32, num_warps=2, num_stages=1, group=2, stores=2))
_INTERPRETER_PROGRAMS = 3


class Tiling:
    """The blocks of one call and the buffer that they share. kernel: "stats", "grads" or "sigmoid"."""

    def __init__(self, x: Tensor, y: Tensor, kernel: str, diagonal: int | None, ids: Ids | None, options: TileOptions):
        self.x, self.y = x, y
        precision: str = options.precision
        if precision == "auto":
            precision = "float32" if x.dtype == torch.float32 else "bf16"
            self.dtype = x.dtype
        else:
            self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        # P spans more orders of magnitude than float16 can represent.
        self.p_dtype = torch.bfloat16 if self.dtype == torch.float16 else self.dtype
        self.exact = precision == "float32"
        tiles, self.pointers = tiles_of(x.device)
        self.tile = tiles[precision, kernel]
        self.stores = 4 if kernel == "sigmoid" else self.tile.stores
        self.diagonal = diagonal
        self.ids = ids
        self.gaps: tuple[Tensor, Tensor] | None = None
        self.budget_bytes = options.tile_budget_mib * 2**20

    def blocks(self, bytes_per_entry: float, *, keeps_tile: bool = False) -> Iterator["Block"]:
        """Yield the blocks in row-major order.

        bytes_per_entry: number of bytes of P or of partial sums that a kernel writes per entry of a block.
        keeps_tile: True if the kernel needs the buffer of P. Exact products always need it, for the logits.
        """
        (m, depth), n = self.x.shape, len(self.y)
        if m == 0 or n == 0:
            return
        if self.ids is not None:
            self.gaps = _gaps(self.ids, self.tile)
        bytes_per_entry += 4 if self.exact and not keeps_tile else 0
        row_bytes, col_bytes = (
            sum(depth * dtype.itemsize for dtype in {self.dtype, self.p_dtype} if not _readable(side, dtype))
            for side in (self.x, self.y)
        )
        col_bytes *= 2  # the columns of the previous block are still allocated while those of a block are staged
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
            x = _Side(part(self.x, rows), self)
            for col0 in range(0, n, cols_per_block):
                cols = slice(col0, min(col0 + cols_per_block, n))
                yield Block(self, rows, cols, x, _Side(part(self.y, cols), self), buffer)

    def matrix(self, values: Tensor, height: int, width: int) -> TensorDescriptor | tuple[Tensor, int]:
        """Return a matrix in the form in which the kernels read or write blocks (height, width) of it."""
        if self.pointers:
            return values, values.stride(0)
        return TensorDescriptor.from_tensor(values, [height, width])

    def _even(self, total: int, limit: float) -> int:
        """Return a block length that cuts `total` evenly: at most `limit`, but at least one quantum."""
        quantum = max(self.tile.block_m, self.tile.block_n)
        limit = max(quantum, int(limit) // quantum * quantum)
        return cdiv(cdiv(total, cdiv(total, limit)), quantum) * quantum


class _Side:
    """Rows of x or y, as the kernels and the library products read them."""

    def __init__(self, features: Tensor, tiling: Tiling):
        self.kernel = _staged(features, tiling.dtype)
        self.product = _staged(features, tiling.p_dtype) if tiling.p_dtype != tiling.dtype else self.kernel


class Block:
    """One launch: the rows and columns of a tiling that it covers, and the arguments that all kernels share."""

    def __init__(self, tiling: Tiling, rows: slice, cols: slice, x: _Side, y: _Side, buffer: Tensor | None):
        tile = tiling.tile
        self.rows, self.cols, self.x, self.y = rows, cols, x, y
        self.m, self.n = x.kernel.shape[0], y.kernel.shape[0]
        self.p: Tensor | None = None
        if buffer is not None:
            pitch = _aligned(self.n)
            self.p = buffer[: self.m * pitch].view(self.m, pitch)[:, : self.n]
            self.p_matrix = tiling.matrix(self.p, tile.block_m, tile.block_n // tiling.stores)
        if tiling.exact:
            assert self.p is not None, "exact logits have a buffer"
            torch.mm(x.kernel, y.kernel.T, out=self.p)
            logits = tiling.matrix(self.p, tile.block_m, tile.block_n)
            self.factors = (logits, logits)
        else:
            self.factors = (
                tiling.matrix(x.kernel, tile.block_m, tile.block_k),
                tiling.matrix(y.kernel, tile.block_n, tile.block_k),
            )
        diagonal = _NO_DIAGONAL if tiling.diagonal is None else tiling.diagonal + rows.start - cols.start
        diagonal = max(-_NO_DIAGONAL, min(diagonal, _NO_DIAGONAL))
        self.programs = _program_count(tiling.x.device, tile)
        self.row_tiles, self.col_tiles = cdiv(self.m, tile.block_m), cdiv(self.n, tile.block_n)
        # Row tiles per work item of the statistics. Four share one column reduction, if every program still has work.
        self.chunk = 4 if self.row_tiles * self.col_tiles >= 16 * self.programs else 1
        self.sizes = (self.m, self.n, diagonal, cols.start)
        # Without ids the kernels read neither pointer.
        self.gaps = (x.kernel, x.kernel)
        if tiling.gaps is not None:
            self.gaps = part(tiling.gaps[0], rows), tiling.gaps[1][rows.start // tile.block_m :]
        self.constants = dict(
            D=tiling.x.shape[1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP=tile.group,
            LOADED=tiling.exact,
            POINTERS=tiling.pointers,
            HAS_IDS=tiling.gaps is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def grid(self, item_rows: int) -> tuple[int]:
        """Return the persistent grid for item_rows x col_tiles work items."""
        return (min(self.programs, item_rows * self.col_tiles),)


def _gaps(ids: Ids, tile: TileConfig) -> tuple[Tensor, Tensor]:
    """Return the gaps (m, 2) of the rows and those of the tiles (row_tiles, GAP_LIMITS), int32, for the kernels.

    The ids of the columns ascend, so the columns with one id are neighbours, and NO_NEGATIVE comes first. If the ids of
    the rows ascend too, few tiles have gaps.
    """
    row_ids, col_ids = (side.contiguous() for side in ids)
    (m, n), tiles = (len(row_ids), len(col_ids)), cdiv(len(row_ids), tile.block_m)
    gaps, tile_gaps = (row_ids.new_empty(size, dtype=torch.int32) for size in ((m, 2), (tiles, GAP_LIMITS.value)))
    step = 1 << (n.bit_length() - 1)
    _gaps_kernel[(tiles,)](row_ids, col_ids, gaps, tile_gaps, m, n, step, NO_NEGATIVE, BLOCK_M=tile.block_m)
    return gaps, tile_gaps


@functools.cache
def tiles_of(device: torch.device) -> tuple[dict[tuple[str, str], TileConfig], bool]:
    """Return the tiles for a device, and whether the kernels get pointers instead of tensor descriptors."""
    return (_INTERPRETER_TILES, False) if INTERPRETED else tiles_for(torch.cuda.get_device_capability(device)[0])


def tiles_for(capability: int) -> tuple[dict[tuple[str, str], TileConfig], bool]:
    """Return the result of `tiles_of` for GPUs with this first number of the compute capability, from 8 on.

    Before 9 there is no copy engine. Triton replaces descriptors with loads of single elements there, which are slow.
    """
    return {9: TILES, 10: B200_TILES}.get(capability, SMALL_TILES), capability < 9


def _readable(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernels can read x in place."""
    return x.dtype == dtype and x.stride(1) == 1 and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _staged(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x if the kernels can read it in place, else a copy that they can read."""
    if _readable(x, dtype):
        return x
    copy = x.new_empty((len(x), _aligned(x.shape[1])), dtype=dtype)[:, : x.shape[1]]
    return copy.copy_(x)


def part(vector: Tensor, span: slice) -> Tensor:
    """Return vector[span], without the cost of slicing if the span covers the vector."""
    return vector if span.stop - span.start == vector.shape[0] else vector[span]


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up (triton.cdiv takes microseconds on the host)."""
    return -(-a // b)


def _aligned(length: int) -> int:
    """Return the length rounded up, so that rows of any dtype start at multiples of 16 bytes."""
    return cdiv(length, 16) * 16


def _program_count(device: torch.device, tile: TileConfig) -> int:
    """Return the number of programs of a persistent grid."""
    if INTERPRETED:
        return _INTERPRETER_PROGRAMS
    return _multiprocessors(device) * tile.programs_per_sm


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
