"""Description of a run for the planner: the run's own settings, and the sizes of its parameters.

`Workload.of(model_config, training_config, world_size)` reads them from a run's model description and ds_config.json. A
workload holds everything that memory and time depend on, except the machine (`cluster.py`).

With tensor parallelism the N ranks are W replicas of T ranks. Batch sizes and parameters are those of one rank: its own
rows, and its part of the split parameters.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megaclip.config import BatchLayout, MegaclipSection, TrainingConfig
from megaclip.config.command_line import DEFAULT_WORKERS
from megaclip.config.section import LoraSettings
from megaclip.config.training import default_text_micro_batch
from megaclip.errors import ConfigError
from megaclip.losses.settings import VARIANTS
from megaclip.models import ModelConfig, ModelDescription
from megaclip.models.compilation import compiles_whole_tower
from megaclip.models.layers import check_split
from megaclip.planner.constants import CACHED_PER_CORE
from megaclip.planner.text_chunks import fitted, mean_positions, text_chunks_for
from megaclip.planner.tower_costs import rank_model
from megaclip.step.layout import (
    KeptGraphs,
    cuts_captions,
    encodes_together,
    has_cheap_passes,
    kept_graphs,
    one_chunk_each,
)
from megaclip.zero.settings import DeepSpeedZeroConfig


class Parameters(NamedTuple):
    """Sizes of a tower's parameters on one rank, in elements."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]
    has_adapters: bool = False
    """True if the trained parameters are adapters, in all blocks."""

    @property
    def trained(self) -> int:
        return sum(self.trainable)

    @property
    def total(self) -> int:
        return sum(self.trainable) + sum(self.frozen)

    @property
    def is_partly_locked(self) -> bool:
        return bool(self.trainable and self.frozen)

    @property
    def in_backward(self) -> int:
        """Number of elements that a backward pass uses: all, or in a partly locked tower the trained ones."""
        return self.trained if self.frozen and not self.has_adapters else self.total

    def joined(self, other: "Parameters") -> "Parameters":
        """Return the parameters of both towers."""
        adapters = self.has_adapters or other.has_adapters
        return Parameters(self.trainable + other.trainable, self.frozen + other.frozen, adapters)

    def above(self, threshold: int) -> "Parameters":
        """Return the parameters with more elements than `threshold`."""
        trainable, frozen = (tuple(size for size in sizes if size > threshold) for sizes in self[:2])
        return Parameters(trainable, frozen, self.has_adapters)


@dataclass(frozen=True)
class EvaluationSets:
    """Sizes of the data sets that a run is evaluated on, over all ranks."""

    batch: int
    """Rows that a rank reads and encodes at a time."""
    pairs: int = 0
    """Image-caption pairs, for retrieval."""
    labelled: int = 0
    """Images with a class, for zero-shot classification."""


@dataclass(frozen=True)
class Workload:
    """One training step on every rank of a job."""

    model: ModelDescription
    megaclip: MegaclipSection
    zero: DeepSpeedZeroConfig
    batch: BatchLayout
    bf16: bool
    """True if parameters, activations and embeddings are bfloat16; otherwise they are float32."""
    gradient_bytes: int
    """Bytes of an accumulated parameter gradient."""
    accumulates_in_bf16: bool
    """True if the gradients of a step's chunks accumulate in bfloat16."""
    optimizer: str
    """Type of the optimizer in ds_config.json."""
    optimizer_state_bytes: int
    """Bytes per trained parameter of the optimizer's states and of the moving average, without the float32 master."""
    optimizer_temporary_bytes: int
    """Bytes per trained parameter that the optimizer takes during its step only."""
    checkpointing: str = ""
    """Activation checkpointing: "", "gpu" or "cpu" (the blocks' inputs are kept in host memory)."""
    image_unlocked: int | None = None
    """Number of trainable groups of a locked image tower. None: the tower is not locked."""
    text_unlocked: int | None = None
    """Number of trainable layers of a locked text tower. None: the tower is not locked."""
    cached_images: bool = False
    """True if steps read image features from a cache (--feature-cache). The image tower then runs before them only."""
    may_decode_on_gpu: bool = False
    """True if the GPU decodes images of the training data, or may do so later (--image-decoder)."""
    workers: int = DEFAULT_WORKERS
    """Loader processes per rank."""
    samples: int = 0
    """Number of samples of the dataset. Only losses with per-sample state require it."""
    evaluation: EvaluationSets | None = None
    """Data sets of the evaluations between steps. None: the run is not evaluated."""
    text_positions_saved: float | None = None
    """Share of the text tower's token positions that cutting captions saves. None: assumed for times
    (`planner.text_chunks`), and nothing is saved in memory."""
    steps: int | None = None
    """Number of steps of the run. None: unknown, and assumed to be large."""
    ring_levels: int = 1
    """Levels of the ring (`megaclip.comm.ring`) on the planned cluster, set by `resolve_auto`."""
    objective_pairs: bool = False
    """True if the objective pairs images with captions (`Objective.encodes_pairs`). A caption decoder always does."""
    async_save: bool = False
    """True if checkpoints are written from a copy in host memory (--async-save)."""

    @classmethod
    def of(cls, model: ModelDescription, config: TrainingConfig, world_size: int, **run: Any) -> "Workload":
        """Return the workload of `config` on `world_size` ranks, tensor-parallel ones included.

        run: fields that ds_config.json does not set: locks, `workers`, `samples`, `evaluation`, `steps`, `async_save`,
        `cached_images`, `may_decode_on_gpu`, `objective_pairs`.

        Raises ConfigError if the batch of `config` does not divide among them, if tensor parallelism cannot split a
        tower, or if a lock locks nothing.
        """
        if isinstance(model, ModelConfig):
            for tower in (model.vision_cfg, model.text_cfg):
                check_split(config.megaclip.tensor_parallel_size, tower)
        elif config.megaclip.tensor_parallel_size > 1:
            raise ConfigError(
                f"megaclip.tensor_parallel_size {config.megaclip.tensor_parallel_size} requires MegaCLIP's own towers, "
                "and open_clip's modules run this model; use 1"
            )
        checkpoints_to = "cpu" if config.settings.activation_checkpointing.cpu_checkpointing else "gpu"
        accumulate = config.settings.data_types.grad_accum_dtype
        states, temporary = _optimizer_bytes(config)
        workload = cls(
            model=model,
            megaclip=config.megaclip,
            zero=config.zero,
            batch=fitted(config, model, pairs=run.get("objective_pairs", False)).batch_layout(world_size),
            bf16=config.bf16,
            gradient_bytes={"fp32": 4, "bf16": 2}.get(str(accumulate), 2 if config.bf16 else 4),
            accumulates_in_bf16=config.accumulates_in_bf16,
            optimizer=config.optimizer.type,
            optimizer_state_bytes=states + (4 if config.megaclip.ema_decay else 0),
            optimizer_temporary_bytes=temporary,
            checkpointing=checkpoints_to if config.activation_checkpointing else "",
            **run,
        )
        if workload.pairs and workload.batch.text_micro_batch != workload.batch.micro_batch:
            raise ConfigError(
                f"megaclip.text_micro_batch_size {workload.batch.text_micro_batch} differs from "
                f"train_micro_batch_size_per_gpu {workload.batch.micro_batch}, and the caption decoder or the "
                "objective pairs images with captions; leave it out"
            )
        if workload.pairs and config.megaclip.cut_captions is True:
            raise ConfigError(
                "megaclip.cut_captions true cannot be used with a caption decoder or an objective that pairs images "
                'with captions: captions are not sorted by length; use "auto" or false, which encode the padding'
            )
        locks = ("image", workload.image_unlocked), ("text", workload.text_unlocked)
        for (name, unlocked), parameters in zip(locks, workload.parameters, strict=True):
            if unlocked is not None and config.megaclip.lora is not None:
                raise ConfigError(
                    f"--lock-{name} cannot be used with megaclip.lora, which freezes both towers and trains adapters "
                    "in those of lora.towers; leave it out"
                )
            if unlocked is not None and parameters.trained == parameters.total:
                raise ConfigError(
                    f"--lock-{name} with {unlocked} unlocked groups trains every parameter of the {name} tower, so "
                    f"nothing would be locked; unlock fewer groups, or leave out --lock-{name}"
                )
        return workload

    def with_batch(
        self, local_batch: int | None = None, *, micro_batch: int | None = None, text_micro_batch: int | None = None
    ) -> "Workload":
        """Return a copy with other numbers of samples per rank, or per rank and chunk. Values that are not given stay
        unchanged. Text chunks change with the image chunks if the settings have no text_micro_batch_size."""
        section, tensor_ranks = self.megaclip, self.tensor_ranks
        if text_micro_batch is not None:
            section = section.model_copy(update={"text_micro_batch_size": text_micro_batch * tensor_ranks})
        rows, chunk = local_batch or self.batch.local_batch, micro_batch or self.batch.micro_batch
        limits = text_chunks_for(self.model, self.compute_bytes, section.cut_captions, pairs=self.pairs)
        batch = BatchLayout(
            global_batch=rows * self.world_size,
            micro_batch=chunk,
            accumulation=rows // chunk,
            world_size=self.world_size,
            text_micro_batch=section.text_micro_batch_size // tensor_ranks
            if section.text_micro_batch_size
            else default_text_micro_batch(chunk, rows // chunk, limits),
        )
        return replace(self, megaclip=section, batch=batch)

    def with_megaclip(self, **settings: Any) -> "Workload":
        """Return a copy with other settings of the section "megaclip"; `with_batch` sets text_micro_batch_size."""
        return replace(self, megaclip=self.megaclip.model_copy(update=settings))

    def with_zero(self, **settings: Any) -> "Workload":
        """Return a copy with other settings of zero_optimization."""
        return replace(self, zero=self.zero.model_copy(update=settings))

    def at_stage(self, stage: int) -> "Workload":
        """Return a copy at another ZeRO stage. overlap_comm and contiguous_gradients have their defaults, which are
        true at stage 3 only.

        If they were set at a lower stage, they stay where a run accepts them.
        """
        zero = self.zero
        if stage == zero.stage:
            return self
        was_set = zero.stage < 3 and bool(zero.overlap_comm)
        return self.with_zero(
            stage=stage,
            overlap_comm=stage == 3 or (was_set and (stage == 2 or self.coalesces)),
            contiguous_gradients=stage == 3 or (zero.stage in (1, 2) and zero.contiguous_gradients),
            offload_param=zero.offload_param if stage == 3 else None,
        )

    def runs_at_stage(self, stage: int) -> bool:
        """Return whether a run accepts these settings at another ZeRO stage (`megaclip.config.checks`)."""
        sums_in_float32 = self.bf16 and self.gradient_bytes == 4 and not self.offloads_optimizer
        return not (stage == 1 and sums_in_float32)

    @property
    def world_size(self) -> int:
        """Number of all ranks N."""
        return self.batch.world_size

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks T that each tower is split over."""
        return self.megaclip.tensor_parallel_size

    @property
    def replicas(self) -> int:
        """Number of replicas W = N / T. ZeRO divides its states among them, and gradients are averaged over them."""
        return self.world_size // self.tensor_ranks

    @property
    def local_batch(self) -> int:
        """Samples per rank and step."""
        return self.batch.local_batch

    @property
    def compute_bytes(self) -> int:
        """Bytes of a working parameter, an activation or an embedding."""
        return 2 if self.bf16 else 4

    @property
    def image_bytes(self) -> int:
        """Bytes of one image in the step store: uint8 pixels."""
        return 3 * self.model.vision_cfg.image_size**2

    def loaded_per_core(self, decoded: float) -> float:
        """Return the samples per second and core of the loader. decoded: the rate at which it decodes images."""
        return CACHED_PER_CORE if self.cached_images else decoded

    @property
    def caption_bytes(self) -> int:
        """Bytes of one caption in the step store: int32 tokens."""
        return 4 * self.model.text_cfg.context_length

    @property
    def coalesces(self) -> bool:
        """True if gradients are reduced once per step."""
        return self.megaclip.coalesce_gradient_reduction

    @property
    def gradient_sum_bytes(self) -> int:
        """Bytes per trained parameter of the float32 sums of coalesced bfloat16 gradients."""
        return 4 if self.coalesces and self.bf16 and not self.accumulates_in_bf16 else 0

    @property
    def sample_columns(self) -> int:
        """Float32 numbers that the loss keeps of every sample of the dataset: two estimates; with temperatures of each
        sample those two, Adam's four moments and a count of steps."""
        if self.megaclip.loss not in VARIANTS:
            return 0
        return 9 if VARIANTS[self.megaclip.loss].individual else 2

    @property
    def offloads_optimizer(self) -> bool:
        """True if master weights and optimizer states are kept in host memory."""
        return self.zero.offload_optimizer is not None

    @property
    def offloads_parameters(self) -> bool:
        """True if ZeRO-3 keeps the partitioned working copies of the parameters in host memory."""
        return self.zero.offload_param is not None

    @functools.cached_property
    def kept(self) -> KeptGraphs:
        """Chunks whose graphs a step keeps. "auto" counts as 0 here; `megaclip.planner.memory.resolve_auto` replaces it
        by a number."""
        setting = self.megaclip.keep_graphs
        return kept_graphs(0 if setting == "auto" else setting, *self._chunks_and_trained, self.pairs)

    @functools.cached_property
    def graphs(self) -> KeptGraphs:
        """Chunks of the trained towers, each of which needs a graph."""
        return kept_graphs(sum(self.chunks), *self._chunks_and_trained, self.pairs)

    @property
    def encoded_again(self) -> tuple[int, int]:
        """Number of image chunks and of text chunks that a step encodes twice."""
        return self.graphs.image - self.kept.image, self.graphs.text - self.kept.text

    @property
    def encodes_together(self) -> bool:
        """True if one forward pass encodes the whole share of a rank."""
        cheap = has_cheap_passes(
            int(self.zero.stage), coalesces=self.coalesces, offloads_optimizer=self.offloads_optimizer
        )
        return encodes_together(*self._chunks_and_trained, cheap)

    @property
    def one_chunk_each(self) -> bool:
        """True if each trained tower has one chunk, so that all graphs are kept."""
        return one_chunk_each(*self._chunks_and_trained, self.pairs)

    @property
    def pairs(self) -> bool:
        """True if one pass encodes a chunk of images together with its captions."""
        return self.objective_pairs or self.model.has_decoder

    @property
    def image_readings(self) -> float:
        """Number of times per step that the image tower reads an image, on average."""
        return 1 + self.encoded_again[0] / self.batch.accumulation

    @property
    def chunks(self) -> tuple[int, int]:
        """Number of image chunks and of text chunks of a step."""
        return self.batch.accumulation, self.batch.text_chunks

    @property
    def text_positions(self) -> float:
        """Mean number of token positions per caption that the text tower computes: the context length if captions are
        not cut."""
        text = self.model.text_cfg
        if self.pairs or not cuts_captions(self.megaclip.cut_captions, text):
            return text.context_length
        if self.text_positions_saved is None:
            return mean_positions(self.batch.text_micro_batch, self.batch.text_chunks, text, self.tensor_ranks)
        return (1 - self.text_positions_saved) * text.context_length

    @property
    def compiles_image_tower(self) -> bool:
        """True if a run that compiles compiles the image tower as a whole."""
        return compiles_whole_tower(
            int(self.zero.stage), checkpointing=bool(self.checkpointing), coalesces=self.coalesces
        )

    @functools.cached_property
    def parameters(self) -> tuple[Parameters, Parameters]:
        """Sizes of the image tower's and the text tower's parameters on one rank, without the loss's scalars. A caption
        decoder counts as a part of the text tower."""
        return tower_parameters(
            self.model, self.image_unlocked, self.text_unlocked, self.tensor_ranks, self.megaclip.lora
        )

    @property
    def trained(self) -> int:
        """Number of trained parameters on one rank."""
        return sum(tower.trained for tower in self.parameters)

    @property
    def total(self) -> int:
        """Number of all parameters on one rank."""
        return sum(tower.total for tower in self.parameters)

    @property
    def _chunks_and_trained(self) -> tuple[tuple[int, int], list[bool]]:
        return self.chunks, [self.pairs or tower.trained > 0 for tower in self.parameters]


@functools.lru_cache(maxsize=64)
def tower_parameters(
    config: ModelDescription,
    image_unlocked: int | None,
    text_unlocked: int | None,
    tensor_ranks: int,
    lora: LoraSettings | None,
) -> tuple[Parameters, Parameters]:
    """Count both towers' parameters on one of the tensor-parallel ranks, on the model itself, built without values."""
    model = rank_model(config, {"image": image_unlocked, "text": text_unlocked}, tensor_ranks, lora)

    def sizes(tower: torch.nn.Module, trainable: bool) -> tuple[int, ...]:
        return tuple(each.numel() for each in tower.parameters() if each.requires_grad == trainable)

    image, text, *decoder = (
        Parameters(sizes(part, True), sizes(part, False), lora is not None) for part in model.parts().values()
    )
    return image, text.joined(decoder[0]) if decoder else text


def _optimizer_bytes(config: TrainingConfig) -> tuple[int, int]:
    """Return the bytes per parameter of the float32 states, and of what the optimizer takes during its step only.

    Adam and LAMB have two moments, Lion and SGD with momentum one. Adafactor's states are negligible. During a step
    torch's Adam holds the square roots of the second moments, timm's optimizers the update too. DeepSpeed's Adam is
    fused and takes none.
    """
    params = config.optimizer.params
    adam = 8, 4 if getattr(params, "torch_adam", False) else 0
    sgd = 4 if getattr(params, "momentum", 0) else 0, 0
    others = {"Adafactor": (0, 0), "Lamb": (8, 8), "Lion": (4, 4), "SGD": sgd}
    return others.get(config.optimizer.type, adam)
