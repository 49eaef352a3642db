"""Exact access to `logit_scale` and `logit_bias`: read and write their float32 master values, and clamp the scale.

With bf16 the parameter in the model is rounded (2.65378 becomes 2.65625). Clamping it has no effect on the master value
that the optimizer updates. Where DeepSpeed keeps the master value depends on ZeRO stage and precision; no other module
has to distinguish these cases.
"""

import math
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

from megaclip.logging import get_logger, log_once
from megaclip.zero.parameters import is_partitioned

logger = get_logger(__name__)


class MasterScalar:
    """The float32 master value of a parameter with one element. All ranks must call each method together."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        """parameter: shape (1,), from the module of a DeepSpeed engine, alone in its optimizer group."""
        self._parameter: Any = parameter  # Any, because DeepSpeed adds attributes to it

    def read(self) -> torch.Tensor:
        """Return the value: (1,) float32 on the engine's device, the same on every rank."""
        parameter = self._parameter
        if is_partitioned(parameter):
            value = safe_get_local_fp32_param(parameter).detach().to(torch.float32, copy=True)
            # ZeRO-3 gives the first rank of the group the only element; the other ranks hold padding.
            group = parameter.ds_process_group
            dist.broadcast(value, src=dist.get_global_rank(group, 0), group=group)
            return value
        if (master := safe_get_full_fp32_param(parameter)) is not None:
            return master.detach()
        return parameter.detach().to(torch.float32, copy=True)  # ZeRO-0 is float32: no separate master

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Set the master value and the model's parameter to `value`, (1,), the same on every rank."""
        parameter = self._parameter
        if is_partitioned(parameter):
            safe_set_local_fp32_param(parameter, value)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
        else:
            safe_set_full_fp32_param(parameter, value)  # nothing at ZeRO-0
            parameter.data.copy_(value)


class LogitScale(MasterScalar):
    """The logarithm of the logit scale, `engine.module.logit_scale`."""

    def __init__(self, engine: DeepSpeedEngine, maximum: float) -> None:
        """maximum: upper bound of exp(logit_scale). The lower bound is 1, as in open_clip."""
        super().__init__(engine.module.logit_scale)
        self.maximum = math.log(maximum)
        """Upper bound of the value. The lower bound is 0."""

    def admit(self, earlier_maximum: float = 0.0, *, raises_maximum: bool) -> None:
        """Warn if the value is above its upper bound, and make it the bound if `raises_maximum`.

        SigLIP's released scales are 112 to 118. Call it when the weights of a start or of a checkpoint are in place.

        earlier_maximum: upper bound of the run that is resumed. If `raises_maximum`, the bound is not below it.
        """
        value = float(self.read())
        if raises_maximum:
            value = max(value, earlier_maximum)
        if value <= self.maximum:
            return
        scale, maximum = math.exp(value), math.exp(self.maximum)
        outcome = f"becomes {maximum:.4g} at the first update"
        if raises_maximum:
            outcome, self.maximum = "is the bound of this run; --logit-scale-max sets another one", value
        log_once(logger.warning, f"a logit scale of {scale:.4g} is above {maximum:.4g}: it {outcome}")

    @torch.no_grad()
    def clamp_(self) -> torch.Tensor:
        """Clamp the master value and the model's parameter to the bounds; return the value as `read` does."""
        value = self.read()
        clamped = value.clamp(0.0, self.maximum)
        # To write at ZeRO-3 takes two collectives, which take longer than to wait for the comparison.
        if not (is_partitioned(self._parameter) and torch.equal(value, clamped)):
            self.write(clamped)
        return clamped
