"""Reference implementation of FastCLIP: one process, whole matrices, float64, autograd, u, one torch Adam per sample.

The estimator is a surrogate whose autograd gradient is that of the papers, with u constant. The objective and the
published code are implemented as well, so three formulations must agree.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

RATE, BETAS, ADAM_EPS = 0.03, (0.8, 0.95), 1e-3
BOUNDS = (0.05, 0.8)
RHO, EPS = 1.7, 1e-3
FEATURE_FACTOR = {  # whether the feature gradient contains the factor tau
    "sogclr": True,
    "isogclr": True,
    "fastclip_v0": False,
    "fastclip_v1": True,
    "fastclip_v2": True,
    "fastclip_v3": True,
}


def individual(variant: str) -> bool:
    return variant in ("isogclr", "fastclip_v2")


def learned(variant: str) -> bool:
    return variant in ("fastclip_v0", "fastclip_v3")


def batch_g(x: Tensor, y: Tensor, tau_x: Tensor, tau_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return g1 and g2 (B,) of a batch, from their definition; tau () or (B,)."""
    s = x @ y.T
    off = ~torch.eye(len(x), dtype=torch.bool)
    positive = s.diagonal()
    g1 = (torch.exp((s - positive[:, None]) / tau_x.reshape(-1, 1)) * off).sum(1) / (len(x) - 1)
    g2 = (torch.exp((s - positive[None, :]) / tau_y.reshape(1, -1)) * off).sum(0) / (len(x) - 1)
    return g1, g2


def gamma_of(schedule: str, epoch: float, minimum: float, epochs: float) -> float:
    if schedule == "constant":
        return 1.0 if epoch < 1 else minimum
    return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * epoch / epochs)) if epoch < epochs else minimum


class Found(NamedTuple):
    """Loss and gradients of a step."""

    loss: Tensor
    d_image: Tensor
    d_text: Tensor
    d_log_scale: Tensor | None


class Oracle:
    """State of the dataset and temperature, updated batch by batch."""

    def __init__(self, variant: str, samples: int, tau: float) -> None:
        self.variant = variant
        self.u: dict[tuple[int, int], float] = {}
        self.tau: dict[tuple[int, int], Tensor] = {}
        self.adams: dict[tuple[int, int], torch.optim.Adam] = {}
        self.log_scale = torch.tensor([-math.log(tau)], dtype=torch.float32).double().requires_grad_()
        self.adam = torch.optim.Adam([self.log_scale], lr=RATE, betas=BETAS, eps=ADAM_EPS)
        for sample in range(samples):
            for side in (0, 1):
                self.tau[sample, side] = torch.tensor(tau, dtype=torch.float64).requires_grad_()
                options = {"lr": RATE, "betas": BETAS, "eps": ADAM_EPS}
                self.adams[sample, side] = torch.optim.Adam([self.tau[sample, side]], **options)

    def step(self, x: Tensor, y: Tensor, ids: list[int], gamma: float) -> Found:
        """Return the loss and gradients of a batch before the update. Then update the state."""
        x, y = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
        global_tau = torch.exp(-self.log_scale).reshape(())
        if individual(self.variant):
            tau_x, tau_y = (torch.stack([self.tau[i, side] for i in ids]) for side in (0, 1))
        else:
            tau_x = tau_y = global_tau
        g = batch_g(x, y, tau_x, tau_y)
        u = [
            torch.stack(
                [
                    (1 - gamma) * self.u[sample, side] + gamma * value if (sample, side) in self.u else value
                    for sample, value in zip(ids, g[side].detach(), strict=True)
                ]
            )
            for side in (0, 1)
        ]
        logs = [torch.log(EPS + u[side]) for side in (0, 1)]
        ratios = [g[side] / (EPS + u[side]) for side in (0, 1)]
        rho = RHO if individual(self.variant) or self.variant == "fastclip_v3" else 0.0
        if FEATURE_FACTOR[self.variant]:
            surrogate = (tau_x.detach() * ratios[0] + tau_y.detach() * ratios[1]).mean()
            value = (tau_x * (logs[0] + rho) + tau_y * (logs[1] + rho)).mean()
        else:
            surrogate = (ratios[0] + ratios[1]).mean()
            value = (logs[0] + logs[1]).mean()
        total = surrogate + (value - value.detach() if value.requires_grad else 0.0)
        leaves = [x, y]
        if learned(self.variant):
            leaves.append(self.log_scale)
        elif individual(self.variant):
            leaves += [self.tau[i, side] for side in (0, 1) for i in dict.fromkeys(ids)]
        gradients = torch.autograd.grad(total, leaves)
        found = Found(value.detach(), gradients[0], gradients[1], gradients[2] if learned(self.variant) else None)
        self._update(ids, u, gradients[2:])
        return found

    @torch.no_grad()
    def _update(self, ids: list[int], u: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
        rest = iter(gradients)
        for side in (0, 1):
            for sample in dict.fromkeys(ids):
                at = [row for row, other in enumerate(ids) if other == sample]
                self.u[sample, side] = float(u[side][at].mean())
                if individual(self.variant):
                    # Autograd sums over the occurrences, each divided by B. The update requires their mean.
                    gradient = next(rest) * len(ids) / len(at)
                    tau = self.tau[sample, side]
                    tau.grad = gradient
                    self.adams[sample, side].step()
                    tau.clamp_(*BOUNDS)
        if learned(self.variant):
            self.log_scale.grad = next(rest)
            self.adam.step()
            self.log_scale.clamp_(-math.log(BOUNDS[1]), -math.log(BOUNDS[0]))


def released(
    variant: str,
    x: Tensor,
    y: Tensor,
    u: tuple[Tensor, Tensor],
    log_scale: Tensor,
    tau: tuple[Tensor, Tensor],
    ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the released code (Optimization-AI/fast_clip, loss.py).

    Results: the gradients of each rank's own features before averaging over ranks, (B, D) twice, and the gradient of
    logit_scale after averaging. A rank has its own features with gradient and all features without. It adds `local`
    (its rows) and `forward` (all rows with its own columns).
    """
    x_parts, y_parts = (t.detach().chunk(ranks) for t in (x, y))
    d_x, d_y, d_scale = [], [], torch.zeros(1, dtype=torch.float64)
    batch, size = len(x), len(x) // ranks
    off = ~torch.eye(batch, dtype=torch.bool)
    for rank in range(ranks):
        mine = slice(rank * size, (rank + 1) * size)
        own_x, own_y = (parts[rank].clone().requires_grad_() for parts in (x_parts, y_parts))
        scale_log = log_scale.detach().clone().requires_grad_()
        scale = scale_log.exp()
        scales = (1 / tau[0], 1 / tau[1]) if individual(variant) else (scale.expand(batch), scale.expand(batch))
        u_image, u_text = u

        def pairwise(fx, fy, gx, gy, mask, weights, scale_image, scale_text):
            positive = (fx * fy).sum(1, keepdim=True)
            image = torch.exp((fx @ gy.T - positive) * scale_image[:, None]) * mask
            text = torch.exp((fy @ gx.T - positive) * scale_text[:, None]) * mask
            return image.sum(1) / weights, text.sum(1) / weights

        loss1 = pairwise(own_x, own_y, x, y, off[mine], batch - 1, scales[0][mine], scales[1][mine])
        weights = size * (batch - 1) / batch
        loss2 = pairwise(x, y, own_x, own_y, off[:, mine], weights, scales[0], scales[1])
        first = loss1[0] / (u_image[mine] + EPS) + loss1[1] / (u_text[mine] + EPS)
        second = loss2[0] / (u_image + EPS) + loss2[1] / (u_text + EPS)
        loss = (first.mean() + second.mean()) / 2
        if variant == "fastclip_v3":  # --multiply_tau
            loss = loss / scale.detach() + RHO / scale
            loss = loss + (u_image[mine].log() + u_text[mine].log()).mean() / 2 / scale
        loss.sum().backward()
        d_x.append(own_x.grad)
        d_y.append(own_y.grad)
        if scale_log.grad is not None:
            d_scale += scale_log.grad / ranks
    return torch.cat(d_x), torch.cat(d_y), d_scale
