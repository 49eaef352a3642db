"""Report the progress of a run: progress bar, log lines, TensorBoard scalars and pictures.

Only the first rank reports; on the other ranks `Metrics` writes nothing. On a terminal the progress bar shows the
figures. Otherwise log lines show them: one for the first step, then one every --log-every-n-steps steps. When steps are
long, there is at least one line per minute. DeepSpeed's monitors (wandb, comet, csv) receive the same scalars if
ds_config.json enables them.
"""

import logging as standard_logging
import math
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from deepspeed.accelerator import get_accelerator
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megaclip.comm.groups import group_rank
from megaclip.engine.schedule import RunLength
from megaclip.errors import first_line
from megaclip.logging import get_logger
from megaclip.zero.settings import DeepSpeedMonitorConfig, MonitorMaster

logger = get_logger(__name__)

T = TypeVar("T")

LONGEST_LOG_INTERVAL_S = 60.0
"""A step that ends this many seconds after the last logged step is logged too."""
_TIMED_STEPS = 50
"""Number of recent steps from whose mean duration the samples per second and the remaining time are calculated."""
WAITED_STEPS = 10
"""Number of steps, after the first, before a run counts as bound by its data."""
WAITED_SHARE = 0.1
"""Share of the recent steps' time spent waiting for samples above which a run counts as bound by its data."""
_SPIKE_WINDOW = 100
"""Number of recent losses from which the running level is calculated."""
_SPIKE_FEWEST = 20
"""Minimum number of losses before a spike is reported."""
_SPIKE = 10.0
"""Minimum distance of a spike from the level, in standard deviations."""
_SPIKE_SMALLEST_SPREAD = 0.01
"""Lower bound of the standard deviation, as a share of the level, so that rounding does not count as a spike."""


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one optimizer step, the same on every rank unless a field states otherwise."""

    loss: float
    logit_scale: float
    """exp(`logit_scale`) that the loss used, before the update."""
    learning_rate: float
    gradient_norm: float
    tokens_per_caption: float | None = None
    """Mean number of tokens of this rank's captions before padding. None: captions are not cut."""
    text_positions_saved: float = 0.0
    """Share of this rank's token positions that the text tower does not process because captions are cut."""
    equal_pairs: float | None = None
    """Share of the pairs of the batch whose id another pair has. None: megaclip.same_ids is "ignore"."""
    skipped_steps: int = 0
    """Number of steps since the process started whose update was left out because it was not finite."""
    data_wait_s: float = 0.0
    """Seconds of the step in which this rank's towers waited for samples."""
    terms: dict[str, float] = field(default_factory=dict)
    """Value of each term of the loss, the contrastive one included, if the run has an objective."""


def peak_memory_mib() -> float:
    """Return the peak memory of this process in MiB: allocated GPU memory or, on CPUs, resident host memory."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return accelerator.max_memory_allocated() / 2**20


class Metrics:
    """Context manager around the steps of a run that reports each step, evaluation and checkpoint."""

    def __init__(
        self, folder: Path, length: RunLength, *, start_step: int, log_every: int, monitors: DeepSpeedMonitorConfig
    ) -> None:
        """start_step: number of steps that are already done. log_every: period of log lines in steps."""
        self._length = length
        self._log_every = log_every
        reports = group_rank() == 0
        self._curves = Curves(folder / "tensorboard", start_step, monitors) if reports else None
        """None on ranks that do not report."""
        self._loss_level = LossLevel()
        self._shows_bar = reports and sys.stderr.isatty()
        self._bar = tqdm(
            total=length.total_steps, initial=start_step, unit="step", disable=not self._shows_bar, dynamic_ncols=True
        )
        self._on_exit = ExitStack()
        self._training_s = 0.0
        self._steps = 0
        self._last_logged_at: float | None = None
        self._waits: deque[tuple[float, float]] = deque(maxlen=_TIMED_STEPS)
        """Seconds of waiting for samples and of the whole step, for recent steps."""
        self._is_bound_by_data = False
        self.bad_samples: dict[str, int] = {}
        """Number of bad samples that all ranks have replaced since the process started, by kind."""
        self.restart_clock()

    def __enter__(self) -> "Metrics":
        if self._shows_bar:  # prints log lines above the bar
            self._on_exit.enter_context(logging_redirect_tqdm([standard_logging.getLogger("megaclip")]))
        return self

    def __exit__(self, *_: object) -> None:
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
        return self._steps * self._length.global_batch / self._training_s if self._training_s else 0.0

    def restart_clock(self) -> None:
        """Restart the timing of steps, so that an evaluation or a checkpoint does not count as training time."""
        self._step_ends = deque([time.monotonic()], maxlen=_TIMED_STEPS + 1)

    def forget_waits(self) -> None:
        """Forget how long past steps waited for data, because later steps get them in another way."""
        self._waits.clear()

    def record_step(self, step: int, metrics: StepMetrics) -> None:
        """Report the optimizer step number `step` (1-based)."""
        now = time.monotonic()
        self._training_s += now - self._step_ends[-1]
        self._steps += 1
        if self._steps > 1:  # the first step waits for the workers to start
            self._waits.append((metrics.data_wait_s, now - self._step_ends[-1]))
        self._step_ends.append(now)
        if self._curves is None:
            return
        self._warn_if_bound_by_data()
        recent_s = (now - self._step_ends[0]) / (len(self._step_ends) - 1)
        samples_per_s = self._length.global_batch / recent_s
        peak_mib = peak_memory_mib()
        self._bar.update()
        texts = {
            "loss": f"{metrics.loss:.4f}",
            **{name: f"{value:.4f}" for name, value in metrics.terms.items()},
            "scale": f"{metrics.logit_scale:.2f}",
            "lr": f"{metrics.learning_rate:.2e}",
            "grad": f"{metrics.gradient_norm:.2f}",
            **({} if metrics.equal_pairs is None else {"equal": f"{metrics.equal_pairs:.1%}"}),
            "wait": f"{metrics.data_wait_s:.2f}s",
            "samples/s": f"{samples_per_s:.0f}",
            "MiB": f"{peak_mib:.0f}",
        }
        self._bar.set_postfix(texts, refresh=False)
        is_overdue = self._last_logged_at is None or now - self._last_logged_at >= LONGEST_LOG_INTERVAL_S
        if step % self._log_every == 0 or step == self._length.total_steps or is_overdue:
            self._last_logged_at = now
            if not self._shows_bar:
                left_s = int((self._length.total_steps - step) * recent_s)
                text = " ".join(f"{key} {value}" for key, value in texts.items())
                left = f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}"
                logger.info("step %d/%d %s, %s left", step, self._length.total_steps, text, left)
            scalars = {**asdict(metrics), "samples_per_s": samples_per_s, "peak_mib": peak_mib}
            scalars |= {f"terms/{name}": value for name, value in scalars.pop("terms").items()}
            self._curves.write(step, {f"train/{name}": value for name, value in scalars.items() if value is not None})
        if (spike := self._loss_level.spike(step, metrics.loss)) is not None:
            self._curves.write(step, {"train/loss_spike": spike})
        if self._steps == 1:  # which may have compiled: later steps show neither its rate nor a time left from it
            self.restart_clock()

    def _warn_if_bound_by_data(self) -> None:
        waited_s, total_s = (sum(step[part] for step in self._waits) for part in (0, 1))
        if self._is_bound_by_data or len(self._waits) < WAITED_STEPS or waited_s <= WAITED_SHARE * total_s:
            return
        self._is_bound_by_data = True
        logger.warning(
            "bound by data: the last %d steps waited for samples for %.0f %% of their time; set more "
            "--workers (this host has %d cores for all its ranks) or --image-decoder gpu, or use smaller image files "
            "or a host with more cores. `megaclip inspect` measures the samples per second and core",
            len(self._waits),
            100 * waited_s / total_s,
            os.cpu_count(),
        )

    def record_evaluation(
        self,
        step: int,
        scores: dict[str, float],
        pictures: dict[str, np.ndarray],
        left_out: dict[str, int],
        *,
        of_average: bool,
    ) -> None:
        """Report an evaluation after `step` steps.

        pictures: (3, H, W) uint8. left_out: number of bad samples that the evaluation left out, by kind. of_average:
        the moving average of the weights was evaluated.
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
        more = sum(counts.values()) > sum(self.bad_samples.values())
        self.bad_samples = counts
        if self._curves is None:
            return
        if more:
            logger.warning("bad samples until step %d, bad substitutes included: %s", step, _listed(counts))
        self._curves.write(step, {"train/bad_samples": sum(counts.values())})
        self._curves.flush()  # a checkpoint was just written, and a run that resumes from it needs the curves up to it


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


class Curves:
    """Writer of the curves of a run, on the rank that reports: to TensorBoard, and to DeepSpeed's monitors.

    If one of them cannot start or write, for example because the disk is full, the error is logged once. The run then
    continues without it. A resumed run writes both again.
    """

    def __init__(self, folder: Path, start_step: int, monitors: DeepSpeedMonitorConfig) -> None:
        """folder: of its files. start_step: TensorBoard hides what an earlier process wrote after this step."""
        self._tensorboard, self._monitors = f"TensorBoard's files in {folder}", "the monitors of ds_config.json"
        self._outputs: dict[str, Any] = {}
        """Those that can be written, by their names in the log."""
        if monitors.enabled:
            with self._reported(self._monitors):
                self._outputs[self._monitors] = monitor = MonitorMaster(monitors)
                if (table := monitor.csv_monitor) is not None:  # a file of the run that is resumed has its header
                    table.filenames += [path.stem for path in Path(table.log_dir).glob("*.csv")]
        _hide_traceback_of_writer()
        with self._reported(self._tensorboard):
            self._outputs[self._tensorboard] = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars by name."""
        events = [(name, value, step) for name, value in scalars.items()]
        self._try(self._tensorboard, lambda writer: [writer.add_scalar(*event) for event in events])
        self._try(self._monitors, lambda monitor: monitor.write_events(events))

    def write_pictures(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Write pictures, (3, H, W) uint8, by name."""
        self._try(self._tensorboard, lambda writer: [writer.add_image(*each, step) for each in pictures.items()])

    def flush(self) -> None:
        """Write buffered values to the file."""
        self._try(self._tensorboard, lambda writer: writer.flush())

    def close(self) -> None:
        """Write buffered values and close the file."""
        self._try(self._tensorboard, lambda writer: writer.close())
        self._outputs.clear()

    def _try(self, output: str, action: Callable[[Any], Any]) -> None:
        if output in self._outputs:
            with self._reported(output):
                action(self._outputs[output])

    @contextmanager
    def _reported(self, output: str) -> Iterator[None]:
        """Log an error of an output, which is then no longer written."""
        try:
            yield
        except Exception as error:  # wandb and comet have classes of their own
            self._outputs.pop(output, None)
            logger.warning(
                "%s cannot be written (%s); the run continues without curves there; to get them after a resume, free "
                "space, fix permissions or log in first",
                output,
                first_line(error),
            )


def _hide_traceback_of_writer() -> None:
    """Keep TensorBoard's thread from printing the traceback of an error that `Curves` reports."""
    before = threading.excepthook

    def hook(arguments: Any) -> None:
        if type(arguments.thread).__name__ != "_AsyncWriterThread":
            before(arguments)

    if getattr(before, "__module__", None) != __name__:
        threading.excepthook = hook


class LossLevel:
    """The running level of the loss: median and spread of the last `_SPIKE_WINDOW` finite losses."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_SPIKE_WINDOW)
        self._in_spike = False

    def spike(self, step: int, loss: float) -> float | None:
        """Return the distance of the loss above its level in standard deviations if the loss is a spike, else None.

        A spike is a finite loss more than `_SPIKE` standard deviations above the level. Its first step is logged.
        """
        if not math.isfinite(loss):
            return None
        known = np.array(self._losses)
        self._losses.append(loss)
        if len(known) < _SPIKE_FEWEST:
            return None
        level = float(np.median(known))
        # 1.4826 times the median distance is the standard deviation of a normal distribution.
        spread = max(1.4826 * float(np.median(np.abs(known - level))), _SPIKE_SMALLEST_SPREAD * abs(level), 1e-6)
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
