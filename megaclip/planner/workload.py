"""What is to be trained and how, as plain numbers: all that memory and time depend on but the machine.

`Workload.of(model_config, training_config, world_size)` reads them from the files a run reads. Batches are samples,
sizes of buffers elements, widths of numbers bytes.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megaclip.config import TrainingConfig
from megaclip.losses.fastclip_variants import VARIANTS
from megaclip.models import ModelConfig
from megaclip.models.clip import ClipModel


class Parameters(NamedTuple):
    """Sizes of a tower's parameters, in elements."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]

    @property
    def trained(self) -> int:
        return sum(self.trainable)

    @property
    def total(self) -> int:
        return sum(self.trainable) + sum(self.frozen)


@dataclass(frozen=True)
class ZeroSettings:
    """What zero_optimization and its neighbours in ds_config.json mean for memory."""

    stage: int
    reduce_bucket: int
    overlap_comm: bool
    contiguous_gradients: bool
    offload_optimizer: str  # "none" | "cpu" | "nvme"
    offload_parameters: str
    persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    prefetch_bucket: int
    sub_group: int
    parameters_in_cpu: int
    """Of a rank, with offload_param to "nvme": what stays in host memory (max_in_cpu)."""
    parameter_buffers: int
    """Elements of the page-locked buffers through which parameters go to "nvme" and come back."""
    optimizer_buffers: int
    """Buffers of a sub-group each, likewise for the optimizer's states."""
    nvme_paths: tuple[str, ...] = ()
    """Folders of what is on "nvme"."""

    @classmethod
    def of(cls, config: TrainingConfig) -> "ZeroSettings":
        """DeepSpeed's own defaults for what the file leaves out."""
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        zero = DeepSpeedZeroConfig(**config.deepspeed.get("zero_optimization", {}))
        return cls(
            stage=config.zero_stage,
            reduce_bucket=zero.reduce_bucket_size,
            overlap_comm=bool(zero.overlap_comm),
            contiguous_gradients=zero.contiguous_gradients,
            offload_optimizer=_device(zero.offload_optimizer),
            offload_parameters=_device(zero.offload_param),
            persistence_threshold=zero.param_persistence_threshold,
            max_live_parameters=zero.max_live_parameters,
            max_reuse_distance=zero.max_reuse_distance,
            prefetch_bucket=zero.prefetch_bucket_size,
            sub_group=zero.sub_group_size,
            parameters_in_cpu=zero.offload_param.max_in_cpu if zero.offload_param else 0,
            parameter_buffers=zero.offload_param.buffer_count * zero.offload_param.buffer_size
            if zero.offload_param
            else 0,
            optimizer_buffers=zero.offload_optimizer.buffer_count if zero.offload_optimizer else 0,
            nvme_paths=tuple(
                str(offload.nvme_path)
                for offload in (zero.offload_optimizer, zero.offload_param)
                if _device(offload) == "nvme"
            ),
        )


@dataclass(frozen=True)
class EvaluationSets:
    """What a run is evaluated on, over all ranks."""

    batch: int
    """Rows that a rank reads and encodes at a time."""
    pairs: int = 0
    """Image-caption pairs, for retrieval."""
    labelled: int = 0
    """Images with a class, for zero-shot classification."""


@dataclass(frozen=True)
class Workload:
    """One training step on every rank of a data-parallel group."""

    model: ModelConfig
    world_size: int
    image_micro_batch: int
    text_micro_batch: int
    text_follows: bool
    """Whether captions go in chunks as large as images do because the file says nothing else."""
    local_batch: int
    zero: ZeroSettings
    compute_bytes: int
    """Of a working parameter, an activation and an embedding: 2 in bf16, 4 in float32."""
    gradient_bytes: int
    """Of an accumulated parameter gradient."""
    optimizer_state_bytes: int
    """Per trained parameter, besides the float32 master."""
    optimizer_temporary_bytes: int = 0
    """Per trained parameter, while the optimizer steps."""
    checkpointing: str = ""
    """Activation checkpointing: "", "gpu" or "cpu" (the blocks' inputs wait in host memory)."""
    compiled: bool = False
    """Blocks compiled by torch.compile."""
    coalesce: bool = False
    gradient_sum_bytes: int = 0
    """Of a trained parameter, beside its gradient: the sum of coalesced gradients in a wider dtype."""
    loss: str = "clip"
    exchange: str = "auto"
    """"ring", "all_gather" or "auto": `megaclip.planner.memory.settled` says what that becomes."""
    reduction: str = "feature"
    payload_bytes: int = 4
    """Of a number of the embeddings' gradients between ranks."""
    tile_budget_mib: float = 128
    data_offload: str = "auto"
    """Where the whole local batch waits: "auto", "cpu", "disk" or "reread" (nowhere)."""
    embeddings_offload: bool | str = "auto"
    """Embeddings and their gradients wait in host memory; "auto": where they would be large for the GPU."""
    image_unlocked: int | None = None
    """Trainable groups of a locked image tower; None: not locked."""
    text_unlocked: int | None = None
    workers: int = 4
    """Loader processes per rank."""
    sample_columns: int = 0
    """Float32 numbers that the loss keeps of every sample of the dataset."""
    sample_state_on_gpu: bool = False
    samples: int = 0
    """Of the dataset."""
    evaluation: EvaluationSets | None = None

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: TrainingConfig,
        world_size: int,
        *,
        image_unlocked: int | None = None,
        text_unlocked: int | None = None,
        workers: int = 4,
        samples: int = 0,
        evaluation: EvaluationSets | None = None,
    ) -> "Workload":
        """What `config` asks for on `world_size` data-parallel ranks; ConfigError if its batch does not fit them.

        samples: of the dataset, which only losses that keep state of every sample need. evaluation: None: there is
        none while the run trains.
        """
        batch, section = config.batch_plan(world_size), config.megaclip
        local_batch = batch.micro_batch * batch.accumulation
        compute_bytes = 2 if config.bf16 else 4
        accumulate = config.deepspeed.get("data_types", {}).get("grad_accum_dtype")
        sums = section.coalesce_gradient_reduction and config.bf16 and not config.accumulates_in_bf16
        return cls(
            model=model,
            world_size=world_size,
            image_micro_batch=batch.micro_batch,
            text_micro_batch=section.text_micro_batch_size or batch.micro_batch,
            text_follows=section.text_micro_batch_size is None,
            local_batch=local_batch,
            zero=ZeroSettings.of(config),
            compute_bytes=compute_bytes,
            gradient_bytes={"fp32": 4, "bf16": 2}.get(str(accumulate), compute_bytes),
            optimizer_state_bytes=_optimizer_state_bytes(config),
            optimizer_temporary_bytes=_optimizer_temporary_bytes(config),
            checkpointing=("cpu" if config.cpu_checkpointing else "gpu") if config.activation_checkpointing else "",
            compiled=section.compile_blocks,
            coalesce=section.coalesce_gradient_reduction,
            gradient_sum_bytes=4 if sums else 0,
            loss=section.loss,
            exchange=section.exchange,
            reduction="feature" if section.reduction == "auto" else section.reduction,
            payload_bytes=2 if section.payload == "bf16" else 4,
            tile_budget_mib=section.tile_budget_mib,
            data_offload=section.data_offload,
            embeddings_offload=section.embeddings_offload,
            image_unlocked=image_unlocked,
            text_unlocked=text_unlocked,
            workers=workers,
            sample_columns=_sample_columns(section.loss),
            sample_state_on_gpu=section.fastclip.state_device == "accelerator",
            samples=samples,
            evaluation=evaluation,
        )

    @property
    def global_batch(self) -> int:
        """The contrastive batch B."""
        return self.local_batch * self.world_size

    @property
    def cached(self) -> bool:
        """Whether the step runs its towers twice: not if one forward pass is all that needs a graph
        (`megaclip.engine.gradient_cache.keeps_graph`)."""
        chunks = [self.local_batch // rows for rows in (self.image_micro_batch, self.text_micro_batch)]
        trained = sum(count for count, tower in zip(chunks, self.parameters, strict=True) if tower.trained)
        return max(chunks) > 1 and trained != 1

    @property
    def reads_images_twice(self) -> bool:
        """Whether the image tower needs a step's images in two passes."""
        return self.cached and self.parameters[0].trained > 0

    @property
    def parameters(self) -> tuple[Parameters, Parameters]:
        """Of the image tower and of the text tower (the loss's scalars are nothing beside them)."""
        return tower_parameters(self.model.model_dump_json(), self.image_unlocked, self.text_unlocked)

    @property
    def trained(self) -> int:
        """Trained parameters."""
        return sum(tower.trained for tower in self.parameters)

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(tower.total for tower in self.parameters)

    @property
    def bf16(self) -> bool:
        return self.compute_bytes == 2


@functools.lru_cache(maxsize=64)
def tower_parameters(
    model_json: str, image_unlocked: int | None, text_unlocked: int | None
) -> tuple[Parameters, Parameters]:
    """Counted on the model itself, built without values."""
    with torch.device("meta"):
        model = ClipModel(ModelConfig.model_validate_json(model_json))
    if image_unlocked is not None:
        model.lock_image_tower(image_unlocked)
    if text_unlocked is not None:
        model.lock_text_tower(text_unlocked)
    image, text = (
        Parameters(
            tuple(p.numel() for p in tower.parameters() if p.requires_grad),
            tuple(p.numel() for p in tower.parameters() if not p.requires_grad),
        )
        for tower in (model.visual, model.text)
    )
    return image, text


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _sample_columns(loss: str) -> int:
    """Two estimates; with temperatures of each sample those two, Adam's four moments and a count of steps."""
    if loss not in VARIANTS:
        return 0
    return 9 if VARIANTS[loss].individual else 2


def _optimizer_state_bytes(config: TrainingConfig) -> int:
    """Float32 states per parameter: two moments (Adam, LAMB), one (Lion, SGD with momentum), none that counts
    (Adafactor)."""
    optimizer = config.optimizer
    if optimizer.type == "SGD":
        return 4 if getattr(optimizer.params, "momentum", 0) else 0
    return {"Adafactor": 0, "Lion": 4}.get(optimizer.type, 8)


def _optimizer_temporary_bytes(config: TrainingConfig) -> int:
    """torch's Adam works on whole tensors and holds the square roots of the second moments, timm's optimizers the
    update, too; DeepSpeed's Adam is fused."""
    optimizer = config.optimizer
    if optimizer.type in ("Lion", "Lamb"):
        return {"Lion": 4, "Lamb": 8}[optimizer.type]
    return 4 if getattr(optimizer.params, "torch_adam", False) else 0
