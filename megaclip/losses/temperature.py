"""Temperatures with optimizers of their own: one for the whole dataset, or two per sample.

They are updated outside the model's optimizer, because the papers give them their own learning rate, schedule and
bounds, and because per-sample ones live in sharded state that no optimizer sees. Both use Adam (Kingma and Ba, 2015,
algorithm 1) in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SCHEDULES = ("constant", "cosine", "threshold")
GRADIENT_LIMIT = 5.0
"""Per-sample temperature gradients are clipped to this, as in FastCLIP's released code."""


def scheduled_rate(base: float, schedule: str, temperature: GlobalTemperature, progress: float) -> float:
    """The temperature's learning rate.

    schedule: "constant"; "cosine", half a cosine to 0 over the training; "threshold", a third once the temperature is
    at or below 0.03 (FastCLIP, section 5.1). progress: fraction of the training done, 0 to 1.
    """
    if schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if schedule == "threshold" and temperature.value <= 0.03:  # reading it waits for the GPU
        return base / 3
    return base


class GlobalTemperature(nn.Module):
    """One temperature for all samples, held as `log_scale = log(1/tau)`, (1,), like a CLIP model's logit_scale.

    FastCLIP's learning rates are meant for this logarithm: its code trains logit_scale. It stays in float32 whatever
    the model's precision, so its clamp acts on the master.
    """

    log_scale: Tensor
    first_moment: Tensor
    second_moment: Tensor
    steps: Tensor

    def __init__(self, temperature: float, bounds: tuple[float, float], *, learnable: bool) -> None:
        super().__init__()
        log_scale = torch.tensor([-math.log(temperature)])
        if learnable:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        self.learnable = learnable
        self._bounds = (-math.log(bounds[1]), -math.log(bounds[0]))
        self.register_buffer("first_moment", torch.zeros(1))
        self.register_buffer("second_moment", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1))

    @property
    def value(self) -> float:
        return math.exp(-float(self.log_scale.detach()))

    @torch.no_grad()
    def step(self, learning_rate: float, betas: tuple[float, float], eps: float) -> None:
        """One Adam step with the gradient in `log_scale.grad`, then the clamp; clears the gradient."""
        gradient = self.log_scale.grad
        assert gradient is not None, "step() before backward()"
        self.steps += 1
        change, first, second = adam(gradient, self.first_moment, self.second_moment, self.steps, betas, eps)
        self.first_moment.copy_(first)
        self.second_moment.copy_(second)
        self.log_scale.sub_(learning_rate * change).clamp_(*self._bounds)
        self.log_scale.grad = None


def adam(
    gradient: Tensor, first: Tensor, second: Tensor, steps: Tensor, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(change for a learning rate of 1, new first moment, new second moment); `steps` counts this one too."""
    first = betas[0] * first + (1 - betas[0]) * gradient
    second = betas[1] * second + (1 - betas[1]) * gradient**2
    change = (first / (1 - betas[0] ** steps)) / ((second / (1 - betas[1] ** steps)).sqrt() + eps)
    return change, first, second


# Per-sample state: what a fetch brings, then what only the owner needs. u is kept as log u; NaN: not seen yet.
U_COLUMNS = {"log_u_image": math.nan, "log_u_text": math.nan}


def individual_columns(temperature: float) -> dict[str, float]:
    """Columns of per-sample temperatures, behind `U_COLUMNS`: two temperatures (fetched), then their Adam's state."""
    moments = ("first_image", "first_text", "second_image", "second_text", "steps")
    return {"tau_image": temperature, "tau_text": temperature, **dict.fromkeys(moments, 0.0)}


def step_individual(
    held: Tensor,
    gradients: Tensor,
    *,
    learning_rate: float,
    bounds: tuple[float, float],
    betas: tuple[float, float],
    eps: float,
    released_epoch: int | None = None,
) -> Tensor:
    """New temperature columns (k, 7) after one Adam step with gradients (k, 2), each sample with its own step count.

    released_epoch: the epoch, where betas and bias correction are to be those of FastCLIP's released code, which counts
        epochs for steps and takes no momentum in the first.
    """
    tau, first, second, steps = held[:, :2], held[:, 2:4], held[:, 4:6], held[:, 6:] + 1
    counted = steps
    if released_epoch is not None:
        counted = torch.full_like(steps, released_epoch + 1)
        betas = betas if released_epoch > 0 else (0.0, 0.0)
    limited = gradients.clamp(-GRADIENT_LIMIT, GRADIENT_LIMIT)
    change, first, second = adam(limited, first, second, counted, betas, eps)
    tau = (tau - learning_rate * change).clamp(*bounds)
    return torch.cat([tau, first, second, steps], dim=1)
