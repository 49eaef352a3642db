"""Build timm's optimizers, set the learning rate, and take updates, which refuse non-finite gradients.

A refused update changes no parameter and no optimizer state. DeepSpeed then takes the path of a float16 overflow, which
discards the gradients.

DeepSpeed builds most optimizers from ds_config.json; Lion and LAMB are timm's. `megaclip.zero.parameter_groups` forms
the groups that they update.
"""

import math
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.config import TrainingConfig
from megaclip.config.optimizers import AdamParams, Optimizer
from megaclip.errors import ConfigError, NonFiniteError
from megaclip.models import DualEncoder
from megaclip.models.layers import split_dim
from megaclip.open_clip_package import import_torchvision
from megaclip.zero.parameter_groups import LR_SCALE


def needed_ops(config: TrainingConfig) -> list[str]:
    """Return the names of the ops that DeepSpeed compiles for the optimizer of ds_config.json."""
    params, offload = config.optimizer.params, config.zero.offload_optimizer
    if not isinstance(params, AdamParams) or params.torch_adam:
        return []
    on_cpu = get_accelerator().device_name() == "cpu" or (offload is not None and offload.device != "none")
    return ["cpu_adam" if on_cpu else "fused_adam"]


def timm_optimizer(settings: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return timm's optimizer `settings.type` over `groups`. Settings that are not given have timm's defaults.

    Raises:
        ConfigError: timm is not installed.
    """
    try:
        import_torchvision()
        import timm.optim
    except ImportError as error:
        raise ConfigError(
            f"optimizer.type {settings.type} requires timm, which cannot be imported ({error}); run  pip install timm"
        ) from None
    options = settings.params.model_dump(exclude_unset=True)
    if settings.type == "Lamb":
        options["max_grad_norm"] = None  # timm's default clips at norm 1; DeepSpeed has already clipped the gradients
    optimizer: torch.optim.Optimizer = getattr(timm.optim, settings.type)(groups, **options)
    return optimizer


def set_learning_rate(engine: DeepSpeedEngine, learning_rate: float) -> None:
    """Set the learning rate of every parameter group for the next update.

    learning_rate: learning rate of groups with the factor 1 (`parameter_groups`).
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate * group[LR_SCALE]


def guard_gradients(engine: DeepSpeedEngine) -> None:
    """Make the optimizer refuse an update whose global gradient norm is infinite or NaN.

    DeepSpeed refuses it at ZeRO-3 and in float32. In bf16 at ZeRO-1 and 2 DeepSpeed refuses it only if it also checks
    every gradient alone (bf16.check_grad_overflow), which ds_config.json may not set. With this function it checks the
    norm.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "check_grad_overflow", None) is False:
        optimizer.check_grad_overflow = True
        optimizer.check_overflow = lambda **_: None


def step_without_history(engine: DeepSpeedEngine) -> None:
    """Make an update of DeepSpeed's Adam on the CPU depend on its arguments only, so that resuming keeps every bit.

    The compiled optimizer keeps beta ** step and multiplies it by beta in each step. After a restart it computes the
    power directly, which rounds differently in float32. An update of no elements with step number 0 makes it compute
    the power directly in every step. The CUDA kernels and PyTorch's optimizers always compute it directly, and so does
    FusedAdam on the CPU (`megaclip.zero.op_builds`).
    """
    empty = [torch.empty(0)] * 4

    def forget(optimizer: DeepSpeedCPUAdam, args: tuple, kwargs: dict) -> None:
        group = optimizer.param_groups[0]
        settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, *settings, *empty)

    if isinstance(engine.basic_optimizer, DeepSpeedCPUAdam):
        engine.basic_optimizer.register_step_pre_hook(forget)


def update(engine: DeepSpeedEngine, step: int | None = None, loss: Tensor | None = None) -> float:
    """Take the optimizer step at the end of an accumulation and return the gradient's global norm before clipping.

    The device has then computed the norm and all that was queued before it, but perhaps not the update.

    step: number of earlier steps, for the error message. None: DeepSpeed's count. loss: (), reported in the error
    message if it is not finite.

    Raises:
        NonFiniteError: the norm is infinite or NaN (raised on every rank; no parameter and no optimizer state has
            changed, and the gradients are discarded).
    """
    step = engine.global_steps if step is None else step
    if engine.optimizer is engine.basic_optimizer:  # ZeRO-0, where DeepSpeed computes no norm
        engine._global_grad_norm = _gradient_norm(engine.module)
        if not math.isfinite(norm := float(engine._global_grad_norm)):
            engine.zero_grad()
            raise _non_finite(norm, step, loss)
        engine.step()
        return norm
    engine.step()
    if getattr(engine.optimizer, "overflow", False):
        raise _non_finite(math.inf, step, loss)
    return float(engine.get_global_grad_norm())


def _gradient_norm(model: DualEncoder) -> Tensor:
    """Return the norm, (), of all gradients of a model that ZeRO has not partitioned, parts on other ranks included."""
    whole: list[Tensor] = []
    parts: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            (whole if split_dim(name) is None else parts).append(parameter.grad)
    # The norm of no gradients is on the CPU, and its sum over ranks must be on the device of the others.
    norms = [torch.nn.utils.get_total_norm(gradients).to(model.logit_scale.device) for gradients in (whole, parts)]
    return (norms[0].square() + sum_over_ranks(norms[1].square(), group=model.tensor)).sqrt()


def _non_finite(norm: float, step: int, loss: Tensor | None) -> NonFiniteError:
    value = 0.0 if loss is None else float(loss)
    reason = f"the gradient norm is {norm}" if math.isfinite(value) else f"the loss is {value}"
    return NonFiniteError(f"step {step}: {reason}, so the update was not made")
