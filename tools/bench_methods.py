"""The methods that tools/bench_train.py compares: training steps of this project and of open_clip, on equal samples.

Both start from the same weights, take their samples from this project's loader and normalise them on the device, so
only model, loss and step differ. `MegaclipSteps` is the run of launch/train.py, one `step()` at a time. `OpenClipSteps`
repeats open_clip 3.3.0's trainer with `--accum-freq k --local-loss --gather-with-grad` (`open_clip_train/train.py`):
embed each micro-batch without a graph and keep all of them on the GPU; then encode each again and evaluate the loss
over the whole batch, k times.
"""

import dataclasses
import gc
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megaclip.checkpoint.open_clip_package import import_open_clip
from megaclip.comm.collectives import gather_objects
from megaclip.config import TrainArguments, TrainingConfig, load_training_config
from megaclip.data import Batch, ImageTransform, PairDataset, TrainLoader, load_tokenizer
from megaclip.data.batch import RawSample
from megaclip.engine.inputs import Inputs, read_inputs
from megaclip.engine.preflight import plan_run
from megaclip.engine.run import Run
from megaclip.models import build_model, load_model_config
from megaclip.models.open_clip_keys import to_open_clip

POOL = 512
"""Number of distinct synthetic images and captions; a sample's id selects one."""


class Clock:
    """Seconds of the parts of a step: measured on the GPU, except where the host waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, list[Any]]] = []

    def begin(self, part: str) -> Callable[[], None]:
        """Start a span of `part`; return the function that ends it. A second call of that function ends it later."""
        marks = [self._mark()]
        self._spans.append((part, marks))
        return lambda: marks.append(self._mark())

    def wait(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, with the host's time in it counted as `part`."""

        def timed(*arguments: Any, **options: Any) -> Any:
            marks: list[Any] = [time.perf_counter()]
            self._spans.append((part, marks))
            try:
                return function(*arguments, **options)
            finally:
                marks.append(time.perf_counter())

        return timed

    def add(self, part: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere as `part`."""
        self._spans.append((part, [0.0, seconds]))

    def loss(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `loss`, timed from its call until the gradients of both features exist."""

        def timed(image_features: Tensor, text_features: Tensor, *others: Any) -> Tensor:
            end = self.begin("loss")
            for features in (image_features, text_features):
                if features.is_leaf:
                    features.register_post_accumulate_grad_hook(lambda _: end())
                else:
                    features.register_hook(lambda _: end())
            return loss(image_features, text_features, *others)

        return timed

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call; the device must have finished."""
        totals: dict[str, float] = {}
        for part, (first, *ends) in self._spans:
            seconds = ends[-1] - first if isinstance(first, float) else first.elapsed_time(ends[-1]) / 1e3
            totals[part] = totals.get(part, 0.0) + seconds
        self._spans.clear()
        return totals

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclasses.dataclass(frozen=True)
class Case:
    """One case to measure; every method reads the same ds_config.json, with its batch triple."""

    model: str
    ds_config: Path
    precision: str
    """open_clip's precision: pure_bf16, amp_bf16 or fp32. ds_config.json sets that of this project."""
    train_data: list[str]
    """Data sets. Empty: synthetic samples."""
    workers: int
    seed: int = 0


class SyntheticSource:
    """Samples from memory, in the shape of a data source (`megaclip.data.sources.Source`)."""

    kind = "synthetic"

    def __init__(self, samples: int) -> None:
        self.problems: dict[str, int] = {}
        self.shard_sizes = np.array([samples], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.shard_sizes[0])

    def read(self, row: int) -> RawSample:
        return RawSample(image=row.to_bytes(8, "little"), caption=self.caption(row), key=str(row))

    def caption(self, row: int) -> str:
        return f"a photo of thing number {row % POOL}, with some more words that a caption of the usual length has"

    def shard_name(self, row: int) -> str:
        return "memory"

    def manifest(self) -> list[list[Any]]:
        return [["memory", 0, len(self)]]


class SyntheticTransform(ImageTransform):
    """Reads a row's bytes as a number and returns pixels (3, size, size) uint8 from a pool of random pictures."""

    def __call__(self, content: bytes, *, seeds: tuple[int, int, int] = (0, 0, 0)) -> Tensor:
        return _pool(self.size)[int.from_bytes(content, "little") % POOL]


_POOLS: dict[int, Tensor] = {}


def _pool(size: int) -> Tensor:
    if size not in _POOLS:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(POOL, 3, max(2, size // 8), max(2, size // 8), generator=generator)
        _POOLS[size] = F.interpolate(coarse, size=(size, size)).mul_(255).to(torch.uint8)
    return _POOLS[size]


def _arguments(case: Case, folder: Path) -> TrainArguments:
    return TrainArguments(
        deepspeed_config=str(case.ds_config),
        model=case.model,
        train_data=case.train_data or ["synthetic"],
        workers=case.workers,
        warmup=0,
        train_steps=1_000_000,
        lr_scheduler="const",
        seed=case.seed,
        logs=str(folder),
        name="bench",
    )


def _inputs(case: Case, arguments: TrainArguments) -> Inputs:
    """Return the inputs of `read_inputs`, with samples from memory if the case names no data."""
    if case.train_data:
        return read_inputs(arguments)
    config, model_config = load_training_config(case.ds_config), load_model_config(case.model)
    tokenizer = load_tokenizer(arguments.tokenizer or "clip", model_config.text_cfg.context_length)
    with tempfile.TemporaryDirectory() as folder:
        model_config = model_config.replace(text_cfg=tokenizer.write_open_clip(folder))
    transform = SyntheticTransform(model_config.vision_cfg.image_size)
    transform(bytes(8))  # fill the pool before workers are forked
    return Inputs(
        config=config,
        model_config=model_config,
        tokenizer=tokenizer,
        train=PairDataset([SyntheticSource(4 * config.batch_plan(dist.get_world_size()).global_batch)]),
        validation=None,
        labelled=None,
        train_transform=transform,
        evaluation_transform=transform,
    )


class MegaclipSteps:
    """This project's steps, through the run of launch/train.py."""

    def __init__(self, case: Case, clock: Clock) -> None:
        self._clock = clock
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "checkpoints").mkdir()
        arguments = _arguments(case, folder)
        inputs = _inputs(case, arguments)
        batch_plan = inputs.config.batch_plan(dist.get_world_size())
        self._run = Run(arguments, inputs, batch_plan, folder, plan_run(arguments, inputs))
        self._data = self._run.open_data()
        self._batch = self._data.__enter__()
        bind, update = self._run.loss.bind, self._run.engine.step

        def timed_update(*given: Any, **options: Any) -> None:
            end = clock.begin("update")
            update(*given, **options)
            end()

        self._run.loss.bind = lambda *given: clock.loss(bind(*given))  # type: ignore[method-assign]
        self._run.engine.step = timed_update

    def step(self, *, probe: bool = False) -> float:
        """Run one whole step; return the loss."""
        waited_s = self._batch.waited_s
        loss = self._run.train_step(self._batch).loss
        self._clock.add("data", self._batch.waited_s - waited_s)
        return loss

    def close(self) -> None:
        """Free the memory."""
        self._data.__exit__(None, None, None)
        self._run.engine.destroy()
        del self._run, self._data, self._batch
        self._folder.cleanup()
        free_memory()


class OpenClipSteps:
    """open_clip's model, loss and step, with the learning rate, clipping and checkpointing of the case's ds_config."""

    def __init__(self, case: Case, clock: Clock) -> None:
        package = import_open_clip()
        self._clock = clock
        with tempfile.TemporaryDirectory() as folder:
            arguments = _arguments(case, Path(folder))
        inputs = _inputs(case, arguments)
        self._config: TrainingConfig = inputs.config
        self._batch_plan = inputs.config.batch_plan(dist.get_world_size())
        self._device = torch.device(get_accelerator().current_device_name())
        self._dtype = torch.bfloat16 if case.precision == "pure_bf16" else torch.float32
        self._precision = case.precision
        self._transform = inputs.train_transform
        model = _open_clip_model(package, inputs, case.seed, self._device).to(self._dtype).train()
        if self._config.activation_checkpointing:
            model.set_grad_checkpointing()
        self._bare = model
        self._model = model
        if self._batch_plan.world_size > 1:
            devices = [self._device] if self._device.type == "cuda" else None
            self._model = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)
        self._loss = clock.loss(
            package.loss.ClipLoss(
                local_loss=True,
                gather_with_grad=True,
                cache_labels=True,
                rank=dist.get_rank(),
                world_size=self._batch_plan.world_size,
            )
        )
        self._optimizer = _open_clip_optimizer(model, self._config, fused=self._device.type == "cuda")
        self._loader = TrainLoader(
            inputs.train,
            inputs.train_transform,
            inputs.tokenizer,
            micro_batch_size=self._batch_plan.micro_batch,
            micro_batches_per_step=self._batch_plan.accumulation,
            rank=dist.get_rank(),
            world_size=self._batch_plan.world_size,
            seed=case.seed,
            num_workers=case.workers,
            pin_memory=self._device.type == "cuda",
        )
        self._next = clock.wait("data", self._loader.__next__)

    def step(self, *, probe: bool = False) -> float:
        """Run one step; return the loss. probe: run only as much of it as reaches the step's peak memory."""
        count = self._batch_plan.accumulation
        if count == 1:
            images, texts = self._inputs(self._next())
            with self._autocast():
                output = self._model(images, texts)
                loss = self._loss(output["image_features"], output["text_features"], output["logit_scale"])
            loss.backward()
            return self._update(loss)
        kept: list[tuple[Tensor, Tensor]] = []
        features: dict[str, list[Tensor]] = {"image_features": [], "text_features": []}
        with torch.no_grad(), self._autocast():
            for _ in range(count):
                kept.append(self._inputs(self._next()))
                output = self._model(*kept[-1])
                for name, parts in features.items():
                    parts.append(output[name])
        loss = torch.zeros(())
        for index, (images, texts) in enumerate(kept[: 2 if probe else count]):
            with self._autocast():
                output = self._model(images, texts)
                whole = {
                    name: torch.cat([*parts[:index], output[name], *parts[index + 1 :]])
                    for name, parts in features.items()
                }
                loss = self._loss(whole["image_features"], whole["text_features"], output["logit_scale"])
                del whole
            loss.backward()
        return self._update(loss)

    def close(self) -> None:
        """Free the memory."""
        self._loader.close()
        del self._bare, self._model, self._loss, self._optimizer, self._loader, self._next
        free_memory()

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images = self._transform.normalise(batch.images.to(self._device, non_blocking=True), self._dtype)
        return images, batch.tokens.to(self._device, non_blocking=True)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._precision == "amp_bf16" else nullcontext()

    def _update(self, loss: Tensor) -> float:
        end = self._clock.begin("update")
        if clipping := self._config.deepspeed["gradient_clipping"]:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            self._bare.logit_scale.clamp_(0, math.log(100))
        end()
        return sum(gather_objects(float(loss.detach()))) / self._batch_plan.world_size  # mean of local losses


METHODS: dict[str, Callable[[Case, Clock], MegaclipSteps | OpenClipSteps]] = {
    "megaclip": MegaclipSteps,
    "open_clip": OpenClipSteps,
}


def _open_clip_model(package: Any, inputs: Inputs, seed: int, device: torch.device) -> Any:
    """Return open_clip's model with the initial values that this project draws from the same seed."""
    torch.manual_seed(seed)
    weights = to_open_clip(build_model(inputs.model_config).state_dict(), inputs.model_config)
    description = inputs.model_config.to_open_clip()
    kind = package.CustomTextCLIP if description.pop("custom_text") else package.CLIP
    with device:
        model = kind(**description, output_dict=True)
    model.load_state_dict(weights)
    return model


def _open_clip_optimizer(model: torch.nn.Module, config: TrainingConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Return AdamW with open_clip's two groups. Its states are made here, so that every step has them in memory."""
    settings = config.deepspeed["optimizer"]["params"]
    named = list(model.named_parameters())
    not_decayed = [p for name, p in named if p.ndim < 2 or any(word in name for word in ("bn", "ln", "bias"))]
    decayed = [p for _, p in named if all(p is not other for other in not_decayed)]
    optimizer = torch.optim.AdamW(
        [
            {"params": not_decayed, "weight_decay": 0.0},
            {"params": decayed, "weight_decay": settings.get("weight_decay", 0.0)},
        ],
        lr=0.0,
        betas=tuple(settings.get("betas", (0.9, 0.999))),
        eps=settings.get("eps", 1e-8),
        fused=fused,
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].zero_()
    return optimizer


def free_memory() -> None:
    """Collect garbage and return the device's cached memory to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
