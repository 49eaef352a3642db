"""Handle updates that are not finite, and report losses far above their running level.

`SkippedSteps` decides what a run does after a `NonFiniteError`. Every rank raises this error in the same step, before
anything was updated, so all ranks make the same decision. `LossLevel` reports loss spikes; it changes nothing.
"""

import math
from collections import deque

import numpy as np

from megaclip.errors import NonFiniteError
from megaclip.logging import get_logger

logger = get_logger(__name__)

_WINDOW = 100
"""Number of recent losses from which the running level is calculated."""
_FEWEST = 20
"""Minimum number of losses before a spike is reported."""
_SPIKE = 10.0
"""Minimum distance of a spike from the level, in standard deviations."""
_SMALLEST_SPREAD = 0.01
"""Lower bound of the standard deviation, as a share of the level, so that rounding does not count as a spike."""


class SkippedSteps:
    """Count of the steps whose update was left out because it was not finite (--on-nonfinite).

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


class LossLevel:
    """The running level of the loss: median and spread of the last `_WINDOW` finite losses."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._in_spike = False

    def spike(self, step: int, loss: float) -> float | None:
        """Return the distance of the loss above its level in standard deviations if the loss is a spike, else None.

        A spike is a finite loss more than `_SPIKE` standard deviations above the level. Its first step is logged.
        """
        if not math.isfinite(loss):
            return None
        known = np.array(self._losses)
        self._losses.append(loss)
        if len(known) < _FEWEST:
            return None
        level = float(np.median(known))
        # 1.4826 times the median distance is the standard deviation of a normal distribution.
        spread = max(1.4826 * float(np.median(np.abs(known - level))), _SMALLEST_SPREAD * abs(level), 1e-6)
        height = (loss - level) / spread
        is_spike = height > _SPIKE
        if is_spike and not self._in_spike:
            logger.warning(
                "loss spike: %.4g at step %d, %.0f standard deviations above the level of the last %d steps, %.4g",
                loss,
                step,
                height,
                len(known),
                level,
            )
        self._in_spike = is_spike
        return height if is_spike else None
