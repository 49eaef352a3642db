"""The steps for which a run writes a log line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megaclip.engine import metrics
from megaclip.engine.metrics import Metrics, StepMetrics


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step_s: float,
    expected: list[int],
) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines: list[int] = []
    monkeypatch.setattr(metrics.logger, "info", lambda text, step, *_: lines.append(step))
    run = Metrics(tmp_path, first_rank=True, start_step=3, total_steps=33, global_batch=8, log_every=10, monitor=None)
    with run:
        for step in range(4, 34):
            now[0] += step_s
            run.record_step(step, StepMetrics(1.0, 2.0, 3.0, 4.0))
    assert lines == expected
