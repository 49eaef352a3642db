"""Updates of the temperatures compared with formulas: rates, bounds, limits, and the Adam of the published code."""

import math
from typing import Any

import pytest
import torch

from megaclip.losses.settings import FastClipSettings
from megaclip.losses.temperature import GlobalTemperature, scheduled_rate, step_individual

BETAS, EPS, BOUNDS = (0.8, 0.95), 1e-3, (0.05, 0.8)


def settings_of(**others: Any) -> FastClipSettings:
    low, high = BOUNDS
    adam = {"temperature_betas": BETAS, "temperature_eps": EPS, "temperature_min": low, "temperature_max": high}
    return FastClipSettings.model_validate(adam | {"temperature": 0.3} | others)


@pytest.mark.parametrize(
    ("schedule", "temperature", "steps_done", "expected"),
    [
        ("constant", 0.02, 27, 6.0),
        ("cosine", 0.02, 0, 6.0),
        ("cosine", 0.02, 10, 4.5),
        ("cosine", 0.02, 30, 0.0),
        ("threshold", 0.031, 27, 6.0),
        ("threshold", 0.029, 0, 2.0),
    ],
)
def test_the_rate_follows_its_schedule(schedule: str, temperature: float, steps_done: int, expected: float) -> None:
    settings = settings_of(
        temperature=temperature, temperature_min=0.01, temperature_schedule=schedule, temperature_learning_rate=6.0
    )
    own = GlobalTemperature(settings, learnable=True)
    assert scheduled_rate(settings, own, steps_done, 30) == pytest.approx(expected)


def test_the_cosine_has_the_published_warmup() -> None:
    """FastCLIP v0 on CC3M: 37 epochs of 2,660 steps, 10,000 of them warm-up, peak rate 1e-3."""
    total, warmup = 37 * 2660, 10_000
    settings = settings_of(temperature_schedule="cosine", temperature_learning_rate=1e-3, temperature_warmup=warmup)
    own = GlobalTemperature(settings, learnable=True)
    rates = {step: scheduled_rate(settings, own, step, total) for step in (0, 4_999, 9_999, 10_000, 54_210, total - 1)}
    assert rates[0] == pytest.approx(1e-7) and rates[4_999] == pytest.approx(5e-4)
    assert rates[9_999] == rates[10_000] == pytest.approx(1e-3)
    for step in (10_000, 54_210, total - 1):
        assert rates[step] == pytest.approx(5e-4 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))))


@pytest.mark.parametrize(("steps_done", "total_steps"), [(None, 30), (3, None), (-1, 30), (31, 30), (math.nan, 30)])
def test_the_cosine_refuses_missing_and_wrong_numbers_of_steps(steps_done: int, total_steps: int) -> None:
    settings = settings_of(temperature_schedule="cosine")
    own = GlobalTemperature(settings, learnable=True)
    with pytest.raises(ValueError, match=r"'cosine' requires both, with 0 <= steps_done <= total_steps"):
        scheduled_rate(settings, own, steps_done, total_steps)


@pytest.mark.parametrize(("gradient", "expected"), [(1.0, BOUNDS[1]), (-1.0, BOUNDS[0])])
def test_the_global_temperature_stays_inside_its_bounds(gradient: float, expected: float) -> None:
    own = GlobalTemperature(settings_of(), learnable=True)  # trained as log(1/tau), so a positive gradient raises tau
    own.log_scale.grad = torch.tensor([gradient])
    own.step(100.0)
    assert own.value == pytest.approx(expected)


def held(*temperatures: float) -> torch.Tensor:
    """Return the state of new samples: tau of both sides, moments, and number of steps."""
    return torch.tensor([[tau, tau, 0, 0, 0, 0, 0] for tau in temperatures], dtype=torch.float64)


def test_per_sample_temperatures_stay_inside_their_bounds() -> None:
    gradients = torch.tensor([[3.0, -3.0]], dtype=torch.float64)
    new = step_individual(held(0.3), gradients, settings_of(), learning_rate=1.0, epoch=0.0)
    assert new[0, :2].tolist() == [*BOUNDS]


def test_a_per_sample_gradient_is_reduced_to_the_limit() -> None:
    gradients = torch.tensor([[100.0, -100.0], [5.0, -5.0]], dtype=torch.float64)
    settings = settings_of(temperature_gradient_limit=5.0)
    new = step_individual(held(0.3, 0.3), gradients, settings, learning_rate=0.01, epoch=0.0)
    assert torch.equal(new[0], new[1])
    assert new[0, 2:4].tolist() == pytest.approx([(1 - BETAS[0]) * 5, -(1 - BETAS[0]) * 5])
    unlimited = step_individual(held(0.3), gradients[:1], settings_of(), learning_rate=0.01, epoch=0.0)
    assert unlimited[0, 2:4].tolist() == pytest.approx([(1 - BETAS[0]) * 100, -(1 - BETAS[0]) * 100])


def test_the_published_adam_counts_epochs_and_uses_no_momentum_in_the_first() -> None:
    """Take three steps, in epochs 0, 0 and 4."""
    state, tau, rate = held(0.3), 0.3, 0.01
    for gradient, epoch in ((2.0, 0), (-0.5, 0), (1.5, 4)):
        if epoch == 0:
            first, second = gradient, gradient**2
            change = gradient / (abs(gradient) + EPS)
        else:
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
            corrected = first / (1 - BETAS[0] ** (epoch + 1)), second / (1 - BETAS[1] ** (epoch + 1))
            change = corrected[0] / (math.sqrt(corrected[1]) + EPS)
        tau -= rate * change
        gradients = torch.full((1, 2), gradient, dtype=torch.float64)
        state = step_individual(
            state, gradients, settings_of(compat="reference"), learning_rate=rate, epoch=epoch + 0.5
        )
        assert state[0, :6].tolist() == pytest.approx([tau, tau, first, first, second, second], rel=1e-12)


@pytest.mark.parametrize("learnable", [True, False])
def test_the_temperature_keeps_float32_in_a_module_of_16_bits(learnable: bool) -> None:
    """In bfloat16 a step of 2e-4 would be rounded away."""
    own = GlobalTemperature(settings_of(temperature=0.07), learnable=learnable)
    before = own.value
    module = torch.nn.ModuleList([own, torch.nn.Linear(2, 2)])
    for convert in (module.bfloat16, module.half, lambda: module.to("cpu", torch.bfloat16)):
        convert()
        assert own.log_scale.dtype == own.first_moment.dtype == torch.float32 and own.value == before
    assert module[1].weight.dtype == torch.bfloat16
    if learnable:
        own.log_scale.grad = torch.ones(1)
        own.step(2e-4)
        assert own.value / before == pytest.approx(math.exp(2e-4 / (1 + EPS)), rel=1e-6)
    assert module.double() is module and own.log_scale.dtype == torch.float64


@pytest.mark.parametrize("learnable", [True, False])
def test_the_temperature_is_float32_at_any_default_dtype(learnable: bool) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        own = GlobalTemperature(settings_of(temperature=0.07), learnable=learnable)
    finally:
        torch.set_default_dtype(default)
    assert {tensor.dtype for tensor in own.state_dict().values()} == {torch.float32}
    assert own.value == pytest.approx(0.07, rel=1e-6)
