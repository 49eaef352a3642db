"""The published FastCLIP code for per-sample temperatures, as formulas: one process, whole matrices, float64.

The formulas follow FastCLIPLossIndividual of github.com/Optimization-AI/fast_clip at commit efd89d5. They include what
`FastClipLoss(compat="reference")` reproduces, and what it does not:

- u is stored as a multiple of exp(bound). The bound of a sample is the largest (s_ij - s_ii)/tau_i so far, and at least
  0. eps is added to the stored number, so relative to u its size is eps * exp(bound).
- A stored number below 1e-35 is replaced by g, once gamma is below 1.
- The gradients of the temperatures are limited to 5, and their Adam counts epochs.
"""

import torch
from torch import Tensor

SMALLEST_STORED = 1e-35
GRADIENT_LIMIT = 5.0
BOUNDS = (0.01, 1.0)


class Released:
    """State of n samples. Columns: image side and text side, (n, 2)."""

    def __init__(
        self, samples: int, *, tau: float, rho: float, eps: float, rate: float, betas: tuple[float, float]
    ) -> None:
        self.stored, self.bound, self.first, self.second = torch.zeros(4, samples, 2, dtype=torch.float64)
        self.tau = torch.full((samples, 2), tau, dtype=torch.float64)
        self.rho, self.eps, self.rate, self.betas = rho, eps, rate, betas

    @property
    def u(self) -> Tensor:
        """The estimates (n, 2)."""
        return self.stored * self.bound.exp()

    def step(self, x: Tensor, y: Tensor, ids: Tensor, gamma: float, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the feature gradients (b, D) of both sides, and update the state. ids: (b,), all different."""
        x, y = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
        similarities = x @ y.T
        others = ~torch.eye(len(x), dtype=torch.bool)
        objective, gradients = torch.zeros((), dtype=torch.float64), []
        for side, rows in enumerate((similarities, similarities.T)):
            exponents = (rows - similarities.diagonal()[:, None]) / self.tau[ids, side][:, None]
            before = self.bound[ids, side]
            bound = torch.maximum(before, exponents.detach().amax(1))
            terms = torch.exp(exponents - bound[:, None]) * others / (len(x) - 1)
            g, old = terms.detach().sum(1), self.stored[ids, side]
            stored = (1 - gamma) * old * torch.exp(before - bound) + gamma * g
            if gamma < 1:
                stored = torch.where(old < SMALLEST_STORED, g, stored)
            objective = objective + (terms.sum(1) / (stored + self.eps)).mean() / 2
            through_g = (terms * exponents).detach().sum(1) / (stored + self.eps)
            gradients.append(torch.log(stored + self.eps) + bound + self.rho - through_g)
            self.stored[ids, side], self.bound[ids, side] = stored, bound
        self._update(ids, torch.stack(gradients, dim=1).clamp(-GRADIENT_LIMIT, GRADIENT_LIMIT), epoch)
        d_x, d_y = torch.autograd.grad(objective, (x, y))
        return d_x, d_y

    def _update(self, ids: Tensor, gradients: Tensor, epoch: int) -> None:
        first_decay, second_decay = self.betas if epoch else (0.0, 0.0)
        self.first[ids] = first_decay * self.first[ids] + (1 - first_decay) * gradients
        self.second[ids] = second_decay * self.second[ids] + (1 - second_decay) * gradients**2
        first = self.first[ids] / (1 - first_decay ** (epoch + 1))
        second = self.second[ids] / (1 - second_decay ** (epoch + 1))
        self.tau[ids] = (self.tau[ids] - self.rate * first / (second.sqrt() + 1e-8)).clamp(*BOUNDS)
