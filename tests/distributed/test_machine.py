"""The measurement for the cost model: all ranks get the figures of the slowest rank, rounded so that runs agree."""

import math

import pytest
import torch

from megaclip.comm import machine
from megaclip.comm.groups import resolve
from megaclip.errors import ConfigError
from tests.distributed.harness import run_ranks


def measured() -> tuple[machine.Machine, float, str]:
    """Measure on a CPU with small probes, and then with the device of rank 1 filled by another program.

    `machine_of` measures on GPUs only. Rank 1 has less memory.
    """
    machine._PROBE_MIB, machine._PROBE_SIDE = 1, 64
    ranks, device, world = resolve(), torch.device("cpu"), torch.distributed.group.WORLD
    accelerator = machine.get_accelerator()
    before_the_probes = iter([2**30 + 5 if ranks.rank == 0 else 2**29 + 5])
    accelerator.available_memory = lambda: next(before_the_probes, 2**20)
    figures, link = machine._measured(world, ranks, device), machine.slowest_link(ranks, device)
    machine._measured.cache_clear()
    machine._PROBE_MIB = 32
    accelerator.available_memory = lambda: 2**40 if ranks.rank == 0 else 2**20
    with pytest.raises(ConfigError) as refused:
        machine._measured(world, ranks, device)
    return figures, link, str(refused.value)


def test_all_ranks_get_the_slowest_ones_figures_and_refuse_a_full_device() -> None:
    first, second = run_ranks(measured, 2)
    assert first == second
    rounded, link, refused = first
    assert "has 1 MiB of free memory" in refused
    assert rounded.free_bytes == 2**29
    for figure in rounded:
        assert figure > 1e4 and math.log2(figure).is_integer()
    assert rounded.link_bytes_per_s < 1e12 and rounded.flops_per_s < 1e15
    assert 1e4 < link < 1e12


def test_the_messages_of_many_ranks_fit_beside_a_model() -> None:
    assert [machine._probe_mib(world_size) for world_size in (1, 64, 256, 4096)] == [32, 32, 8, 1]
