"""The model of a run on one rank: DeepSpeed's engine, the loss, the learning rate, optimizer steps, evaluations."""

import functools
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine

from megaclip.cache.kept_graphs import MEASURED_STEPS
from megaclip.cache.passes import restored
from megaclip.comm.collectives import gather_on_host, raise_on_all_ranks
from megaclip.comm.groups import resolve
from megaclip.comm.parallelism import parallel_groups
from megaclip.config import TrainArguments
from megaclip.data import TrainLoader, normalised_pixels, slots_ahead
from megaclip.data.feature_cache import CachedFeatures
from megaclip.engine.image_decoding import ImageDecoding
from megaclip.engine.inputs import Inputs
from megaclip.engine.metrics import Metrics, StepMetrics
from megaclip.engine.preflight import keep_more_graphs
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedule import RunLength, chosen_schedule, chosen_warmup
from megaclip.errors import NonFiniteError
from megaclip.evaluation import Evaluator, ModelEncoder, example_pictures
from megaclip.evaluation.suite import score_task
from megaclip.logging import get_logger
from megaclip.models.compilation import compiled_function, report_compilation
from megaclip.planner import MemoryPlan
from megaclip.step.batch import DeviceFeed
from megaclip.step.caption_chunks import division_of_captions
from megaclip.step.gradient_cache import RandomState, accumulate_gradients, running_statistics
from megaclip.step.layout import chunks_held
from megaclip.step.sample_store import ImageSlots, StepStore
from megaclip.zero.build import build_engine
from megaclip.zero.logit_scale import LogitScale, MasterScalar
from megaclip.zero.optimizers import set_learning_rate, update
from megaclip.zero.weight_average import WeightAverage

logger = get_logger(__name__)

SUITE_AVERAGE = "suite_average"
"""Name of the mean of the main metrics of --suite."""


class Trainer:
    """The model of a run with everything that a step changes. All ranks call each method together."""

    def __init__(self, arguments: TrainArguments, inputs: Inputs, memory_plan: MemoryPlan) -> None:
        """Build the model and the engine."""
        self.arguments, self.inputs, self.memory_plan = arguments, inputs, memory_plan
        self.config, self.batch = inputs.config, memory_plan.workload.batch
        planned = memory_plan.workload.megaclip  # without "auto"
        self.length = length = RunLength.of(arguments, len(inputs.train), self.batch.global_batch)
        self.schedule = chosen_schedule(arguments, length, self.config.learning_rate)
        self.engine: DeepSpeedEngine = build_engine(
            self.config,
            arguments,
            inputs.model_config,
            compiles=planned.compile is True,
            recomputes=planned.selective_recompute is True,
            objective=inputs.objective,
        )
        self.average = WeightAverage(self.engine, self.config.megaclip.ema_decay)
        self.logit_scale = LogitScale(self.engine, arguments.logit_scale_max)
        self._keeps_scale = "logit_scale_max" not in arguments.model_fields_set
        self._admit_scale()
        bias = self.engine.module.logit_bias
        self.logit_bias = None if bias is None else MasterScalar(bias)
        self.loss = RunLoss(planned, length, chosen_warmup(arguments, length), self.engine.device)
        self.skipped_steps = SkippedSteps(arguments.skips_in_a_row)
        self.decoding = ImageDecoding(arguments.image_decoder, self.engine.device, inputs.train_transform)
        self.step_s = 0.0
        """Seconds of the last step."""
        self.features: CachedFeatures | None = None
        """Image features that replace the training images, with --feature-cache."""
        self.step = 0
        """Number of optimizer steps done."""
        self._steps_here = 0
        """Number of steps that this process has done."""
        self._replica = parallel_groups(self.config.megaclip.tensor_parallel_size).data.rank

    @property
    def samples_consumed(self) -> int:
        """Number of samples that the steps took, over all ranks."""
        return self.step * self.batch.global_batch

    def resumed(self, step: int, log_scale_max: float) -> None:
        """Continue after `step` steps. The engine and the loss have loaded their checkpoint.

        log_scale_max: upper bound of the logarithm of the logit scale before, 0 if it is not known.
        """
        self.step = step
        self.average.loaded(step)
        self._admit_scale(log_scale_max)

    def _admit_scale(self, log_scale_max: float = 0.0) -> None:
        if not self.config.megaclip.is_global:  # these losses have bounds of their own
            self.logit_scale.admit(log_scale_max, raises_maximum=self._keeps_scale)

    @contextmanager
    def open_data(self, folder: Path) -> Iterator[StepStore]:
        """Open the run's training data from the next step on, with a step's images where the plan keeps them.

        Every rank opens it. folder: where a file of images is created, unless the command line names another folder.

        Raises:
            ConfigError: on every rank, if the images' memory or file cannot be reserved.
            DataError: on every rank, if the batch is larger than the data, or a rank cannot start its data workers.
        """
        arguments, inputs, plan = self.arguments, self.inputs, self.memory_plan
        batch, transform = self.batch, inputs.train_transform
        again = 0 if plan.keeps_images else plan.workload.encoded_again[0]
        held = chunks_held(batch.accumulation, again, keeps=plan.keeps_images)
        image_shape = (3, transform.size, transform.size) if self.features is None else (self.features.width,)
        slots = ImageSlots(
            (held + slots_ahead(batch.micro_batch, arguments.workers), batch.micro_batch, *image_shape),
            Path(arguments.data_offload_dir or folder) if plan.image_place == "disk" else None,
        )
        with raise_on_all_ranks():
            loader = TrainLoader(
                inputs.train,
                transform,
                inputs.tokenizer,
                micro_batch_size=batch.micro_batch,
                micro_batches_per_step=batch.accumulation,
                reread_from=batch.accumulation - again,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                seed=arguments.seed,
                num_workers=arguments.workers,
                samples_consumed=self.samples_consumed,
                shard_order=arguments.shard_order,
                max_bad_fraction=arguments.max_bad_fraction,
                shard_cache=Path(arguments.shard_cache) if arguments.shard_cache else None,
                shard_cache_bytes=arguments.shard_cache_bytes,
                gpu_decoder=self.decoding.gpu,
                features=self.features,
                slots=slots.tensor,
            )
        slots.lock_pages(self.engine.device)
        normalise: Callable[..., torch.Tensor] = transform.normalise
        if self.features is not None:
            normalise = self.features.to_input
        elif plan.workload.megaclip.compile:
            normalise = functools.partial(normalise, compute=compiled_function(normalised_pixels))
        text = inputs.model_config.text_cfg
        divide_captions = division_of_captions(
            self.config.megaclip.cut_captions,
            text,
            tensor_ranks=self.engine.module.tensor.size,
            ranks=resolve(),
            pairs=plan.workload.pairs,
        )
        with (
            closing(slots),
            StepStore(
                loader,
                DeviceFeed(self.engine.device, self.engine.get_data_types()[0], normalise),
                text_chunks=batch.text_chunks,
                context_length=text.context_length,
                divide_captions=divide_captions,
            ) as store,
        ):
            yield store

    def train_step(self, store: StepStore) -> StepMetrics:
        """Take one optimizer step, and advance `store` and `step`.

        If the loss or the gradient norm is not finite and --on-nonfinite allows skipping, nothing else changes.

        Raises:
            DataError, NonFiniteError: on every rank, before the parameters are updated.
        """
        learning_rate = self.config.learning_rate * self.schedule(self.step)
        set_learning_rate(self.engine, learning_rate)
        loss, gradient_norm, updated = torch.tensor(math.nan), math.nan, False
        waited_s, began = store.waited_s, time.monotonic()
        scale, terms = torch.full((1,), math.nan), dict[str, torch.Tensor]()

        def read_scalars() -> list[torch.Tensor]:
            nonlocal scale
            log_scale = self.logit_scale.read() if self.loss.own is None else self.loss.own.log_scale.detach().clone()
            scale = _to_host(log_scale.exp())
            return [log_scale] if self.logit_bias is None else [log_scale, self.logit_bias.read()]

        try:
            # The forward passes change the statistics before the step is known to be good.
            with restored(running_statistics(self.engine.module), only_on_failure=True):
                loss = self._accumulate(store, read_scalars, terms)
                store.look_ahead()
                gradient_norm = update(self.engine, self.step, loss)
            if (own_loss := self.loss.own) is not None:
                own_loss.step(self.step, self.length.total_steps)
            self.skipped_steps.updated()
            updated = True
        except NonFiniteError as error:  # on every rank, and nothing has changed
            self.skipped_steps.skip(error)
        captions = store.captions()
        equal = None if self.config.megaclip.same_ids == "ignore" else share_of_equal(store.pair_ids())
        store.next_step()
        self.step_s = time.monotonic() - began
        self._count_step()
        if self.loss.own is None:
            self.logit_scale.clamp_()
        if updated:
            self.average.update()
        return StepMetrics(
            float(loss),
            float(scale),
            learning_rate,
            gradient_norm,
            tokens_per_caption=captions.mean_tokens,
            text_positions_saved=captions.saved_share,
            skipped_steps=self.skipped_steps.total,
            equal_pairs=equal,
            data_wait_s=store.waited_s - waited_s,
            terms={name: float(value) for name, value in terms.items()},
        )

    def _accumulate(
        self, store: StepStore, read_scalars: Callable[[], list[torch.Tensor]], terms: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Leave the gradients of the step in the engine and return its loss, as `_to_host` does.

        read_scalars: see `accumulate_gradients`. terms: receives those of the loss, from `_to_host` too.
        """
        section, planned = self.config.megaclip, self.memory_plan.workload.megaclip
        with report_compilation(section.compile, self.step + 1) if planned.compile else nullcontext():
            loss = accumulate_gradients(
                self.engine,
                self.loss.bind(store.ids, self.length.epoch_at(self.step), store.pair_ids),
                store,
                read_scalars,
                RandomState(self.arguments.seed, self.step, self._replica),
                coalesce=section.coalesce_gradient_reduction,
                kept=self.memory_plan.workload.kept,
                accumulation_dtype=torch.bfloat16 if self.config.accumulates_in_bf16 else torch.float32,
                embeddings_on_cpu=planned.embeddings_offload is True,
                check_loss=(lambda: None) if self.loss.own is None else self.loss.own.check_step,
                term_values=terms,
            )
        terms |= {name: _to_host(value) for name, value in terms.items()}
        return _to_host(loss)

    def evaluate(self, metrics: Metrics, watched: Callable[[Iterable[Any]], Iterable[Any]]) -> dict[str, float]:
        """Evaluate on the data that the command line specifies. Report the scores, and return them by name.

        With --eval-ema the moving average of the weights is evaluated.

        watched: returns an iterable over the same batches that reports each of them to the watchdog.
        """
        inputs, arguments, engine = self.inputs, self.arguments, self.engine
        encode = ModelEncoder(
            engine,
            inputs.evaluation_transform.normalise,
            device=engine.device,
            image_dtype=engine.get_data_types()[0],
            cut_captions=None if self.config.megaclip.cut_captions is False else engine.module.cut_captions,
        )

        evaluator = Evaluator(
            encode,
            inputs.evaluation_transform,
            inputs.tokenizer,
            arguments.eval_batch_size,
            arguments.workers,
            progress=lambda batches, name: watched(metrics.progress(batches, name)),
        )
        engine.eval()
        try:
            with self.average.in_model() if arguments.eval_ema else nullcontext():
                scores, left_out = self._suite_scores(evaluator)
                result = evaluator.evaluate(inputs.validation, inputs.labelled, group_captions=arguments.group_captions)
                scores, left_out = result.metrics | scores, left_out + Counter(result.bad_samples)
        finally:
            engine.train()
        pictures = {}
        if dist.get_rank() == 0 and result.examples is not None and inputs.validation is not None:
            pictures = example_pictures(result.examples, inputs.validation)
        metrics.record_evaluation(self.step, scores, pictures, left_out, of_average=arguments.eval_ema)
        return scores

    def _suite_scores(self, evaluator: Evaluator) -> tuple[dict[str, float], Counter[str]]:
        """Return the main metrics of --suite by task with their mean, and the number of bad samples by kind."""
        scores, left_out = dict[str, float](), Counter[str]()
        for task, data in self.inputs.suite:
            result = score_task(evaluator, task, data)
            if result["metrics"]["main_metric"] is not None:
                scores[f"suite/{task.key}"] = float(result["metrics"]["main_metric"])
            left_out += Counter(result["bad_samples"])
        return scores | ({SUITE_AVERAGE: sum(scores.values()) / len(scores)} if scores else {}), left_out

    def _count_step(self) -> None:
        """Count a step. After the first ones, keep more graphs if they fit."""
        self.step += 1
        self._steps_here += 1
        if self._steps_here == MEASURED_STEPS:
            self.memory_plan = keep_more_graphs(self.memory_plan)
            gc.collect()
            gc.freeze()  # a garbage collection over all objects from the start-up takes tens of milliseconds


def _to_host(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which must not be read before `update` returns: the host does not wait for it."""
    return value.to("cpu", non_blocking=True)


def share_of_equal(ids: torch.Tensor) -> float:
    """Return the share of the pairs of all ranks whose id another pair has. ids: (b,) int64. Every rank calls it."""
    _, counts = gather_on_host(ids).unique(return_counts=True)
    return float(counts[counts > 1].sum() / counts.sum())


class SkippedSteps:
    """Count of the steps whose update was left out because it was not finite (--on-nonfinite).

    Every rank raises `NonFiniteError` in the same step, before anything was updated, so all ranks decide alike.
    limit: largest number of such steps in a row; 0 ends the run at the first one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.total = 0
        """Number of skipped steps since the process started."""
        self._in_a_row = 0

    def skip(self, error: NonFiniteError) -> None:
        """Count a step that raised `error`. Raises NonFiniteError, with advice, if the step may not be skipped."""
        if self._in_a_row == self._limit:
            row = f" (after {self._limit} skipped steps in a row, the limit of --on-nonfinite)" if self._limit else ""
            cure = "" if self._limit else ", or add --on-nonfinite skip"
            raise NonFiniteError(
                f"{error}{row}; resuming with the same settings repeats this; set a lower optimizer.params.lr, a "
                "longer --warmup or a smaller gradient_clipping, and resume from an earlier checkpoint (--resume "
                f"RUN/checkpoints/step_N){cure}"
            ) from error
        self._in_a_row += 1
        self.total += 1
        logger.warning("%s; skipped, %d in a row, %d in all", error, self._in_a_row, self.total)

    def updated(self) -> None:
        """Record that a step was not skipped."""
        self._in_a_row = 0
