"""FastClipLoss in the reference mode compared with the published code, and the figures in docs/fastclip.md about it.

`fastclip_oracle.released` returns the gradients of the published code. `fastclip_released.Released` takes its steps
with per-sample temperatures.
"""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.collectives import sum_over_ranks
from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import FastClipLoss
from megaclip.losses.settings import VARIANTS
from tests.distributed.fastclip_oracle import batch_g, gamma_of, individual, learned, released
from tests.distributed.fastclip_released import Released
from tests.distributed.harness import run_ranks
from tests.distributed.test_fastclip_loss import (
    EPOCHS,
    GAMMA_EPOCHS,
    GAMMA_MIN,
    batch_of,
    distance,
    local_part,
    make_loss,
    one_step,
)
from tests.tolerances import FASTCLIP, assert_close, exceeded
from tests.unit.test_docs import section

PAGE = "docs/fastclip.md"
RHO_V2, TAU_V2, EPS_V2, RATE_V2, BETAS_V2 = 7.0, 0.03, 1e-14, 0.0133, (0.9, 0.999)
"""Published settings of v2 on CC3M: 37 epochs, gamma from 1 to 0.2 over the first 18."""


def pairs_with_cosine(samples: int, dimension: int, cosine: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random unit vectors (n, D) whose positives have approximately this cosine similarity."""
    generator = torch.Generator().manual_seed(0)
    x, noise = F.normalize(torch.randn(2, samples, dimension, generator=generator, dtype=dtype), dim=2)
    return x, F.normalize(cosine * x + math.sqrt(1 - cosine**2) * noise, dim=1)


# --------------------------------------------------------------------------------------------- gradients of one step


def check_released(variant: str) -> list[str]:
    loss = make_loss(variant, compat="reference")
    found = []
    for step, epoch in enumerate(EPOCHS):
        x, y, ids = batch_of(step)
        before = torch.stack([row_of(loss, i) for i in ids])
        log_scale = loss.temperature.log_scale.detach().clone()
        tau = (before[:, 2], before[:, 3]) if individual(variant) else (log_scale.neg().exp(),) * 2
        gamma = gamma_of(VARIANTS[variant].gamma_schedule, epoch, GAMMA_MIN, GAMMA_EPOCHS)
        g = batch_g(x, y, *tau)
        u = tuple(
            torch.where(old.isnan(), new, (1 - gamma) * old.exp() + gamma * new)
            for old, new in zip((before[:, 0], before[:, 1]), g, strict=True)
        )
        wanted = released(variant, x, y, u, log_scale, tau, group_size())
        _, d_image, d_text, d_scale = one_step(loss, step, epoch)
        checks = [(d_image, local_part(wanted[0])), (d_text, local_part(wanted[1]))]
        if learned(variant):
            checks.append((d_scale, wanted[2]))
        for number, (got, expected) in enumerate(checks):
            found += exceeded([distance(got, expected, f"{variant} step {step} gradient {number}")])
    return found


def row_of(loss: FastClipLoss, sample: int) -> Tensor:
    """Return the state of a sample on every rank."""
    row = torch.zeros(len(loss.state.columns)).double()
    if sample % group_size() == group_rank():  # this rank owns the sample
        row = loss.state.values[sample // group_size()]
    unseen = row.isnan()
    total = sum_over_ranks(row.nan_to_num(0.0))
    return total.masked_fill(sum_over_ranks(unseen.double()) > 0, math.nan)


def check_all_released() -> list[str]:
    return [problem for variant in VARIANTS for problem in check_released(variant)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_reference_mode_gives_the_released_gradients(world_size):
    for found in run_ranks(check_all_released, world_size):
        assert found == []


# ------------------------------------------------------------------------------- steps with per-sample temperatures


def published_v2(samples: int, eps: float = EPS_V2) -> tuple[FastClipLoss, Released]:
    """Return our loss in the reference mode and the published code, with v2's published settings."""
    ours = FastClipLoss(
        "fastclip_v2",
        samples=samples,
        compat="reference",
        gamma_min=0.2,
        gamma_epochs=18,
        rho=RHO_V2,
        eps=eps,
        temperature=TAU_V2,
        temperature_learning_rate=RATE_V2,
        state_dtype=torch.float64,
    ).double()
    return ours, Released(samples, tau=TAU_V2, rho=RHO_V2, eps=eps, rate=RATE_V2, betas=BETAS_V2)


def both_step(ours: FastClipLoss, theirs: Released, x: Tensor, y: Tensor, ids: Tensor, epoch: int) -> list[Tensor]:
    """Take one step with both. Return the gradients of both sides: ours, then those of the published code."""
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    ours(*leaves, ids=ids, epoch=float(epoch)).backward()
    ours.step()
    return [leaves[0].grad, leaves[1].grad, *theirs.step(x, y, ids, gamma_of("cosine", epoch, 0.2, 18), epoch)]


def test_sixteen_steps_equal_those_of_the_published_code() -> None:
    """With an eps that is negligible compared with u, gradients, estimates and temperatures are equal."""
    samples, batch = 24, 12
    bound = FASTCLIP.magnified(0.3 / TAU_V2)  # larger exponents than at the temperature of the other tests
    ours, theirs = published_v2(samples, eps=1e-100)
    generator = torch.Generator().manual_seed(3)
    for step in range(16):
        x, y = pairs_with_cosine(samples, 16, step / 32, torch.float64)
        ids = torch.randperm(samples, generator=generator)[:batch]
        d_x, d_y, their_x, their_y = both_step(ours, theirs, x[ids], y[ids], ids, epoch=step // 2)
        seen = ~ours.state.values[:, 0].isnan()
        for name, got, wanted in (
            ("images", d_x, their_x),
            ("texts", d_y, their_y),
            ("u", ours.state.values[seen, :2].exp(), theirs.u[seen]),
            ("tau", ours.state.values[:, 2:4], theirs.tau),
        ):
            assert_close(got, wanted, bound, f"{name} in step {step}")


def test_eps_counts_more_in_the_published_code() -> None:
    """The published code multiplies eps by exp(bound).

    docs/fastclip.md documents the error of the gradients after 37 visits.
    """
    ours, theirs = published_v2(256)
    errors = []
    for epoch in range(37):
        x, y = pairs_with_cosine(256, 64, 0.9 * min(1.0, epoch / 5), torch.float64)
        d_x, d_y, their_x, their_y = both_step(ours, theirs, x, y, torch.arange(256), epoch)
        errors.append((torch.cat([d_x - their_x, d_y - their_y]).norm() / torch.cat([their_x, their_y]).norm()).item())
    assert theirs.bound.mean() > 5 and errors[0] < 1e-10
    text = " ".join(section(PAGE, "### Differences from the published code").split())
    documented = re.search(r"([\d.]+) % after 37 visits", text)
    assert documented and float(documented[1]) == pytest.approx(100 * errors[-1], abs=0.1)


def test_an_estimate_that_is_nearly_zero_is_kept_here_and_replaced_in_the_published_code() -> None:
    ours, theirs = published_v2(8)
    x, y = pairs_with_cosine(8, 4, 0.5, torch.float64)
    ids = torch.arange(8)
    ours.state.values[:, :2] = math.log(1e-40)
    theirs.stored[:] = 1e-40
    both_step(ours, theirs, x, y, ids, epoch=18)  # gamma is 0.2
    tau = torch.full((8,), TAU_V2, dtype=torch.float64)
    g = torch.stack(batch_g(x, y, tau, tau), dim=1)
    assert_close(ours.state.values[:, :2].exp() / g, torch.full_like(g, 0.2), FASTCLIP)
    assert_close(theirs.u / g, torch.ones_like(g), FASTCLIP)


# ----------------------------------------------------------------------------------- the limit of gradients of tau_i


def temperature_gradients(dimension: int, **settings: Any) -> tuple[Tensor, FastClipLoss]:
    """Return gradients of tau_i (n, 2) for random features at v2's published settings, and the loss after one step."""
    x, y = pairs_with_cosine(1024, dimension, 0.0, torch.float32)
    loss = FastClipLoss("fastclip_v2", samples=1024, rho=RHO_V2, temperature=TAU_V2, **settings)
    loss(x.requires_grad_(), y, ids=torch.arange(1024), epoch=0.0).backward()
    assert loss._pending is not None and loss._pending.temperature_gradient is not None
    gradients = loss._pending.temperature_gradient
    loss.step()
    return gradients, loss


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"compat": "reference"}, 5.0),
        ({"compat": "paper"}, math.inf),
        ({"compat": "reference", "temperature_gradient_limit": 0.0}, math.inf),
        ({"compat": "paper", "temperature_gradient_limit": 4.0}, 4.0),
    ],
)
def test_gradients_of_temperatures_are_limited_in_the_reference_mode_only(settings: Any, limit: float) -> None:
    """Adam's first moments are compared with the definition of the gradient, rho - KL."""
    gradients, loss = temperature_gradients(512, **settings)
    decay = 0.0 if settings["compat"] == "reference" else BETAS_V2[0]  # the published Adam has no momentum in epoch 0
    moments = loss.state.values[:, 4:6] / (1 - decay)
    x, y = pairs_with_cosine(1024, 512, 0.0, torch.float32)
    expected = RHO_V2 - torch.stack(kl_and_log_g(x, y, TAU_V2)[0], dim=1)
    assert expected.min() > 4 and expected.max() > 6
    assert moments == pytest.approx(expected.clamp(max=limit).float(), rel=1e-4)
    assert gradients == pytest.approx(expected.float(), rel=1e-4)


# --------------------------------------------------------------------------------------------------------- rho and tau


def kl_and_log_g(x: Tensor, y: Tensor, tau: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return KL(p, uniform) and log g (n,) of the image side and the text side, in float64."""
    divergences, logs = [], []
    for rows, columns in ((x.double(), y.double()), (y.double(), x.double())):
        positives = (rows * columns).sum(1)
        sums, means = [], []
        for first in range(0, len(rows), 512):
            part = slice(first, first + 512)
            exponents = (rows[part] @ columns.T - positives[part, None]) / tau
            own = torch.arange(len(exponents))
            exponents[own, first + own] = -math.inf
            sums.append(exponents.logsumexp(1))
            weights = exponents.softmax(1)
            means.append((weights * exponents.masked_fill(weights == 0, 0.0)).sum(1))
        logs.append(torch.cat(sums) - math.log(len(rows) - 1))
        divergences.append(torch.cat(means) - logs[-1])
    return divergences, logs


def mean_of(sides: list[Tensor]) -> float:
    return torch.stack(sides).mean().item()


def derivative(x: Tensor, y: Tensor, *, tau: float, **settings: Any) -> float:
    """Return the derivative of v3's objective with respect to tau, as FastClipLoss passes it to the optimizer."""
    loss = FastClipLoss("fastclip_v3", samples=len(x), temperature=tau, **settings).to(x.dtype)
    loss(x.clone().requires_grad_(), y, ids=torch.arange(len(x)), epoch=0.0).backward()
    assert loss.temperature.log_scale.grad is not None
    return -loss.temperature.log_scale.grad.item() / tau  # the loss trains log(1/tau)


@pytest.mark.parametrize("rho", [1.0, 6.5])
def test_the_temperature_follows_rho_the_divergence_and_g(rho: float) -> None:
    """docs/fastclip.md: 2 (rho - KL) in paper mode, and rho - 2 KL - log g in reference mode, while u = g."""
    x, y = pairs_with_cosine(32, 8, 0.0, torch.float64)
    divergences, logs = kl_and_log_g(x, y, 0.05)
    assert all(((divergence > 0) & (divergence < math.log(31))).all() for divergence in divergences)
    options: dict[str, Any] = {"tau": 0.05, "rho": rho, "eps": 0.0}
    paper, reference = (derivative(x, y, compat=compat, **options) for compat in ("paper", "reference"))
    assert paper == pytest.approx(2 * (rho - mean_of(divergences)), rel=1e-6)
    assert reference == pytest.approx(rho - 2 * mean_of(divergences) - mean_of(logs), rel=1e-6)
    # here tau falls in paper mode and rises in reference mode
    assert rho < math.log(31) or (paper > 0 and reference < 0)


def test_far_below_eps_the_temperature_follows_eps_and_u() -> None:
    """docs/fastclip.md: 2 (rho + log eps) in paper mode, and rho + log g in reference mode."""
    x, y = pairs_with_cosine(32, 8, 0.999, torch.float64)
    logs = mean_of(kl_and_log_g(x, y, 0.01)[1])
    options: dict[str, Any] = {"tau": 0.01, "rho": 6.5, "eps": 1.0}
    assert logs < -20
    paper, reference = (derivative(x, y, compat=compat, **options) for compat in ("paper", "reference"))
    assert paper == pytest.approx(2 * 6.5, abs=1e-2)
    assert reference == pytest.approx(6.5 + logs, abs=1e-2)
