"""What this machine can do: its links, its products, its free memory. Measured once per group, for cost models.

Every rank gets the same numbers, the worst of any rank's, rounded to powers of two: choices made from them agree
between ranks, and mostly between runs. CPUs get fixed numbers, because there reproducibility is worth more than a
choice that follows the load.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.collectives import gather_integers, gather_rows
from megaclip.comm.groups import RankGroup

_PROBE_MIB = 32  # that each rank gathers from every other
_PROBE_SIDE = 4096  # of the square matrices
_REPEATS = 5


class Machine(NamedTuple):
    """The slowest rank's figures."""

    link_bytes_per_s: float  # that one rank sends in a collective
    flops_per_s: float  # of bfloat16 products
    free_bytes: float  # of the device


CPU = Machine(link_bytes_per_s=2.0**30, flops_per_s=2.0**36, free_bytes=2.0**31)


def machine_of(ranks: RankGroup, device: torch.device) -> Machine:
    """Figures for this group; the first call measures for a few milliseconds, and every rank must make it."""
    if device.type == "cpu":
        return CPU
    return _measured(torch.distributed.group.WORLD, ranks, device)


@functools.cache
def _measured(world: Any, ranks: RankGroup, device: torch.device) -> Machine:
    """world: the job, so that a new one is measured anew."""
    factor = torch.zeros(_PROBE_SIDE, _PROBE_SIDE, device=device, dtype=torch.bfloat16)
    own = Machine(
        link_bytes_per_s=_link_bytes_per_s(ranks, device),
        flops_per_s=2 * _PROBE_SIDE**3 / min(seconds(lambda: factor @ factor)),
        free_bytes=float(get_accelerator().available_memory()),
    )
    worst = map(min, zip(*gather_integers([int(figure) for figure in own], group=ranks), strict=True))
    return Machine(*(2.0 ** (figure.bit_length() - 1) for figure in worst))


def slowest_link(ranks: RankGroup, device: torch.device) -> float:
    """Bytes per second that a rank sends while all gather from all, of the slowest rank; every rank calls it."""
    own = _link_bytes_per_s(ranks, device)
    return float(min(gather_integers([int(own)], group=ranks))[0])


def _link_bytes_per_s(ranks: RankGroup, device: torch.device) -> float:
    message = torch.zeros(_PROBE_MIB * 2**18, device=device)
    sent = (ranks.size - 1) * message.numel() * 4
    return sent / min(seconds(lambda: gather_rows(message, group=ranks)))


def seconds(run: Callable[[], Any]) -> list[float]:
    """What each of a few repeats took until the device had finished, after one that warms up."""
    run()
    times = []
    for _ in range(_REPEATS):
        get_accelerator().synchronize()
        started = time.perf_counter()
        run()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return times
