"""Save a run's checkpoints, immediately or in the background, and measure how long training waits for them."""

import time
from typing import Any

from deepspeed import DeepSpeedEngine

from megaclip.checkpoint import store
from megaclip.checkpoint.background import BackgroundSaves, Saved
from megaclip.checkpoint.store import Target
from megaclip.errors import MegaclipError
from megaclip.logging import get_logger

logger = get_logger(__name__)

_LONG_PAUSE_S, _LONG_SHARE = 1.0, 0.01
"""Pause, in seconds and as a share of the time between two saves, above which the log recommends --async-save."""


class Saves:
    """The saves of one run. All ranks must call each method together, in the main thread.

    Every method except `training_starts` and `finish_before_failing` raises CheckpointError, on every rank, if any rank
    cannot write.
    """

    def __init__(self, *, in_background: bool) -> None:
        """in_background: value of --async-save."""
        self._in_background = in_background
        self._background = BackgroundSaves()
        self._last_end = time.monotonic()

    def training_starts(self) -> None:
        """Start to measure the time until the first save."""
        self._last_end = time.monotonic()

    def save(
        self, engine: DeepSpeedEngine, target: Target, loss_state: dict[str, Any] | None, *, training_continues: bool
    ) -> None:
        """Write a checkpoint. With --async-save, and if training continues, only start to write it.

        A save in flight is completed first.
        """
        began = time.monotonic()
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
        if self._in_background and training_continues:
            self._background.start(engine, target, loss_state)
            logger.info("saving %s in the background: %s", path, self._pause(began))
        else:
            store.save(engine, target, loss_state)
            logger.info("saved %s: %s", path, self._pause(began))

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
        if pause > _LONG_PAUSE_S and share > _LONG_SHARE and not self._in_background:
            advice = "; --async-save writes while training continues"
        return f"training waited {pause:.2f} s, {share:.1%} of the {interval:.3g} s since the previous save{advice}"


def _log_completed(saved: Saved | None) -> None:
    if saved is not None:
        logger.info("saved %s: complete %.1f s after its copy", saved.tag, saved.seconds)
