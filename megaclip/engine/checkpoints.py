"""The checkpoints of a run: save them immediately or in the background, and resume from one."""

import time
from pathlib import Path
from typing import Any

from megaclip.checkpoint import store
from megaclip.checkpoint.background import BackgroundSaves, Saved
from megaclip.config import TrainArguments
from megaclip.engine.best_checkpoint import BestCheckpoint
from megaclip.engine.resume import resume
from megaclip.engine.trainer import Trainer
from megaclip.errors import MegaclipError
from megaclip.logging import get_logger

logger = get_logger(__name__)

_LONG_PAUSE_S, _LONG_SHARE = 1.0, 0.01
"""Pause, in seconds and as a share of the time between two saves, above which the log recommends --async-save."""


class Checkpoints:
    """The checkpoints of one run. All ranks must call each method together, in the main thread.

    `save`, `poll` and `finish` raise CheckpointError, on every rank, if any rank cannot write.
    """

    def __init__(
        self,
        folder: Path,
        arguments: TrainArguments,
        trainer: Trainer,
        identity: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:
        """
        Args:
            folder: the run's folder.
            trainer: its model, optimizer and loss are saved.
            identity: `megaclip.engine.resume.describe_run` of this run.
            settings: the command line and ds_config.json, which checkpoints record too.
        """
        self.folder = folder / "checkpoints"
        self.best = BestCheckpoint(folder, arguments)
        self.run_id = ""
        """Identifier that this run's checkpoints record; only the first rank's is used."""
        self.saved_step = 0
        """Step of the newest checkpoint; with --async-save it may still be being written."""
        self._arguments = arguments
        self._trainer = trainer
        self._identity, self._settings = identity, settings
        self._background = BackgroundSaves()
        self._last_end = time.monotonic()

    def resume(self) -> None:
        """Load the checkpoint that --resume specifies, if any, into the trainer.

        Raises:
            CheckpointError, DataError: on every rank: the checkpoint does not exist, or this run cannot resume from it.
        """
        trainer = self._trainer
        step, self.run_id = resume(
            trainer.engine, trainer.loss, self._identity, arguments=self._arguments, checkpoints=self.folder
        )
        trainer.resumed(step)
        self.saved_step = step

    def training_starts(self) -> None:
        """Start to measure the time until the first save."""
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
        trainer.loss.write_scale(trainer.logit_scale, trainer.average)
        loss_state = trainer.loss.checkpoint_state()
        if self._arguments.async_save and training_continues:
            self._background.start(trainer.engine, target, loss_state)
            logger.info("saving %s in the background: %s", path, self._pause(began))
        else:
            store.save(trainer.engine, target, loss_state)
            logger.info("saved %s: %s", path, self._pause(began))
        self.saved_step = target.step

    def _target(self) -> store.Target:
        trainer, arguments = self._trainer, self._arguments
        progress = {"step": trainer.step, "samples_consumed": trainer.samples_consumed}
        return store.Target(
            folder=self.folder,
            step=trainer.step,
            state={**progress, **self._identity, "settings": self._settings},
            keep_last=arguments.keep_last,
            keep_every=arguments.keep_every_steps,
            run=self.run_id,
            best=self.best.tag,
        )

    def poll(self) -> None:
        """Log the save in flight if it is complete. Call it between two steps."""
        _log_completed(self._background.poll())

    def finish(self) -> None:
        """Wait for the save in flight."""
        _log_completed(self._background.finish())

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
        if pause > _LONG_PAUSE_S and share > _LONG_SHARE and not self._arguments.async_save:
            advice = "; --async-save writes while training continues"
        return f"training waited {pause:.2f} s, {share:.1%} of the {interval:.3g} s since the previous save{advice}"


def _log_completed(saved: Saved | None) -> None:
    if saved is not None:
        logger.info("saved %s: complete %.1f s after its copy", saved.tag, saved.seconds)
