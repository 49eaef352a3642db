"""Which steps a run shows."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megaclip.engine import metrics
from megaclip.engine.metrics import Metrics, StepMetrics


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (1, [4, 10, 20, 30, 33]),
        (25, [4, 7, 10, 13, 16, 19, 20, 23, 26, 29, 30, 33]),  # of three steps one is more than a minute after the last
        (197, list(range(4, 34))),
    ],
)
def test_the_first_step_every_tenth_and_at_least_one_a_minute_are_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step_s: float,
    expected: list[int],
) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines: list[int] = []
    monkeypatch.setattr(metrics.logger, "info", lambda text, step, *_: lines.append(step))
    shown = Metrics(tmp_path, first_rank=True, start_step=3, total_steps=33, global_batch=8, log_every=10, monitor=None)
    with shown:
        for step in range(4, 34):
            now[0] += step_s
            shown.step(step, StepMetrics(1.0, 2.0, 3.0, 4.0))
    assert lines == expected
