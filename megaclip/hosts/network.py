"""Test the network between hosts with one process per host: the port, a small all-reduce, and the rate of each host."""

import contextlib
import datetime
import time
from collections.abc import Iterator

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel, ConfigDict
from torch.distributed import PrefixStore, TCPStore

from megaclip.errors import first_line

LIMIT_S = 60.0
"""Seconds to wait for the other hosts."""
_MIB = 16
"""Size of a message in MiB."""
_MESSAGES = 4


class NetworkResult(BaseModel):
    """The measurements of one host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problem: str = ""
    """Reason why this host could not take part, "" if it could or if another host was missing."""
    absent: list[int] = []
    """Hosts, by their number, that did not connect; only the first host reports them."""
    mib_per_s: float | None = None
    """Rate of messages to the first host and back."""


def measure(rank: int, hosts: int, address: str, port: int) -> NetworkResult:
    """Exchange messages with the other hosts; every host calls this function at the same time.

    Args:
        rank: number of this host, from 0. The first one listens at `address` and `port`.
        hosts: number of hosts.
        address, port: those of the first host.
    """
    limit = datetime.timedelta(seconds=LIMIT_S)
    try:
        store = TCPStore(address, port, hosts, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        if rank == 0:
            return NetworkResult(
                problem=f"cannot listen on port {port} ({first_line(error)}); choose another --master_port"
            )
        return NetworkResult(
            problem=f"cannot reach {address} at port {port} ({first_line(error)}); open the firewall between the "
            "hosts, or pass an address of the first host with --master_addr"
        )
    everyone = [f"joined/{number}" for number in range(hosts)]
    try:
        store.set(f"joined/{rank}", "1")
        store.wait(everyone, limit)
    except RuntimeError:
        absent = [number for number in range(hosts) if not store.check([f"joined/{number}"])] if rank == 0 else []
        return NetworkResult(absent=absent)
    with _leave_together(store, rank, hosts):
        try:
            return _exchange(rank, hosts, PrefixStore("check", store), limit)
        except RuntimeError as error:
            return NetworkResult(
                problem=f"cannot exchange data with the other hosts ({first_line(error)}); set NCCL_SOCKET_IFNAME or "
                "GLOO_SOCKET_IFNAME in .deepspeed_env to the interface that leads to them, and open all ports"
            )


@contextlib.contextmanager
def _leave_together(store: TCPStore, rank: int, hosts: int) -> Iterator[None]:
    """Keep the first host's process, which contains the store, until the other hosts have ended the test."""
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            store.set(f"done/{rank}", "1")
            if rank == 0:
                store.wait([f"done/{number}" for number in range(hosts)])


def _exchange(rank: int, hosts: int, store: PrefixStore, limit: datetime.timedelta) -> NetworkResult:
    is_gpu = get_accelerator().device_name() == "cuda"
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    torch.distributed.init_process_group(
        "nccl" if is_gpu else "gloo", store=store, rank=rank, world_size=hosts, timeout=limit
    )
    try:
        numbers = torch.arange(1000.0, device=device) * (rank + 1)
        torch.distributed.all_reduce(numbers)
        expected = torch.arange(1000.0) * (hosts * (hosts + 1) // 2)
        if not torch.equal(numbers.cpu(), expected):
            return NetworkResult(problem="an all-reduce has a wrong result: the network or memory is broken")
        return NetworkResult(mib_per_s=_rate(rank, hosts, device))
    finally:
        torch.distributed.destroy_process_group()


def _rate(rank: int, hosts: int, device: torch.device) -> float | None:
    """Return the MiB/s between this host and the first host, or None on the first host. Pairs are measured in turn."""
    message = torch.zeros(_MIB * 2**18, device=device)
    rate = None
    for other in range(1, hosts):
        torch.distributed.all_reduce(torch.zeros(1, device=device))
        if rank not in (0, other):
            continue
        for number in range(_MESSAGES + 1):
            if number == 1:  # the first message connects
                started = time.perf_counter()
            if rank == 0:
                torch.distributed.send(message, other)
                torch.distributed.recv(message, other)
            else:
                torch.distributed.recv(message, 0)
                torch.distributed.send(message, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if rank == other:
            rate = 2 * _MESSAGES * _MIB / (time.perf_counter() - started)
    return rate
