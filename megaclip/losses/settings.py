"""Settings of the losses, typed: their values, meanings and defaults.

The section "megaclip" of ds_config.json (`megaclip.config.section`) includes them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_Decay = Annotated[float, Field(ge=0, lt=1)]


class LossSettings(BaseModel):
    """Settings of every loss: how features and gradients are exchanged and how tiles are computed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exchange: Literal["auto", "ring", "all_gather"] = "auto"
    """How text features reach the other ranks: neighbour by neighbour, or all at once."""

    reduction: Literal["auto", "feature", "scalar"] = "auto"
    """What crosses ranks for the gradient: feature gradients, or only log-normalisers."""

    payload: Literal["auto", "bf16"] = "auto"
    """What features and their gradients travel in: features' dtype and float32, or bfloat16 both."""

    implementation: Literal["auto", "torch", "triton"] = "auto"
    """Which tile implementation runs: "auto" takes Triton on a GPU and PyTorch elsewhere."""

    tile_budget_mib: int = Field(128, gt=0)
    """Upper bound, in MiB, of the temporary memory that a tile of logits may take."""


class FastClipSettings(BaseModel):
    """The sub-section "fastclip" of our section, for the losses in VARIANTS; `megaclip.losses.FastClipLoss` says
    what each setting does, and has the defaults of those left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    gamma_min: float = Field(default=0.2, gt=0, le=1)
    """The inner learning rate that the schedule ends at."""

    gamma_epochs: float | None = Field(default=None, gt=0)
    """Epochs over which the cosine schedule goes from 1 to gamma_min; left out, half of the run's epochs."""

    gamma_schedule: Literal["auto", "constant", "cosine"] = "auto"
    """"auto" is the variant's own: constant for sogclr and isogclr, cosine for the others."""

    gamma_per: Literal["epoch", "step"] = "epoch"
    """How often the schedule moves on."""

    rho: float = Field(default=6.5, ge=0)
    """What tau itself costs in the objective of isogclr, fastclip_v2 and fastclip_v3: the larger, the lower tau."""

    eps: float = Field(default=1e-14, ge=0)
    """Added to the estimate u wherever its logarithm is taken or something is divided by it."""

    temperature: float = Field(default=0.07, gt=0)
    """Initial tau."""

    temperature_min: float = Field(default=0.01, gt=0)
    """Lower bound of tau."""

    temperature_max: float = Field(default=1.0, gt=0)
    """Upper bound of tau."""

    temperature_learning_rate: float = Field(default=2e-4, gt=0)
    """Of the Adam that trains the temperature: log(1/tau) if there is one for all samples, else each tau itself."""

    temperature_schedule: Literal["constant", "cosine", "threshold"] = "constant"
    """"threshold" takes a third of the rate once tau is at or below 0.03; for one global temperature."""

    temperature_betas: list[_Decay] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Decays of that Adam's two moments."""

    temperature_eps: float = Field(default=1e-8, gt=0)
    """That Adam's eps."""

    compat: Literal["paper", "reference"] = "paper"
    """"reference" scales gradients as the released code does, for hyper-parameters that were tuned with it."""

    state_device: Literal["cpu", "accelerator"] = "cpu"
    """Where each rank keeps its samples' state."""
