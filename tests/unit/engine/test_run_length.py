"""The steps at which a run evaluates and saves, and its learning rate, from the command line."""

import math
from dataclasses import replace

import pytest

from megaclip.config import TrainArguments, parse_arguments
from megaclip.engine.schedule import RunLength, chosen_schedule
from megaclip.errors import ConfigError

SAMPLES, BATCH, PEAK = 10, 3, 0.02


LENGTH = RunLength(SAMPLES, BATCH, total_steps=20)


def arguments(*flags: str) -> TrainArguments:
    required = ["--deepspeed_config", "x", "--model", "x", "--train-data", "x"]
    return parse_arguments([*required, *flags])


@pytest.mark.parametrize(
    ("every_steps", "every_epochs", "expected"),
    [
        (None, 1, [4, 7, 10, 14, 17, 20]),  # the steps in which the 10th, 20th, ... sample is consumed
        (None, 2, [7, 14, 20]),
        (None, 0, []),
        (6, 1, [6, 12, 18]),
    ],
)
def test_steps_of_actions_that_repeat_after_steps_or_epochs(
    every_steps: int | None, every_epochs: int, expected: list[int]
) -> None:
    assert [step for step in range(1, 21) if LENGTH.is_due(step, every_steps, every_epochs)] == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), 106), (("--epochs", "1"), 3), (("--train-steps", "7"), 7)],  # 32 epochs of 10 in batches of 3
)
def test_a_run_is_as_long_as_its_steps_or_its_whole_epochs(flags: tuple[str, ...], expected: int) -> None:
    assert RunLength.of(arguments(*flags), SAMPLES, BATCH).total_steps == expected
    assert RunLength.of(arguments("--epochs", "1"), samples=2, global_batch=3).total_steps == 1
    assert LENGTH.epoch_at(5) == 1.5


def test_the_cosine_ends_at_the_configured_rate() -> None:
    """In FastCLIP's published code the cosine falls from the peak rate to --lr_min."""
    schedule = chosen_schedule(arguments("--warmup", "4", "--lr-min", "0.005"), LENGTH, PEAK)
    rates = [PEAK * schedule(step) for step in range(21)]
    falling = [0.5 * (1 + math.cos(math.pi * (step - 4) / 16)) * (PEAK - 0.005) + 0.005 for step in range(4, 21)]
    assert rates == pytest.approx([0.005, 0.01, 0.015, 0.02, *falling])
    assert rates[-1] == pytest.approx(0.005)
    with pytest.raises(ConfigError, match=r"--lr-min 0\.03 is above the peak .*optimizer\.params\.lr, 0\.02; set"):
        chosen_schedule(arguments("--lr-min", "0.03"), LENGTH, PEAK)


def test_the_cooldown_ends_at_the_configured_rate() -> None:
    flags = ["--lr-scheduler", "const-cooldown", "--warmup", "4", "--cooldown-steps", "5", "--lr-cooldown-end", "0.002"]
    schedule = chosen_schedule(arguments(*flags), LENGTH, PEAK)
    rates = [PEAK * schedule(step) for step in (0, 4, 14, 15, 16, 20)]
    assert rates == pytest.approx([0.005, 0.02, 0.02, 0.02, 0.002 + 0.018 * 0.8, 0.002])


def test_a_cooldown_that_ends_above_the_peak_is_refused() -> None:
    flags = ["--lr-scheduler", "const-cooldown", "--cooldown-steps", "5", "--lr-cooldown-end", "0.03"]
    with pytest.raises(ConfigError, match=r"--lr-cooldown-end 0\.03 is above the peak learning rate .*, 0\.02; set"):
        chosen_schedule(arguments(*flags), LENGTH, PEAK)


def test_a_cooldown_in_epochs_has_their_number_of_steps() -> None:
    flags = ["--lr-scheduler", "const-cooldown", "--warmup", "4", "--epochs-cooldown", "2"]
    schedule = chosen_schedule(arguments(*flags), LENGTH, PEAK)
    assert schedule(14) == 1 > schedule(15)  # 2 epochs are 6 whole steps, the last of 20
    with pytest.raises(ConfigError, match="cooldown of 6 steps are together longer than the run of 9 steps"):
        chosen_schedule(arguments(*flags), replace(LENGTH, total_steps=9), PEAK)
