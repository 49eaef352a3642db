"""Temperatures with separate optimizers: one temperature for the whole dataset, or two per sample.

The model's optimizer does not update them, because the papers give them a separate learning rate, schedule and bounds.
Per-sample temperatures are kept in `SampleState`, sharded over ranks. They are not model parameters. Both kinds use
Adam (Kingma and Ba, 2015, algorithm 1) in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

PUBLISHED_GRADIENT_LIMIT = 5.0
"""Largest absolute gradient of a per-sample temperature in FastCLIP's published code."""


def scheduled_rate(
    base: float,
    schedule: str,
    temperature: GlobalTemperature,
    *,
    warmup: int = 0,
    steps_done: int | None,
    total_steps: int | None,
) -> float:
    """Return the learning rate of the temperature.

    base: learning rate of the "constant" schedule.
    schedule: "constant"; "cosine", which rises to base over `warmup` steps and falls to 0 at `total_steps` along half a
        cosine, as in FastCLIP's published code; "threshold", a third of base while the temperature is at or below 0.03
        (FastCLIP, section 5.1).
    steps_done, total_steps: numbers of steps, which "cosine" requires. Raises ValueError if they are missing or wrong.
    """
    if schedule == "cosine":
        if steps_done is None or total_steps is None or not 0 <= steps_done <= total_steps:
            raise ValueError(
                f"steps_done is {steps_done} and total_steps is {total_steps}; temperature_schedule 'cosine' requires "
                "both, with 0 <= steps_done <= total_steps: call step(steps_done, total_steps)"
            )
        if steps_done < warmup:
            return base * (steps_done + 1) / warmup
        return base * 0.5 * (1 + math.cos(math.pi * (steps_done - warmup) / max(1, total_steps - warmup)))
    if schedule == "threshold" and temperature.value <= 0.03:  # this read waits for the GPU
        return base / 3
    return base


class GlobalTemperature(nn.Module):
    """One temperature for all samples, stored as `log_scale = log(1/tau)`, (1,), like a CLIP model's logit_scale.

    FastCLIP's learning rates apply to this logarithm, because its code trains logit_scale. The value is float32 at any
    precision of the model, so the clamp acts on the master value.
    """

    log_scale: Tensor
    first_moment: Tensor
    second_moment: Tensor
    steps: Tensor

    def __init__(self, temperature: float, bounds: tuple[float, float], *, learnable: bool) -> None:
        super().__init__()
        log_scale = torch.tensor([-math.log(temperature)], dtype=torch.float32)  # even if the default dtype has 16 bits
        if learnable:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        self.learnable = learnable
        self._bounds = (-math.log(bounds[1]), -math.log(bounds[0]))
        for name in ("first_moment", "second_moment", "steps"):
            self.register_buffer(name, torch.zeros_like(log_scale))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GlobalTemperature:
        """Move or convert the tensors for `nn.Module.to` and similar calls, but never to a 16-bit dtype.

        In a 16-bit dtype a step of 2e-4 would have no effect: bfloat16 numbers near log(1/0.07) = 2.7 are 0.016 apart.
        """

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= 4 else tensor.to(moved.device)

        return super()._apply(move, recurse)

    @property
    def value(self) -> float:
        return math.exp(-float(self.log_scale.detach()))

    @torch.no_grad()
    def step(self, learning_rate: float, betas: tuple[float, float], eps: float) -> None:
        """Take one Adam step with the gradient in `log_scale.grad`, clamp the result, and clear the gradient."""
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
    """Return the change at learning rate 1, and the new moments. steps: number of steps, this one included."""
    first = betas[0] * first + (1 - betas[0]) * gradient
    second = betas[1] * second + (1 - betas[1]) * gradient**2
    change = (first / (1 - betas[0] ** steps)) / ((second / (1 - betas[1] ** steps)).sqrt() + eps)
    return change, first, second


# Columns of the per-sample state: first those that are fetched, then those that only the owner needs. The state holds
# log u, or NaN for a sample that was never seen.
U_COLUMNS = {"log_u_image": math.nan, "log_u_text": math.nan}


def individual_columns(temperature: float) -> dict[str, float]:
    """Return the columns after `U_COLUMNS`, with their initial values: two temperatures and the state of their Adam."""
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
    gradient_limit: float,
    released_epoch: int | None = None,
) -> Tensor:
    """Return the temperature columns (k, 7) after one Adam step. Each sample counts its own steps.

    held: the columns before the step (k, 7). gradients: (k, 2).
    gradient_limit: largest absolute gradient. Larger gradients are reduced to it. Infinity: no limit.
    released_epoch: the epoch, to use betas and bias correction of FastCLIP's published code. It counts epochs instead
        of steps and uses no momentum in the first epoch. None: the paper's Adam.
    """
    tau, first, second, steps = held[:, :2], held[:, 2:4], held[:, 4:6], held[:, 6:] + 1
    counted = steps
    if released_epoch is not None:
        counted = torch.full_like(steps, released_epoch + 1)
        betas = betas if released_epoch > 0 else (0.0, 0.0)
    limited = gradients.clamp(-gradient_limit, gradient_limit)
    change, first, second = adam(limited, first, second, counted, betas, eps)
    tau = (tau - learning_rate * change).clamp(*bounds)
    return torch.cat([tau, first, second, steps], dim=1)
