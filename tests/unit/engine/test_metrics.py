"""The reports of a run: which steps are logged, curves when the disk is full, loss spikes and skipped steps."""

import itertools
import math
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deepspeed import comm as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megaclip.engine import metrics
from megaclip.engine.metrics import Curves, LossLevel, Metrics, StepMetrics
from megaclip.engine.schedule import RunLength
from megaclip.engine.trainer import SkippedSteps
from megaclip.errors import NonFiniteError
from megaclip.zero.settings import DeepSpeedMonitorConfig

NO_MONITORS = DeepSpeedMonitorConfig()


def metrics_of(folder: Path, *, start_step: int = 0, total_steps: int = 40) -> Metrics:
    """Return the metrics of a run of 40 steps."""
    length = RunLength(samples=8, global_batch=8, total_steps=total_steps)
    return Metrics(folder, length, start_step=start_step, log_every=10, monitors=NO_MONITORS)


class FullMonitor:
    """Monitor that fails as on a full disk."""

    calls, csv_monitor = 0, None

    def write_events(self, events: list[Any]) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("wait_s", "expected"), [(0.05, 0), (0.5, 1)])
def test_a_run_that_waits_for_samples_says_so_once(tmp_path, warnings, monkeypatch, wait_s, expected) -> None:
    """Steps take one second. The first one waits for the workers to start."""
    clock = itertools.count()
    monkeypatch.setattr(metrics.time, "monotonic", lambda: float(next(clock)))
    with metrics_of(tmp_path) as report:
        for step in range(1, 40):
            report.record_step(step, StepMetrics(1.0, 1.0, 1.0, 1.0, data_wait_s=1.0 if step == 1 else wait_s))
            assert len(warnings.messages) == (expected if step > 10 else 0)
    assert all("50 % of their time; set more --workers" in line for line in warnings.messages)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("train/data_wait_s")[-1].value == pytest.approx(wait_s)


def test_a_run_continues_without_curves_when_the_disk_is_full(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch, capfd
) -> None:
    """No file of this process may grow beyond 2,000 bytes, as on a full disk."""
    monitor = FullMonitor()
    monkeypatch.setattr(metrics, "MonitorMaster", lambda _: monitor)
    curves = Curves(tmp_path, 0, DeepSpeedMonitorConfig(wandb={"enabled": True}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    curves.write(1, {"loss": 1.0})
    curves.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        for step in range(2, 200):
            curves.write(step, {"loss": float(step)})
            curves.write_pictures(step, {"picture": np.zeros((3, 8, 8), np.uint8)})
            curves.flush()
        curves.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    of_monitor, of_tensorboard = warnings.messages
    assert "No space left on device" in of_monitor and monitor.calls == 1
    assert str(tmp_path) in of_tensorboard and "continues without curves" in of_tensorboard
    assert "Traceback" not in capfd.readouterr().err
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("loss")[0].value == 1.0


def test_the_csv_files_of_a_resumed_run_have_one_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monitors = DeepSpeedMonitorConfig(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "csv"})
    for start in (0, 2):
        curves = Curves(tmp_path / "tensorboard", start, monitors)
        for step in (start + 1, start + 2):
            curves.write(step, {"train/loss": float(step), "new": 0.0} if start else {"train/loss": float(step)})
        curves.close()
    assert (tmp_path / "csv" / "train_loss.csv").read_text().split() == [
        "step,loss",
        "1,1.0",
        "2,2.0",
        "3,3.0",
        "4,4.0",
    ]
    assert (tmp_path / "csv" / "new.csv").read_text().split() == ["step,new", "3,0.0", "4,0.0"]


def test_outputs_that_do_not_start_leave_the_run_without_curves(tmp_path: Path, warnings, monkeypatch) -> None:
    """A folder below a file, and wandb without a key."""

    def not_logged_in(_config: DeepSpeedMonitorConfig) -> None:
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(metrics, "MonitorMaster", not_logged_in)
    curves = Curves(tmp_path / "file" / "tensorboard", 0, DeepSpeedMonitorConfig(wandb={"enabled": True}))
    curves.write(1, {"loss": 1.0})
    curves.close()
    assert ["continues without curves" in line for line in warnings.messages] == [True, True]
    assert "(No API key configured. " in warnings.messages[0]


def test_a_loss_far_above_its_level_is_logged_once(warnings: pytest.LogCaptureFixture) -> None:
    level, generator = LossLevel(), np.random.default_rng(0)
    losses = 3.0 * np.exp(-np.arange(300) / 200) + 0.05 * generator.standard_normal(300)
    losses[5] = 90.0  # too early: the level is not known yet
    losses[[150, 151, 152]] = 9.0
    losses[200] = math.nan
    losses[250] = 0.0  # far below the level: not a spike
    spikes = {step: spike for step, loss in enumerate(losses) if (spike := level.spike(step, loss)) is not None}
    assert list(spikes) == [150, 151, 152]
    assert all(spike > 10 for spike in spikes.values())
    assert len(warnings.messages) == 1 and "loss spike: 9 at step 150" in warnings.messages[0]


def test_a_new_level_is_not_reported_as_a_spike_for_ever() -> None:
    level = LossLevel()
    losses = [1.0, 1.01] * 50 + [5.0, 5.01] * 50
    spikes = [step for step, loss in enumerate(losses) if level.spike(step, loss) is not None]
    assert spikes[0] == 100 and 20 < len(spikes) < 60


def test_skipped_steps_are_counted_and_limited(warnings: pytest.LogCaptureFixture) -> None:
    skipped = SkippedSteps(limit=2)
    error = NonFiniteError("step 7: the loss is nan")
    for _ in range(2):
        skipped.skip(error)
    skipped.updated()
    for _ in range(2):
        skipped.skip(error)
    with pytest.raises(NonFiniteError, match="after 2 skipped steps in a row, the limit of --on-nonfinite"):
        skipped.skip(error)
    assert skipped.total == 4
    assert warnings.messages[-1] == "step 7: the loss is nan; skipped, 2 in a row, 4 in all"


def test_the_first_non_finite_step_ends_a_run_with_advice_that_does_not_repeat_it() -> None:
    with pytest.raises(NonFiniteError) as ended:
        SkippedSteps(limit=0).skip(NonFiniteError("step 7: the loss is nan"))
    for words in ("repeats this", "lower optimizer.params.lr", "an earlier checkpoint", "--on-nonfinite skip"):
        assert words in str(ended.value)
    assert "last checkpoint" not in str(ended.value)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (1, [4, 10, 20, 30, 33]),
        # the third step after a logged one ends 75 s later
        (25, [4, 7, 10, 13, 16, 19, 20, 23, 26, 29, 30, 33]),
        (197, list(range(4, 34))),
    ],
)
def test_the_first_step_every_tenth_step_and_at_least_one_step_per_minute_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, expected: list[int]
) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines: list[int] = []
    monkeypatch.setattr(metrics.logger, "info", lambda text, step, *_: lines.append(step))
    with metrics_of(tmp_path, start_step=3, total_steps=33) as run:
        for step in range(4, 34):
            now[0] += step_s
            run.record_step(step, StepMetrics(1.0, 2.0, 3.0, 4.0))
    assert lines == expected


def test_the_rate_of_later_steps_leaves_out_the_first_step_which_compiles(tmp_path: Path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda text, *values: lines.append(text % values))
    with metrics_of(tmp_path) as run:
        for step in range(1, 11):
            now[0] += 60.0 if step == 1 else 2.0
            run.record_step(step, StepMetrics(1.0, 2.0, 3.0, 4.0))
    assert ["samples/s 4 MiB" in line and line.endswith("0:01:00 left") for line in lines] == [False, True]
