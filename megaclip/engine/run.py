"""A training run, from its command line to its last checkpoint.

launch/train.py calls `main(argv)` on every rank. `train` then reads and checks all inputs, starts the process group,
checks that the run fits into memory, builds the engine (`Run`), resumes if requested, and runs the training loop
(`Run._train_steps`): one optimizer step at a time (`Trainer.train_step`), with checkpoints (`Checkpoints`) and
evaluations in between.
"""

import os
import shlex
import signal
import time
from pathlib import Path

import deepspeed.comm as dist

from megaclip.checkpoint.search import MODEL_CARD
from megaclip.comm.collectives import gather_objects, sum_counts, wait_for_all_ranks
from megaclip.config import TrainArguments, parse_arguments
from megaclip.data import check_batch
from megaclip.engine.checkpoints import Checkpoints
from megaclip.engine.equal_inputs import require_equal_inputs
from megaclip.engine.feature_cache import cached_features
from megaclip.engine.inputs import Inputs, read_inputs
from megaclip.engine.metrics import Metrics
from megaclip.engine.preflight import check_fit, report_peak
from megaclip.engine.process_group import end_spare_ranks, start_process_group, wait_if_spare
from megaclip.engine.run_folder import (
    SUMMARY,
    report_write_errors,
    run_folder,
    summarised_step,
    write_settings,
    write_summary,
)
from megaclip.engine.saved_model import locked_weights, write_model_folder
from megaclip.engine.trainer import Trainer
from megaclip.errors import DataError, MegaclipError, refused_before_training
from megaclip.guards.signals import StopSignals, end_with_launcher
from megaclip.guards.watchdog import Watchdog
from megaclip.logging import format_count, get_logger, local_rank_from_environment
from megaclip.planner import MemoryPlan
from megaclip.step.sample_store import StepStore

logger = get_logger(__name__)


def main(argv: list[str], *, other_ranks_delay_s: float = 0.0) -> int:
    """Run this rank's part of the training that `argv` specifies; return the exit code of the process.

    A `MegaclipError` is logged as one line. argv: command line, without the name of the program.

    other_ranks_delay_s: seconds that ranks other than the first one of a host wait before they log their error. A
        launcher ends all ranks when one exits, so the others log only an error that the first one does not have.
    """
    end_with_launcher()
    arguments: TrainArguments | None = None
    exit_code = 0
    try:
        arguments = parse_arguments(argv)
        exit_code = train(arguments)
    except MegaclipError as error:
        if local_rank_from_environment() != 0:
            time.sleep(other_ranks_delay_s)
        logger.error("%s", error)
        if arguments is not None and arguments.debug_traceback:
            raise
        exit_code = error.exit_code
    end_spare_ranks(exit_code)
    # Not called after any other exception: the other ranks may be in a collective, and this call would wait for them.
    if dist.is_initialized():
        dist.destroy_process_group()
    return exit_code


def train(arguments: TrainArguments) -> int:
    """Train on this rank, together with the other ranks; return the exit code: 0, or that of `megaclip.guards.signals`.

    Raises:
        MegaclipError: on every rank, for any problem that the user can solve.
    """
    with refused_before_training():
        inputs = read_inputs(arguments)
    if (exit_code := wait_if_spare(inputs.config)) is not None:
        return exit_code
    start_process_group()
    require_equal_inputs(arguments, inputs)
    with refused_before_training():
        batch = inputs.config.batch_layout(dist.get_world_size()).global_batch
        check_batch(batch, inputs.train.order(batch, seed=arguments.seed))
    memory_plan = check_fit(arguments, inputs)
    with run_folder(arguments) as folder:
        with refused_before_training():
            run = Run(arguments, inputs, folder, memory_plan)
            run.checkpoints.resume()
        run.write_description()  # not before: a checkpoint that is refused must leave the old description unchanged
        if run.is_finished():
            source = folder if arguments.resume == "auto" else arguments.resume
            logger.info("nothing left to train: %s has all %d steps", source, run.last_step)
            return 0
        with refused_before_training():
            if arguments.feature_cache is not None:
                run.trainer.features = cached_features(run.trainer.engine, inputs, arguments)
        stop_signal = run.train_to_end()
        report_peak(run.trainer.memory_plan)
        if stop_signal is None:
            return 0
        wait_for_all_ranks()  # until all have saved and logged: a launcher ends the other ranks when one exits
        return 128 + stop_signal


class Run:
    """One rank's part of a run: the trainer, and when it saves, evaluates and stops.

    Construct it, then call `checkpoints.resume`, `write_description` and `train_to_end`, on all ranks together.
    """

    def __init__(self, arguments: TrainArguments, inputs: Inputs, folder: Path, memory_plan: MemoryPlan) -> None:
        self.arguments, self.inputs, self.folder = arguments, inputs, folder
        self.trainer = Trainer(arguments, inputs, memory_plan)
        self.length = self.trainer.length
        self.last_step = min(self.length.total_steps, arguments.stop_after_steps or self.length.total_steps)
        self.checkpoints = Checkpoints(folder, self.trainer)
        self.watchdog = Watchdog(folder, arguments.hang_timeout)
        self.scores: dict[str, float] = {}
        """Scores of the last evaluation, by name."""
        self._is_first_rank = dist.get_rank() == 0

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.trainer.step

    def write_description(self) -> None:
        """Write the model card, the tokenizer and settings.json on the first rank.

        The record of the best checkpoint is read or, if it does not apply to this run, deleted.
        """
        with report_write_errors():
            if self._is_first_rank:
                model, card = self.trainer.engine.module, self.checkpoints.folder / MODEL_CARD
                locked, resumed = model.locked_weights, self.checkpoints.resumed_from
                if resumed is not None:
                    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
                    names = frozen if model.base_sha256 is None else []  # --pretrained has those below adapters
                    locked = locked_weights(resumed, card, names, bf16=self.inputs.config.bf16)
                write_model_folder(card, self.inputs, locked)
                model.locked_weights = {}
                write_settings(self.folder, self.checkpoints.settings, resumed and resumed.parents[1])
                self.checkpoints.best.resume(self.step, self.checkpoints.run_id)

    def is_finished(self) -> bool:
        """Return whether the run is complete.

        With --resume auto the last evaluation must be done too, because the run may have been killed after its last
        step.
        """
        scored_step = gather_objects(summarised_step(self.folder))[0]  # of the first rank: all must decide alike
        return self.step >= self.last_step and (self.arguments.resume != "auto" or scored_step == self.step)

    def train_to_end(self) -> signal.Signals | None:
        """Train until the last step or until a signal stops the run; return that signal, or None."""
        with report_write_errors():
            if self._is_first_rank:
                (self.folder / SUMMARY).unlink(missing_ok=True)  # from a shorter run, or from discarded steps
        if self.step < self.last_step:  # not if only an evaluation is left, or --stop-after-steps is behind
            self._log_batch()
        with (
            StopSignals() as signals,
            self.watchdog,
            Metrics(
                self.folder,
                self.length,
                start_step=self.step,
                log_every=self.arguments.log_every_n_steps,
                monitors=self.inputs.config.monitors,
            ) as metrics,
            self.trainer.open_data(self.folder) as store,
        ):
            try:
                stop_signal = self._train_steps(store, metrics, signals)
            except DataError as error:  # raised on every rank before an update, so the last step is complete
                stop_signal = signals.received_by_any_rank()  # a launcher that stops a run also ends its data workers
                self._save_before_failing(error)
                if stop_signal is None:
                    raise
            except MegaclipError:  # on every rank
                with self.watchdog.phase("a checkpoint"):
                    self.checkpoints.finish_before_failing()
                raise
            if stop_signal is None:
                with report_write_errors(has_trained=True):
                    if self._is_first_rank:
                        write_summary(self.folder, self.step, self.scores, metrics.bad_samples, metrics.samples_per_s)
            self._log_end(stop_signal)
        return stop_signal

    def _train_steps(self, store: StepStore, metrics: Metrics, signals: StopSignals) -> signal.Signals | None:
        """Run the training loop: step, save and evaluate until the last step or a stop signal."""
        arguments, is_due = self.arguments, self.length.is_due
        while self.step < self.last_step:
            step_metrics = self.trainer.train_step(store)
            self.watchdog.step_done(self.step)
            if self.trainer.decoding.step_done(store, step_metrics.data_wait_s, self.trainer.step_s):
                metrics.forget_waits()
            metrics.record_step(self.step, step_metrics)
            is_last = signals.run_is_ending = self.step == self.last_step
            stop_signal = None if is_last else signals.received_by_any_rank()
            self.checkpoints.poll()
            if is_last or stop_signal or is_due(self.step, arguments.save_every_steps, arguments.save_frequency):
                self._save(training_continues=not (is_last or stop_signal))
                metrics.record_bad_samples(self.step, sum_counts(store.bad_counts))
                metrics.restart_clock()
            if stop_signal:
                return stop_signal
            if is_due(self.step, arguments.eval_every_steps, arguments.val_frequency) and not is_last:
                self._evaluate(metrics)
        signals.run_is_ending = True
        self._evaluate(metrics)  # here, because a resumed run may have only this left to do
        return None

    def _save(self, *, training_continues: bool) -> None:
        with self.watchdog.phase("a checkpoint"):
            self.checkpoints.save(training_continues=training_continues)

    def _save_before_failing(self, error: DataError) -> None:
        """Save the steps since the last checkpoint before `error` ends the run."""
        if self.step > self.checkpoints.saved_step:
            # Log before saving: if the disk has failed, saving raises another error, which would hide this one.
            logger.warning("reading data failed after step %d, saving a checkpoint of that step: %s", self.step, error)
            self._save(training_continues=False)
        with self.watchdog.phase("a checkpoint"):
            self.checkpoints.finish()

    def _evaluate(self, metrics: Metrics) -> None:
        """Evaluate, if the command line specifies evaluation data, and record whether the checkpoint is the best."""
        if self.inputs.validation is None and self.inputs.labelled is None and not self.inputs.suite:
            return
        with self.watchdog.phase("an evaluation"):
            self.scores = self.trainer.evaluate(metrics, self.watchdog.watched)
            self.checkpoints.finish()  # a checkpoint counts when it is complete
            with report_write_errors(has_trained=True):
                if self._is_first_rank:
                    self.checkpoints.best.evaluated(self.step, self.scores)
            metrics.restart_clock()

    def _log_batch(self) -> None:
        """Log the steps of this process and how the contrastive batch is divided."""
        batch = self.trainer.batch
        logger.info(
            "training steps %d to %d of %d: contrastive batch %d = %s x %s of %d or %s of %d, %d samples an epoch",
            self.step,
            self.last_step,
            self.length.total_steps,
            batch.global_batch,
            format_count(batch.world_size, "rank"),
            format_count(batch.accumulation, "image chunk"),
            batch.micro_batch,
            format_count(batch.text_chunks, "text chunk"),
            batch.text_micro_batch,
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
        self.checkpoints.best.report()
