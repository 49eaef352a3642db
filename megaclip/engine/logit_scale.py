"""The float32 masters of `logit_scale` and `logit_bias`: read them exactly, and keep the scale inside its bounds.

Under bf16 the model's own copy is rounded (2.65378 becomes 2.65625), and clamping that copy never reaches the master
that the optimizer updates. Where the master lies differs by ZeRO stage and precision; this file is the one place that
knows.
"""

import math
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)


class MasterScalar:
    """Access to the master of a parameter of one element, (1,). Every method is called by all ranks together."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        """`parameter`: of an engine's module, in an optimizer group of its own."""
        self._parameter: Any = parameter  # DeepSpeed adds attributes to it

    def read(self) -> torch.Tensor:
        """The value: (1,) float32 on the engine's device, the same on every rank."""
        parameter = self._parameter
        if hasattr(parameter, "ds_id"):
            value = safe_get_local_fp32_param(parameter).detach().to(torch.float32, copy=True)
            # Partitioned parameters start on the first rank of their group; the others hold padding.
            group = parameter.ds_process_group
            dist.broadcast(value, src=dist.get_global_rank(group, 0), group=group)
            return value
        if hasattr(parameter, "_hp_mapping"):
            return safe_get_full_fp32_param(parameter).detach()
        return parameter.detach().to(torch.float32, copy=True)  # ZeRO-0, where only float32 is allowed: its own master

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Give master and working copy this value, (1,), the same on every rank."""
        parameter = self._parameter
        if hasattr(parameter, "ds_id"):
            safe_set_local_fp32_param(parameter, value)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
        else:
            if hasattr(parameter, "_hp_mapping"):
                safe_set_full_fp32_param(parameter, value)
            parameter.data.copy_(value)


class LogitScale(MasterScalar):
    """The logarithm of the logit scale, `engine.module.logit_scale`."""

    def __init__(self, engine: DeepSpeedEngine, maximum: float) -> None:
        """`maximum` bounds exp(logit_scale) from above; 1 bounds it from below, as in open_clip."""
        super().__init__(engine.module.logit_scale)
        self._bounds = (0.0, math.log(maximum))

    @torch.no_grad()
    def clamp_(self) -> torch.Tensor:
        """Bring master and working copy back inside the bounds, where needed; returns the value, as `read` does."""
        value = self.read()
        clamped = value.clamp(*self._bounds)
        if torch.equal(value, clamped):
            return value
        self.write(clamped)
        return clamped
