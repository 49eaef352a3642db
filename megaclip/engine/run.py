"""A training run, from its command line to its last checkpoint.

launch/train.py calls `main(argv)` on every rank. `train` then reads and checks all inputs, starts the process group,
checks that the run fits into memory, builds the engine (`Run`), resumes if requested, and runs the training loop
(`Run._train_steps`): one optimizer step at a time (`Run.train_step`), with checkpoints and evaluations in between.
"""

import contextlib
import gc
import json
import math
import os
import shlex
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine

from megaclip.checkpoint import store
from megaclip.checkpoint.durable import read_text, write_atomically
from megaclip.checkpoint.search import MODEL_CARD, locate
from megaclip.comm.collectives import gather_objects, sum_counts, wait_for_all_ranks
from megaclip.comm.parallelism import parallel_groups
from megaclip.config import BatchLayout, TrainArguments, parse_arguments
from megaclip.data import check_batch
from megaclip.engine.best_checkpoint import BestCheckpoint
from megaclip.engine.changed_settings import report_changed_settings
from megaclip.engine.equal_inputs import require_equal_inputs
from megaclip.engine.inputs import Inputs, read_inputs
from megaclip.engine.loss_watch import LossLevel, SkippedSteps
from megaclip.engine.metrics import Metrics, StepMetrics
from megaclip.engine.preflight import MEASURED_STEPS, check_fit, keep_more_graphs, report_peak
from megaclip.engine.process_group import start_process_group
from megaclip.engine.resume import describe_run, resume
from megaclip.engine.run_folder import report_write_errors, run_folder
from megaclip.engine.run_length import RunLength
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.saved_model import write_model_folder
from megaclip.engine.saving import Saves
from megaclip.engine.schedules import chosen_schedule, chosen_warmup
from megaclip.engine.spare_ranks import end_spare_ranks, wait_if_spare
from megaclip.engine.training_data import open_training_data
from megaclip.errors import DataError, MegaclipError, NonFiniteError
from megaclip.evaluation import (
    CaptionGroups,
    Evaluation,
    ModelEncoder,
    evaluate_datasets,
    example_pictures,
    group_captions,
)
from megaclip.guards.launcher import end_with_launcher
from megaclip.guards.signals import StopSignals
from megaclip.guards.watchdog import Watchdog
from megaclip.logging import get_logger, local_rank_from_environment
from megaclip.planner import MemoryPlan
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from megaclip.step.running_statistics import restored, running_statistics
from megaclip.step.sample_store import StepStore
from megaclip.zero.build import build_engine
from megaclip.zero.compilation import report_compilation
from megaclip.zero.logit_scale import LogitScale, MasterScalar
from megaclip.zero.optimizers import set_learning_rate, update
from megaclip.zero.weight_average import WeightAverage

logger = get_logger(__name__)


def main(argv: list[str], *, other_ranks_delay_s: float | None = None) -> int:
    """Run this rank's part of the training that `argv` specifies; return the exit code of the process.

    A `MegaclipError` is logged as one line, by the first rank of each host.

    Args:
        argv: command line, without the name of the program.
        other_ranks_delay_s: delay in seconds before the other ranks log their own errors. A launcher ends all ranks
            when one exits, so the delay lets the first rank log its error first. An error that occurs only on another
            rank is still logged. None: the other ranks log nothing.
    """
    end_with_launcher()
    arguments: TrainArguments | None = None
    exit_code = 0
    try:
        arguments = parse_arguments(argv)
        exit_code = train(arguments)
    except MegaclipError as error:
        if local_rank_from_environment() == 0:
            logger.error("%s", error)
        elif other_ranks_delay_s is not None:
            time.sleep(other_ranks_delay_s)
            logger.error("%s", error)
        if arguments is not None and arguments.debug_traceback:
            raise
        exit_code = error.exit_code
    end_spare_ranks(exit_code)
    # Not called after any other exception: the other ranks may be in a collective, and this call would wait for them.
    if dist.is_initialized():
        dist.destroy_process_group()
    if exit_code == 0 and (completed := os.environ.get("MEGACLIP_COMPLETED_FILE")):
        Path(completed).write_text("0\n")  # launch/multi_node.sh accepts exit code 0 only with this file
    return exit_code


def train(arguments: TrainArguments) -> int:
    """Train on this rank, together with the other ranks; return the exit code: 0, or that of `megaclip.guards.signals`.

    Raises:
        MegaclipError: on every rank, for any problem that the user can solve.
    """
    inputs = read_inputs(arguments)
    if (exit_code := wait_if_spare(inputs.config)) is not None:
        return exit_code
    start_process_group()
    require_equal_inputs(arguments, inputs)
    batch_layout = inputs.config.batch_layout(dist.get_world_size())
    check_batch(batch_layout.global_batch, inputs.train.order(seed=arguments.seed))
    memory_plan = check_fit(arguments, inputs)
    with run_folder(arguments) as folder:
        run = Run(arguments, inputs, batch_layout, folder, memory_plan)
        run.resume()
        run.write_description()  # after resume(): a checkpoint that is refused must leave the old description unchanged
        if run.is_finished():
            source = folder if arguments.resume == "auto" else arguments.resume
            logger.info("nothing left to train: %s has all %d steps", source, run.last_step)
            return 0
        stop_signal = run.train_to_end()
        report_peak(run.memory_plan)
        if stop_signal is None:
            return 0
        wait_for_all_ranks()  # until all have saved and logged: a launcher ends the other ranks when one exits
        return 128 + stop_signal


class Run:
    """One rank's part of a run: the engine, the loss and the progress of training.

    Construct it, then call `resume`, `write_description` and `train_to_end`, on all ranks together.
    """

    def __init__(
        self,
        arguments: TrainArguments,
        inputs: Inputs,
        batch_layout: BatchLayout,
        folder: Path,
        memory_plan: MemoryPlan,
    ) -> None:
        self.arguments = arguments
        self.inputs = inputs
        self.batch_layout = batch_layout
        self.folder = folder
        self.memory_plan = memory_plan
        self.checkpoints = folder / "checkpoints"
        self._summary = folder / "metrics.json"
        self.rank = dist.get_rank()
        self.replica = parallel_groups(inputs.config.megaclip.tensor_parallel_size).data.rank
        self.length = RunLength.of(arguments, len(inputs.train), batch_layout.global_batch)
        self.last_step = min(self.length.total_steps, arguments.stop_after_steps or self.length.total_steps)
        self.schedule = chosen_schedule(arguments, self.length, inputs.config.learning_rate)
        self.engine: DeepSpeedEngine = build_engine(
            inputs.config,
            arguments,
            inputs.model_config,
            compiles=memory_plan.compiles,
            recomputes=memory_plan.recomputes,
        )
        self.average = WeightAverage(self.engine, inputs.config.megaclip.ema_decay)
        self.logit_scale = LogitScale(self.engine, arguments.logit_scale_max)
        bias = self.engine.module.logit_bias
        self.logit_bias = None if bias is None else MasterScalar(bias)
        self.loss = RunLoss(
            inputs.config.megaclip,
            samples=len(inputs.train),
            epochs=self.length.epoch_at(self.length.total_steps),
            total_steps=self.length.total_steps,
            warmup=chosen_warmup(arguments, self.length),
            device=self.engine.device,
        )
        self.identity = describe_run(inputs, arguments, batch_layout, self.length.total_steps)
        self.step = 0
        """Number of optimizer steps done."""
        self.samples_consumed = 0
        """Number of samples that these steps took, over all ranks."""
        self.saved_step = 0
        """Step of the newest checkpoint; with --async-save it may still be being written."""
        self.run_id = ""
        """Identifier that this run's checkpoints record; only the first rank's is used."""
        self._first_step = 0
        """Number of steps that were done when this process started."""
        self.watchdog = Watchdog(folder, arguments.hang_timeout)
        self.saves = Saves(in_background=arguments.async_save)
        self.skipped_steps = SkippedSteps(arguments.skips_in_a_row)
        self.loss_level = LossLevel()
        self.best = BestCheckpoint(folder, arguments)
        self.scores: dict[str, float] = {}
        """Scores of the last evaluation."""
        self.bad_samples: dict[str, int] = {}
        """Number of bad samples that all ranks have replaced, by kind, at the last checkpoint."""

    def resume(self) -> None:
        """Load the checkpoint that --resume specifies, if any.

        Raises:
            CheckpointError, DataError: on every rank: the checkpoint does not exist, or this run cannot resume from it.
        """
        progress = resume(self.engine, self.loss, self.identity, arguments=self.arguments, checkpoints=self.checkpoints)
        self.step, self.samples_consumed, self.run_id = progress.step, progress.samples_consumed, progress.run
        self.saved_step = self._first_step = self.step
        if self.step:
            self.average.loaded(self.step)

    def write_description(self) -> None:
        """Write the model card, the tokenizer and settings.json on the first rank.

        The record of the best checkpoint is read or, if it does not apply to this run, deleted.
        """
        with report_write_errors():
            if self.rank == 0:
                write_model_folder(self.checkpoints / MODEL_CARD, self.inputs)
                self._write_settings()
                self.best.resume(self.step, self.run_id)

    def _write_settings(self) -> None:
        """Write settings.json; log the settings that a resumed run has changed."""
        settings = self._settings()
        if self.step > 0:
            report_changed_settings(self._resumed_folder() / "settings.json", settings)
        write_atomically(self.folder / "settings.json", json.dumps(settings, indent=1))

    def _settings(self) -> dict[str, Any]:
        """Return the command line and ds_config.json, in JSON types."""
        return {"arguments": self.arguments.model_dump(), "ds_config": self.inputs.config.deepspeed}

    def _resumed_folder(self) -> Path:
        """Return the folder of the run whose checkpoint --resume names."""
        wanted = self.arguments.resume or "auto"
        return self.folder if wanted == "auto" else locate(Path(wanted))[0].parent

    def is_finished(self) -> bool:
        """Return whether the run is complete.

        With --resume auto the last evaluation must be done too, because the run may have been killed after its last
        step.
        """
        scored_step = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            scored_step = json.loads(read_text(self._summary))["steps"]
        scored_step = gather_objects(scored_step)[0]  # the first rank wrote the file, and all ranks must decide alike
        return self.step >= self.last_step and (self.arguments.resume != "auto" or scored_step == self.step)

    def train_to_end(self) -> signal.Signals | None:
        """Train until the last step or until a signal stops the run; return that signal, or None."""
        with report_write_errors():
            if self.rank == 0:
                self._summary.unlink(missing_ok=True)  # from a shorter run, or from discarded steps
        self._log_batch()
        self.saves.training_starts()
        with StopSignals() as signals, self.watchdog, self._open_metrics() as metrics, self.open_data() as batch:
            try:
                stop_signal = self._train_steps(batch, metrics, signals)
            except DataError as error:  # raised on every rank before an update, so the last step is complete
                stop_signal = signals.received_by_any_rank()  # a launcher that stops a run also ends its data workers
                self._save_before_failing(error)
                if stop_signal is None:
                    raise
            except MegaclipError:  # on every rank
                with self.watchdog.phase("a checkpoint"):
                    self.saves.finish_before_failing()
                raise
            if stop_signal is None:
                with report_write_errors(has_trained=True):
                    if self.rank == 0:
                        self._write_summary(metrics)
            self._log_end(stop_signal)
        return stop_signal

    def _log_batch(self) -> None:
        """Log the steps of this process and how the contrastive batch is divided."""
        logger.info(
            "training steps %d to %d of %d: contrastive batch %d = %d ranks x %d image chunks of %d or %d text chunks "
            "of %d, %d samples an epoch",
            self.step,
            self.last_step,
            self.length.total_steps,
            self.batch_layout.global_batch,
            self.batch_layout.world_size,
            self.batch_layout.accumulation,
            self.batch_layout.micro_batch,
            self.batch_layout.text_chunks,
            self.batch_layout.text_micro_batch,
            len(self.inputs.train),
        )

    def _log_end(self, stop_signal: signal.Signals | None) -> None:
        """Log how to resume a run that was stopped, or how to use the model of a run that has trained to its end."""
        if stop_signal is not None:
            name = shlex.quote(os.path.relpath(self.folder, self.arguments.logs))
            flags = f"--name {name} --resume auto"
            logger.info("stopped by %s after step %d; resume with %s", stop_signal.name, self.step, flags)
            return
        logger.info(
            "trained to step %d. To export it: megaclip export %s OUT_DIR%s --verify. To see its curves and "
            "pictures: tensorboard --logdir %s",
            self.step,
            shlex.quote(str(self.folder)),
            " --ema" * self.arguments.eval_ema,  # the weights that were evaluated
            shlex.quote(str(self.folder / "tensorboard")),
        )
        self.best.report()

    def _train_steps(self, batch: StepStore, metrics: Metrics, signals: StopSignals) -> signal.Signals | None:
        """Run the training loop: step, save and evaluate until the last step or a stop signal."""
        while self.step < self.last_step:
            step_metrics = self.train_step(batch)
            self.watchdog.step_done(self.step)
            metrics.record_step(self.step, step_metrics)
            is_last = self.step == self.last_step
            stop_signal = None if is_last else signals.received_by_any_rank()
            self.saves.poll()
            if is_last or stop_signal or self._is_save_due():
                self._save(training_continues=not (is_last or stop_signal))
                self.bad_samples = sum_counts(batch.bad_counts)
                metrics.record_bad_samples(self.step, self.bad_samples)
                metrics.restart_clock()
            if stop_signal:
                return stop_signal
            if self._is_evaluation_due() and not is_last:
                self._evaluate(metrics)
        self._evaluate(metrics)  # here, because a resumed run may have only this left to do
        return None

    def open_data(self) -> AbstractContextManager[StepStore]:
        """Return a context manager around this rank's training data from the next step on; every rank opens it."""
        return open_training_data(
            self.arguments,
            self.inputs,
            self.memory_plan,
            self.engine,
            folder=self.folder,
            samples_consumed=self.samples_consumed,
        )

    def _open_metrics(self) -> Metrics:
        return Metrics(
            self.folder,
            first_rank=self.rank == 0,
            start_step=self.step,
            total_steps=self.length.total_steps,
            global_batch=self.batch_layout.global_batch,
            log_every=self.arguments.log_every_n_steps,
            monitor=self.engine.monitor,
        )

    def train_step(self, batch: StepStore) -> StepMetrics:
        """Take one optimizer step on all ranks, and advance `batch`, `step` and `samples_consumed`.

        If the loss or the gradient norm is not finite and --on-nonfinite allows skipping, nothing else changes.

        Raises:
            DataError, NonFiniteError: on every rank, before the parameters are updated.
        """
        learning_rate = self.inputs.config.learning_rate * self.schedule(self.step)
        set_learning_rate(self.engine, learning_rate)
        queued, gradient_norm = torch.tensor(math.nan), math.nan
        updated = False
        try:
            # The forward passes change the statistics before the step is known to be good.
            with restored(running_statistics(self.engine.module), only_on_failure=True):
                queued = self._accumulate(batch)
                gradient_norm = update(self.engine, self.step, queued)
            self.loss.update(self.step)
            self.skipped_steps.updated()
            updated = True
        except NonFiniteError as error:  # on every rank, and nothing has changed
            self.skipped_steps.skip(error)
        loss = float(queued)
        captions = batch.captions()
        batch.next_step()
        self.step += 1
        self.samples_consumed += self.batch_layout.global_batch
        if self.step == self._first_step + MEASURED_STEPS:
            self.memory_plan = keep_more_graphs(self.memory_plan)
            gc.collect()
            gc.freeze()  # a garbage collection over all objects from the start-up takes tens of milliseconds
        log_scale = self.loss.settled_scale(self.logit_scale)
        if updated:
            self.average.update()
        return StepMetrics(
            loss,
            float(log_scale.exp()),
            learning_rate,
            gradient_norm,
            tokens_per_caption=captions.mean_tokens,
            text_positions_saved=captions.saved_share,
            skipped_steps=self.skipped_steps.total,
            loss_spike=self.loss_level.spike(self.step, loss),
        )

    def _accumulate(self, batch: StepStore) -> torch.Tensor:
        """Leave the gradients of the step in the engine and return its loss, ()."""
        section = self.inputs.config.megaclip
        with report_compilation(section.compile, self.step + 1) if self.memory_plan.compiles else nullcontext():
            return accumulate_gradients(
                self.engine,
                self.loss.bind(batch.ids, self.length.epoch_at(self.step)),
                batch,
                self.logit_scale.read(),
                RandomState(self.arguments.seed, self.step, self.replica),
                logit_bias=None if self.logit_bias is None else self.logit_bias.read(),
                coalesce=section.coalesce_gradient_reduction,
                kept=self.memory_plan.workload.kept,
                accumulation_dtype=torch.bfloat16 if self.inputs.config.accumulates_in_bf16 else torch.float32,
                embeddings_on_cpu=self.memory_plan.embeddings_on_cpu,
                check_loss=self.loss.check,
            )

    def _is_save_due(self) -> bool:
        return self.length.is_due(self.step, self.arguments.save_every_steps, self.arguments.save_frequency)

    def _is_evaluation_due(self) -> bool:
        return self.length.is_due(self.step, self.arguments.eval_every_steps, self.arguments.val_frequency)

    def _evaluate(self, metrics: Metrics) -> None:
        """Evaluate on all ranks and record the scores, if the command line specifies evaluation data."""
        if self.inputs.validation is not None or self.inputs.labelled is not None:
            with self.watchdog.phase("an evaluation"):
                result, left_out = self._run_evaluation(metrics)
                self._record_evaluation(metrics, result, left_out)
                metrics.restart_clock()

    def _run_evaluation(self, metrics: Metrics) -> tuple[Evaluation, dict[str, int]]:
        """Evaluate the model, or with --eval-ema its moving average; return as `evaluate_datasets` does."""
        inputs = self.inputs
        encode = ModelEncoder(
            self.engine,
            inputs.evaluation_transform.normalise,
            device=self.engine.device,
            image_dtype=self.engine.get_data_types()[0],
            cut_captions=None if inputs.config.megaclip.cut_captions is False else self.engine.module.cut_captions,
        )
        self.engine.eval()
        try:
            with self.average.in_model() if self.arguments.eval_ema else nullcontext():
                return evaluate_datasets(
                    encode,
                    pairs=inputs.validation,
                    labelled=inputs.labelled,
                    captions=self._validation_captions,
                    transform=inputs.evaluation_transform,
                    tokenizer=inputs.tokenizer,
                    batch_size=self.arguments.eval_batch_size,
                    num_workers=self.arguments.workers,
                    progress=lambda batches, name: self.watchdog.watched(metrics.progress(batches, name)),
                )
        finally:
            self.engine.train()

    def _record_evaluation(self, metrics: Metrics, result: Evaluation, left_out: dict[str, int]) -> None:
        """Report the scores and pictures of an evaluation, and record whether its checkpoint is the best so far."""
        self.scores = result.metrics
        pictures = {}
        if self.rank == 0 and result.examples is not None and self.inputs.validation is not None:
            pictures = example_pictures(result.examples, self.inputs.validation)
        metrics.record_evaluation(self.step, result.metrics, pictures, left_out, of_average=self.arguments.eval_ema)
        self.saves.finish()  # a checkpoint counts when it is complete
        with report_write_errors(has_trained=True):
            if self.rank == 0:
                self.best.evaluated(self.step, result.metrics)

    @cached_property
    def _validation_captions(self) -> CaptionGroups | None:
        """Groups of validation captions that belong to the same image. None without --group-captions."""
        if self.inputs.validation is None or not self.arguments.group_captions:
            return None
        return group_captions(self.inputs.validation)

    def _save(self, *, training_continues: bool) -> None:
        """Write a checkpoint on all ranks. With --async-save only start to write it, if training continues."""
        with self.watchdog.phase("a checkpoint"):
            self._write_checkpoint(training_continues)
        self.saved_step = self.step

    def _write_checkpoint(self, training_continues: bool) -> None:
        progress = {"step": self.step, "samples_consumed": self.samples_consumed}
        state = {**progress, **self.identity, "settings": self._settings()}
        self.loss.write_scale(self.logit_scale, self.average)
        loss_state = self.loss.checkpoint_state()
        target = store.Target(
            folder=self.checkpoints,
            step=self.step,
            state=state,
            keep_last=self.arguments.keep_last,
            keep_every=self.arguments.keep_every_steps,
            run=self.run_id,
            best=self.best.tag,
        )
        self.saves.save(self.engine, target, loss_state, training_continues=training_continues)

    def _save_before_failing(self, error: DataError) -> None:
        """Save the steps since the last checkpoint before `error` ends the run."""
        if self.step > self.saved_step:
            # Log before saving: if the disk has failed, saving raises another error, which would hide this one.
            logger.warning("reading data failed after step %d, saving a checkpoint of that step: %s", self.step, error)
            self._save(training_continues=False)
        with self.watchdog.phase("a checkpoint"):
            self.saves.finish()

    def _write_summary(self, metrics: Metrics) -> None:
        """Write metrics.json. `is_finished` reads its number of steps."""
        finite = {name: value for name, value in self.scores.items() if math.isfinite(value)}
        summary = {**finite, "steps": self.step, "bad_samples": self.bad_samples}
        if metrics.samples_per_s:  # zero if the resumed run only had to evaluate
            summary["samples_per_s"] = metrics.samples_per_s
        write_atomically(self._summary, json.dumps(summary, indent=1))
