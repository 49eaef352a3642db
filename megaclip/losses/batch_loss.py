"""Base class of the losses over the batch of all ranks: process group, settings and plan."""

import copy
import inspect
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megaclip.comm.groups import RankGroup, name_of
from megaclip.errors import config_error
from megaclip.losses.costs import LossCost
from megaclip.losses.plan import Plan, make_plan
from megaclip.losses.settings import StandaloneSettings
from megaclip.ops.types import TileOptions, accumulation_dtype

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
    """Base class of the losses, with the process group and the validated settings, `self.settings`.

    group: the ranks that share the batch (a deepspeed.comm or torch.distributed group). None: all ranks of the job, or
    a group of one in a Python process without a launcher.
    settings: fields of the class `settings_model`; `megaclip.losses.settings` has their values, meanings and defaults.

    Raises ConfigError, a ValueError, for a wrong value, and TypeError for an unknown name. The TypeError explains what
    replaces the arguments of open_clip's constructors.
    """

    settings_model: type[StandaloneSettings] = StandaloneSettings
    settings: StandaloneSettings
    __signature__: inspect.Signature

    def __init__(self, *, group: Any = None, **settings: Any) -> None:
        super().__init__()
        if unknown := settings.keys() - self.settings_model.model_fields:
            raise TypeError(_unknown_settings_message(type(self).__name__, unknown))
        try:
            self.settings = self.settings_model(**settings)
        except ValidationError as error:
            raise config_error(error) from None
        self.group = group
        self.group_name, self.settings_json = name_of(group), self.settings.model_dump_json()  # for compiled graphs
        self.tiles = TileOptions(self.settings.precision, self.settings.implementation, self.settings.tile_budget_mib)

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Make `help()` and `inspect.signature` list the settings in place of `**settings`."""
        super().__init_subclass__(**arguments)
        _, *own = inspect.signature(cls.__init__).parameters.values()
        listed = {parameter.name: parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD}
        if len(listed) < len(own):
            fields, parameters = cls.settings_model.model_fields, inspect.signature(cls.settings_model).parameters
            for name in [name for name in fields if name not in listed]:
                listed[name] = parameters[name].replace(annotation=fields[name].annotation)
        cls.__signature__ = inspect.Signature(sorted(listed.values(), key=lambda parameter: parameter.kind))

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchLoss":
        """Return a copy with the same process group. Weight averages copy the module that contains the loss."""
        handle = self.group.handle if isinstance(self.group, RankGroup) else self.group
        memo[id(handle)] = handle  # a process group cannot be copied
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def plan(self, features: Tensor, ranks: RankGroup, cost: LossCost, *, need_dots: bool = False) -> Plan:
        """Return the plan of a step with local features (b, D). cost: costs of this loss. need_dots: as in `Plan`."""
        return make_plan(
            features,
            ranks=ranks,
            exchange=self.settings.exchange,
            reduction=self.settings.reduction,
            payload=self.settings.payload,
            tiles=self.tiles,
            need_dots=need_dots,
            cost=cost,
        )


def as_scalar(value: Any, features: Tensor) -> Tensor:
    """Return a logit_scale or logit_bias as a tensor: a number becomes () in the dtype of sums, on the same device.

    Anything else is returned unchanged. `check_features` raises for it, on all ranks.
    """
    if isinstance(value, Tensor) or not (isinstance(value, int | float) or hasattr(value, "__float__")):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    if not isinstance(features, Tensor):  # `check_features` raises for it too
        return torch.tensor(number)
    return torch.full((), number, dtype=accumulation_dtype(features), device=features.device)


def working_scalar(scalar: Tensor, features: Tensor) -> Tensor:
    """Return a scalar as () on the features' device, in the dtype of sums."""
    return scalar.reshape(()).to(features.device, accumulation_dtype(features))


def with_unused(loss: Tensor, scalar: Tensor | float | None) -> Tensor:
    """Return the loss unchanged, with a zero gradient for a scalar without effect, such as ClipLoss's logit_bias."""
    return loss + (0.0 * scalar.sum()).to(loss) if isinstance(scalar, Tensor) else loss


def _unknown_settings_message(loss: str, names: set[str]) -> str:
    theirs = ", ".join(sorted(names & _OPEN_CLIP_SETTINGS))
    if not theirs:
        return f"{loss}() got an unexpected keyword argument {min(names)!r}"
    return (
        f"{loss}() takes none of open_clip's {theirs}: it always computes the exact loss of the whole batch of the "
        f"ranks of `group` (default: all ranks); write {loss}(), or select the data transfers with exchange= and "
        "reduction="
    )
