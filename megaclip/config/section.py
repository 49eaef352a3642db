"""The section "megaclip" of ds_config.json, typed: its settings, their meanings and defaults.

`megaclip.config.checks` refuses combinations that have no effect or contradict each other.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from megaclip.losses.settings import VARIANTS, FastClipSettings, LossSettings


class LoraSettings(BaseModel):
    """The section "lora": adapters of low rank, by peft, which are trained instead of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, gt=0, le=2**14)
    """Rank of the adapters: the number of rows of A and of columns of B."""

    alpha: float = Field(default=16, gt=0)
    """Scale of the adapters: the product B A is multiplied by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which an element of an adapter's input is set to zero during training."""

    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the linear layers that get adapters, such as "q_proj" and "v_proj". A layer that a tower does not have
    is refused with the list of its layers. Default: all linear layers in the blocks."""

    towers: tuple[Literal["image", "text"], ...] = Field(default=("image", "text"), min_length=1)
    """Towers that get adapters. The other tower is frozen as a whole."""

    dora: bool = False
    """Train the length of each row of a weight apart from its direction (DoRA, arXiv:2402.09353). Requires ZeRO stage 2
    or less."""

    rslora: bool = False
    """Multiply B A by alpha / sqrt(rank) instead (rank-stabilised LoRA, arXiv:2312.03732)."""


class MegaclipSection(LossSettings):
    """The section "megaclip" of ds_config.json: settings that DeepSpeed does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["clip", "siglip", "sogclr", "isogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"] = (
        "clip"
    )
    """Contrastive loss. "clip" (InfoNCE over images and texts) and "siglip" (sigmoid loss of every pair, for models
    with init_logit_bias) contrast each sample with all other samples of the batch. The others, the global losses,
    contrast it with the whole dataset, using estimates that are stored per sample (docs/fastclip.md)."""

    objective: str | None = None
    """Objective beside the contrastive loss (docs/objectives.md): a name, such as "distillation", or FILE.py:CLASS of
    your own. The file is executed. Relative paths start at the working directory. Default: the contrastive loss
    only."""

    objective_settings: dict[str, Any] | None = None
    """Settings of the objective: the keyword arguments of its constructor. Default: its own defaults."""

    same_ids: Literal["ignore", "mask", "positive"] = "ignore"
    """Treatment of equal pairs in a batch, such as equal captions; --id-key selects what must be equal. "mask": they
    are no negatives of each other. "positive": they are positives of each other, each with the same weight. "ignore":
    they are negatives. The global losses require "ignore" (docs/losses.md)."""

    fastclip: FastClipSettings = FastClipSettings()
    """Settings of the global losses: the section "fastclip"."""

    towers: Literal["auto", "own", "open_clip"] = "auto"
    """Implementation of the towers (docs/models.md). "own" is MegaCLIP's, which is faster and can be tensor parallel.
    It refuses models that it does not support. "open_clip" runs open_clip's modules (timm trunks, Hugging Face text
    models, ...). It requires `pip install 'megaclip[open-clip]'`, no tensor parallelism and layer_norm "torch". "auto":
    MegaCLIP's towers for every model that they support, open_clip's for all others."""

    image_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the image tower, on the common schedule. Default: optimizer.params.lr. A setting of a tower
    without trained parameters is refused. docs/models.md describes the learning rates of towers and layers."""

    text_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the text tower. Default: optimizer.params.lr."""

    image_weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the image tower. Default: optimizer.params.weight_decay. Norms and biases have none."""

    text_weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the text tower. Default: optimizer.params.weight_decay."""

    image_layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Layer-wise decay of the image tower's learning rate: the factor from each layer to the one below it. The
    projection behind the last layer has the whole rate. Default: all layers have the same rate."""

    text_layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Layer-wise decay of the text tower's learning rate, as image_layer_decay."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the trained weights, which checkpoints hold beside the weights
    themselves. `megaclip export --ema` and `megaclip evaluate --ema` read it. It takes 4 bytes per trained parameter,
    divided among ranks like the optimizer states. Default: no average."""

    lora: LoraSettings | None = None
    """Train adapters instead of the weights: the section "lora" (docs/fine_tuning.md). All other parameters are frozen,
    except logit_scale and logit_bias. Requires --pretrained and `pip install 'megaclip[lora]'`, and excludes locks,
    tensor parallelism and layer decay. Default: no adapters."""

    tensor_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that each layer of the towers is split over (docs/tensor_parallel.md): a divisor of the attention
    heads of both towers. Requires `pip install 'megaclip[megatron]'`. train_micro_batch_size_per_gpu and
    text_micro_batch_size then count the samples of a replica of this many ranks; train_batch_size still counts the
    whole job."""

    layer_norm: Literal["torch", "apex"] = "torch"
    """Implementation of the towers' layer norms. "apex" is NVIDIA apex's memory-efficient one. It requires apex built
    with its CUDA extensions."""

    coalesce_gradient_reduction: bool = False
    """Reduce parameter gradients once per step instead of once per gradient-cache chunk (ZeRO stages 1 to 3). This
    reduces traffic, but whole gradients are kept until the end of the step. With bf16 their float32 sums are kept too,
    unless data_types.grad_accum_dtype is "bf16"."""

    text_micro_batch_size: int | None = Field(default=None, gt=0)
    """Number of captions per text chunk: a divisor of the rank's share of the batch. Default: the largest multiple of
    train_micro_batch_size_per_gpu for which a text chunk takes about as much memory as an image chunk. Larger text
    chunks need fewer kernel launches."""

    cut_captions: Literal[True, False, "auto"] = "auto"
    """Sort the captions of a rank's share of the batch by length, and cut each text chunk at its longest caption. The
    text tower then does not process the padding after it. Losses and gradients stay the same. "auto" cuts captions if
    the text tower's features do not depend on the padding: attention is causal and "pool_type" is "argmax" or "eos".
    `true` refuses other towers. Evaluations cut captions too, without sorting them (docs/huge_batches.md)."""

    compile: Literal[True, False, "auto", "measure"] = "auto"
    """Run the towers through torch.compile. The image tower is compiled as a whole, or block by block if activations,
    parameters or gradients are handled block by block. The text tower is compiled block by block. "auto" compiles on
    GPUs, if MegaCLIP's own towers run and compilation saves more time over the run than it takes. "measure" is for all
    towers: if the run is long enough, a chunk runs as plain PyTorch and compiled before it, and the faster way is used.
    `true` requires layer_norm "torch" and no tensor parallelism."""

    selective_recompute: Literal[True, False, "auto"] = "auto"
    """In compiled towers, compute layer norms and activation functions again in the backward pass instead of keeping
    their outputs. A graph then takes about a third less memory, and a step about 2 % more time. "auto" does so if the
    gradient cache can then keep more graphs and the step becomes faster, or if the run does not fit otherwise. `true`
    requires compiled towers."""

    keep_graphs: int | Literal["auto"] = "auto"
    """Number of graphs, counted over the chunks of both towers, that the gradient cache keeps between forward and
    backward pass. If a step has fewer, it keeps all. Chunks without a kept graph are encoded twice. "auto" keeps as
    many as fit into the GPU's memory, and none on CPUs or with cpu_checkpointing. 0 needs the least memory. If each
    trained tower has one chunk, all graphs are kept. docs/huge_batches.md has details."""

    data_offload: Literal["auto", "cpu", "disk", "reread"] = "auto"
    """Place of a step's images between the two passes of the gradient cache: "cpu" is host memory (page-locked for
    GPUs), "disk" a file (see --data-offload-dir), "reread" reads them again from the dataset. "auto" selects host
    memory if the images fit, otherwise the disk, and otherwise refuses to start. Nothing is stored if the images are
    read only once."""

    embeddings_offload: Literal[True, False, "auto"] = "auto"
    """Keep embeddings and their gradients in host memory while the towers run. "auto" does so if they would take more
    than a tenth of the device's memory."""

    @field_validator("keep_graphs", mode="before")
    @classmethod
    def _check_graphs(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise ValueError('write "auto" or a number of graphs, 0 or more')

    @property
    def untraced(self) -> str:
        """Setting with which torch.compile cannot run the towers, and the reason; empty if there is none."""
        if self.layer_norm != "torch":
            return (
                f"megaclip.layer_norm {self.layer_norm!r}: torch.compile does not trace apex's kernels, and fuses "
                "PyTorch's layer norm itself"
            )
        if self.tensor_parallel_size > 1:
            return (
                f"megaclip.tensor_parallel_size {self.tensor_parallel_size}: torch.compile does not trace "
                "Megatron-core's asynchronous all-reduce"
            )
        if self.lora is not None and self.lora.dora:
            return "megaclip.lora.dora: torch.compile does not trace peft's layers of DoRA"
        return ""

    @property
    def is_global(self) -> bool:
        """True for the global losses, which have per-sample state and their own temperature."""
        return self.loss in VARIANTS
