"""Choose the exchange, the reduction and the tile options of a loss (`megaclip.planner` predicts memory and time).

Exchange and reduction are independent choices. All are exact (docs/mathematics.md); they differ in memory, traffic and
arithmetic. `choose_way` resolves "auto" by a cost model:

    seconds = operations / rate + bytes / link speed    all_gather; ring between the GPUs of one host
    seconds = max of the two + a latency per hop        ring over several hosts, or on CPUs

`choose_way` is a function of plain numbers and measures nothing. The planner calls it for a run, whose loss gets the
planned exchange and reduction, and for `megaclip plan`. A loss that is left to choose by itself, as in another trainer,
calls it at its first step (`make_way`) with measured rates, which are the same on every rank, and logs the result once.

A ring sends features while tiles are computed. Between hosts the network cards send them during the computation, and
the loss takes the longer of both times. Between GPUs of one host NCCL uses multiprocessors of the GPU to send them, so
the tiles have fewer. A matrix product that needs all multiprocessors then needs a second round: on four H200s a kernel
of 0.19 ms takes 0.35 ms during an exchange. So between GPUs of one host the ring saves memory but no time.

`megaclip.losses.costs` has the operations and bytes of each loss. An all_gather whose features and gradients would take
more than half of the free memory is not chosen.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megaclip.comm.groups import NodeGroup, RankGroup, by_node
from megaclip.comm.machine import CPU as CPU  # for the planner
from megaclip.comm.machine import Machine, machine_of
from megaclip.logging import get_logger, log_once
from megaclip.losses.costs import LossCost, Sizes
from megaclip.losses.settings import LossSettings
from megaclip.ops.types import TileOptions, accumulation_dtype

EXCHANGES = ("ring", "all_gather")
REDUCTIONS = ("feature", "scalar")
PAYLOADS = {"auto": None, "bf16": torch.bfloat16}

_HOP_SECONDS = 50e-6
"""Fixed seconds per hop of a ring: launches of its exchange and its tile, and the wait for a late neighbour."""
_COLLECTIVE_SECONDS = 50e-6

_logger = get_logger(__name__)


@dataclass(frozen=True)
class Way:
    """How the features of a step travel between ranks and are computed: arguments of `distributed_tiles`."""

    ranks: RankGroup
    exchange: str
    """"ring" or "all_gather"."""
    reduction: str
    """"feature" or "scalar"."""
    tiles: TileOptions
    payload: torch.dtype | None = None
    """Dtype in which ranks exchange features and their gradients. None: features keep theirs, gradients are float32."""
    negatives: int = 0
    """Rows of the negatives that each rank sends: the largest number of all ranks."""


class Choice(NamedTuple):
    """Exchange and reduction that `choose_way` has chosen, with its estimates."""

    exchange: str
    reduction: str
    seconds: dict[tuple[str, str], float]
    """Estimated seconds by (exchange, reduction) of each way that was compared; empty on one rank."""
    gathered_bytes: float
    """Bytes that an all_gather of the features and of their gradients takes on each rank."""

    def described(self, machine: Machine) -> str:
        """Return a line for the log: the choice and the figures that it follows from."""
        estimates = ", ".join(f"{' + '.join(way)} {1000 * value:.3g} ms" for way, value in self.seconds.items())
        return (
            f"loss: {self.exchange} + {self.reduction} (estimates: {estimates}; links "
            f"{machine.link_bytes_per_s / 1e9:.3g} GB/s, products {machine.flops_per_s / 1e12:.3g} TFLOP/s; gathering "
            f"takes {self.gathered_bytes / 2**20:.0f} MiB, {machine.free_bytes / 2**20:.0f} MiB are free)"
        )


def make_way(
    features: Tensor,
    *,
    ranks: RankGroup,
    settings: LossSettings,
    tiles: TileOptions,
    cost: LossCost,
    negatives: int = 0,
) -> Way:
    """Return the way of local features (b, D) on each of `ranks`; log once how "auto" was resolved.

    settings: those of a loss; ids="mask" and "positive" change its cost, as do the negatives that each rank sends.
    cost: costs of this loss.
    """
    exchange, reduction, payload = settings.exchange, settings.reduction, PAYLOADS[settings.payload]
    ranks = by_node(ranks)
    if ranks.size == 1 or "auto" in (exchange, reduction):
        machine, sum_dtype = machine_of(ranks, features.device) if ranks.size > 1 else CPU, accumulation_dtype(features)
        choice = choose_way(
            exchange,
            reduction,
            sizes=Sizes(
                world_size=ranks.size,
                batch=features.shape[0],
                embedding=features.shape[1],
                feature_bytes=(payload or features.dtype).itemsize,
                gradient_bytes=(payload or sum_dtype).itemsize,
                sum_bytes=sum_dtype.itemsize,
                ids=getattr(settings, "ids", "ignore"),
                negatives=negatives,
            ),
            held_bytes=features.dtype.itemsize,
            cost=cost,
            machine=machine,
            hides_exchanges=isinstance(ranks, NodeGroup) or features.device.type == "cpu",
        )
        # The names of a choice are among those of the settings, which only their types tell apart.
        exchange, reduction = choice.exchange, choice.reduction  # type: ignore[assignment]
        if ranks.size > 1:
            log_once(_logger.info, choice.described(machine))
    if exchange == "ring" and isinstance(ranks, NodeGroup):
        inside = f"inside each of {ranks.outer.size} hosts, and " if ranks.inner.size > 1 else ""
        log_once(_logger.info, f"ring: {inside}from host to host")
    return Way(ranks, exchange, reduction, tiles, payload, negatives)


def choose_way(
    exchange: str,
    reduction: str,
    *,
    sizes: Sizes,
    held_bytes: int,
    cost: LossCost,
    machine: Machine,
    hides_exchanges: bool,
) -> Choice:
    """Return the cheapest exchange and reduction that the settings and the free memory allow.

    Args:
        exchange, reduction: the settings; "auto" or one of EXCHANGES and REDUCTIONS.
        sizes: the features of one rank, and the bytes of a number that ranks exchange.
        held_bytes: bytes of a feature in memory; `sizes.feature_bytes` are those of the exchange.
        cost: operations and traffic of the loss.
        machine: link speed, rate of matrix products and free memory.
        hides_exchanges: True if a ring's exchanges take no additional time while tiles are computed.
    """
    exchanges = EXCHANGES if exchange == "auto" else (exchange,)
    reductions = REDUCTIONS if reduction == "auto" else (reduction,)
    rows = sizes.world_size * (sizes.batch + sizes.negatives)
    gathered = rows * sizes.embedding * (held_bytes + sizes.sum_bytes)
    if sizes.world_size == 1:  # ranks exchange nothing, and "feature" needs the fewest products
        return Choice(exchanges[0], reductions[0], {}, gathered)
    if exchange == "auto" and gathered > machine.free_bytes / 2:
        exchanges = ("ring",)
    seconds = {
        way: _seconds(*way, sizes, cost, machine, hides_exchanges) for way in itertools.product(exchanges, reductions)
    }
    return Choice(*min(seconds, key=lambda way: seconds[way]), seconds, gathered)


def _seconds(
    exchange: str, reduction: str, sizes: Sizes, cost: LossCost, machine: Machine, hides_exchanges: bool
) -> float:
    """Return the cost model's time of one forward and backward pass."""
    columns = sizes.batch + sizes.negatives
    operations = cost.products[reduction] * sizes.batch * columns * sizes.world_size * sizes.embedding
    computing = operations / machine.flops_per_s
    # Negatives travel as the texts do.
    moved = cost.traffic(exchange, reduction, sizes).total * columns / sizes.batch
    sending = moved / machine.link_bytes_per_s
    if exchange == "all_gather":
        return computing + sending + 4 * _COLLECTIVE_SECONDS
    together = max(computing, sending) if hides_exchanges else computing + sending
    return together + cost.passes * sizes.world_size * _HOP_SECONDS
