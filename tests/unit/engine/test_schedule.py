"""The learning-rate schedules equal those of open_clip at every step."""

import itertools
from types import SimpleNamespace

import pytest

from megaclip.engine.schedule import constant, constant_with_cooldown, cosine, default_warmup
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


def ours(schedule) -> list[float]:
    return [RATE * schedule(step) for step in range(TOTAL)]


@pytest.mark.parametrize("warmup", WARMUPS)
def test_constant(warmup):
    assert_close(ours(constant(warmup)), theirs(scheduler.const_lr, warmup, TOTAL), SCALAR)


@pytest.mark.parametrize("warmup", [*WARMUPS, TOTAL])
def test_cosine(warmup):
    assert_close(ours(cosine(warmup, TOTAL)), theirs(scheduler.cosine_lr, warmup, TOTAL), SCALAR)


@pytest.mark.parametrize(
    ("warmup", "cooldown", "power", "end"), [*itertools.product(WARMUPS, (1, 9), (1.0, 2.5), (0.0, 0.06))]
)
def test_constant_with_cooldown(warmup, cooldown, power, end):
    expected = theirs(scheduler.const_lr_cooldown, warmup, TOTAL, cooldown, cooldown_power=power, cooldown_end_lr=end)
    assert_close(ours(constant_with_cooldown(warmup, TOTAL, cooldown, power, end / RATE)), expected, SCALAR)


def test_the_rate_stays_at_its_final_value_after_the_last_step():
    """A run that is resumed with more steps must not raise the rate again."""
    assert [cosine(2, 10)(step) for step in (10, 11, 25)] == [0.0, 0.0, 0.0]
    assert [constant_with_cooldown(2, 10, 4, 1.0, 0.5)(step) for step in (10, 11, 25)] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("total", "expected"), [(5, 0), (1280, 128), (99_999, 9_999), (100_000, 10_000), (10**6, 10_000)]
)
def test_the_default_warmup_is_at_most_a_tenth_of_the_run(total, expected):
    assert default_warmup(total) == expected
