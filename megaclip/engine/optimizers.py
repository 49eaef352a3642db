"""Parameter groups, the learning rate, and the update that refuses non-finite gradients.

DeepSpeed builds most optimizers from ds_config.json; Lion and LAMB are timm's. This module chooses the parameters that
receive weight decay, and takes the optimizer step. `logit_scale` and `logit_bias` have parameter groups of their own,
so that each float32 master is one tensor at every ZeRO stage.
"""

import math
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.config.optimizers import Optimizer
from megaclip.errors import ConfigError, NonFiniteError
from megaclip.models import DualEncoder
from megaclip.models.layers import split_dim
from megaclip.open_clip_package import import_torchvision


def parameter_groups(model: DualEncoder, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters as optimizer groups: with weight decay, without, and one per scalar of the loss.

    Empty groups are left out. Parameters are chosen by name, not by shape, because ZeRO-3 changes the shapes.
    """
    not_decayed, alone = model.no_weight_decay_names(), ("logit_scale", "logit_bias")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "name": "decayed",
            "params": [parameter for name, parameter in named if name not in not_decayed],
            "weight_decay": weight_decay,
        },
        {
            "name": "not_decayed",
            "params": [parameter for name, parameter in named if name in not_decayed and name not in alone],
            "weight_decay": 0.0,
        },
        *({"name": name, "params": [parameter], "weight_decay": 0.0} for name, parameter in named if name in alone),
    ]
    return [group for group in groups if group["params"]]


def timm_optimizer(settings: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return timm's optimizer `settings.type` over `groups`. Parameters that are left out have timm's defaults.

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
    """Set the learning rate of every parameter group for the next update."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate


def guard_gradients(engine: DeepSpeedEngine) -> None:
    """Make the optimizer refuse an update whose global gradient norm is infinite or NaN.

    DeepSpeed takes such a step in bf16 at ZeRO-1 and 2, or skips it silently if bf16.check_grad_overflow is true
    (`update` reports it). The hook runs inside `engine.step()`, on every rank with the same global norm, before any
    parameter changes.
    """
    checked: Tensor | None = None  # DeepSpeed steps once per parameter group; reading the norm waits for the GPU

    def refuse(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        nonlocal checked
        norm = getattr(engine.optimizer, "_global_grad_norm", None)
        if norm is not None and norm is not checked:
            _check_norm(float(norm), engine.global_steps)
            checked = norm

    engine.basic_optimizer.register_step_pre_hook(refuse)


def update(engine: DeepSpeedEngine) -> float:
    """Take the optimizer step at the end of an accumulation and return the gradient's global norm before clipping.

    Raises:
        NonFiniteError: the norm is infinite or NaN (raised on every rank; no parameter has changed).
    """
    if engine.optimizer is engine.basic_optimizer:  # ZeRO-0, where it has no norm of its own
        engine._global_grad_norm = _gradient_norm(engine.module)
        _check_norm(float(engine._global_grad_norm), engine.global_steps)
    steps_before = engine.global_steps
    engine.step()
    if getattr(engine.optimizer, "overflow", False):
        _check_norm(math.inf, steps_before)
    return float(engine.get_global_grad_norm())


def _gradient_norm(model: DualEncoder) -> Tensor:
    """Return the norm, (), of all gradients of a model that ZeRO has not partitioned, parts on other ranks included."""
    whole: list[Tensor] = []
    parts: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            (whole if split_dim(name) is None else parts).append(parameter.grad)
    squares = [torch.nn.utils.get_total_norm(gradients).square() for gradients in (whole, parts)]
    return (squares[0] + sum_over_ranks(squares[1], group=model.tensor)).sqrt()


def _check_norm(norm: float, step: int) -> None:
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"step {step}: the gradient norm is {norm}, so the update was not made; lower the learning rate, lengthen "
            "--warmup or set gradient_clipping, and resume from the last checkpoint"
        )
