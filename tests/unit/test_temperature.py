"""Compare the updates of the temperatures with formulas: rates, bounds, limits, and the Adam of the released code."""

import math

import pytest
import torch

from megaclip.losses.temperature import GRADIENT_LIMIT, GlobalTemperature, scheduled_rate, step_individual

BETAS, EPS, BOUNDS = (0.8, 0.95), 1e-3, (0.05, 0.8)


@pytest.mark.parametrize(
    ("schedule", "temperature", "progress", "expected"),
    [
        ("constant", 0.02, 0.9, 6.0),
        ("cosine", 0.02, 0.0, 6.0),
        ("cosine", 0.02, 1 / 3, 4.5),
        ("cosine", 0.02, 1.1, 0.0),
        ("threshold", 0.031, 0.9, 6.0),
        ("threshold", 0.029, 0.0, 2.0),
    ],
)
def test_the_rate_follows_its_schedule(schedule: str, temperature: float, progress: float, expected: float) -> None:
    own = GlobalTemperature(temperature, (0.01, 1.0), learnable=True)
    assert scheduled_rate(6.0, schedule, own, progress) == pytest.approx(expected)


@pytest.mark.parametrize(("gradient", "expected"), [(1.0, BOUNDS[1]), (-1.0, BOUNDS[0])])
def test_the_global_temperature_stays_inside_its_bounds(gradient: float, expected: float) -> None:
    own = GlobalTemperature(0.3, BOUNDS, learnable=True)  # trained as log(1/tau), so a positive gradient raises tau
    own.log_scale.grad = torch.tensor([gradient])
    own.step(100.0, BETAS, EPS)
    assert own.value == pytest.approx(expected)


def held(*temperatures: float) -> torch.Tensor:
    """Return the state of new samples: tau of both sides, moments, number of steps."""
    return torch.tensor([[tau, tau, 0, 0, 0, 0, 0] for tau in temperatures], dtype=torch.float64)


def test_per_sample_temperatures_stay_inside_their_bounds() -> None:
    gradients = torch.tensor([[3.0, -3.0]], dtype=torch.float64)
    new = step_individual(held(0.3), gradients, learning_rate=1.0, bounds=BOUNDS, betas=BETAS, eps=EPS)
    assert new[0, :2].tolist() == [*BOUNDS]


def test_a_per_sample_gradient_is_clipped_to_the_limit() -> None:
    gradients = torch.tensor([[100.0, -100.0], [GRADIENT_LIMIT, -GRADIENT_LIMIT]], dtype=torch.float64)
    new = step_individual(held(0.3, 0.3), gradients, learning_rate=0.01, bounds=BOUNDS, betas=BETAS, eps=EPS)
    assert torch.equal(new[0], new[1])
    assert new[0, 2:4].tolist() == pytest.approx([(1 - BETAS[0]) * 5, -(1 - BETAS[0]) * 5])


def test_the_released_adam_counts_epochs_and_uses_no_momentum_in_the_first() -> None:
    """Three steps, in epochs 0, 0 and 4."""
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
            state, gradients, learning_rate=rate, bounds=BOUNDS, betas=BETAS, eps=EPS, released_epoch=epoch
        )
        assert state[0, :6].tolist() == pytest.approx([tau, tau, first, first, second, second], rel=1e-12)
