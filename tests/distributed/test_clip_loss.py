"""Compare ClipLoss and SigLipLoss on 1, 2 and 3 ranks with the loss of one process on the whole batch.

Every combination of exchange and reduction is compared in float64: the loss on every rank, and all gradients under the
reduction contract (features times W, logit_scale and logit_bias unscaled). The functions on the ranks return lists of
differences. One launch per world size runs all of them. Other tests call our losses and open_clip's with equal
arguments.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from megaclip.comm.groups import group_rank, group_size, resolve
from megaclip.errors import MegaclipError
from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss
from megaclip.losses.distillation import DistillationLoss
from megaclip.open_clip_package import import_open_clip
from tests.distributed.harness import run_ranks
from tests.reference import info_nce
from tests.tolerances import (
    BF16_PAYLOAD,
    EXTREME_LOSS,
    GRADIENT,
    VALUE,
    Comparison,
    assert_close,
    compare,
    exceeded,
    unnoticed,
)

Kind = type[ClipLoss] | type[SigLipLoss]
WAYS = list(itertools.product(("ring", "all_gather"), ("feature", "scalar")))


def random_batch(batch: int, embedding: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return unit vectors, equal on every rank. Positives are more similar than random pairs."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, batch, embedding, generator=generator, dtype=torch.float64)
    return F.normalize(x, dim=1).to(dtype), F.normalize(x + noise, dim=1).to(dtype)


def sigmoid_loss(x: Tensor, y: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return SigLIP's equation 1 over the whole matrix, written as its pseudocode. logsigmoid is always exact."""
    signs = 2 * torch.eye(len(x), dtype=x.dtype) - 1
    return -F.logsigmoid(signs * (alpha * x @ y.T + beta)).sum() / len(x)


def oracle(kind: Kind, *arguments: Tensor) -> list[Tensor]:
    """Return the loss of the whole batch and the gradients of images, texts, scale and bias (SigLipLoss), float64."""
    if kind is ClipLoss:
        return list(info_nce(*arguments))
    leaves = [tensor.detach().double().requires_grad_() for tensor in arguments]
    loss = sigmoid_loss(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def comparisons(
    kind: Kind,
    whole: tuple[Tensor, Tensor],
    scalars: Sequence[Tensor],
    expected: list[Tensor],
    *,
    group: Any = None,
    magnified: float = 1,
    **options: Any,
) -> list[Comparison]:
    """Compare a loss on this rank's part of the batch with `expected`, the result of `oracle`.

    scalars: the scale and, for SigLipLoss, the bias. magnified: factor by which this case magnifies rounding errors in
    addition to the table of bounds.
    """
    rank, world_size, dtype = group_rank(group), group_size(group), whole[0].dtype
    local = [features.chunk(world_size)[rank].clone().requires_grad_() for features in whole]
    leaves = [scalar.clone().requires_grad_() for scalar in scalars]
    loss = kind(group=group, **options)(*local, *leaves)
    loss.backward()
    case = f"with {kind.__name__}, {options}, W={world_size}, b={len(local[0])}, {dtype}"
    found = [compare(loss, expected[0], VALUE[dtype].magnified(magnified), f"loss {case}")]
    for name, features, wanted in zip(("image", "text"), local, expected[1:3], strict=True):
        mine, bound = world_size * wanted.chunk(world_size)[rank], GRADIENT[dtype].magnified(magnified)
        found.append(compare(features.grad, mine, bound, f"{name} gradient {case}"))
    for name, leaf, wanted in zip(("logit_scale", "logit_bias"), leaves, expected[3:], strict=False):
        bound, size = VALUE[dtype], None
        if kind is ClipLoss:  # a mean of p_ij * (s_ij - s_ii): terms of size 1, which cancel
            bound, size = GRADIENT[torch.promote_types(dtype, torch.float32)], 1
        what, wanted = f"{name} gradient {case}", wanted.reshape(leaf.shape)
        found.append(compare(leaf.grad, wanted, bound.magnified(magnified), what, size=size))
    return found


def in_every_way(kind: Kind, whole: tuple[Tensor, Tensor], *scalars: Tensor, **options: Any) -> list[str]:
    expected = oracle(kind, *whole, *scalars)
    return [
        problem
        for exchange, reduction in WAYS
        for problem in exceeded(
            comparisons(kind, whole, scalars, expected, exchange=exchange, reduction=reduction, **options)
        )
    ]


# ------------------------------------------------------------------------------------------ cases, run on every rank


def check_sizes_and_dtypes() -> list[str]:
    found = []
    for batch, embedding, tile_budget_mib in ((1, 3, 128), (5, 7, 128), (63, 16, 0.02), (23, 33, 0.005)):
        whole = random_batch(batch * group_size(), embedding, torch.float64)
        for scale in (torch.tensor(14.3), torch.tensor([3.0])):
            found += in_every_way(ClipLoss, whole, scale.double(), tile_budget_mib=tile_budget_mib)
        for scale, bias in ((10.0, -10.0), (100.0, 3.0), (1.0, 0.0)):
            tensors = torch.tensor(scale).double(), torch.tensor([bias]).double()
            found += in_every_way(SigLipLoss, whole, *tensors, tile_budget_mib=tile_budget_mib)
    images, _ = random_batch(5 * group_size(), 7, torch.float64)
    # Each positive is the match of another row. The losses are close to the scale, where log(1 + exp(v)) is nearly v.
    found += in_every_way(ClipLoss, (images, images.roll(1, dims=0)), torch.tensor(22.0).double())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = random_batch(17 * group_size(), 32, dtype)
        for scale in (14.3, 100.0):
            found += in_every_way(ClipLoss, whole, torch.tensor([scale]), tile_budget_mib=0.005)
        found += in_every_way(SigLipLoss, whole, torch.tensor([10.0]), torch.tensor(-5.0), tile_budget_mib=0.005)
    return found


def check_extreme_scales_and_vectors() -> list[str]:
    """Check scale 1000, and batches whose similarities are all 1, -1 or 0, so that gradients cancel."""
    x, y = random_batch(6 * group_size(), 8, torch.float64)
    same = x[:1].expand_as(x).contiguous()
    batches = {"random": (x, y), "identical": (same, same), "opposite": (same, -same), "zero": (x, torch.zeros_like(x))}
    thousand, found = torch.tensor(1000.0).double(), []
    for name, (images, texts) in batches.items():
        for scale in (100.0, 1000.0):
            # exp(scale*s) magnifies rounding errors by the scale. Gradients of that size that cancel magnify them
            # again. These gradients are compared relative to 1e-3, the smallest size. The table assumes a scale of up
            # to 100.
            magnified = scale if name == "random" else scale**2 * 1e3 / 100
            problems = in_every_way(ClipLoss, (images, texts), torch.tensor(scale).double(), magnified=magnified)
            found += [f"{name}: {problem}" for problem in problems]
        if name != "random":
            found += in_every_way(SigLipLoss, (images, texts), thousand, torch.tensor(-10.0).double())
        whole = images.float(), texts.float()
        expected = info_nce(*whole, thousand)
        for exchange, reduction in WAYS:
            local = [features.chunk(group_size())[group_rank()].clone().requires_grad_() for features in whole]
            loss = ClipLoss(exchange=exchange, reduction=reduction)(*local, torch.tensor(1000.0))
            loss.backward()
            # The rounding error of a logit 1000*s is 1000 times that of s. Losses are differences of logits.
            what = f"{name} float32 at scale 1000"
            found += exceeded([compare(loss, expected.loss, EXTREME_LOSS, what, size=1000)])
            if not local[0].grad.isfinite().all():
                found.append(f"{what}: the gradient is not finite")
    return found


def check_that_wrong_scales_are_noticed() -> list[str]:
    """Check that the comparison detects the mistakes of published code (docs/mathematics.md, reduction contract)."""
    whole, size = random_batch(4 * group_size(), 8, torch.float64), group_size()
    found = []
    for kind, values in ((ClipLoss, (5.0,)), (SigLipLoss, (5.0, -2.0))):
        scalars = [torch.tensor(value).double() for value in values]
        right = oracle(kind, *whole, *scalars)
        wrong = {
            f"scalar {place}": oracle(
                kind, *whole, *(s * (1 + 1e-9) if n == place else s for n, s in enumerate(scalars))
            )
            for place in range(len(scalars))
        }
        if size > 1:
            factors = (size, 1 / size, 1 / size, size, size)
            for place, value in enumerate(right):
                wrong[f"result {place}"] = [*right[:place], value * factors[place], *right[place + 1 :]]
        for name, expected in wrong.items():
            found += unnoticed(comparisons(kind, whole, scalars, expected), f"{kind.__name__}, a wrong {name}")
    return found


def check_trainer_arguments() -> list[str]:
    """Check the arguments of open_clip's trainer: logit_bias, output_dict, a scaled loss, and a scale of shape (1,)."""
    whole = random_batch(4 * group_size(), 8, torch.float32)
    x, y = (features.chunk(group_size())[group_rank()].clone().requires_grad_() for features in whole)
    bias, scale = torch.tensor(-10.0, requires_grad=True), torch.tensor([10.0], requires_grad=True)
    outputs = ClipLoss()(x, y, logit_scale=scale, logit_bias=bias, output_dict=True)
    (outputs["contrastive_loss"] * 65536).backward()
    expected = info_nce(*whole, scale)
    found = []
    if list(outputs) != ["contrastive_loss"] or bias.grad != 0:
        found.append(f"outputs {list(outputs)}, bias gradient {bias.grad}")
    bound = GRADIENT[torch.float32]
    got = scale.grad.squeeze() / 65536
    found += exceeded([compare(got, expected.d_logit_scale, bound, "scaled logit_scale", size=1)])
    mine = expected.d_image.chunk(group_size())[group_rank()] * group_size()
    return found + exceeded([compare(x.grad / 65536, mine, bound, "scaled features")])


def expect_same_error(build: Any, text: str) -> list[str]:
    """Return a problem unless `build` raises a ValueError that contains `text`."""
    try:
        build()
    except ValueError as error:
        return [] if text in str(error) else [f"rank {dist.get_rank()} raised {error!r}, not {text!r}"]
    return [f"rank {dist.get_rank()} did not raise {text!r}"]


def check_errors() -> list[str]:
    """Check that a mistake on one rank raises a ValueError on all ranks."""
    good, is_last = torch.randn(4, 5), group_rank() == group_size() - 1

    def called(*wrong: Any, kind: Kind = ClipLoss, **settings: Any) -> Callable[[], Any]:
        """Return a call of the loss, on the last rank with these arguments instead of the first of correct ones."""
        correct = (good, good, 10.0)
        return lambda: kind(**settings if is_last else {})(*((*wrong, *correct[len(wrong) :]) if is_last else correct))

    def no_gradients() -> Tensor:
        return ClipLoss()(torch.randn(4, 5, requires_grad=not is_last), good, 10.0)

    def other_teacher() -> Tensor:
        return DistillationLoss()(good, good, 10.0, good, torch.randn(4, 6) if is_last else good, 10.0)

    cases = [
        (called(None, kind=SigLipLoss), "image_features is a NoneType on rank"),
        (called(good, good, None, kind=SigLipLoss), "logit_scale is a NoneType on rank"),
        (called(good, good, [10.0], kind=SigLipLoss), "logit_scale is a list on rank"),
        (called(good, good, 10.0, "-10", kind=SigLipLoss), "logit_bias is a str on rank"),
        (called(good, good, 10.0, torch.zeros(2), kind=SigLipLoss), "logit_bias has shape (2,) on rank"),
        (called(good, good, np.ones(2)), "logit_scale is a ndarray on rank"),  # it has a method __float__
        (called(good, (good,)), "text_features is a tuple on rank"),
        (called(good, good.to_sparse()), "torch.sparse_coo on cpu on rank"),
        (called(good, torch.randn(4, 5, device="meta")), "torch.strided on meta on rank"),
        (called(good, torch.randn(4, 6)), "shapes (4, 5) and (4, 6) on rank"),
        (called(good, good, torch.ones(2)), "logit_scale has shape (2,) on rank"),
    ]
    if group_size() > 1:
        shapes = [f"({rows}, 5) torch.float32 (CPU) on rank {rank}" for rows, rank in ((4, 0), (3, group_size() - 1))]
        cases += [
            (called(good[:3], good[:3]), " and ".join(shapes)),
            (called(good.bfloat16(), good.bfloat16()), "torch.bfloat16 (CPU) on rank"),
            (no_gradients, "requires_grad of the loss is True on rank 0 and False on"),
            (other_teacher, "teacher_shapes of the loss is [(4, 5), (4, 5)] on rank 0 and"),
        ]
        for kind in (ClipLoss, SigLipLoss):
            call = called(kind=kind, exchange="ring", reduction="feature")
            cases.append((call, "exchange of the loss is 'auto' on rank 0 and 'ring' on rank"))
    nested = torch.nested.nested_tensor([good] * 2)  # PyTorch itself would raise a RuntimeError
    with pytest.raises((RuntimeError, MegaclipError)):
        called(good, nested)()
    return [problem for call, text in cases for problem in expect_same_error(call, text)]


def check_bf16_payload() -> list[str]:
    """Check that features exact in bfloat16 arrive unchanged, and that float64 gradients are rounded to bfloat16."""
    found = []
    for loss_class, arguments in (
        (ClipLoss, (torch.tensor(9.0).double(),)),
        (SigLipLoss, (torch.tensor(9.0).double(),)),
    ):
        x, y = (features.bfloat16().double() for features in random_batch(20 * group_size(), 7, torch.float64))
        for exchange, reduction in WAYS:
            results = []
            for payload in ("auto", "bf16"):
                local = [f.chunk(group_size())[group_rank()].clone().requires_grad_() for f in (x, y)]
                loss = loss_class(exchange=exchange, reduction=reduction, payload=payload)(*local, *arguments)
                loss.backward()
                results.append((loss.detach(), torch.stack([local[0].grad, local[1].grad])))
            (value, gradient), (rounded_value, rounded_gradient) = results
            rounding = compare(rounded_gradient, gradient, BF16_PAYLOAD, "gradients that travel in bfloat16")
            travels = reduction == "feature" and group_size() > 1
            found += exceeded([rounding])
            if not torch.equal(value, rounded_value) or (rounding.error > 1e-5) != travels:
                found.append(f"{loss_class.__name__} {exchange} {reduction}: {value}, {rounded_value}, {rounding}")
    return found


def check_everything() -> list[str]:
    checks = [
        check_sizes_and_dtypes,
        check_extreme_scales_and_vectors,
        check_that_wrong_scales_are_noticed,
        check_trainer_arguments,
        check_bf16_payload,
        check_errors,
    ]
    checks += [check_a_subgroup, check_copies] if group_size() == 3 else []
    return [problem for check in checks for problem in check()]


def check_a_subgroup() -> list[str]:
    """Check a group of ranks 0 and 2 of three. Rank 1 gets an error."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        features = torch.randn(2, 3)
        return expect_same_error(lambda: ClipLoss(group=group)(features, features, torch.tensor(1.0)), "not a member")
    whole, scale = random_batch(10, 7, torch.float64), torch.tensor(9.0).double()
    return in_every_way(ClipLoss, whole, scale, group=group)


def check_torch_distributed_alone() -> list[str]:
    """Check a program that initialised torch.distributed but not deepspeed.comm."""
    dist.comm.cdb = None
    assert not dist.is_initialized() and torch.distributed.is_initialized()
    return in_every_way(ClipLoss, random_batch(8, 7, torch.float64), torch.tensor(9.0).double())


def check_copies() -> list[str]:
    """Check that copies of losses in a subgroup of ranks compute the same loss as the originals, in the same group.

    Moving averages of weights copy the module that contains the loss, but process groups cannot be copied.
    """
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    group = pairs[dist.get_rank() // 2]
    x, y = random_batch(4, 5, torch.float64, seed=dist.get_rank())
    found = []
    for given in (group, resolve(group)):
        averaged = AveragedModel(nn.ModuleList([ClipLoss(group=given), SigLipLoss(group=given)]))
        for original, copied in zip(averaged.module, copy.deepcopy(averaged).module, strict=True):
            if copied is original or resolve(copied.group).handle is not group:
                found.append(f"{type(copied).__name__} was not copied, or its copy has another group")
            if copied(x, y, 3.0) != original(x, y, 3.0):
                found.append(f"the copy of {type(copied).__name__} computes another loss")
        originals = FastClipLoss("fastclip_v2", samples=12, group=given, state_dtype=torch.float64)
        losses = [originals, copy.deepcopy(originals)]
        if losses[0].state.values.data_ptr() == losses[1].state.values.data_ptr():
            found.append("the copy of FastClipLoss shares its state")
        ids = torch.arange(4) + 4 * group_rank(group)
        features = x.requires_grad_()
        for loss in losses:
            loss(features, y, ids=ids, epoch=0.0).backward()
            loss.step()
        if not torch.equal(*(loss.state.values.nan_to_num(-1.0) for loss in losses)):
            found.append("the copy of FastClipLoss has another state after a step")
    return found


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_one_process_on_the_whole_batch(world_size: int) -> None:
    assert run_ranks(check_everything, world_size) == [[]] * world_size


def test_a_program_that_initialised_torch_distributed_only() -> None:
    assert run_ranks(check_torch_distributed_alone, 2) == [[]] * 2


def test_without_torch_distributed() -> None:
    assert not torch.distributed.is_initialized()
    whole = random_batch(9, 7, torch.float64)
    assert in_every_way(ClipLoss, whole, torch.tensor([9.0]).double(), tile_budget_mib=0.001) == []


def test_autocast_does_not_reach_the_tiles() -> None:
    whole = random_batch(9, 7, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_every_way(ClipLoss, whole, torch.tensor(50.0)) == []


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
@pytest.mark.parametrize("bias", [None, -3.0])
@pytest.mark.parametrize("numbers", [True, False])
def test_loss_and_gradients_equal_open_clips(name: str, bias: float | None, numbers: bool) -> None:
    """In one process, open_clip's loss and ours get equal arguments. Scale and bias may be plain numbers."""
    results = []
    for kind in (getattr(import_open_clip().loss, name), {"ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}[name]):
        leaves = [features.requires_grad_() for features in random_batch(9, 7, torch.float64)]
        scalars: list[Any] = [5.0, bias]
        if not numbers:
            scalars = [None if value is None else torch.tensor(value, requires_grad=True) for value in scalars]
        outputs = kind()(*leaves, logit_scale=scalars[0], logit_bias=scalars[1], output_dict=True)
        outputs["contrastive_loss"].backward()
        assert list(outputs) == ["contrastive_loss"]
        leaves += [scalar for scalar in scalars if isinstance(scalar, Tensor)]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        results.append([outputs["contrastive_loss"], *gradients])
    for theirs, ours in zip(*results, strict=True):
        assert_close(ours, theirs, GRADIENT[torch.float64], size=1)  # ClipLoss does not depend on the bias


def test_the_value_is_float32_for_bfloat16_features() -> None:
    x, y = random_batch(9, 7, torch.bfloat16)
    loss = SigLipLoss()(x, y, torch.tensor(10.0), torch.tensor(-10.0))
    assert loss.dtype == torch.float32 and loss.bfloat16().float() != loss


@pytest.mark.parametrize("kind", [ClipLoss, SigLipLoss])
def test_arguments_of_open_clips_constructor_are_refused_with_their_replacement(kind: type) -> None:
    for name in inspect.signature(getattr(import_open_clip().loss, kind.__name__)).parameters:
        with pytest.raises(TypeError, match=rf"takes none of open_clip's {name}: .* write {kind.__name__}\(\)"):
            kind(**{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'exchnage'"):
        kind(exchnage="ring")


@pytest.mark.parametrize("kind", [ClipLoss, SigLipLoss])
def test_a_trainer_may_divide_the_loss_in_place(kind: type) -> None:
    x, y = (features.requires_grad_() for features in random_batch(9, 7, torch.float32))
    loss = kind()(x, y, torch.tensor(5.0))
    loss /= 4
    loss.backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
