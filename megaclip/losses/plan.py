"""How a loss moves its data: which exchange, which reduction, which tiles.

Two independent choices, both exact (MATH.md, "Moving features, reducing gradients"); they differ in memory, traffic and
arithmetic only. `make_plan` resolves "auto" from the sizes of one batch, the same way on every rank, and logs once why:

    exchange   "all_gather" while the gathered text features and their gradient fit `ALL_GATHER_LIMIT_MIB`, else "ring"
    reduction  "feature", which needs the fewest products (8 b*B*D against 10)
"""

from dataclasses import dataclass

from torch import Tensor

from megaclip.comm.groups import NodeGroup, RankGroup, by_node
from megaclip.logging import get_logger
from megaclip.ops.tiles import accumulation_dtype

EXCHANGES = ("ring", "all_gather")
REDUCTIONS = ("feature", "scalar")

# What all_gather may hold beyond the local batch: 1 GiB is B = 262144 at D = 512 in bfloat16 with float32 gradients.
ALL_GATHER_LIMIT_MIB = 1024

_logger = get_logger(__name__)
_announced: set[str] = set()


@dataclass(frozen=True)
class TileOptions:
    """How tiles are computed on the device; passed on to `megaclip.ops.tiles` as they are."""

    precision: str = "auto"
    implementation: str = "auto"
    tile_budget_mib: float = 128


@dataclass(frozen=True)
class Plan:
    """Everything the distributed tiles need to know besides the features."""

    ranks: RankGroup
    exchange: str  # "ring" | "all_gather"
    reduction: str  # "feature" | "scalar"
    tiles: TileOptions
    need_dots: bool = True  # row_dot and col_dot, which only per-sample temperatures need


def check_choices(exchange: str, reduction: str) -> None:
    """Raise ValueError unless both are "auto" or one of the known choices."""
    for name, value, known in (("exchange", exchange, EXCHANGES), ("reduction", reduction, REDUCTIONS)):
        if value != "auto" and value not in known:
            raise ValueError(f"expected {name} to be one of auto, {', '.join(known)}, got {value!r}")


def make_plan(
    features: Tensor, *, ranks: RankGroup, exchange: str, reduction: str, tiles: TileOptions, need_dots: bool
) -> Plan:
    """The plan for local features (b, D) on each of `ranks`; logs once what "auto" became and why."""
    if exchange == "auto":
        exchange, reason = _choose_exchange(features, ranks.size)
        _announce(f"exchange: {exchange} ({reason})")
    if exchange == "ring":
        ranks = by_node(ranks)
        if isinstance(ranks, NodeGroup):
            _announce(f"ring: inside each of {ranks.outer.size} nodes, and from node to node")
    if reduction == "auto":
        reduction = "feature"
        _announce("reduction: feature (fewest products; choose scalar where moving gradients is the bottleneck)")
    return Plan(ranks=ranks, exchange=exchange, reduction=reduction, tiles=tiles, need_dots=need_dots)


def _choose_exchange(features: Tensor, world_size: int) -> tuple[str, str]:
    if world_size == 1:
        return "ring", "one rank, nothing moves"
    elements = features.numel() * world_size
    mib = elements * (features.dtype.itemsize + accumulation_dtype(features).itemsize) / 2**20
    comparison = f"gathered features and gradients take {mib:.1f} MiB, the limit is {ALL_GATHER_LIMIT_MIB}"
    return ("all_gather" if mib <= ALL_GATHER_LIMIT_MIB else "ring"), comparison


def _announce(message: str) -> None:
    if message not in _announced:
        _announced.add(message)
        _logger.info(message)
