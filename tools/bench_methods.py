"""Parts of tools/bench_train.py: equal samples for all methods, a clock, and the training steps of this project.

`MegaclipSteps` is the run of launch/train.py, one `step()` at a time. bench_open_clip.py has the steps of open_clip.
All methods start from the same weights, take their samples from this project's loader and normalise them on the device,
so only model, loss and step differ.
"""

import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import torch
from bench_samples import CAPTION_LENGTHS, SyntheticSource, SyntheticTransform, synthetic_captions
from torch import Tensor

from megaclip import __version__
from megaclip.config import TrainArguments, load_training_config
from megaclip.config.training import DEEPSPEED_DEFAULTS
from megaclip.data import PairDataset
from megaclip.engine.inputs import Inputs, chosen_objective, read_inputs
from megaclip.engine.preflight import check_fit
from megaclip.engine.run import Run
from megaclip.engine.tokenizer_choice import choose_tokenizer
from megaclip.models import load_model_config
from megaclip.planner.text_chunks import fitted
from megaclip.zero import build


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
    caption_lengths: str = CAPTION_LENGTHS[0]
    """Lengths of synthetic captions, one of CAPTION_LENGTHS."""
    seed: int = 0


def case_arguments(case: Case, folder: Path) -> TrainArguments:
    """Return the command line of a run of this case in `folder`."""
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
        no_plan=True,
    )


def case_inputs(case: Case, arguments: TrainArguments) -> Inputs:
    """Return the inputs of `read_inputs`, with samples from memory if the case names no data."""
    if case.train_data:
        return read_inputs(arguments)
    config, model_config = load_training_config(case.ds_config), load_model_config(case.model)
    chosen = choose_tokenizer(arguments.tokenizer or "clip", None, model_config)
    tokenizer, model_config = chosen.tokenizer, chosen.fit(model_config)
    transform = SyntheticTransform(model_config.vision_cfg.image_size)
    transform(bytes(8))  # fill the pool before workers are forked
    captions = synthetic_captions(case.caption_lengths, model_config.text_cfg.context_length)
    samples = 4 * config.batch_layout(dist.get_world_size()).global_batch
    config = fitted(config, model_config)
    return Inputs(
        config=config,
        model_config=model_config,
        saved_config=model_config,
        tokenizer=tokenizer,
        train=PairDataset([SyntheticSource(samples, captions)]),
        validation=None,
        labelled=None,
        train_transform=transform,
        evaluation_transform=transform,
        objective=chosen_objective(arguments, config.megaclip, model_config),
    )


class MegaclipSteps:
    """This project's steps, through the run of launch/train.py."""

    program = f"megaclip {__version__}"
    text_positions_saved = 0.0
    """Share of the text tower's token positions that cutting captions saved in the last step, on this rank."""

    def __init__(self, case: Case, clock: Clock) -> None:
        self._clock = clock
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "checkpoints").mkdir()
        arguments = case_arguments(case, folder)
        inputs = case_inputs(case, arguments)
        batch_layout = inputs.config.batch_layout(dist.get_world_size())
        plan = check_fit(arguments, inputs)
        planned = plan.workload.megaclip
        self.compiled, self.recomputes = planned.compile is True, planned.selective_recompute is True
        self.text_micro_batch = batch_layout.text_micro_batch * inputs.config.megaclip.tensor_parallel_size
        run = Run(arguments, inputs, folder, plan)
        self._trainer = run.trainer
        self._data = run.trainer.open_data(folder)
        self._batch = self._data.__enter__()
        bind, update = self._trainer.loss.bind, self._trainer.engine.step

        def timed_update(*given: Any, **options: Any) -> None:
            end = clock.begin("update")
            update(*given, **options)
            end()

        self._trainer.loss.bind = lambda *given: clock.loss(bind(*given))  # type: ignore[method-assign]
        self._trainer.engine.step = timed_update

    def prepare(self) -> None:
        """Load nothing: the run loads its data itself, and the time that it waits for them is part of the step."""

    def step(self) -> float:
        """Run one whole step; return the loss."""
        waited_s = self._batch.waited_s
        metrics = self._trainer.train_step(self._batch)
        self._clock.add("data", self._batch.waited_s - waited_s)
        self.text_positions_saved = metrics.text_positions_saved
        return metrics.loss

    @property
    def kept_graphs(self) -> list[int]:
        """Number of image chunks and of text chunks whose graphs the next step keeps."""
        return list(self._trainer.memory_plan.workload.kept)

    def close(self) -> None:
        """Free the memory."""
        self._data.__exit__(None, None, None)
        self._trainer.engine.destroy()
        del self._trainer, self._data, self._batch
        self._folder.cleanup()
        free_memory()


class DeepSpeedUpdateSteps(MegaclipSteps):
    """Steps of this project with the update of DeepSpeed's own step and its check of all gradients."""

    def __init__(self, case: Case, clock: Clock) -> None:
        checked = mock.patch.dict(DEEPSPEED_DEFAULTS["bf16"], check_grad_overflow=True)  # ds_config.json may not set it
        with checked, mock.patch.object(build, "group_kernels", lambda engine: None):
            super().__init__(case, clock)


def free_memory() -> None:
    """Forget compiled code, collect garbage and return the device's cached memory to the driver."""
    torch.compiler.reset()
    gc.unfreeze()  # what a run has frozen
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
