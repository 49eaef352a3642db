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

from megaclip.losses.settings import FastClipSettings

PUBLISHED_GRADIENT_LIMIT = 5.0
"""Largest absolute gradient of a per-sample temperature in FastCLIP's published code."""


def scheduled_rate(
    settings: FastClipSettings, temperature: GlobalTemperature, steps_done: int | None, total_steps: int | None
) -> float:
    """Return the learning rate of the temperature, by `settings.temperature_schedule`.

    "cosine" falls along half a cosine, as in FastCLIP's published code. It requires both numbers of steps. Raises
    ValueError if they are missing or wrong. "threshold": FastCLIP, section 5.1.
    """
    base, warmup = settings.temperature_learning_rate, settings.temperature_warmup or 0
    if settings.temperature_schedule == "cosine":
        if steps_done is None or total_steps is None or not 0 <= steps_done <= total_steps:
            raise ValueError(
                f"steps_done is {steps_done} and total_steps is {total_steps}; temperature_schedule 'cosine' requires "
                "both, with 0 <= steps_done <= total_steps: call step(steps_done, total_steps)"
            )
        if steps_done < warmup:
            return base * (steps_done + 1) / warmup
        return base * 0.5 * (1 + math.cos(math.pi * (steps_done - warmup) / max(1, total_steps - warmup)))
    if settings.temperature_schedule == "threshold" and temperature.value <= 0.03:  # this read waits for the GPU
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

    def __init__(self, settings: FastClipSettings, *, learnable: bool) -> None:
        super().__init__()
        # float32 even if the default dtype has 16 bits
        log_scale = torch.tensor([-math.log(settings.temperature)], dtype=torch.float32)
        if learnable:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        self.learnable, self._settings = learnable, settings
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
    def step(self, learning_rate: float) -> None:
        """Take one Adam step with the gradient in `log_scale.grad`, clamp the result, and clear the gradient."""
        gradient, chosen = self.log_scale.grad, self._settings
        assert gradient is not None, "step() before backward()"
        self.steps += 1
        options = (chosen.temperature_betas, chosen.temperature_eps)
        change, first, second = adam(gradient, self.first_moment, self.second_moment, self.steps, *options)
        self.first_moment.copy_(first)
        self.second_moment.copy_(second)
        low, high = -math.log(chosen.temperature_max), -math.log(chosen.temperature_min)
        self.log_scale.sub_(learning_rate * change).clamp_(low, high)
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
    held: Tensor, gradients: Tensor, settings: FastClipSettings, *, learning_rate: float, epoch: float
) -> Tensor:
    """Return the temperature columns (k, 7) after one Adam step. Each sample counts its own steps.

    With compat "reference", betas and bias correction are those of FastCLIP's published code. It counts epochs instead
    of steps, uses no momentum in the first epoch, and limits gradients.

    held: the columns before the step (k, 7). gradients: (k, 2). epoch: number of completed epochs.
    """
    tau, first, second, steps = held[:, :2], held[:, 2:4], held[:, 4:6], held[:, 6:] + 1
    counted, betas, limit = steps, settings.temperature_betas, settings.temperature_gradient_limit
    if settings.compat == "reference":
        counted = torch.full_like(steps, math.floor(epoch) + 1)
        betas = betas if epoch >= 1 else (0.0, 0.0)
        limit = PUBLISHED_GRADIENT_LIMIT if limit is None else limit
    if limit:
        gradients = gradients.clamp(-limit, limit)
    change, first, second = adam(gradients, first, second, counted, betas, settings.temperature_eps)
    tau = (tau - learning_rate * change).clamp(settings.temperature_min, settings.temperature_max)
    return torch.cat([tau, first, second, steps], dim=1)
