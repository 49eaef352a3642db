"""What a run shows while it works: a progress bar, log lines, TensorBoard scalars and pictures.

Only the first rank shows anything; the other ranks hold a `Metrics` that stays silent. On a terminal the bar carries
the numbers; where the output goes to a file, a log line for the first step, then every few steps or, if they are long,
every minute does. DeepSpeed's own monitors (wandb, comet, csv), when ds_config.json turns them on, receive the same
scalars.
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
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megaclip.logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

LONGEST_SILENCE_S = 60.0
"""A step that ends so long after the last one with a log line has a line too."""


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, as every rank saw it."""

    loss: float
    logit_scale: float
    learning_rate: float
    gradient_norm: float


def peak_memory_mib() -> float:
    """Largest memory this process has held so far: allocated on its GPU, or resident when it has none."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return accelerator.max_memory_allocated() / 2**20


class Metrics:
    """Context manager around a run; `step` after each update, `evaluation` after each evaluation."""

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
        """`folder` is the run's; TensorBoard's files go to its subfolder. `monitor` is DeepSpeed's MonitorMaster."""
        self._first_rank = first_rank
        self._global_batch = global_batch
        self._log_every = log_every
        self._total_steps = total_steps
        self._monitor = monitor
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1) if first_rank else None
        on_terminal = first_rank and sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps, initial=start_step, unit="step", disable=not on_terminal, dynamic_ncols=True
        )
        self._shows_bar = on_terminal
        self._on_exit = ExitStack()
        self._step_ends: deque[float] = deque([time.monotonic()], maxlen=51)
        self._training_s = 0.0
        self._steps = 0
        self._last_line_at: float | None = None
        self._bad_samples = 0

    def __enter__(self) -> "Metrics":
        if self._shows_bar:  # log lines above the bar, not through it
            self._on_exit.enter_context(logging_redirect_tqdm([standard_logging.getLogger("megaclip")]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._on_exit.close()
        if self._writer:
            self._writer.close()

    def progress(self, batches: Iterable[T], description: str) -> Iterable[T]:
        """The same batches, with a passing bar of their own on a terminal."""
        return tqdm(batches, description, unit="batch", leave=False, disable=not self._shows_bar, dynamic_ncols=True)

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second of training in this process, evaluation and checkpoints aside."""
        return self._steps * self._global_batch / self._training_s if self._training_s else 0.0

    def resume_clock(self) -> None:
        """Start timing anew: the time since the last step went to something else than training."""
        self._step_ends = deque([time.monotonic()], maxlen=51)

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Record the update that ended as number `step` (1-based)."""
        now = time.monotonic()
        self._training_s += now - self._step_ends[-1]
        self._steps += 1
        self._step_ends.append(now)
        if not self._first_rank:
            return
        recent_s = (now - self._step_ends[0]) / (len(self._step_ends) - 1)
        samples_per_s = self._global_batch / recent_s
        peak_mib = peak_memory_mib()
        self._bar.update()
        shown = {
            "loss": f"{metrics.loss:.4f}",
            "scale": f"{metrics.logit_scale:.2f}",
            "lr": f"{metrics.learning_rate:.2e}",
            "grad": f"{metrics.gradient_norm:.2f}",
            "samples/s": f"{samples_per_s:.0f}",
            "MiB": f"{peak_mib:.0f}",
        }
        self._bar.set_postfix(shown, refresh=False)
        if step % self._log_every == 0 or step == self._total_steps or self._was_silent(now):
            self._last_line_at = now
            if not self._shows_bar:
                left_s = int((self._total_steps - step) * recent_s)
                text = " ".join(f"{key} {value}" for key, value in shown.items())
                left = f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}"
                logger.info("step %d/%d %s, %s left", step, self._total_steps, text, left)
            scalars = {**asdict(metrics), "samples_per_s": samples_per_s, "peak_mib": peak_mib}
            self._write(step, {f"train/{name}": value for name, value in scalars.items()})

    def _was_silent(self, now: float) -> bool:
        return self._last_line_at is None or now - self._last_line_at >= LONGEST_SILENCE_S

    def evaluation(
        self, step: int, scores: dict[str, float], pictures: dict[str, np.ndarray], left_out: dict[str, int]
    ) -> None:
        """Record an evaluation: scalars, pictures as (3, H, W) uint8, and how many bad samples it left out, by kind."""
        if not self._first_rank:
            return
        logger.info("evaluation at step %d: %s", step, ", ".join(f"{key} {value:.4f}" for key, value in scores.items()))
        if left_out:
            logger.warning("bad samples left out of the evaluation: %s", _listed(left_out))
        self._write(step, {f"evaluation/{name}": value for name, value in scores.items()})
        assert self._writer is not None
        for name, picture in pictures.items():
            self._writer.add_image(f"evaluation/{name}", picture, step)
        self._writer.flush()

    def bad_samples(self, step: int, counts: dict[str, int]) -> None:
        """Record how many bad samples all ranks have met and replaced since this process began, by kind."""
        if not self._first_rank:
            return
        total = sum(counts.values())
        if total > self._bad_samples:
            logger.warning("bad samples met and replaced until step %d: %s", step, _listed(counts))
        self._bad_samples = total
        self._write(step, {"train/bad_samples": total})
        assert self._writer is not None
        self._writer.flush()  # a checkpoint was written: a run that goes on from it has the history before it

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        assert self._writer is not None
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        if self._monitor is not None and self._monitor.enabled:
            self._monitor.write_events([(name, value, step) for name, value in scalars.items()])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
