"""A training run from its command line to its last checkpoint.

`main(argv)` is what launch/train.py calls on every rank: read and check everything, start the process group, build the
engine, resume if asked, then step, evaluate and save until the schedule ends.
"""

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megaclip.checkpoint import store
from megaclip.checkpoint.model_card import write_model_card
from megaclip.comm.collectives import gather_objects, raise_together, sum_counts
from megaclip.comm.parallelism import parallel_groups
from megaclip.config import BatchPlan, TrainArguments, parse_arguments
from megaclip.data import check_batch
from megaclip.engine.build import build_engine
from megaclip.engine.data_offload import embeddings_on_cpu
from megaclip.engine.gradient_cache import RandomState, accumulate_gradients
from megaclip.engine.inputs import Inputs, read_inputs
from megaclip.engine.logit_scale import LogitScale, MasterScalar
from megaclip.engine.metrics import Metrics, StepMetrics
from megaclip.engine.optimizers import set_learning_rate, update
from megaclip.engine.preflight import check_fit, report_peak
from megaclip.engine.process_group import start_process_group
from megaclip.engine.resume import describe_run, resume
from megaclip.engine.run_length import RunLength
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedules import chosen_schedule
from megaclip.engine.step_store import StepStore, open_step_store
from megaclip.engine.stop import StopSignals
from megaclip.errors import CheckpointError, ConfigError, DataError, MegaclipError
from megaclip.evaluation import (
    CaptionGroups,
    ModelEncoder,
    evaluate_datasets,
    example_pictures,
    group_captions,
)
from megaclip.logging import get_logger

logger = get_logger(__name__)


def main(argv: list[str], *, patience_s: float | None = None) -> int:
    """Run one rank's part of the training that `argv` asks for; returns the process's exit code.

    A user's mistake is one line, from the first rank of each host. patience_s: after how long the other ranks say
    theirs too. A launcher kills them when the first one ends; so they do speak when the mistake is theirs alone, and
    their own end does not kill the first one before it has spoken. None: they never do.
    """
    arguments: TrainArguments | None = None
    exit_code = 0
    try:
        arguments = parse_arguments(argv)
        exit_code = train(arguments)
    except MegaclipError as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            logger.error("%s", error)
        elif patience_s is not None:
            time.sleep(patience_s)
            logger.error("%s", error)
        if arguments is not None and arguments.debug_traceback:
            raise
        exit_code = 1
    # Not after any other exception: the peers may be inside a collective, and leaving the group would wait for them.
    if dist.is_initialized():
        dist.destroy_process_group()
    return exit_code


def train(arguments: TrainArguments) -> int:
    """Train on this rank, together with the others; returns the exit code: 0, or what `megaclip.engine.stop` says.

    Raises MegaclipError, on every rank, when anything the user can mend goes wrong.
    """
    inputs = read_inputs(arguments)
    if arguments.resume == "auto" and arguments.name is None:
        raise ConfigError("--resume auto needs --name: the run to go on with")
    start_process_group()
    batch_plan = inputs.config.batch_plan(dist.get_world_size())
    check_batch(batch_plan.global_batch, len(inputs.train))
    plan = check_fit(arguments, inputs)
    folder = _prepare_folder(arguments)
    run = Run(arguments, inputs, batch_plan, folder)
    if run.is_finished():
        done = folder if arguments.resume == "auto" else arguments.resume
        logger.info("nothing left to train: %s has all %d steps", done, run.last_step)
        return 0
    stopped_by = run.to_the_end()
    report_peak(plan)
    if stopped_by is None:
        return 0
    raise_together(None)  # all have said and written everything: a launcher ends the others when the first one leaves
    return 128 + stopped_by


def _prepare_folder(arguments: TrainArguments) -> Path:
    """Make RUN/checkpoints on the first rank; every rank gets RUN's path or the error."""
    folder = Path()

    def make() -> None:
        nonlocal folder
        name = arguments.name or f"{Path(arguments.model).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(arguments.logs) / name
        checkpoints = folder / "checkpoints"
        if arguments.resume is None and (checkpoints / store.LATEST).exists():
            raise CheckpointError(f"{str(folder)!r} holds a run already: add --resume auto, or choose another --name")
        checkpoints.mkdir(parents=True, exist_ok=True)

    _write_on_first_rank(make)
    return gather_objects(folder)[0]


def _write_on_first_rank(write: Callable[[], None]) -> None:
    """Run `write` on the first rank; what goes wrong there ends every rank."""
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except OSError as problem:
            error = ConfigError(f"cannot write to the run's folder: {problem}")
        except MegaclipError as problem:
            error = problem
    raise_together(error)


class Run:
    """One rank's run: what the steps share."""

    def __init__(self, arguments: TrainArguments, inputs: Inputs, batch_plan: BatchPlan, folder: Path) -> None:
        self.arguments = arguments
        self.inputs = inputs
        self.batch_plan = batch_plan
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._summary = folder / "metrics.json"
        self.rank = dist.get_rank()
        self.replica = parallel_groups(inputs.config.megaclip.tensor_parallel_size).data.rank
        self.length = RunLength.of(arguments, len(inputs.train), batch_plan.global_batch)
        self.last_step = min(self.length.total_steps, arguments.stop_after_steps or self.length.total_steps)
        self.schedule = chosen_schedule(arguments, self.length, inputs.config.learning_rate)
        self.engine: DeepSpeedEngine = build_engine(inputs.config, arguments, inputs.model_config)
        self.logit_scale = LogitScale(self.engine, arguments.logit_scale_max)
        bias = self.engine.module.logit_bias
        self.logit_bias = None if bias is None else MasterScalar(bias)
        self.loss = RunLoss(
            inputs.config.megaclip,
            samples=len(inputs.train),
            epochs=self.length.epoch_at(self.length.total_steps),
            device=self.engine.device,
        )
        self.identity = describe_run(inputs, arguments, batch_plan, self.length.total_steps)
        self.embeddings_on_cpu = embeddings_on_cpu(
            inputs.config.megaclip.embeddings_offload,
            (batch_plan.local_batch, inputs.model_config.embed_dim),
            self.engine.get_data_types()[0],
            self.engine.device,
        )
        self.step, self.samples_consumed = resume(
            self.engine, self.loss, self.identity, arguments=arguments, checkpoints=self.checkpoints
        )
        self.saved_step = self.step
        _write_on_first_rank(self._write_description)  # not before: a refused --resume must leave the old one alone
        self.scores: dict[str, float] = {}
        self.bad_samples: dict[str, int] = {}

    def is_finished(self) -> bool:
        """Whether nothing is left to do: the last step is done and, unless another run did it, its scores are written
        (a run may have been killed in between)."""
        scored_step = None
        with contextlib.suppress(OSError, ValueError):
            scored_step = json.loads(self._summary.read_text(encoding="utf-8"))["steps"]
        scored_step = gather_objects(scored_step)[0]  # as the first rank, which writes the file, sees it
        return self.step >= self.last_step and (self.arguments.resume != "auto" or scored_step == self.step)

    def to_the_end(self) -> signal.Signals | None:
        """Train from `self.step` to the last step; returns the signal that ended it before, if one did."""
        logger.info(
            "training steps %d to %d of %d: contrastive batch %d = %d ranks x %d image chunks of %d or %d text chunks "
            "of %d, %d samples an epoch",
            self.step,
            self.last_step,
            self.length.total_steps,
            self.batch_plan.global_batch,
            self.batch_plan.world_size,
            self.batch_plan.accumulation,
            self.batch_plan.micro_batch,
            self.batch_plan.text_chunks,
            self.batch_plan.text_micro_batch,
            len(self.inputs.train),
        )
        shown = Metrics(
            self.folder,
            first_rank=self.rank == 0,
            start_step=self.step,
            total_steps=self.length.total_steps,
            global_batch=self.batch_plan.global_batch,
            log_every=self.arguments.log_every_n_steps,
            monitor=self.engine.monitor,
        )
        with StopSignals() as signals, shown as metrics, self.open_data() as batch:
            try:
                stopped_by = self._train(batch, metrics, signals)
            except DataError as error:  # on every rank, and before an update: what was trained so far is whole
                stopped_by = signals.agreed()  # launchers end the data workers too
                self._save_unsaved(error)
                if stopped_by is None:
                    raise
            if stopped_by:
                go_on = f"--name {self.folder.name} --resume auto"
                logger.info("stopped by %s after step %d; go on with %s", stopped_by.name, self.step, go_on)
            elif self.rank == 0:
                self._write_summary(metrics)
        return stopped_by

    def _train(self, batch: StepStore, metrics: Metrics, signals: StopSignals) -> signal.Signals | None:
        while self.step < self.last_step:
            done = self.train_step(batch)
            metrics.step(self.step, done)
            ends = self.step == self.last_step
            stopped_by = None if ends else signals.agreed()
            saves = self.length.is_due(self.step, self.arguments.save_every_steps, self.arguments.save_frequency)
            if ends or stopped_by or saves:
                self._save()
                self.bad_samples = sum_counts(batch.bad_counts)
                metrics.bad_samples(self.step, self.bad_samples)
                metrics.resume_clock()
            if stopped_by:
                return stopped_by
            evaluates = self.length.is_due(self.step, self.arguments.eval_every_steps, self.arguments.val_frequency)
            if evaluates and not ends:
                self._evaluate(metrics)
        self._evaluate(metrics)
        return None

    def open_data(self) -> AbstractContextManager[StepStore]:
        """This rank's training data from the next step on, for `train_step`; every rank opens it."""
        return open_step_store(
            self.arguments,
            self.inputs,
            self.batch_plan,
            self.engine,
            folder=self.folder,
            samples_consumed=self.samples_consumed,
        )

    def train_step(self, batch: StepStore) -> StepMetrics:
        """One optimizer step on all ranks, which moves `batch`, `step` and `samples_consumed` on.

        Raises DataError or NonFiniteError, on every rank, before the parameters are updated.
        """
        loss = accumulate_gradients(
            self.engine,
            self.loss.bind(batch.ids, self.length.epoch_at(self.step)),
            batch,
            self.logit_scale.read(),
            RandomState(self.arguments.seed, self.step, self.replica),
            logit_bias=None if self.logit_bias is None else self.logit_bias.read(),
            coalesce=self.inputs.config.megaclip.coalesce_gradient_reduction,
            accumulation_dtype=torch.bfloat16 if self.inputs.config.accumulates_in_bf16 else torch.float32,
            embeddings_on_cpu=self.embeddings_on_cpu,
        )
        batch.next_step()
        learning_rate = self.inputs.config.learning_rate * self.schedule(self.step)
        set_learning_rate(self.engine, learning_rate)
        gradient_norm = update(self.engine)
        self.loss.update(self.step / self.length.total_steps)
        self.step += 1
        self.samples_consumed += self.batch_plan.global_batch
        own_scale = self.loss.log_scale
        log_scale = self.logit_scale.clamp_() if own_scale is None else own_scale
        return StepMetrics(loss, float(log_scale.exp()), learning_rate, gradient_norm)

    def _evaluate(self, metrics: Metrics) -> None:
        inputs = self.inputs
        if inputs.validation is None and inputs.labelled is None:
            return
        encode = ModelEncoder(
            self.engine,
            inputs.evaluation_transform.normalise,
            device=self.engine.device,
            image_dtype=self.engine.get_data_types()[0],
        )
        self.engine.eval()
        try:
            result, left_out = evaluate_datasets(
                encode,
                pairs=inputs.validation,
                labelled=inputs.labelled,
                captions=self._validation_captions,
                transform=inputs.evaluation_transform,
                tokenizer=inputs.tokenizer,
                batch_size=self.arguments.eval_batch_size,
                num_workers=self.arguments.workers,
                progress=metrics.progress,
            )
        finally:
            self.engine.train()
        self.scores = result.metrics
        pictures = {}
        if self.rank == 0 and result.examples is not None and inputs.validation is not None:
            pictures = example_pictures(result.examples, inputs.validation)
        metrics.evaluation(self.step, result.metrics, pictures, left_out)
        metrics.resume_clock()

    @cached_property
    def _validation_captions(self) -> CaptionGroups | None:
        """With --group-captions, which captions belong to the same image; read once."""
        if self.inputs.validation is None or not self.arguments.group_captions:
            return None
        return group_captions(self.inputs.validation)

    def _save(self) -> None:
        state = {"step": self.step, "samples_consumed": self.samples_consumed, **self.identity}
        own_scale = self.loss.log_scale
        if own_scale is not None:
            self.logit_scale.write(own_scale)
        loss_state = self.loss.checkpoint_state()
        tag = store.save(self.engine, self.checkpoints, self.step, state, self.arguments.keep_last, loss_state)
        self.saved_step = self.step
        logger.info("saved %s", self.checkpoints / tag)

    def _save_unsaved(self, error: DataError) -> None:
        """Save what was trained since the last checkpoint, before `error` ends the run."""
        if self.step > self.saved_step:
            # Said now: if the disk is what failed, saving fails too, and that error would be the only one shown.
            logger.warning("the data failed after step %d, saving what was trained: %s", self.step, error)
            self._save()

    def _write_description(self) -> None:
        """The model card and tokenizer that exports carry, and the settings of this run."""
        card = self.checkpoints / store.MODEL_CARD
        card.mkdir(exist_ok=True)
        self.inputs.tokenizer.write_open_clip(card)
        write_model_card(card, self.inputs.model_config, self.inputs.preprocess_cfg, self.inputs.tokenizer.files)
        settings = {"arguments": self.arguments.model_dump(), "ds_config": self.inputs.config.deepspeed}
        store.write_atomically(self.folder / "settings.json", json.dumps(settings, indent=1))

    def _write_summary(self, metrics: Metrics) -> None:
        finite = {name: value for name, value in self.scores.items() if math.isfinite(value)}
        summary = {**finite, "steps": self.step, "bad_samples": self.bad_samples}
        if metrics.samples_per_s:  # not where only the scores were missing
            summary["samples_per_s"] = metrics.samples_per_s
        store.write_atomically(self._summary, json.dumps(summary, indent=1))
