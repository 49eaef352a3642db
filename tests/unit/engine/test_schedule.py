"""The steps at which a run evaluates and saves, and its learning rates, which equal those of open_clip."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megaclip.config import TrainArguments, parse_arguments
from megaclip.engine.schedule import RunLength, chosen_schedule, default_warmup
from megaclip.errors import ConfigError
from tests.tolerances import SCALAR, assert_close

scheduler = pytest.importorskip("open_clip_train.scheduler", reason="open_clip's training package is the oracle")

RATE = 0.3
TOTAL = 23
WARMUPS = (0, 1, 7)
SAMPLES, BATCH = 10, 3
LENGTH = RunLength(SAMPLES, BATCH, total_steps=20)


def arguments(*flags: object) -> TrainArguments:
    return parse_arguments(["--deepspeed_config", "x", "--model", "x", "--train-data", "x", *map(str, flags)])


def theirs(function, *arguments, **keywords) -> list[float]:
    """Return the learning rates that open_clip's schedule sets before steps 0 to TOTAL-1."""
    optimizer = SimpleNamespace(param_groups=[{}])
    adjust = function(optimizer, RATE, *arguments, **keywords)
    rates = []
    for step in range(TOTAL):
        adjust(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def ours(scheduler: str, warmup: int, *flags: object, steps: Iterable[int] = range(TOTAL)) -> list[float]:
    given = arguments("--lr-scheduler", scheduler, "--warmup", warmup, *flags)
    schedule = chosen_schedule(given, RunLength(1, 1, TOTAL), RATE)
    return [RATE * schedule(step) for step in steps]


def cooldown_flags(steps: int, power: float, end: float) -> tuple[object, ...]:
    return "--cooldown-steps", steps, "--lr-cooldown-power", power, "--lr-cooldown-end", end


def test_the_rates_are_those_of_open_clip():
    for warmup in WARMUPS:
        assert_close(ours("const", warmup), theirs(scheduler.const_lr, warmup, TOTAL), SCALAR)
    for warmup in (*WARMUPS, TOTAL):
        assert_close(ours("cosine", warmup), theirs(scheduler.cosine_lr, warmup, TOTAL), SCALAR)
    for warmup, steps, power, end in itertools.product(WARMUPS, (1, 9), (1.0, 2.5), (0.0, 0.06)):
        expected = theirs(scheduler.const_lr_cooldown, warmup, TOTAL, steps, cooldown_power=power, cooldown_end_lr=end)
        assert_close(ours("const-cooldown", warmup, *cooldown_flags(steps, power, end)), expected, SCALAR)


def test_the_rate_stays_at_its_final_value_after_the_last_step():
    """A run that is resumed with more steps must not raise the rate again."""
    later = (TOTAL, TOTAL + 1, TOTAL + 15)
    assert ours("cosine", 2, steps=later) == [0.0, 0.0, 0.0]
    assert ours("const-cooldown", 2, *cooldown_flags(4, 1.0, 0.15), steps=later) == [0.15, 0.15, 0.15]


@pytest.mark.parametrize(
    ("total", "expected"), [(5, 0), (1280, 128), (99_999, 9_999), (100_000, 10_000), (10**6, 10_000)]
)
def test_the_default_warmup_is_at_most_a_tenth_of_the_run(total, expected):
    assert default_warmup(total) == expected


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
    schedule = chosen_schedule(arguments("--warmup", "4", "--lr-min", "0.005"), LENGTH, 0.02)
    rates = [0.02 * schedule(step) for step in range(21)]
    falling = [0.5 * (1 + math.cos(math.pi * (step - 4) / 16)) * (0.02 - 0.005) + 0.005 for step in range(4, 21)]
    assert rates == pytest.approx([0.005, 0.01, 0.015, 0.02, *falling])
    assert rates[-1] == pytest.approx(0.005)
    with pytest.raises(ConfigError, match=r"--lr-min 0\.03 is above the peak .*optimizer\.params\.lr, 0\.02; set"):
        chosen_schedule(arguments("--lr-min", "0.03"), LENGTH, 0.02)
    cooldown = ["--lr-scheduler", "const-cooldown", "--cooldown-steps", "5", "--lr-cooldown-end", "0.03"]
    with pytest.raises(ConfigError, match=r"--lr-cooldown-end 0\.03 is above the peak learning rate .*, 0\.02; set"):
        chosen_schedule(arguments(*cooldown), LENGTH, 0.02)


def test_a_cooldown_in_epochs_has_their_number_of_steps() -> None:
    flags = ["--lr-scheduler", "const-cooldown", "--warmup", "4", "--epochs-cooldown", "2"]
    schedule = chosen_schedule(arguments(*flags), LENGTH, RATE)
    assert schedule(14) == 1 > schedule(15)  # 2 epochs are 6 whole steps, the last of 20
    with pytest.raises(ConfigError, match="cooldown of 6 steps are together longer than the run of 9 steps"):
        chosen_schedule(arguments(*flags), replace(LENGTH, total_steps=9), RATE)
