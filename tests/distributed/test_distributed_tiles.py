"""Compare the tile operations over all ranks with the whole matrix, for scales, shifts and weights per sample.

ClipLoss uses one scale for all samples. Losses with per-sample temperatures or estimators require vectors and the dots.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size, resolve
from megaclip.losses.distributed_tiles import distributed_grads, distributed_stats, gather_columns
from megaclip.losses.way import Way
from megaclip.ops.types import Terms, TileOptions
from tests import reference
from tests.distributed.harness import run_ranks
from tests.tolerances import GRADIENT, VALUE, assert_close


def ways() -> Iterator[Way]:
    for exchange, reduction in itertools.product(("ring", "all_gather"), ("feature", "scalar")):
        yield Way(resolve(), exchange, reduction, TileOptions(tile_budget_mib=0.005))


def check(batch: int, vectors: frozenset[int]) -> None:
    """Check one case. Values 0 to 2 are the scale, shift and weight of the rows; 3 to 5 are those of the columns.

    vectors: the values that differ between samples. The others are numbers.
    """
    generator = torch.Generator().manual_seed(batch)
    total = batch * group_size()
    x, y = F.normalize(torch.randn(2, total, 9, generator=generator, dtype=torch.float64), dim=2)
    everyone: list[Tensor | float] = [
        1 + 5 * torch.rand(total, generator=generator, dtype=torch.float64) if index in vectors else 0.7 + index
        for index in range(6)
    ]
    mine = slice(batch * group_rank(), batch * (group_rank() + 1))
    local = [value[mine] if isinstance(value, Tensor) else value for value in everyone]
    expected_stats = reference.tile_stats(x, y, everyone[0], everyone[3], diagonal=0)
    expected_grads = reference.tile_grads(x, y, Terms(*everyone[:3]), Terms(*everyone[3:]), diagonal=0)
    for way in ways():
        y_all = gather_columns(y[mine], way)
        stats = distributed_stats(x[mine], y[mine], local[0], local[3], way=way, y_all=y_all)
        grads = distributed_grads(x[mine], y[mine], Terms(*local[:3]), Terms(*local[3:]), way=way, y_all=y_all)
        for name, got, wanted in zip(("row_lse", "col_lse"), stats, expected_stats, strict=True):
            assert_close(got, wanted[mine], VALUE[torch.float64], f"{name} {way} {vectors}")
        for name, got, wanted in zip(grads._fields, grads, expected_grads, strict=True):
            # Two sums, over rows and over columns, each with its own exponentials.
            bound = GRADIENT[torch.float64].magnified(2)
            assert_close(got, wanted[mine], bound, f"{name} {way} {vectors}")


def check_bf16_payload(batch: int) -> None:
    """Check that statistics and gradients equal those of features rounded alike, where features of both sides are sent.

    At scale 100 the exponentials of different roundings differ by several per cent, far more than the bound.
    """
    generator = torch.Generator().manual_seed(batch)
    total = batch * group_size()
    x, y = F.normalize(torch.randn(2, total, 9, generator=generator, dtype=torch.float64), dim=2)
    mine = slice(batch * group_rank(), batch * (group_rank() + 1))
    rounded = (x.bfloat16().double(), y.bfloat16().double()) if group_size() > 1 else (x, y)
    row_lse, col_lse = reference.tile_stats(*rounded, 100.0, 100.0, diagonal=0)
    expected = reference.tile_grads(*rounded, Terms(100.0, row_lse, 1.0), Terms(100.0, col_lse, 1.0), diagonal=0)
    for exchange in ("ring", "all_gather"):
        way = Way(resolve(), exchange, "scalar", TileOptions(), payload=torch.bfloat16)
        y_all = gather_columns(y[mine], way)
        stats = distributed_stats(x[mine], y[mine], 100.0, 100.0, way=way, y_all=y_all)
        row, col = (Terms(100.0, shift, 1.0) for shift in stats)
        grads = distributed_grads(x[mine], y[mine], row, col, way=way, y_all=y_all)
        for name, got, wanted in zip(("row_lse", "col_lse"), stats, (row_lse, col_lse), strict=True):
            assert_close(got, wanted[mine], VALUE[torch.float64], f"{name} {way}")
        for name, got, wanted in zip(grads._fields, grads, expected, strict=True):
            assert_close(got, wanted[mine], GRADIENT[torch.float64], f"{name} {way}")


def check_everything() -> None:
    for batch in (2, 37):
        for vectors in ((), (0,), (3,), (1, 2), (4, 5), (0, 4), range(6)):
            check(batch, frozenset(vectors))
        check_bf16_payload(batch)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_per_sample_scales_shifts_and_weights(world_size: int) -> None:
    run_ranks(check_everything, world_size)
