"""The optimizers that ds_config.json may name, their parameters, and the combinations that are refused.

DeepSpeed does not check optimizer.params. It also accepts combinations of settings in which an optimizer computes
something other than its name states.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megaclip.errors import ConfigError, nearest

_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerParams(BaseModel):
    """optimizer.params of every optimizer. Types and bounds are strict: the only symptom of a wrong beta is a NaN loss.

    The optimizers set their own defaults. Only the fields in `model_fields_set` are passed to them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    lr: float = Field(gt=0)
    """Peak learning rate; the schedule scales it."""

    weight_decay: float = Field(0.0, ge=0)


class AdamParams(OptimizerParams):
    """DeepSpeed's Adam, with decoupled weight decay by default (AdamW)."""

    betas: list[_Decay] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: float = Field(1e-8, ge=0)
    bias_correction: bool = True
    adam_w_mode: bool = True
    torch_adam: bool = False
    fp32_optimizer_states: bool = True


class SgdParams(OptimizerParams):
    """torch.optim.SGD; its weight decay is added to the gradient."""

    momentum: _Decay = 0.0
    nesterov: bool = False


class AdafactorParams(OptimizerParams):
    """torch.optim.Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235)."""

    beta2_decay: float = Field(-0.8, le=0)
    d: float = Field(1.0, ge=1)


class LionParams(OptimizerParams):
    """timm's Lion (Chen et al., 2023, arXiv:2302.06675), with decoupled weight decay."""

    betas: list[_Decay] = Field([0.9, 0.99], min_length=2, max_length=2)


class LambParams(OptimizerParams):
    """timm's LAMB (You et al., 2020, arXiv:1904.00962), with weight decay inside the trust ratio."""

    betas: list[_Decay] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: float = Field(1e-6, ge=0)
    bias_correction: bool = True
    always_adapt: bool = False
    """Use trust ratios for parameters without weight decay (biases, norms) too, as in the paper's formula. By default
    they take Adam's step, as in NVIDIA's implementation."""


_PARAMS: dict[str, type[OptimizerParams]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "SGD": SgdParams,
    "Adafactor": AdafactorParams,
    "Lion": LionParams,
    "Lamb": LambParams,
}

# DeepSpeed's optimizers of these names are not used. Its Lion changes a parameter whose gradient is zero (such as the
# embedding of a token that the batch lacks) by a whole step, on the CPU and on GPUs. Its LAMB runs on GPUs only.
TIMM_OPTIMIZERS = ("Lion", "Lamb")

NEED_WHOLE_TENSORS = {
    "Adafactor": "cannot factor flat pieces",
    "Lamb": "takes one trust ratio per tensor",
}
UNTESTED_BY_DEEPSPEED = ("SGD", "Lion")
"""Optimizers that are correct on flat pieces, and that DeepSpeed accepts with zero_allow_untested_optimizer only."""

_REFUSED = {
    **dict.fromkeys(
        ("onebitadam", "onebitlamb", "zerooneadam"),
        "it replaces the gradient reduction that the gradient cache relies on; use AdamW",
    ),
    **dict.fromkeys(
        ("muon", "muonwithauxadam"),
        "at ZeRO-1 to 3 DeepSpeed measures and clips Muon's update instead of the gradient, so gradient_clipping and "
        "the check for NaN would not apply to the gradient; use AdamW or Lion",
    ),
}
"""Optimizer of DeepSpeed, in lower case and without underscores -> reason why it is refused, and what to do."""


class Optimizer(BaseModel):
    """Section "optimizer" of ds_config.json."""

    type: str
    params: OptimizerParams

    @field_validator("params", mode="before")
    @classmethod
    def _parse_params(cls, params: Any, info: ValidationInfo) -> OptimizerParams:
        return params_model(info.data.get("type")).model_validate(params)


def params_model(optimizer_type: Any) -> type[OptimizerParams]:
    """Return the model of optimizer.params. Raises ConfigError if the optimizer is not supported."""
    if isinstance(optimizer_type, str) and optimizer_type in _PARAMS:
        return _PARAMS[optimizer_type]
    if reason := _REFUSED.get(str(optimizer_type).lower().replace("_", "")):
        raise ConfigError(f"optimizer.type {optimizer_type!r} cannot be used: {reason}")
    raise ConfigError(
        f"optimizer.type is {optimizer_type!r}; use one of {', '.join(_PARAMS)}"
        f"{nearest(str(optimizer_type), set(_PARAMS))}"
    )


def can_be_offloaded(optimizer_type: str) -> bool:
    """Return whether the optimizer has an implementation for zero_optimization.offload_optimizer."""
    return optimizer_type in ("Adam", "AdamW")


def check_optimizer(optimizer: Optimizer, *, zero_stage: int, offload: bool) -> None:
    """Raise ConfigError if the optimizer contradicts other settings of ds_config.json or its own parameters.

    offload: zero_optimization.offload_optimizer is present.
    """
    kind, params = optimizer.type, optimizer.params
    if kind in NEED_WHOLE_TENSORS and zero_stage > 0:
        raise ConfigError(
            f"optimizer.type {kind} requires zero_optimization.stage 0: stage {zero_stage} splits parameters into flat "
            f"pieces, and {kind} {NEED_WHOLE_TENSORS[kind]}"
        )
    if offload and not can_be_offloaded(kind):
        raise ConfigError(
            f"optimizer.type {kind} has no implementation for offloaded parameters; leave "
            "zero_optimization.offload_optimizer out"
        )
    if isinstance(params, AdamParams):
        deepspeed_only = sorted({"bias_correction", "fp32_optimizer_states"} & params.model_fields_set)
        if params.torch_adam and deepspeed_only:
            raise ConfigError(
                f"optimizer.params.{deepspeed_only[0]} has no effect with optimizer.params.torch_adam, which selects "
                "PyTorch's Adam; leave one of them out"
            )
        if kind == "AdamW" and not params.adam_w_mode:
            raise ConfigError("optimizer.params.adam_w_mode false has no effect with optimizer.type AdamW; use Adam")
    if isinstance(params, SgdParams) and params.nesterov and not params.momentum:
        raise ConfigError("optimizer.params.nesterov requires optimizer.params.momentum above 0; set it")
