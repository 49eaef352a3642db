"""Value and gradients of a global loss: the autograd function of `megaclip.losses.fastclip`, which has the formulas.

The function reads the per-sample state of a batch from a `Step`, and leaves in it what the update of that state needs.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.losses.distributed_tiles import DistributedTiles
from megaclip.losses.estimators import Ticket
from megaclip.losses.settings import VARIANTS, StandaloneFastClipSettings
from megaclip.losses.sums import first_order, gradient_of_scalar
from megaclip.losses.way import Way
from megaclip.ops.rows import finish_gradients, paired_products
from megaclip.ops.types import Terms, accumulation_dtype


class Step:
    """Quantities of one forward and backward pass for `FastClipLoss.step`. Columns: image side, text side."""

    def __init__(
        self, settings: StandaloneFastClipSettings, ticket: Ticket, rows: Tensor, gamma: float, epoch: float
    ) -> None:
        self.rule = VARIANTS[settings.variant]
        self.rho = settings.rho if self.rule.with_rho else 0.0
        self.eps, self.reference = settings.eps, settings.compat == "reference"
        self.ticket, self.gamma, self.epoch = ticket, gamma, epoch
        self.old_log_u = rows[:, :2]
        self.temperatures = rows[:, 2:4] if self.rule.individual else None
        self.log_u: Tensor = self.old_log_u
        self.mean_log_scale: Tensor = torch.zeros(1)
        self.ran_backward = False
        self.is_checked = False
        self.temperature_gradient: Tensor | None = None  # (b, 2), for per-sample temperatures
        self.scale_gradient: Tensor | None = None  # (1,), for a learned global temperature
        self.d_loss = torch.ones(())

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Reduce to None: a copy of a loss has no pending step, because messages cannot be copied."""
        return type(None), ()

    def mixed(self, log_g: Tensor) -> Tensor:
        """Return the new log u (b, 2), by FastCLIP, equation 1. For a sample that was never seen, u = g."""
        if self.gamma == 1:
            return log_g
        mixed = torch.logaddexp(self.old_log_u + math.log1p(-self.gamma), log_g + math.log(self.gamma))
        return torch.where(self.old_log_u.isnan(), log_g, mixed)


class GlobalContrastive(torch.autograd.Function):
    """The loss with the statistics pass and the estimator in the forward, and the gradient pass in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, log_scale: Tensor, way: Way, step: Step) -> Tensor:
        dtype = accumulation_dtype(x)
        tau = step.temperatures
        if tau is None:
            tau = (-log_scale.to(x.device, dtype)).exp().reshape(())
            tau_x = tau_y = tau
        else:
            tau_x, tau_y = tau[:, 0].contiguous(), tau[:, 1].contiguous()
        batch = len(x) * way.ranks.size
        tiles = DistributedTiles(x, y, way)
        row_lse, col_lse = tiles.stats(1 / tau_x, 1 / tau_y)
        s_ii = paired_products(x, y)
        log_g = torch.stack([row_lse - s_ii / tau_x, col_lse - s_ii / tau_y], dim=1) - math.log(batch - 1)
        step.log_u = step.mixed(log_g)
        # log(eps + u). With eps = 0 this is log u.
        log_eps = log_g.new_full((), math.log(step.eps) if step.eps > 0 else -math.inf)
        log_eps_u = torch.logaddexp(step.log_u, log_eps)
        ctx.loss, ctx.way, ctx.step = "FastClipLoss", way, step
        ctx.save_for_backward(x, y, tiles.y_all, log_scale, tau_x, tau_y, s_ii, log_g, log_eps_u)
        terms = log_eps_u + step.rho
        if step.rule.multiplied:
            terms = terms * tau
        totals = torch.stack([terms.sum(), log_eps_u.new_zeros(()) if tau.dim() == 0 else tau.log().sum()])
        totals = sum_over_ranks(totals, group=way.ranks)
        step.mean_log_scale = (-totals[1:] / (2 * batch)).to(log_scale)
        return totals[0] / batch

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        way: Way = ctx.way
        step: Step = ctx.step
        x, y, y_all, log_scale, tau_x, tau_y, s_ii, log_g, log_eps_u = ctx.saved_tensors
        batch = len(x) * way.ranks.size
        row_weight, col_weight = (_weight(step, tau, len(x)) for tau in (tau_x, tau_y))
        shift = log_eps_u + math.log(batch - 1)
        row = Terms(1 / tau_x, shift[:, 0] + s_ii / tau_x, row_weight)
        col = Terms(1 / tau_y, shift[:, 1] + s_ii / tau_y, col_weight)
        negatives = DistributedTiles(x, y, way, y_all=y_all).grads(row, col, need_dots=step.rule.individual)

        ratio = torch.exp(log_g - log_eps_u)  # g/(eps+u)
        pull = row_weight * ratio[:, 0] + col_weight * ratio[:, 1]
        dx, dy, dots = finish_gradients(negatives.dx, negatives.dy, x, y, pull, d_loss)

        log_u = step.log_u if step.reference and not step.rule.individual else log_eps_u
        d_log_scale = None
        step.ran_backward, step.d_loss = True, d_loss
        if step.rule.individual:
            # sum_j exp((s_ij - s_ii)/tau_i) (s_ij - s_ii) / ((B-1)(eps+u_i)), both sides.
            assert negatives.row_dot is not None and negatives.col_dot is not None, "they are needed"
            spread_x = negatives.row_dot / row_weight - s_ii * ratio[:, 0]
            spread_y = negatives.col_dot / col_weight - s_ii * ratio[:, 1]
            through_g = torch.stack([-spread_x / tau_x, -spread_y / tau_y], dim=1)
            step.temperature_gradient = log_u + step.rho + through_g
        elif step.rule.temperature == "global":
            own = _global_gradient(step, way, dots, log_u, tau_x)
            step.scale_gradient = gradient_of_scalar(own, log_scale)
            d_log_scale = gradient_of_scalar(own * d_loss, log_scale)
        return dx, dy, d_log_scale, None, None


def _weight(step: Step, tau: Tensor, local_batch: int) -> Tensor:
    """Return W c_i/(B tau_i), () or (b,), the factor of exp((s_ij - s_ii)/tau)/((B-1)(eps+u)) in the gradient."""
    if step.reference:
        keeps_tau = step.rule.temperature == "global" and step.rule.multiplied  # fastclip_v3
        return (torch.ones_like(tau) if keeps_tau else 1 / tau) / (2 * local_batch)
    return (torch.ones_like(tau) if step.rule.multiplied else 1 / tau) / local_batch


def _global_gradient(step: Step, way: Way, dots: Tensor, log_u: Tensor, tau: Tensor) -> Tensor:
    """Return d objective / d log(1/tau), (): the part through g and, with the factor tau, the part of tau itself.

    g depends on x/tau, so the part through g is sum_i <x_i, dx_i>. These products are the dots (b,), with a factor W.
    """
    local = torch.stack([dots.sum() / way.ranks.size, log_u.sum() / (len(dots) * way.ranks.size)])
    through_g, mean_log_u = sum_over_ranks(local, group=way.ranks)
    own = -tau * (mean_log_u + 2 * step.rho) if step.rule.multiplied else 0.0 * tau
    return 2 * through_g + own / 2 if step.reference else through_g + own
