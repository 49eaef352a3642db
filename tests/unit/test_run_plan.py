"""When a run evaluates and saves, and how its learning rate falls, from the command line's numbers."""

from types import SimpleNamespace
from typing import Any

import pytest

from megaclip.arguments import parse_arguments
from megaclip.engine.run import Run
from megaclip.errors import ConfigError

SAMPLES, BATCH, PEAK = 10, 3, 0.02


def run_of(*flags: str, total_steps: int = 20) -> Any:
    """A run that knows its numbers and nothing else."""
    run: Any = Run.__new__(Run)
    required = ["--deepspeed_config", "x", "--model", "x", "--train-data", "x"]
    run.arguments = parse_arguments([*required, *flags])
    run.inputs = SimpleNamespace(train=range(SAMPLES), config=SimpleNamespace(learning_rate=PEAK))
    run.batch_plan = SimpleNamespace(global_batch=BATCH)
    run.total_steps = total_steps
    return run


@pytest.mark.parametrize(
    ("every_steps", "every_epochs", "expected"),
    [
        (None, 1, [4, 7, 10, 14, 17, 20]),  # the steps in which the 10th, 20th, ... sample is consumed
        (None, 2, [7, 14, 20]),
        (None, 0, []),
        (6, 1, [6, 12, 18]),
    ],
)
def test_what_is_due_every_so_many_steps_or_epochs(
    every_steps: int | None, every_epochs: int, expected: list[int]
) -> None:
    run, due = run_of(), []
    for run.step in range(1, 21):
        if run._is_due(every_steps, every_epochs):
            due.append(run.step)
    assert due == expected


def test_the_cooldown_ends_at_the_rate_that_was_asked_for() -> None:
    flags = ["--lr-scheduler", "const-cooldown", "--warmup", "4", "--cooldown-steps", "5", "--lr-cooldown-end", "0.002"]
    schedule = run_of(*flags)._make_schedule()
    rates = [PEAK * schedule(step) for step in (0, 4, 14, 15, 16, 20)]
    assert rates == pytest.approx([0.005, 0.02, 0.02, 0.02, 0.002 + 0.018 * 0.8, 0.002])


def test_a_cooldown_in_epochs_lasts_as_many_steps_as_they_have() -> None:
    flags = ["--lr-scheduler", "const-cooldown", "--warmup", "4", "--epochs-cooldown", "2"]
    schedule = run_of(*flags)._make_schedule()
    assert schedule(14) == 1 > schedule(15)  # 2 epochs are 6 whole steps, the last of 20
    with pytest.raises(ConfigError, match="cooldown of 6 are longer together than the run's 9"):
        run_of(*flags, total_steps=9)._make_schedule()
