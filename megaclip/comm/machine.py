"""Link speed, matrix-product speed and free memory of the hosts of a job, measured once, for cost models.

All ranks receive the same figures: those of the slowest rank, rounded down to powers of two. Choices made from them are
therefore the same on all ranks, and usually the same in every run. On CPUs the figures are constants, because a choice
that changed with the load of the host would not be reproducible.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.collectives import gather_integers, gather_rows, raise_on_all_ranks
from megaclip.comm.groups import RankGroup
from megaclip.errors import ConfigError

_PROBE_MIB = 32
"""Largest size of the message that each rank sends to every other rank, in MiB."""
_GATHERED_MIB = 2048
"""Largest size of the messages of all ranks together, in MiB. Each rank sends 1 MiB at least."""
_PROBE_SIDE = 4096
"""Rows and columns of the square matrices that are multiplied."""
_REPEATS = 5
"""Number of timed repeats."""


class Machine(NamedTuple):
    """Figures of the slowest rank."""

    link_bytes_per_s: float
    """Bytes per second that one rank sends in a collective."""
    flops_per_s: float
    """Floating-point operations per second of bfloat16 matrix products."""
    free_bytes: float
    """Free memory of the device in bytes."""


CPU = Machine(link_bytes_per_s=2.0**30, flops_per_s=2.0**36, free_bytes=2.0**31)


def machine_of(ranks: RankGroup, device: torch.device) -> Machine:
    """Return the figures of this group. The first call gathers up to 2 GiB six times; every rank must make it."""
    if device.type == "cpu":
        return CPU
    return _measured(torch.distributed.group.WORLD, ranks, device)


@functools.cache
def _measured(world: Any, ranks: RankGroup, device: torch.device) -> Machine:
    """Measure this group. world: the default process group, a part of the cache key: a new job measures again.

    Raises:
        ConfigError: on every rank, if another program fills the device of one of them.
    """
    free = float(get_accelerator().available_memory())
    needed = _probe_mib(ranks.size) * 2**20 * (ranks.size + 1) + 6 * _PROBE_SIDE**2
    with raise_on_all_ranks(group=ranks):
        if free < needed:
            raise ConfigError(
                f"{device} has {free / 2**20:.0f} MiB of free memory, too little to start; end the programs that use it"
            )
    factor = torch.zeros(_PROBE_SIDE, _PROBE_SIDE, device=device, dtype=torch.bfloat16)
    own = Machine(
        link_bytes_per_s=slowest_link(ranks, device),
        flops_per_s=2 * _PROBE_SIDE**3 / min(seconds(lambda: factor @ factor)),
        free_bytes=free,
    )
    worst = map(min, zip(*gather_integers([int(figure) for figure in own], group=ranks), strict=True))
    return Machine(*(2.0 ** (figure.bit_length() - 1) for figure in worst))


def slowest_link(ranks: RankGroup, device: torch.device) -> float:
    """Return the bytes per second that the slowest rank sends in an all-gather. Every rank must call it."""
    message = torch.zeros(_probe_mib(ranks.size) * 2**18, device=device)
    sent = (ranks.size - 1) * message.numel() * 4
    own = sent / min(seconds(lambda: gather_rows(message, group=ranks)))
    return float(min(gather_integers([int(own)], group=ranks))[0])


def _probe_mib(world_size: int) -> int:
    """Return the size of a rank's message in MiB."""
    return min(_PROBE_MIB, max(1, _GATHERED_MIB // world_size))


def seconds(run: Callable[[], Any]) -> list[float]:
    """Return the seconds that each of a few calls of `run` took on the device, after one warm-up call."""
    run()
    times = []
    for _ in range(_REPEATS):
        get_accelerator().synchronize()
        started = time.perf_counter()
        run()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return times
