"""Compare SigLipLoss on 1, 2 and 3 ranks with the sigmoid loss of one process on the whole batch.

Every combination of exchange and reduction is compared in float64: the loss on every rank, and all gradients under the
reduction contract (features times W, logit_scale and logit_bias unscaled). Other tests call our losses and open_clip's
losses with equal arguments.
"""

import inspect
import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import ClipLoss, SigLipLoss
from megaclip.losses.costs import LOSS_COSTS
from megaclip.open_clip_package import import_open_clip
from tests.distributed.harness import run_ranks
from tests.distributed.test_clip_loss import Towers, expect_same_error, random_batch
from tests.tolerances import GRADIENT, VALUE, Comparison, assert_close, compare, exceeded, unnoticed

WAYS = list(itertools.product(("ring", "all_gather"), ("feature", "scalar")))


class Whole(NamedTuple):
    """Loss of the whole batch and its gradients, float64."""

    loss: Tensor
    d_image: Tensor
    d_text: Tensor
    d_logit_scale: Tensor
    d_logit_bias: Tensor


def sigmoid_loss(x: Tensor, y: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return equation 1 over the whole matrix, written as its pseudocode. logsigmoid is exact for any argument."""
    signs = 2 * torch.eye(len(x), dtype=x.dtype) - 1
    return -F.logsigmoid(signs * (alpha * x @ y.T + beta)).sum() / len(x)


def oracle(*arguments: Tensor) -> Whole:
    leaves = [tensor.detach().double().requires_grad_() for tensor in arguments]
    loss = sigmoid_loss(*leaves)
    return Whole(loss.detach(), *torch.autograd.grad(loss, leaves))


def comparisons(
    whole: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor, expected: Whole, **options
) -> list[Comparison]:
    """Compare SigLipLoss on this rank's part of the batch with `expected`."""
    rank, world_size = group_rank(), group_size()
    local = [features.chunk(world_size)[rank].clone().requires_grad_() for features in whole]
    scalars = [scale.clone().requires_grad_(), bias.clone().requires_grad_()]
    loss = SigLipLoss(**options)(*local, *scalars)
    loss.backward()
    mine, dtype = slice(rank * len(local[0]), (rank + 1) * len(local[0])), whole[0].dtype
    pairs = (
        ("loss", loss, expected.loss, VALUE),
        ("image gradient", local[0].grad, world_size * expected.d_image[mine], GRADIENT),
        ("text gradient", local[1].grad, world_size * expected.d_text[mine], GRADIENT),
        ("logit_scale gradient", scalars[0].grad, expected.d_logit_scale, VALUE),
        ("logit_bias gradient", scalars[1].grad, expected.d_logit_bias, VALUE),
    )
    case = f"with {options}, W={world_size}, b={len(local[0])}, {dtype}"
    return [compare(got, wanted, bounds[dtype], f"{name} {case}") for name, got, wanted, bounds in pairs]


def in_every_way(whole: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor, **options) -> list[str]:
    expected = oracle(*whole, scale, bias)
    return [
        problem
        for exchange, reduction in WAYS
        for problem in exceeded(
            comparisons(whole, scale, bias, expected, exchange=exchange, reduction=reduction, **options)
        )
    ]


# ------------------------------------------------------------------------------------------ cases, run on every rank


def check_dtypes_sizes_and_extremes() -> list[str]:
    found = []
    for batch, embedding, tile_budget_mib in ((1, 3, 128), (5, 7, 128), (63, 16, 0.02), (70, 33, 0.005)):
        whole = random_batch(batch * group_size(), embedding, torch.float64)
        for scale, bias in ((10.0, -10.0), (100.0, 3.0), (1.0, 0.0)):
            tensors = torch.tensor(scale).double(), torch.tensor([bias]).double()
            found += in_every_way(whole, *tensors, tile_budget_mib=tile_budget_mib)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = random_batch(17 * group_size(), 32, dtype)
        found += in_every_way(whole, torch.tensor([10.0]), torch.tensor(-5.0), tile_budget_mib=0.005)
    same = random_batch(1, 8, torch.float64)[0].expand(6 * group_size(), 8).contiguous()
    for images, texts in ((same, same), (same, -same), (same, torch.zeros_like(same))):
        found += in_every_way((images, texts), torch.tensor(1000.0).double(), torch.tensor(-10.0).double())
    return found


def check_that_wrong_scales_are_noticed() -> list[str]:
    whole, size = random_batch(4 * group_size(), 8, torch.float64), group_size()
    scale, bias = torch.tensor(5.0).double(), torch.tensor(-2.0).double()
    right = oracle(*whole, scale, bias)
    wrong = {"bias": oracle(*whole, scale, bias * (1 + 1e-9)), "scale": oracle(*whole, scale * (1 + 1e-9), bias)}
    if size > 1:
        wrong["mean"] = right._replace(loss=right.loss * size)
        wrong["features"] = right._replace(d_text=right.d_text / size)
        wrong["logit_bias"] = right._replace(d_logit_bias=right.d_logit_bias * size)
    return [
        problem
        for name, w in wrong.items()
        for problem in unnoticed(comparisons(whole, scale, bias, w), f"a wrong {name}")
    ]


def check_under_data_parallel() -> list[str]:
    """Check that parameter gradients after DDP's averaging equal those of one process."""
    images, texts = torch.randn(2, 4 * group_size(), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    serial, bias = Towers(), torch.tensor(-1.0).double()
    sigmoid_loss(*serial(images, texts), bias).backward()
    found = []
    for exchange, reduction in WAYS:
        parallel = DistributedDataParallel(Towers())
        local = (whole.chunk(group_size())[group_rank()] for whole in (images, texts))
        SigLipLoss(exchange=exchange, reduction=reduction)(*parallel(*local), bias).backward()
        for (name, got), wanted in zip(parallel.module.named_parameters(), serial.parameters(), strict=True):
            what = f"{name} under DDP with {exchange}, {reduction}"
            found += exceeded([compare(got.grad, wanted.grad, GRADIENT[torch.float64], what)])
    return found


def check_products_and_one_pass() -> list[str]:
    """Check that the forward pass computes all products: 6 b*B*D with the feature reduction, 8 with scalar.

    With the ring and scalar, a rank's own block serves both sides and saves 2 b*b*D. That case is left out.
    """
    b, embedding, size = 12, 8, group_size()
    found = []
    for exchange, reduction in (("ring", "feature"), ("all_gather", "feature"), ("all_gather", "scalar")):
        expected = LOSS_COSTS["siglip"].products[reduction] * b * b * size * embedding
        x, y = torch.randn(2, b, embedding).unbind()
        x.requires_grad_()
        with FlopCounterMode(display=False) as counter:
            loss = SigLipLoss(exchange=exchange, reduction=reduction)(x, y, torch.tensor(2.0), torch.tensor(-2.0))
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        if (forward, counter.get_total_flops()) != (expected, 0):
            found.append(f"{exchange} + {reduction}: {forward} and {counter.get_total_flops()} operations")
    return found


def check_errors() -> list[str]:
    last, features = group_rank() == group_size() - 1, torch.randn(4, 5)
    bias = torch.zeros(2 if last else 1)
    return expect_same_error(
        lambda: SigLipLoss()(features, features, torch.tensor(1.0), bias), "logit_bias has shape (2,) on rank"
    )


def check_everything() -> list[str]:
    checks = (
        check_dtypes_sizes_and_extremes,
        check_that_wrong_scales_are_noticed,
        check_under_data_parallel,
        check_products_and_one_pass,
        check_errors,
    )
    return [problem for check in checks for problem in check()]


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_one_process_on_the_whole_batch(world_size: int) -> None:
    assert run_ranks(check_everything, world_size) == [[]] * world_size


@pytest.mark.parametrize("bias", [None, -3.0])
def test_loss_and_gradients_equal_open_clips(bias: float | None) -> None:
    """In one process, open_clip's SigLipLoss and our loss get equal arguments."""
    x, y = random_batch(9, 7, torch.float32)
    results = []
    for kind in (import_open_clip().loss.SigLipLoss, SigLipLoss):
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_(), torch.tensor(5.0, requires_grad=True)]
        logit_bias = None if bias is None else torch.tensor(bias, requires_grad=True)
        outputs = kind()(*leaves, logit_bias=logit_bias, output_dict=True)
        (1024 * outputs["contrastive_loss"]).backward()
        assert list(outputs) == ["contrastive_loss"]
        results.append(
            [outputs["contrastive_loss"], *(leaf.grad for leaf in (*leaves, logit_bias) if leaf is not None)]
        )
    for theirs, ours in zip(*results, strict=True):
        assert_close(ours, theirs, VALUE[torch.float32])


def test_the_value_is_float32_for_bfloat16_features() -> None:
    x, y = random_batch(9, 7, torch.bfloat16)
    loss = SigLipLoss()(x, y, torch.tensor(10.0), torch.tensor(-10.0))
    assert loss.dtype == torch.float32 and loss.bfloat16().float() != loss


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
@pytest.mark.parametrize("bias", [None, -3.0])
def test_scale_and_bias_may_be_plain_numbers(name: str, bias: float | None) -> None:
    """Compare with open_clip's losses, which accept plain numbers too."""
    x, y = (features.requires_grad_() for features in random_batch(9, 7, torch.float64))
    theirs = getattr(import_open_clip().loss, name)()(x, y, 5.0, bias)
    ours = {"ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}[name]()(x, y, 5.0, bias)
    assert_close(ours, theirs, VALUE[torch.float64])
    for mine, expected in zip(*(torch.autograd.grad(loss, (x, y)) for loss in (ours, theirs)), strict=True):
        assert_close(mine, expected, GRADIENT[torch.float64])


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
