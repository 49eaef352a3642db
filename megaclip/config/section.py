"""The section "megaclip" of ds_config.json, typed: its settings, what they mean and their defaults.

`megaclip.config.checks` says which combinations are refused.
"""

from typing import Literal

from pydantic import ConfigDict, Field

from megaclip.losses.fastclip_variants import VARIANTS
from megaclip.losses.settings import FastClipSettings, LossSettings


class MegaclipSection(LossSettings):
    """The section "megaclip" of ds_config.json: what DeepSpeed does not know about."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["clip", "siglip", "sogclr", "isogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"] = (
        "clip"
    )
    """Contrastive loss: "clip" is InfoNCE over images and texts, "siglip" the sigmoid loss of every pair (for models
    with a logit bias); both with every other sample of the batch as a negative. The others contrast each sample with
    the whole dataset, by estimators kept per sample."""

    fastclip: FastClipSettings = FastClipSettings()
    """Settings of the losses over the whole dataset."""

    tensor_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that each layer of the towers is split over. Requires megatron-core. The batch sizes of
    ds_config.json are then those of a replica of this many ranks."""

    coalesce_gradient_reduction: bool = False
    """Reduce parameter gradients once per step, not once per gradient-cache chunk (ZeRO 1 to 3): less traffic, but
    whole gradients are held until the end of the step, with bf16 also their float32 sums (not if
    data_types.grad_accum_dtype is bf16)."""

    text_micro_batch_size: int | None = Field(default=None, gt=0)
    """Captions that go through the text tower at once; by default as many as images, train_micro_batch_size_per_gpu."""

    compile_blocks: bool = False
    """Compile the transformer blocks with torch.compile (not at ZeRO-3): faster steps, after a slower first one."""

    data_offload: Literal["auto", "cpu", "disk", "reread"] = "auto"
    """Where a step's images wait between the two passes of the gradient cache: in host memory (page-locked for GPUs),
    in a file (--data-offload-dir), or nowhere, and are read again. "auto" takes host memory if they fit there, else
    the disk, else refuses; nothing is kept where nothing is passed over twice."""

    embeddings_offload: bool | Literal["auto"] = "auto"
    """Keep embeddings and their gradients in host memory while the towers run; "auto" does where they would take more
    than a tenth of the device's memory."""

    @property
    def is_global(self) -> bool:
        """Whether the loss is over the whole dataset: with state per sample and a temperature of its own."""
        return self.loss in VARIANTS
