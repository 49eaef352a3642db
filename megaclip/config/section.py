"""The section "megaclip" of ds_config.json, typed: its settings, their meanings and defaults.

`megaclip.config.checks` refuses combinations that have no effect or contradict each other.
"""

from typing import Literal

from pydantic import ConfigDict, Field

from megaclip.losses.fastclip_variants import VARIANTS
from megaclip.losses.settings import FastClipSettings, LossSettings


class MegaclipSection(LossSettings):
    """The section "megaclip" of ds_config.json: settings that DeepSpeed does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["clip", "siglip", "sogclr", "isogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"] = (
        "clip"
    )
    """Contrastive loss. "clip" (InfoNCE over images and texts) and "siglip" (sigmoid loss of every pair, for models
    with a logit bias) contrast each sample with all other samples of the batch. The others, the global losses, contrast
    it with the whole dataset, using estimates that are stored per sample."""

    fastclip: FastClipSettings = FastClipSettings()
    """Settings of the global losses."""

    tensor_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that each layer of the towers is split over. Requires megatron-core. The batch sizes of
    ds_config.json are then those of a replica of this many ranks."""

    layer_norm: Literal["torch", "apex"] = "torch"
    """Implementation of the towers' layer norms. "apex" is NVIDIA apex's memory-efficient one and must be installed."""

    coalesce_gradient_reduction: bool = False
    """Reduce parameter gradients once per step instead of once per gradient-cache chunk (ZeRO stages 1 to 3). There is
    less traffic, but whole gradients are kept until the end of the step; with bf16 their float32 sums are kept too,
    unless data_types.grad_accum_dtype is "bf16"."""

    text_micro_batch_size: int | None = Field(default=None, gt=0)
    """Number of captions per text chunk. Default: train_micro_batch_size_per_gpu, the number of images per chunk."""

    compile_blocks: bool = False
    """Compile the transformer blocks with torch.compile (ZeRO stages 0 to 2). Steps are faster after a slower first
    one."""

    data_offload: Literal["auto", "cpu", "disk", "reread"] = "auto"
    """Place of a step's images between the two passes of the gradient cache: "cpu" is host memory (page-locked for
    GPUs), "disk" a file (see --data-offload-dir), "reread" reads them again from the dataset. "auto" selects host
    memory if the images fit, otherwise the disk, and otherwise refuses to start. Nothing is stored if a step has one
    pass."""

    embeddings_offload: Literal[True, False, "auto"] = "auto"
    """Keep embeddings and their gradients in host memory while the towers run. "auto" does so if they would take more
    than a tenth of the device's memory."""

    @property
    def is_global(self) -> bool:
        """True for the global losses, which have per-sample state and a temperature of their own."""
        return self.loss in VARIANTS
