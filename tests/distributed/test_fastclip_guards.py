"""FastClipLoss called directly: abandoned steps have no effect, and wrong or infinite values are refused."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size
from megaclip.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from megaclip.losses import FastClipLoss
from megaclip.losses.settings import VARIANTS
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
    """Return all state that the loss keeps between steps, with -1 for NaN."""
    kept = [loss.state.values, *loss.temperature.state_dict().values()]
    return [tensor.detach().nan_to_num(-1.0).clone() for tensor in kept]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_that_is_abandoned_after_its_backward_pass_changes_nothing(variant: str) -> None:
    """The gradient of a global temperature must not be added to that of the next step."""
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
    """Check that every rank refuses a NaN of the last rank, and that the next step works."""
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


@pytest.mark.parametrize("variant", ["fastclip_v2", "fastclip_v3"])
def test_step_refuses_an_infinite_gradient_of_a_temperature(variant: str) -> None:
    """The estimates are finite, but the incoming gradient of the loss is not."""
    loss = make_loss(variant)
    before = contents(loss)
    x, y, ids = batch_of(1)
    (loss(x, y, ids=ids, epoch=0.0) * math.inf).backward()
    with pytest.raises(NonFiniteError):
        loss.step()
    assert same(contents(loss), before)


@pytest.mark.parametrize(
    ("variant", "settings"), [("fastclip_v2", {"temperature_gradient_limit": 100.0}), ("fastclip_v3", {})]
)
def test_state_and_temperature_depend_on_the_last_loss_alone(variant: str, settings: dict[str, float]) -> None:
    """A factor such as GradScaler's must have no effect, as it has none on the model.

    The gradient of the temperature may be a sum over several backward passes, or may have been cleared. The limit and
    eps apply to the gradient of the unscaled loss.
    """
    kinds = ("plain", "factor 65536", "factor 0.3", "factor 0", "second backward pass", "abandoned step", "zero_grad")
    ends = []
    for kind in kinds:
        loss = make_loss(variant, temperature_eps=0.1, **settings)
        for seed in (1, 2):
            x, y, ids = batch_of(seed + 2)
            abandoned = loss(x, y, ids=ids, epoch=0.0) if kind == "abandoned step" else 0.0
            x, y, ids = batch_of(seed)
            factor = float(kind.removeprefix("factor ")) if "factor" in kind else 1.0
            value = factor * loss(x, y, ids=ids, epoch=0.0) + abandoned
            value.backward(retain_graph=True)
            if kind == "second backward pass":
                value.backward()
            if kind == "zero_grad":
                loss.zero_grad()
            loss.step()
        ends.append(contents(loss))
    assert [kind for kind, end in zip(kinds, ends, strict=True) if not same(end, ends[0])] == []


@pytest.mark.parametrize("epoch", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("per", ["epoch", "step"])
def test_an_epoch_that_is_no_number_of_epochs_is_refused(epoch: float, per: str) -> None:
    loss = make_loss("fastclip_v3", gamma_per=per)
    x, y, ids = batch_of(1)
    with pytest.raises(DataError, match=r"epoch is (nan|inf|-1\.0); expected the number of epochs done, 0 or more"):
        loss(x, y, ids=ids, epoch=epoch)


def test_float16_features_are_refused() -> None:
    """At tau 0.01 nearly all gradients of close pairs are below the smallest float16 number, but not in float32."""
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


@pytest.mark.parametrize("variant", ["fastclip_v2", "fastclip_v3"])
def test_a_run_can_return_to_an_earlier_checkpoint_state(variant: str) -> None:
    loss = make_loss(variant)
    backward(loss, 1)
    loss.step()
    before, state = contents(loss), loss.checkpoint_state()
    backward(loss, 2)
    loss.step()
    assert not same(contents(loss), before)
    loss.load_checkpoint_state([state])
    assert same(contents(loss), before)


@pytest.mark.parametrize(("variant", "is_loaded"), [("sogclr", False), ("fastclip_v1", False), ("fastclip_v3", True)])
def test_a_resumed_run_may_change_a_constant_temperature(variant: str, is_loaded: bool) -> None:
    """The change is logged, so it must have an effect. A learned temperature keeps its learned value."""
    before, after = make_loss(variant, temperature=0.07), make_loss(variant, temperature=0.05)
    after.load_checkpoint_state([before.checkpoint_state()])
    assert after.temperature.value == pytest.approx(0.07 if is_loaded else 0.05, rel=1e-6)


def check_copies_in_the_middle_of_a_step() -> None:
    """Check that a copy made between loss() and step() has the loss's state, and takes no part in its step."""
    loss = make_loss("fastclip_v3")
    backward(loss, 1)
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert same(contents(copied), contents(loss))
        with pytest.raises(RuntimeError, match=r"call loss\(\.\.\.\)\.backward\(\)"):
            copied.step()
    loss.step()


@pytest.mark.parametrize("check", [check_that_nothing_infinite_is_written, check_copies_in_the_middle_of_a_step])
def test_guards_of_one_process(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("variant", "state_dtype"),
    [("fastclip_v2", torch.bfloat16), ("isogclr", torch.float16), ("fastclip_v3", torch.int64)],
)
def test_a_state_that_would_lose_updates_is_refused(variant: str, state_dtype: torch.dtype) -> None:
    """In bfloat16, 0.999, the decay of Adam's second moment, is 1. No per-sample temperature would ever change."""
    with pytest.raises(ConfigError, match=rf"state_dtype is {state_dtype}; expected torch\.float32 or torch\.float64"):
        FastClipLoss(variant, samples=SAMPLES, state_dtype=state_dtype)


def test_an_estimate_may_have_16_bits() -> None:
    exact, rounded = (FastClipLoss(samples=SAMPLES, state_dtype=dtype) for dtype in (torch.float32, torch.float16))
    for loss in (exact, rounded):
        backward(loss.double(), 1)
        loss.step()
    ids = batch_of(1)[2]
    torch.testing.assert_close(rounded.state.values[ids].float(), exact.state.values[ids], rtol=2e-3, atol=0)


def test_parts_of_two_checkpoints_are_refused() -> None:
    """If a run on four ranks resumes on two, its folder has newer parts of ranks 0 and 1 than of ranks 2 and 3."""
    loss = make_loss("fastclip_v3")

    def part(rank: int, world_size: int) -> dict[str, Any]:
        state = loss.checkpoint_state()
        own = {"rank": rank, "world_size": world_size, "values": loss.state.values[rank::world_size]}
        return state | {"samples": state["samples"] | own}

    with pytest.raises(CheckpointError, match=r"some parts .* were saved by 2 ranks, others by 4; give only the parts"):
        loss.load_checkpoint_state([part(0, 2), part(1, 2), part(2, 4), part(3, 4)])
    loss.load_checkpoint_state([part(0, 2), part(1, 2)])


def test_a_state_that_is_not_in_a_list_is_refused() -> None:
    loss = make_loss("fastclip_v3")
    for parts in (loss.checkpoint_state(), [{}]):
        with pytest.raises(CheckpointError, match=r"expected what checkpoint_state\(\) returned .* in a list$"):
            loss.load_checkpoint_state(parts)  # type: ignore[arg-type]  # a wrong type is what is tested


def test_a_frozen_temperature_stays_constant_while_the_estimates_change() -> None:
    loss = make_loss("fastclip_v3").requires_grad_(False)
    values, *temperature = contents(loss)
    backward(loss, 1)
    loss.step()
    assert same(contents(loss)[1:], temperature) and not torch.equal(contents(loss)[0], values)


def test_ids_that_are_no_tensor_are_refused() -> None:
    """The message must contain the type, because NumPy's int64 looks like torch's int64."""
    loss = make_loss("fastclip_v3")
    x, y, ids = batch_of(1)
    for wrong in (ids.tolist(), ids.numpy()):
        for call in (lambda ids: loss(x, y, ids=ids, epoch=0.0), loss.fetch):
            message = rf"ids are a {type(wrong).__name__}; expected a tensor, .*: use torch\.as_tensor\(ids\)$"
            with pytest.raises(DataError, match=message):
                call(wrong)


def check_that_ids_are_refused_on_every_rank() -> None:
    """Check that invalid ids on one rank raise an error on both ranks, and that the next fetch works."""
    loss = make_loss("fastclip_v3")
    _, _, ids = batch_of(1)
    is_last = group_rank() == group_size() - 1
    for wrong, message in (
        (ids[:2], "rank 0 has 3 ids and rank 1 has 2; expected one number on all ranks"),
        (ids.int(), r"ids are \(3,\) torch\.int32; expected one int64 sample id per row, \(b,\)"),
    ):
        with pytest.raises(DataError, match=message):
            loss.fetch(wrong if is_last else ids)
    assert loss.fetch(ids).rows().shape == (3, 2)


def check_that_calls_in_different_ways_are_refused_on_every_rank() -> None:
    loss = make_loss("fastclip_v3")
    x, y, ids = batch_of(1)
    is_last = group_rank() == group_size() - 1
    with pytest.raises(DataError, match=r"epoch of the loss is 0\.0 on rank 0 and 1\.5 on rank 1"):
        loss(x, y, ids=ids, epoch=1.5 * is_last)
    with torch.set_grad_enabled(not is_last), pytest.raises(DataError, match="requires_grad of the loss is True on ra"):
        loss(x, y, ids=ids, epoch=0.0)
    with pytest.raises(DataError, match="training of the loss is True on rank 0 and False on rank 1"):
        loss.train(not is_last)(x, y, ids=ids, epoch=0.0)


def check_a_loss_that_was_constructed_too_early(store: str) -> None:
    """Check that a loss created before distributed training is refused: each rank would keep the whole state."""
    rank, size = group_rank(), group_size()
    dist.destroy_process_group()
    loss = make_loss("fastclip_v3")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    message = rf"constructed for rank 0 of 1, and this is rank {rank} of 2; construct the loss after distributed"
    with pytest.raises(RuntimeError, match=message):
        backward(loss, 1)
    backward(make_loss("fastclip_v3"), 1)


def run_checks(store: str) -> None:
    check_that_nothing_infinite_is_written()
    check_copies_in_the_middle_of_a_step()
    check_that_ids_are_refused_on_every_rank()
    check_that_calls_in_different_ways_are_refused_on_every_rank()
    check_a_loss_that_was_constructed_too_early(store)


def test_guards_of_two_ranks(tmp_path: Path) -> None:
    run_ranks(run_checks, 2, str(tmp_path / "store"), time_limit_s=60)


def test_the_cosine_of_the_temperature_requires_the_numbers_of_steps() -> None:
    loss = make_loss("fastclip_v3", temperature_schedule="cosine")
    before = contents(loss)
    backward(loss, 1)
    with pytest.raises(ValueError, match=r"call step\(steps_done, total_steps\)"):
        loss.step()
    assert same(contents(loss), before)
    loss.step(3, 10)
    assert not same(contents(loss), before)
