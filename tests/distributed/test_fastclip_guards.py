"""FastClipLoss called directly: abandoned steps leave nothing behind, and wrong or infinite values are refused."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size
from megaclip.errors import DataError, NonFiniteError
from megaclip.losses import FastClipLoss
from megaclip.losses.fastclip_variants import VARIANTS
from tests.distributed.harness import run_ranks

SAMPLES = 12


def batch_of(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of this rank's part of a batch of six samples, and their ids."""
    generator = torch.Generator().manual_seed(seed)
    x, y = F.normalize(torch.randn(2, 6, 5, generator=generator, dtype=torch.float64), dim=2)
    ids = torch.randperm(SAMPLES, generator=generator)[:6]
    own_x, own_y, own_ids = (part.chunk(group_size())[group_rank()] for part in (x, y, ids))
    return own_x.clone().requires_grad_(), own_y.clone(), own_ids


def make_loss(variant: str, **settings: Any) -> FastClipLoss:
    return FastClipLoss(variant, samples=SAMPLES, state_dtype=torch.float64, **settings).double()


def backward(loss: FastClipLoss, seed: int) -> None:
    x, y, ids = batch_of(seed)
    loss(x, y, ids=ids, epoch=0.0).backward()


def contents(loss: FastClipLoss) -> list[Tensor]:
    """Return everything that the loss keeps from step to step, with -1 for NaN."""
    kept = [loss.state.values, *loss.temperature.state_dict().values()]
    return [tensor.detach().nan_to_num(-1.0).clone() for tensor in kept]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_that_is_given_up_after_its_backward_pass_changes_nothing(variant: str) -> None:
    """The gradient of a global temperature would otherwise stay and be added to that of the next step."""
    straight, interrupted = make_loss(variant), make_loss(variant)
    before = contents(interrupted)
    for seed in (7, 8):
        backward(interrupted, seed)
    assert same(contents(interrupted), before)
    for loss in (straight, interrupted):
        backward(loss, 1)
        loss.step()
    assert same(contents(interrupted), contents(straight))
    assert not same(contents(straight), before)


def check_that_nothing_infinite_is_written() -> None:
    """Check that every rank refuses a NaN of the last rank, and that the next step is possible."""
    for variant in VARIANTS:
        loss = make_loss(variant)
        backward(loss, 1)
        loss.step()
        before = contents(loss)
        x, y, ids = batch_of(2)
        if group_rank() == group_size() - 1:
            x = x.detach().index_fill(0, torch.tensor([0]), math.nan).requires_grad_()
        loss(x, y, ids=ids, epoch=0.0).backward()
        with pytest.raises(NonFiniteError, match=r"infinite or NaN; step\(\) has changed nothing"):
            loss.step()
        assert same(contents(loss), before)
        backward(loss, 2)
        loss.step()
        after = contents(loss)
        assert all(tensor.isfinite().all() for tensor in after) and not same(after, before)


@pytest.mark.parametrize("world_size", [1, 3])
def test_step_refuses_what_is_not_finite_on_every_rank(world_size: int) -> None:
    run_ranks(check_that_nothing_infinite_is_written, world_size)


@pytest.mark.parametrize("variant", ["fastclip_v2", "fastclip_v3"])
def test_step_refuses_an_infinite_gradient_of_a_temperature(variant: str) -> None:
    """The estimates are finite; the incoming gradient of the loss is not."""
    loss = make_loss(variant)
    before = contents(loss)
    x, y, ids = batch_of(1)
    (loss(x, y, ids=ids, epoch=0.0) * math.inf).backward()
    with pytest.raises(NonFiniteError):
        loss.step()
    assert same(contents(loss), before)


@pytest.mark.parametrize("epoch", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("per", ["epoch", "step"])
def test_an_epoch_that_is_no_number_of_epochs_is_refused(epoch: float, per: str) -> None:
    loss = make_loss("fastclip_v3", gamma_per=per)
    x, y, ids = batch_of(1)
    with pytest.raises(DataError, match=r"epoch is (nan|inf|-1\.0); expected the number of epochs done, 0 or more"):
        loss(x, y, ids=ids, epoch=epoch)


def test_float16_features_are_refused() -> None:
    """At tau 0.01 nearly all gradients of close pairs are below the smallest float16; in float32 they are not."""
    generator = torch.Generator().manual_seed(0)
    x, noise = F.normalize(torch.randn(2, 256, 64, generator=generator), dim=2)
    y = F.normalize(x + 0.5 * noise, dim=1)
    x.requires_grad_()
    FastClipLoss("fastclip_v3", samples=256, temperature=0.01)(x, y, ids=torch.arange(256), epoch=0.0).backward()
    assert x.grad is not None and (x.grad != 0).all()
    assert (x.grad.half() == 0).double().mean() > 0.9
    loss = FastClipLoss("fastclip_v3", samples=256, temperature=0.01)
    with pytest.raises(DataError, match=r"the features are torch\.float16, .* expected bfloat16, float32 or float64"):
        loss(x.detach().half(), y.half(), ids=torch.arange(256), epoch=0.0)


def test_the_cosine_of_the_temperature_requires_the_numbers_of_steps() -> None:
    loss = make_loss("fastclip_v3", temperature_schedule="cosine")
    before = contents(loss)
    backward(loss, 1)
    with pytest.raises(ValueError, match=r"call step\(steps_done, total_steps\)"):
        loss.step()
    assert same(contents(loss), before)
    loss.step(3, 10)
    assert not same(contents(loss), before)
