"""How a loss moves its data: which exchange, which reduction, which tiles.

Two independent choices, both exact (docs/mathematics.md): they differ in memory, traffic and arithmetic only.
`make_plan` resolves "auto" by a cost model, the same way on every rank, and logs once what and why:

    seconds = products / rate + bytes / link speed      all_gather; ring between the GPUs of one node
    seconds = max of the two + a latency per hop        ring over several nodes, or on CPUs

A ring's exchanges are under way while tiles are computed, but between GPUs of one node that hides nothing: NCCL copies
with the GPU's own multiprocessors, and a product that lacks some of them takes a second round (four H200s: a kernel of
0.19 ms takes 0.35 ms beside an exchange). What the ring saves there is memory. Between nodes network cards copy.

Products and bytes are each loss's own (`megaclip.losses.costs`). An all_gather whose features and gradients would take
more than half of the free memory is left out.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from megaclip.comm.groups import NodeGroup, RankGroup, by_node
from megaclip.comm.machine import Machine, machine_of
from megaclip.logging import get_logger, log_once
from megaclip.losses.costs import LossCost, Sizes
from megaclip.ops.tiles import TileOptions, accumulation_dtype

EXCHANGES = ("ring", "all_gather")
REDUCTIONS = ("feature", "scalar")
PAYLOADS = {"auto": None, "bf16": torch.bfloat16}

# A hop's fixed cost: launches of its exchange and its tile, and the wait for a neighbour that is a little late.
_HOP_SECONDS = 50e-6
_COLLECTIVE_SECONDS = 50e-6

_logger = get_logger(__name__)


@dataclass(frozen=True)
class Plan:
    """Everything the distributed tiles need to know besides the features."""

    ranks: RankGroup
    exchange: str  # "ring" | "all_gather"
    reduction: str  # "feature" | "scalar"
    tiles: TileOptions
    need_dots: bool = True  # row_dot and col_dot, which only per-sample temperatures need
    payload: torch.dtype | None = None  # that features and their gradients travel in; None: as they are


def make_plan(
    features: Tensor,
    *,
    ranks: RankGroup,
    exchange: str,
    reduction: str,
    tiles: TileOptions,
    need_dots: bool,
    payload: str = "auto",
    cost: LossCost,
) -> Plan:
    """The plan for local features (b, D) on each of `ranks`; logs once what "auto" became and why."""
    wire = PAYLOADS[payload]
    ranks = by_node(ranks)
    if "auto" in (exchange, reduction):
        exchange, reduction = _choose(features, ranks, exchange, reduction, wire, cost)
    if exchange == "ring" and isinstance(ranks, NodeGroup):
        inside = f"inside each of {ranks.outer.size} nodes, and " if ranks.inner.size > 1 else ""
        log_once(_logger.info, f"ring: {inside}from node to node")
    return Plan(ranks=ranks, exchange=exchange, reduction=reduction, tiles=tiles, need_dots=need_dots, payload=wire)


def _choose(
    features: Tensor,
    ranks: RankGroup,
    exchange: str,
    reduction: str,
    payload: torch.dtype | None,
    cost: LossCost,
) -> tuple[str, str]:
    """The cheapest way among those that "auto" leaves open and the memory allows."""
    exchanges = EXCHANGES if exchange == "auto" else (exchange,)
    reductions = REDUCTIONS if reduction == "auto" else (reduction,)
    if ranks.size == 1:
        return exchanges[0], reductions[0]  # nothing moves, and feature needs the fewest products
    machine = machine_of(ranks, features.device)
    sum_dtype = accumulation_dtype(features)
    gathered = features.numel() * ranks.size * (features.dtype.itemsize + sum_dtype.itemsize)
    if exchange == "auto" and gathered > machine.free_bytes / 2:
        exchanges = ("ring",)
    sizes = Sizes(
        world_size=ranks.size,
        batch=features.shape[0],
        embedding=features.shape[1],
        feature_bytes=(payload or features.dtype).itemsize,
        gradient_bytes=(payload or sum_dtype).itemsize,
        sum_bytes=sum_dtype.itemsize,
    )
    ring_hides = isinstance(ranks, NodeGroup) or features.device.type == "cpu"
    seconds = {
        way: _seconds(*way, sizes, cost, machine, ring_hides) for way in itertools.product(exchanges, reductions)
    }
    best = min(seconds, key=lambda way: seconds[way])
    estimates = ", ".join(f"{' + '.join(way)} {1000 * estimate:.3g} ms" for way, estimate in seconds.items())
    log_once(
        _logger.info,
        f"loss: {' + '.join(best)} (estimates: {estimates}; links {machine.link_bytes_per_s / 1e9:.3g} GB/s, products "
        f"{machine.flops_per_s / 1e12:.3g} TFLOP/s; gathering takes {gathered / 2**20:.0f} MiB, "
        f"{machine.free_bytes / 2**20:.0f} are free)",
    )
    return best


def _seconds(exchange: str, reduction: str, sizes: Sizes, cost: LossCost, machine: Machine, ring_hides: bool) -> float:
    """The cost model's time of one forward and backward. ring_hides: whether exchanges run while tiles are computed."""
    operations = cost.products[reduction] * sizes.batch**2 * sizes.world_size * sizes.embedding
    computing = operations / machine.flops_per_s
    sending = cost.traffic(exchange, reduction, sizes).total / machine.link_bytes_per_s
    if exchange == "all_gather":
        return computing + sending + 4 * _COLLECTIVE_SECONDS
    together = max(computing, sending) if ring_hides else computing + sending
    return together + cost.passes * sizes.world_size * _HOP_SECONDS
