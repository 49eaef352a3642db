"""The measurement for the cost model: all ranks get the figures of the slowest rank, rounded so that runs agree."""

import math

import torch

from megaclip.comm import machine
from megaclip.comm.groups import resolve
from megaclip.errors import ConfigError
from tests.distributed.harness import run_ranks


def measured() -> tuple[machine.Machine, float]:
    """Measure on a CPU with small probes. `machine_of` measures on GPUs only. Rank 1 has less memory."""
    machine._PROBE_MIB, machine._PROBE_SIDE = 1, 64
    ranks = resolve()
    accelerator = machine.get_accelerator()
    accelerator.available_memory = lambda: 2**30 + 5 if ranks.rank == 0 else 2**29 + 5
    device = torch.device("cpu")
    return machine._measured(torch.distributed.group.WORLD, ranks, device), machine.slowest_link(ranks, device)


def test_all_ranks_get_the_slowest_ones_figures() -> None:
    first, second = run_ranks(measured, 2)
    assert first == second
    rounded, link = first
    assert rounded.free_bytes == 2**29
    for figure in rounded:
        assert figure > 1e4 and math.log2(figure).is_integer()
    assert rounded.link_bytes_per_s < 1e12 and rounded.flops_per_s < 1e15
    assert 1e4 < link < 1e12


def refused() -> str:
    """Return the error on a rank if another program fills the device of rank 1."""
    ranks = resolve()
    machine.get_accelerator().available_memory = lambda: 2**40 if ranks.rank == 0 else 2**20
    try:
        machine._measured(torch.distributed.group.WORLD, ranks, torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return "measured"


def test_a_full_device_is_refused_on_every_rank() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second and "has 1 MiB of free memory" in first
