"""Report the progress of a run: progress bar, log lines, TensorBoard scalars and pictures.

Only the first rank reports; on the other ranks `Metrics` writes nothing. On a terminal the progress bar shows the
figures. Otherwise log lines show them: one for the first step, then one every --log-every-n-steps steps. When steps are
long, there is at least one line per minute. DeepSpeed's monitors (wandb, comet, csv) receive the same scalars if
ds_config.json enables them.
"""

import logging as standard_logging
import resource
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megaclip.engine.curves import Curves
from megaclip.logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

LONGEST_LOG_INTERVAL_S = 60.0
"""A step that ends this many seconds after the last logged step is logged too."""
_TIMED_STEPS = 50
"""Number of recent steps from whose mean duration the samples per second and the remaining time are calculated."""


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one optimizer step, the same on every rank unless a field states otherwise."""

    loss: float
    logit_scale: float
    learning_rate: float
    gradient_norm: float
    tokens_per_caption: float | None = None
    """Mean number of tokens of this rank's captions before padding. None: captions are not cut."""
    text_positions_saved: float = 0.0
    """Share of this rank's token positions that the text tower does not process because captions are cut."""
    skipped_steps: int = 0
    """Number of steps since the process started whose update was left out because it was not finite."""
    loss_spike: float | None = None
    """Distance of the loss above its running level in standard deviations, if the step is part of a loss spike."""


def peak_memory_mib() -> float:
    """Return the peak memory of this process in MiB: allocated GPU memory or, on CPUs, resident host memory."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return accelerator.max_memory_allocated() / 2**20


class Metrics:
    """Context manager around the steps of a run that reports each step, evaluation and checkpoint."""

    def __init__(
        self,
        folder: Path,
        *,
        first_rank: bool,
        start_step: int,
        total_steps: int,
        global_batch: int,
        log_every: int,
        monitor: Any,
    ) -> None:
        """
        Args:
            folder: the run's folder; TensorBoard's files are written to its subfolder `tensorboard`.
            first_rank: whether this rank reports.
            start_step: number of steps that are already done.
            log_every: period of log lines in steps.
            monitor: DeepSpeed's MonitorMaster, or None.
        """
        self._global_batch = global_batch
        self._log_every = log_every
        self._total_steps = total_steps
        self._curves = Curves(folder / "tensorboard", start_step, monitor) if first_rank else None
        """None on ranks that do not report."""
        self._shows_bar = first_rank and sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps, initial=start_step, unit="step", disable=not self._shows_bar, dynamic_ncols=True
        )
        self._on_exit = ExitStack()
        self._training_s = 0.0
        self._steps = 0
        self._last_logged_at: float | None = None
        self._bad_samples = 0
        self.restart_clock()

    def __enter__(self) -> "Metrics":
        if self._shows_bar:  # prints log lines above the bar
            self._on_exit.enter_context(logging_redirect_tqdm([standard_logging.getLogger("megaclip")]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._on_exit.close()
        if self._curves is not None:
            self._curves.close()

    def progress(self, batches: Iterable[T], description: str) -> Iterable[T]:
        """Return an iterable over the same batches that, on a terminal, shows a temporary progress bar."""
        return tqdm(batches, description, unit="batch", leave=False, disable=not self._shows_bar, dynamic_ncols=True)

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second of training in this process, without evaluations and checkpoints."""
        return self._steps * self._global_batch / self._training_s if self._training_s else 0.0

    def restart_clock(self) -> None:
        """Restart the timing of steps, so that an evaluation or a checkpoint does not count as training time."""
        self._step_ends = deque([time.monotonic()], maxlen=_TIMED_STEPS + 1)

    def record_step(self, step: int, metrics: StepMetrics) -> None:
        """Report the optimizer step number `step` (1-based)."""
        now = time.monotonic()
        self._training_s += now - self._step_ends[-1]
        self._steps += 1
        self._step_ends.append(now)
        if self._curves is None:
            return
        recent_s = (now - self._step_ends[0]) / (len(self._step_ends) - 1)
        samples_per_s = self._global_batch / recent_s
        peak_mib = peak_memory_mib()
        self._bar.update()
        texts = {
            "loss": f"{metrics.loss:.4f}",
            "scale": f"{metrics.logit_scale:.2f}",
            "lr": f"{metrics.learning_rate:.2e}",
            "grad": f"{metrics.gradient_norm:.2f}",
            "samples/s": f"{samples_per_s:.0f}",
            "MiB": f"{peak_mib:.0f}",
        }
        self._bar.set_postfix(texts, refresh=False)
        if step % self._log_every == 0 or step == self._total_steps or self._is_log_overdue(now):
            self._last_logged_at = now
            if not self._shows_bar:
                left_s = int((self._total_steps - step) * recent_s)
                text = " ".join(f"{key} {value}" for key, value in texts.items())
                left = f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}"
                logger.info("step %d/%d %s, %s left", step, self._total_steps, text, left)
            scalars = {**asdict(metrics), "loss_spike": None, "samples_per_s": samples_per_s, "peak_mib": peak_mib}
            self._curves.write(step, {f"train/{name}": value for name, value in scalars.items() if value is not None})
        if metrics.loss_spike is not None:
            self._curves.write(step, {"train/loss_spike": metrics.loss_spike})

    def _is_log_overdue(self, now: float) -> bool:
        return self._last_logged_at is None or now - self._last_logged_at >= LONGEST_LOG_INTERVAL_S

    def record_evaluation(
        self,
        step: int,
        scores: dict[str, float],
        pictures: dict[str, np.ndarray],
        left_out: dict[str, int],
        *,
        of_average: bool,
    ) -> None:
        """Report an evaluation.

        Args:
            step: number of optimizer steps done.
            scores: scalars by name.
            pictures: (3, H, W) uint8 by name.
            left_out: number of bad samples that the evaluation left out, by kind.
            of_average: True if the moving average of the weights was evaluated.
        """
        if self._curves is None:
            return
        what = "evaluation of the moving average" if of_average else "evaluation"
        shown = ", ".join(f"{key} {value:.4f}" for key, value in scores.items())
        logger.info("%s at step %d: %s", what, step, shown)
        if left_out:
            logger.warning("bad samples left out of the evaluation: %s", _listed(left_out))
        self._curves.write(step, {f"evaluation/{name}": value for name, value in scores.items()})
        self._curves.write_pictures(step, {f"evaluation/{name}": picture for name, picture in pictures.items()})
        self._curves.flush()

    def record_bad_samples(self, step: int, counts: dict[str, int]) -> None:
        """Report the number of bad samples that all ranks have replaced since the process started, by kind."""
        if self._curves is None:
            return
        total = sum(counts.values())
        if total > self._bad_samples:
            logger.warning("bad samples replaced until step %d: %s", step, _listed(counts))
        self._bad_samples = total
        self._curves.write(step, {"train/bad_samples": total})
        self._curves.flush()  # a checkpoint was just written, and a run that resumes from it needs the curves up to it


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
