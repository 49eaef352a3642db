"""Which optimizers ds_config.json may name, with which settings, and which combinations are refused and why.

DeepSpeed hands optimizer.params on unchecked, and lets some optimizers run where they compute something else than
their name says.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

_Decay = Annotated[float, Field(ge=0, lt=1)]


class _Params(BaseModel):
    """optimizer.params of every optimizer. A wrong beta would show as a loss of NaN, so types and bounds are strict."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    lr: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)


class _AdamParams(_Params):
    """DeepSpeed's Adam, decoupled decay by default (AdamW)."""

    betas: list[_Decay] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: float = Field(1e-8, ge=0)
    bias_correction: bool = True
    adam_w_mode: bool = True
    torch_adam: bool = False
    fp32_optimizer_states: bool = True


class _SgdParams(_Params):
    """torch.optim.SGD; its weight decay is added to the gradient."""

    momentum: _Decay = 0.0
    nesterov: bool = False


class _AdafactorParams(_Params):
    """torch.optim.Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235)."""

    beta2_decay: float = Field(-0.8, le=0)
    d: float = Field(1.0, ge=1)


class _LionParams(_Params):
    """timm's Lion (Chen et al., 2023, arXiv:2302.06675), decoupled decay."""

    betas: list[_Decay] = Field([0.9, 0.99], min_length=2, max_length=2)


class _LambParams(_Params):
    """timm's LAMB (You et al., 2020, arXiv:1904.00962), its decay inside the trust ratio."""

    betas: list[_Decay] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: float = Field(1e-6, ge=0)
    bias_correction: bool = True
    always_adapt: bool = False
    """Trust ratios for parameters without weight decay (biases, norms) too, as in the paper's formula; by default they
    take Adam's step, as in NVIDIA's implementation."""


OPTIMIZER_PARAMS: dict[str, type[_Params]] = {
    "AdamW": _AdamParams,
    "Adam": _AdamParams,
    "SGD": _SgdParams,
    "Adafactor": _AdafactorParams,
    "Lion": _LionParams,
    "Lamb": _LambParams,
}
SUPPORTED_OPTIMIZERS = tuple(OPTIMIZER_PARAMS)

_REFUSED_OPTIMIZERS = {
    "onebitadam": "it replaces the gradient reduction that the gradient cache relies on; use AdamW",
    "onebitlamb": "it replaces the gradient reduction that the gradient cache relies on; use AdamW",
    "zerooneadam": "it replaces the gradient reduction that the gradient cache relies on; use AdamW",
}


# DeepSpeed's own of the same names compute something else: its Lion, on the CPU and on GPUs, moves a parameter whose
# gradient is zero by a whole step (tokens that a batch lacks, for one), and its LAMB runs on GPUs only.
TIMM_OPTIMIZERS = ("Lion", "Lamb")

_NEED_WHOLE_TENSORS = {
    "Adafactor": "could not factor any matrix",
    "Lamb": "takes one trust ratio per tensor",
}
_UNTESTED = ("SGD", "Lion")
"""Right on flat pieces, but not on DeepSpeed's list: it asks for zero_allow_untested_optimizer under ZeRO."""


def refusal(kind: Any, params: dict[str, Any], zero_stage: int, untested: bool, offload: bool) -> str | None:
    """Why this optimizer cannot run so; None when it can.

    untested: zero_allow_untested_optimizer, which DeepSpeed demands for SGD and Lion under ZeRO.
    """
    if str(kind).lower().replace("_", "") in _REFUSED_OPTIMIZERS:
        return f"optimizer.type {kind} cannot be used: {_REFUSED_OPTIMIZERS[str(kind).lower().replace('_', '')]}"
    if kind in _NEED_WHOLE_TENSORS and zero_stage > 0:
        return (
            f"optimizer.type {kind} needs zero_optimization.stage 0: stage {zero_stage} hands it flat pieces of "
            f"parameters, and it {_NEED_WHOLE_TENSORS[kind]}"
        )
    if kind in _UNTESTED and offload:
        return f"optimizer.type {kind} has no implementation for offloaded parameters; leave offload_optimizer out"
    needs_untested = kind in _UNTESTED and zero_stage > 0
    if needs_untested and not untested:
        return f'optimizer.type {kind} under ZeRO needs "zero_allow_untested_optimizer": true, which DeepSpeed asks for'
    if untested and not needs_untested:
        return f"zero_allow_untested_optimizer has no effect with optimizer.type {kind}; leave it out"
    if params.get("torch_adam") and (given := sorted({"bias_correction", "fp32_optimizer_states"} & params.keys())):
        return f"optimizer.params.{given[0]} is not for torch_adam, which is torch's own Adam; leave one of them out"
    if kind == "AdamW" and params.get("adam_w_mode") is False:
        return "optimizer.params.adam_w_mode false has no effect with optimizer.type AdamW; use Adam"
    if kind == "SGD" and params.get("nesterov") and not params.get("momentum"):
        return "optimizer.params.nesterov needs a momentum above 0"
    return None
