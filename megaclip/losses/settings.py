"""Settings of the losses: names, accepted values, defaults and meanings.

The section "megaclip" of ds_config.json (`megaclip.config.section`) includes `LossSettings` and `FastClipSettings`. The
constructors of the losses take the fields of these models as keyword arguments.

`VARIANTS` has one row for each version of SogCLR, iSogCLR and FastCLIP. `megaclip.losses.fastclip` has the formulas
that the columns select, and names the papers.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megaclip.ops.types import DEFAULT_OPTIONS, Implementation, Precision

_Decay = Annotated[float, Field(ge=0, lt=1)]
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Variant:
    """Row of the table: the properties of one loss."""

    temperature: Literal["constant", "global", "individual"]
    """"global": one learned temperature for all samples; "individual": two learned temperatures per sample."""
    multiplied: bool
    """Multiply the terms of a sample by its temperature."""
    with_rho: bool
    """Include rho times the temperature in the objective."""
    gamma_schedule: Literal["constant", "cosine"]
    """Default schedule of the inner learning rate gamma."""

    @property
    def individual(self) -> bool:
        return self.temperature == "individual"


VARIANTS = {
    "sogclr": Variant("constant", True, False, "constant"),
    "isogclr": Variant("individual", True, True, "constant"),
    "fastclip_v0": Variant("global", False, False, "cosine"),
    "fastclip_v1": Variant("constant", True, False, "cosine"),
    "fastclip_v2": Variant("individual", True, True, "cosine"),
    "fastclip_v3": Variant("global", True, True, "cosine"),
}


class LossSettings(BaseModel):
    """Settings of every loss: how features and gradients travel between ranks, and how tiles are computed."""

    model_config = _STRICT

    exchange: Literal["auto", "ring", "all_gather"] = "auto"
    """How features are sent to the other ranks: "ring" sends them from neighbour to neighbour, "all_gather" all at
    once. Text features are always sent, image features only with the reduction "scalar". Both are exact. "auto" chooses
    by a cost model (docs/losses.md)."""

    reduction: Literal["auto", "feature", "scalar"] = "auto"
    """Data that ranks exchange to compute the gradient: "feature" sends the gradients of text features. "scalar" sends
    the features of both towers (and log-normalisers, except in the sigmoid loss), no gradients, and computes more. Both
    are exact. "auto" chooses by a cost model (docs/losses.md)."""

    payload: Literal["auto", "bf16"] = "auto"
    """Format of features and their gradients between ranks: "auto" is the features' dtype and float32 gradients, "bf16"
    rounds both to bfloat16. With the reduction "scalar" the statistics and the gradients of InfoNCE and the global
    losses then use rounded features of both sides. Sums stay float32."""

    implementation: Implementation = DEFAULT_OPTIONS.implementation
    """Implementation of the tiles: "auto" selects Triton on a GPU and PyTorch elsewhere. "triton" requires CUDA."""

    tile_budget_mib: float = Field(DEFAULT_OPTIONS.tile_budget_mib, gt=0)
    """Upper limit, in MiB, of the temporary memory for a tile of logits."""


class FastClipSettings(BaseModel):
    """Settings of the global losses: the section "fastclip" inside the section "megaclip" of ds_config.json.

    `megaclip.losses.fastclip` has the formulas.
    """

    model_config = _STRICT

    gamma_min: float = Field(default=0.2, gt=0, le=1)
    """Inner learning rate gamma at the end of its schedule."""

    gamma_epochs: float | None = Field(default=None, gt=0)
    """Number of epochs over which the cosine schedule goes from 1 to gamma_min. Default: half of the epochs of a run,
    and 18 for `FastClipLoss` in another trainer."""

    gamma_schedule: Literal["auto", "constant", "cosine"] = "auto"
    """Schedule of gamma: "auto" is "constant" for sogclr and isogclr, "cosine" for the others."""

    gamma_per: Literal["epoch", "step"] = "epoch"
    """Interval at which the schedule changes gamma: once per epoch or at every step."""

    rho: float = Field(default=6.5, ge=0)
    """Weight of the temperature itself in the objective of isogclr, fastclip_v2 and fastclip_v3. A larger rho leads to
    a lower temperature."""

    eps: float = Field(default=1e-14, ge=0)
    """Number added to the estimate u wherever its logarithm or its reciprocal is taken."""

    temperature_min: float = Field(default=0.01, gt=0)
    """Lower bound of the temperature tau."""

    temperature_max: float = Field(default=1.0, gt=0)
    """Upper bound of tau."""

    temperature: float = Field(default=0.07, gt=0, validate_default=True)
    """Initial tau, between temperature_min and temperature_max."""

    temperature_learning_rate: float = Field(default=2e-4, gt=0)
    """Learning rate of the temperature's Adam. It trains log(1/tau) if one tau is shared by all samples, as the
    published code does, and otherwise each tau itself."""

    temperature_schedule: Literal["constant", "cosine", "threshold"] = "constant"
    """Schedule of that learning rate: "cosine" rises over temperature_warmup steps and then falls to 0 over the rest of
    the training, "threshold" divides it by three while tau is at or below 0.03, and requires one global
    temperature."""

    temperature_warmup: int | None = Field(default=None, ge=0)
    """Number of steps over which the schedule "cosine" raises that learning rate from 0. Default: --warmup of a run,
    and 0 for `FastClipLoss` in another trainer."""

    temperature_betas: tuple[_Decay, _Decay] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the two moments of that Adam."""

    temperature_eps: float = Field(default=1e-8, gt=0)
    """The eps of that Adam."""

    temperature_gradient_limit: float | None = Field(default=None, ge=0)
    """Largest absolute gradient of a per-sample temperature. Larger gradients are reduced to it before Adam. 0 is no
    limit. Default: 5 with compat "reference", as in the published code, and 0 with "paper"."""

    compat: Literal["paper", "reference"] = "paper"
    """"reference" scales gradients as the published code does, for hyper-parameters that were tuned with it. Feature
    gradients are halved and have no factor tau (v3 keeps the factor). The temperature gradient of v3 is halved except
    for the part through g. The part through g of v0 is not halved. The gradient of a global temperature uses log u
    instead of log(eps+u). The Adam of per-sample temperatures counts epochs, and its gradients are limited. The loss
    value is equal in both. docs/fastclip.md lists the remaining differences from the published code."""

    state_device: Literal["cpu", "accelerator"] = "cpu"
    """Device on which each rank keeps the state of its samples."""

    @field_validator("temperature")
    @classmethod
    def _check_bounds(cls, value: float, info: ValidationInfo) -> float:
        low, high = info.data.get("temperature_min", value), info.data.get("temperature_max", value)
        if not low <= value <= high:
            raise ValueError(f"must lie between temperature_min and temperature_max, {low} to {high}")
        return value


class StandaloneSettings(LossSettings):
    """Settings of a loss that is constructed in Python, inside or outside of a MegaCLIP run."""

    precision: Precision = DEFAULT_OPTIONS.precision
    """Precision of the products of features; see `megaclip.ops.types.TileOptions`."""


class StandaloneFastClipSettings(StandaloneSettings, FastClipSettings):
    """Settings of a `FastClipLoss` that is constructed in Python."""

    variant: Literal["sogclr", "isogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"] = "fastclip_v3"
    """Row of the table in `megaclip.losses.fastclip`."""

    samples: int = Field(ge=2)
    """Number of samples of the dataset. Sample ids are 0 to samples - 1."""


class BatchLossSettings(StandaloneSettings):
    """Settings of a `ClipLoss` or `SigLipLoss` that is constructed in Python."""

    ids: Literal["ignore", "mask", "positive"] = "ignore"
    """Meaning of equal ids of two pairs of the batch. "mask": they are no negatives of each other. "positive": they are
    positives of each other, each with the same weight. "ignore": there are no ids."""

    cuda_graphs: bool = True
    """Run the kernels of small batches on GPUs as CUDA graphs, except with the exchange "ring". Results have the same
    bits. `megaclip.losses.small_batches` documents the limits."""


class ClipLossSettings(BatchLossSettings):
    """Settings of a `ClipLoss` that is constructed in Python."""

    symmetric: bool = True
    """True: mean of both directions. False: only from images to texts, or from queries to documents."""

    margin: float | None = Field(default=None, ge=0)
    """Leave out negatives that are more similar to their image or text than its positive by more than this margin of
    the cosine, as probable false negatives. The tiles then run in PyTorch. Default: none are left out."""

    @field_validator("margin")
    @classmethod
    def _check_margin(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("ids") == "positive":
            raise ValueError("requires ids 'mask' or 'ignore', because it would leave out positives too")
        return value

    same_side: bool = False
    """Contrast pairs within each side too: the denominators of pair i include the images of the other pairs with image
    i, and their texts with text i, as queries and documents in Qwen3 Embedding (arXiv:2506.05176). This triples the
    products of the loss, and with the ring its traffic; all_gather sends the texts once."""
