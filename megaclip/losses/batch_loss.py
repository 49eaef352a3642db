"""What every loss over the batch of all ranks is told: who shares it, how data moves, how tiles are computed."""

from typing import Any

import torch
from torch import Tensor, nn

from megaclip.comm.groups import RankGroup
from megaclip.losses.costs import LossCost
from megaclip.losses.plan import Plan, TileOptions, check_choices, make_plan
from megaclip.ops.tiles import accumulation_dtype

_OPEN_CLIP_SETTINGS = {
    "local_loss",
    "gather_with_grad",
    "cache_labels",
    "rank",
    "world_size",
    "use_horovod",
    "dist_impl",
}


class BatchLoss(nn.Module):
    """Base of the losses; holds their common settings.

    group: the ranks that share the batch (a deepspeed.comm or torch.distributed group); None is every rank of
        the job, and plain Python without any launcher is a group of one.
    exchange: "ring", "all_gather" or "auto"; reduction: "feature", "scalar" or "auto". All are exact; `losses/plan.py`
        says how they differ and how "auto" chooses.
    payload: what features and their gradients travel in between ranks: "auto" is features' own dtype and float32
        gradients; "bf16" rounds both on the way (sums stay float32), for half the traffic of float32.
    precision, implementation, tile_budget_mib: as in `megaclip.ops.tiles`.

    Raises ValueError for an unknown exchange, reduction or payload, and TypeError for any other argument; one of
    open_clip's constructors' is named together with what takes its place.
    """

    def __init__(
        self,
        *,
        group: Any = None,
        exchange: str = "auto",
        reduction: str = "auto",
        payload: str = "auto",
        precision: str = "auto",
        implementation: str = "auto",
        tile_budget_mib: float = 128,
        **others: Any,
    ) -> None:
        super().__init__()
        if others:
            raise TypeError(_no_such_setting(type(self).__name__, set(others)))
        check_choices(exchange, reduction, payload)
        self.group = group
        self.exchange = exchange
        self.reduction = reduction
        self.payload = payload
        self.tiles = TileOptions(precision, implementation, tile_budget_mib)

    def plan(self, features: Tensor, ranks: RankGroup, cost: LossCost, *, need_dots: bool = False) -> Plan:
        """`make_plan` with this loss's settings, for what it costs and needs of the tiles."""
        return make_plan(
            features,
            ranks=ranks,
            exchange=self.exchange,
            reduction=self.reduction,
            payload=self.payload,
            tiles=self.tiles,
            need_dots=need_dots,
            cost=cost,
        )


def as_scalar(value: Tensor | float, features: Tensor) -> Tensor:
    """A logit_scale or logit_bias as a tensor: itself, or the number, () on the features' device, as sums are held."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), float(value), dtype=accumulation_dtype(features), device=features.device)


def _no_such_setting(loss: str, names: set[str]) -> str:
    theirs = ", ".join(sorted(names & _OPEN_CLIP_SETTINGS))
    if not theirs:
        return f"{loss}() got an unexpected keyword argument {min(names)!r}"
    return (
        f"{loss}() takes none of open_clip's {theirs}: it is the exact loss of the whole batch of the ranks of "
        f"`group` (default: all); write {loss}(), or choose how data moves with exchange= and reduction="
    )
