"""The checkpoints of a run: save them immediately or in the background, resume from one, and record the best one.

The best checkpoint has the highest main score of the run's evaluations: `zero_shot_top1` if the run evaluates zero-shot
classification, else the mean of `retrieval_r1_i2t` and `retrieval_r1_t2i`, else `suite_average`. Only evaluations at a
step that has a checkpoint count. The record is `best_checkpoint.json` in the run's folder. `checkpoint.store.save`
keeps the checkpoint that it names, whatever --keep-last is.
"""

import contextlib
import math
import shlex
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megaclip.checkpoint import store
from megaclip.checkpoint.background import BackgroundSaves
from megaclip.checkpoint.durable import read_text
from megaclip.checkpoint.search import TAG_PATTERN, run_of, step_of, tag_of
from megaclip.config import TrainArguments
from megaclip.engine.resume import describe_run, resume
from megaclip.engine.trainer import SUITE_AVERAGE, Trainer
from megaclip.errors import MegaclipError
from megaclip.files import write_atomically
from megaclip.logging import get_logger

logger = get_logger(__name__)

_LONG_PAUSE_S, _LONG_SHARE = 1.0, 0.01
"""Pause, in seconds and as a share of the time between two saves, above which the log recommends --async-save."""


class Checkpoints:
    """The checkpoints of one run. All ranks must call each method together, in the main thread.

    `save`, `poll` and `finish` raise CheckpointError, on every rank, if any rank cannot write.
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        """folder: the run's folder. trainer: its model, optimizer and loss are saved."""
        arguments, inputs = trainer.arguments, trainer.inputs
        self.settings = {"arguments": arguments.recorded(), "ds_config": inputs.config.deepspeed}
        """The command line and ds_config.json, which checkpoints record."""
        self.folder = folder / "checkpoints"
        self.best = BestCheckpoint(folder, arguments)
        self.run_id = ""
        """Identifier that this run's checkpoints record; only the first rank's is used."""
        self.resumed_from: Path | None = None
        """Folder of the checkpoint that `resume` has loaded."""
        self.saved_step = 0
        """Step of the newest checkpoint; with --async-save it may still be being written."""
        self._trainer = trainer
        self._identity = describe_run(inputs, arguments, trainer.length, trainer.engine.module.base_sha256)
        self._background = BackgroundSaves()
        self._last_end = time.monotonic()

    def resume(self) -> None:
        """Load the checkpoint that --resume specifies, if any, into the trainer.

        Raises:
            CheckpointError, DataError: on every rank: the checkpoint does not exist, or this run cannot resume from it.
        """
        self.resumed_from, self.run_id = resume(self._trainer, self._identity, self.folder)
        self.saved_step = self._trainer.step
        self._last_end = time.monotonic()

    def save(self, *, training_continues: bool) -> None:
        """Write a checkpoint. With --async-save, and if training continues, only start to write it.

        A save in flight is completed first.
        """
        began = time.monotonic()
        target = self._target()
        path = target.folder / target.tag
        if (earlier := self._background.in_flight) is not None:
            logger.info("%s is still being written; %s waits for it", earlier, target.tag)
            self.finish()
            if training_continues:
                logger.warning(
                    "saving %s waited %.1f s for %s; save less often (--save-every-steps or --save-frequency), or use "
                    "a faster disk",
                    target.tag,
                    time.monotonic() - began,
                    earlier,
                )
        trainer = self._trainer
        loss_state = None
        if (own_loss := trainer.loss.own) is not None:
            trainer.logit_scale.write(own_loss.log_scale)  # exports read it there
            trainer.average.write_log_scale(own_loss.log_scale)
            loss_state = own_loss.checkpoint_state()
        if trainer.arguments.async_save and training_continues:
            self._background.start(trainer.engine, target, loss_state)
            logger.info("saving %s in the background: %s", path, self._pause(began))
        else:
            store.save(trainer.engine, target, loss_state)
            logger.info("saved %s: %s", path, self._pause(began))
        self.saved_step = target.step

    def _target(self) -> store.Target:
        trainer, arguments = self._trainer, self._trainer.arguments
        progress = {"step": trainer.step, "samples_consumed": trainer.samples_consumed}
        identity = {**self._identity, "image_decoder": trainer.decoding.libraries}
        identity |= {"log_scale_max": trainer.logit_scale.maximum}
        return store.Target(
            folder=self.folder,
            step=trainer.step,
            state={**progress, **identity, "settings": self.settings},
            keep_last=arguments.keep_last,
            keep_every=arguments.keep_every_steps,
            run=self.run_id,
            best=self.best.tag,
        )

    def poll(self) -> None:
        """Log the save in flight if it is complete. Call it between two steps."""
        self._background.poll()

    def finish(self) -> None:
        """Wait for the save in flight."""
        self._background.finish()

    def finish_before_failing(self) -> None:
        """Wait for the save in flight, and log its error: another error is about to end the run."""
        try:
            self.finish()
        except MegaclipError as error:
            logger.error("%s", error)

    def _pause(self, began: float) -> str:
        """Return the duration of a save, and its share of the time since the previous one, as text."""
        now = time.monotonic()
        pause, interval, self._last_end = now - began, now - self._last_end, now
        share = pause / max(interval, 1e-9)
        advice = ""
        if pause > _LONG_PAUSE_S and share > _LONG_SHARE and not self._trainer.arguments.async_save:
            advice = "; --async-save writes while training continues"
        return f"training waited {pause:.2f} s, {share:.1%} of the {interval:.3g} s since the previous save{advice}"


FILE = "best_checkpoint.json"
_RETRIEVAL = ("retrieval_r1_i2t", "retrieval_r1_t2i")


_SOURCES = ("val_data", "val_fraction", "zeroshot_data", "suite")
"""Flags of the command line of which an evaluation requires one."""
_DATA = (*_SOURCES, "group_captions", "eval_ema")
"""Flags that specify the evaluation. Scores are compared only if these flags are equal."""


class _Record(BaseModel):
    """Content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    checkpoint: str = Field(pattern=f"^{TAG_PATTERN}$")
    """Name of the checkpoint, such as "step_00000100"."""
    main_score: str
    """Name of the score that ranks checkpoints."""
    value: float
    scores: dict[str, float]
    """All finite scores of the evaluation, by name."""
    data: dict[str, Any]
    """The flags `_DATA` of the run that was evaluated."""


def main_score(scores: dict[str, float]) -> tuple[str, float]:
    """Return name and value of the score that ranks checkpoints. Higher is better."""
    if "zero_shot_top1" in scores:
        return "zero_shot_top1", scores["zero_shot_top1"]
    if _RETRIEVAL[0] not in scores:
        return SUITE_AVERAGE, scores.get(SUITE_AVERAGE, math.nan)
    return "mean of " + " and ".join(_RETRIEVAL), sum(scores[name] for name in _RETRIEVAL) / len(_RETRIEVAL)


class BestCheckpoint:
    """The best checkpoint of the run in a folder. Only the first rank uses it."""

    def __init__(self, folder: Path, arguments: TrainArguments) -> None:
        """folder: the run's folder. arguments: the command line, whose evaluation data are recorded."""
        self._folder = folder
        self._file = folder / FILE
        self._data = {name: arguments.recorded()[name] for name in _DATA}
        self._run = ""
        self._record: _Record | None = None

    @property
    def tag(self) -> str | None:
        """Name of the best checkpoint. None: no evaluation has counted yet."""
        return None if self._record is None else self._record.checkpoint

    def resume(self, step: int, run: str) -> None:
        """Read the record of an earlier process of this run. Delete the file if it no longer applies.

        The record no longer applies if its checkpoint is missing or belongs to another run. Nor does it apply if the
        run resumes from an earlier step or evaluates on other data.

        step: number of steps that are done. run: identifier that the run's checkpoints record.
        """
        self._run = run
        record = None
        with contextlib.suppress(OSError, ValueError):
            record = _Record.model_validate_json(read_text(self._file))
        if record is not None and self._applies(record, step):
            self._record = record
        elif self._file.exists():
            self._file.unlink()
            logger.info("%s no longer applies to this run and was deleted", self._file)

    def _applies(self, record: _Record, step: int) -> bool:
        same_data = record.data == self._data or not any(self._data[name] for name in _SOURCES)
        return self._is_saved(record.checkpoint) and step_of(record.checkpoint) <= step and same_data

    def _is_saved(self, tag: str) -> bool:
        """Return whether this run has written checkpoint `tag` completely."""
        return run_of(self._folder / "checkpoints", tag) == self._run

    def evaluated(self, step: int, scores: dict[str, float]) -> None:
        """Write the record if `step` has a checkpoint and its score is higher than all earlier scores.

        Raises:
            OSError: the file cannot be written.
        """
        name, score = main_score(scores)
        tag = tag_of(step)
        if not math.isfinite(score) or not self._is_saved(tag):
            return
        if self._record is None or score > self._record.value:
            finite = {key: value for key, value in scores.items() if math.isfinite(value)}
            self._record = _Record(checkpoint=tag, main_score=name, value=score, scores=finite, data=self._data)
            write_atomically(self._file, self._record.model_dump_json(indent=1))

    def report(self) -> None:
        """Log the best checkpoint and the command that exports it."""
        if self._record is not None:
            logger.info(
                "best checkpoint: %s with %s %.4f. To export it: megaclip export %s OUT_DIR --tag %s%s --verify",
                self._record.checkpoint,
                self._record.main_score,
                self._record.value,
                shlex.quote(str(self._folder)),
                self._record.checkpoint,
                " --ema" if self._record.data.get("eval_ema") else "",
            )
