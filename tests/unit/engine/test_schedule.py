"""The learning-rate schedules equal those of open_clip at every step."""

import itertools
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from megaclip.config import parse_arguments
from megaclip.engine.schedule import RunLength, chosen_schedule, default_warmup
from tests.tolerances import SCALAR, assert_close

scheduler = pytest.importorskip("open_clip_train.scheduler", reason="open_clip's training package is the oracle")

RATE = 0.3
TOTAL = 23
WARMUPS = (0, 1, 7)


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
    words = ["--deepspeed_config", "x", "--model", "x", "--train-data", "x", "--lr-scheduler"]
    arguments = parse_arguments([*words, scheduler, "--warmup", str(warmup), *map(str, flags)])
    schedule = chosen_schedule(arguments, RunLength(1, 1, TOTAL), RATE)
    return [RATE * schedule(step) for step in steps]


def cooldown_flags(steps: int, power: float, end: float) -> tuple[object, ...]:
    return "--cooldown-steps", steps, "--lr-cooldown-power", power, "--lr-cooldown-end", end


@pytest.mark.parametrize("warmup", WARMUPS)
def test_constant(warmup):
    assert_close(ours("const", warmup), theirs(scheduler.const_lr, warmup, TOTAL), SCALAR)


@pytest.mark.parametrize("warmup", [*WARMUPS, TOTAL])
def test_cosine(warmup):
    assert_close(ours("cosine", warmup), theirs(scheduler.cosine_lr, warmup, TOTAL), SCALAR)


@pytest.mark.parametrize(
    ("warmup", "cooldown", "power", "end"), [*itertools.product(WARMUPS, (1, 9), (1.0, 2.5), (0.0, 0.06))]
)
def test_constant_with_cooldown(warmup, cooldown, power, end):
    expected = theirs(scheduler.const_lr_cooldown, warmup, TOTAL, cooldown, cooldown_power=power, cooldown_end_lr=end)
    assert_close(ours("const-cooldown", warmup, *cooldown_flags(cooldown, power, end)), expected, SCALAR)


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
