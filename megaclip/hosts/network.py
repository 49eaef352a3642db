"""Exchange messages between all ranks for `megaclip check-hosts`: a small all-reduce, and the rate of each host."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megaclip.errors import first_line
from megaclip.logging import local_rank_from_environment

LIMIT_S = 60.0
"""Seconds within which the ranks must have exchanged their messages."""
_MIB, _MESSAGES = 16, 4
"""Size of a message in MiB, and number of messages."""


def measure(store: dist.Store, rank: int, world_size: int, others: list[int]) -> tuple[str, float | None]:
    """Exchange messages with the other ranks; every rank calls this function at the same time.

    Args:
        store: connects the ranks.
        others: ranks whose rate to rank 0 is measured, one per host, the same on all ranks.

    Returns:
        The problem of this rank, "" without one, and its rate in MiB/s if it is one of `others`.
    """
    device = torch.device(get_accelerator().device_name(local_rank_from_environment()))
    try:
        get_accelerator().set_device(device)
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=limit)
        numbers = torch.arange(1000.0, device=device) * (rank + 1)
        dist.all_reduce(numbers)
        if not torch.equal(numbers.cpu(), torch.arange(1000.0) * (world_size * (world_size + 1) // 2)):
            return "an all-reduce has a wrong result: the network or memory is broken", None
        return "", _rate(rank, others, device)
    except RuntimeError as error:
        advice = "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to the interface that leads to them, and open all ports"
        return f"cannot exchange data with the other hosts ({first_line(error)}); {advice}", None


def _rate(rank: int, others: list[int], device: torch.device) -> float | None:
    """Return the MiB/s between this rank and rank 0, if this rank is one of `others`. Pairs are measured in turn."""
    message = torch.zeros(_MIB * 2**18, device=device)
    rate = None
    for other in others:
        dist.all_reduce(torch.zeros(1, device=device))
        if rank not in (0, other):
            continue
        for number in range(_MESSAGES + 1):
            if number == 1:  # the first message connects
                started = time.perf_counter()
            for transfer in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
                transfer(message, other if rank == 0 else 0)
        get_accelerator().synchronize(device)
        if rank == other:
            rate = 2 * _MESSAGES * _MIB / (time.perf_counter() - started)
    return rate
