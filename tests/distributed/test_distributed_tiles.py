"""Compare the tile operations over all ranks with the whole matrix of features that are rounded as they are sent.

test_fastclip_loss.py tests scales, shifts and weights per sample, which FastCLIP passes.
"""

import pytest
import torch
import torch.nn.functional as F

from megaclip.comm.groups import group_rank, group_size, resolve
from megaclip.losses.distributed_tiles import DistributedTiles
from megaclip.losses.way import Way
from megaclip.ops.types import Terms, TileOptions
from tests import reference
from tests.distributed.harness import run_ranks
from tests.tolerances import GRADIENT, VALUE, assert_close


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
        tiles = DistributedTiles(x[mine], y[mine], way)
        stats = tiles.stats(100.0, 100.0)
        row, col = (Terms(100.0, shift, 1.0) for shift in stats)
        grads = tiles.grads(row, col, need_dots=True)
        for name, got, wanted in zip(("row_lse", "col_lse"), stats, (row_lse, col_lse), strict=True):
            assert_close(got, wanted[mine], VALUE[torch.float64], f"{name} {way}")
        for name, got, wanted in zip(grads._fields, grads, expected, strict=True):
            assert_close(got, wanted[mine], GRADIENT[torch.float64], f"{name} {way}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_both_sides_are_rounded_alike_where_both_are_sent(world_size: int) -> None:
    run_ranks(check_bf16_payload, world_size, 37)
