"""Compare ClipLoss on 1, 2 and 3 ranks with the cross-entropy of one process on the whole batch.

Every combination of exchange and reduction is compared in float64: the loss on every rank, and all gradients under the
reduction contract (features times W, logit_scale unscaled). The functions on the ranks return lists of differences. One
launch per world size runs all of them.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from megaclip.comm.groups import group_rank, group_size, resolve
from megaclip.errors import MegaclipError
from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss
from tests.distributed.harness import run_ranks
from tests.reference import LossAndGrads, info_nce
from tests.tolerances import (
    BF16_PAYLOAD,
    EXTREME_LOSS,
    GRADIENT,
    VALUE,
    Comparison,
    compare,
    exceeded,
    unnoticed,
)

WAYS = list(itertools.product(("ring", "all_gather"), ("feature", "scalar")))


def random_batch(batch: int, embedding: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return unit vectors, equal on every rank. Positives are more similar than random pairs."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, batch, embedding, generator=generator, dtype=torch.float64)
    return F.normalize(x, dim=1).to(dtype), F.normalize(x + noise, dim=1).to(dtype)


def comparisons(
    whole: tuple[Tensor, Tensor],
    scale: Tensor,
    expected: LossAndGrads,
    *,
    group: Any = None,
    magnified: float = 1,
    **options: Any,
) -> list[Comparison]:
    """Compare ClipLoss on this rank's part of the batch with `expected`.

    magnified: factor by which this case magnifies rounding errors in addition to the table of bounds.
    """
    rank, world_size = group_rank(group), group_size(group)
    local = [features.chunk(world_size)[rank].clone().requires_grad_() for features in whole]
    logit_scale = scale.clone().requires_grad_()
    loss = ClipLoss(group=group, **options)(*local, logit_scale)
    loss.backward()
    dtype = whole[0].dtype
    mine = slice(rank * len(local[0]), (rank + 1) * len(local[0]))
    pairs = (
        ("loss", loss, expected.loss, VALUE),
        ("image gradient", local[0].grad, world_size * expected.d_image[mine], GRADIENT),
        ("text gradient", local[1].grad, world_size * expected.d_text[mine], GRADIENT),
    )
    case = f"with {options}, W={world_size}, b={len(local[0])}, {dtype}"
    found = [
        compare(got, wanted, bounds[dtype].magnified(magnified), f"{name} {case}")
        for name, got, wanted, bounds in pairs
    ]
    # A mean of p_ij * (s_ij - s_ii): terms of size 1, which cancel.
    bound, wanted = GRADIENT[torch.promote_types(dtype, torch.float32)], expected.d_logit_scale.reshape(scale.shape)
    return [
        *found,
        compare(logit_scale.grad, wanted, bound.magnified(magnified), f"logit_scale gradient {case}", size=1),
    ]


def in_every_way(whole: tuple[Tensor, Tensor], scale: Tensor, **options: Any) -> list[str]:
    expected = info_nce(*whole, scale)
    return [
        problem
        for exchange, reduction in WAYS
        for problem in exceeded(comparisons(whole, scale, expected, exchange=exchange, reduction=reduction, **options))
    ]


# ------------------------------------------------------------------------------------------ cases, run on every rank


def check_float64() -> list[str]:
    found = []
    for batch, embedding, tile_budget_mib in ((1, 3, 128), (5, 7, 128), (63, 16, 0.02), (70, 33, 0.005)):
        whole = random_batch(batch * group_size(), embedding, torch.float64)
        for scale in (torch.tensor(14.3), torch.tensor([3.0])):
            found += in_every_way(whole, scale.double(), tile_budget_mib=tile_budget_mib)
    images, _ = random_batch(5 * group_size(), 7, torch.float64)
    # Each positive is the match of another row. The losses are close to the scale, where log(1 + exp(v)) is nearly v.
    found += in_every_way((images, images.roll(1, dims=0)), torch.tensor(22.0).double())
    return found


def check_other_dtypes() -> list[str]:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = random_batch(17 * group_size(), 32, dtype)
        for scale in (14.3, 100.0):
            found += in_every_way(whole, torch.tensor([scale]), tile_budget_mib=0.005)
    return found


def check_extreme_scales_and_vectors() -> list[str]:
    """Check scale 1000, and batches whose similarities are all 1, -1 or 0, so that gradients cancel."""
    x, y = random_batch(6 * group_size(), 8, torch.float64)
    same = x[:1].expand_as(x).contiguous()
    batches = {"random": (x, y), "identical": (same, same), "opposite": (same, -same), "zero": (x, torch.zeros_like(x))}
    found = []
    for name, (images, texts) in batches.items():
        for scale in (100.0, 1000.0):
            # exp(scale*s) magnifies rounding errors by the scale. Gradients of that size that cancel magnify them
            # again. These gradients are compared relative to 1e-3, the smallest size. The table assumes a scale of up
            # to 100.
            magnified = scale if name == "random" else scale**2 * 1e3 / 100
            found += [
                f"{name}: {p}" for p in in_every_way((images, texts), torch.tensor(scale).double(), magnified=magnified)
            ]
        whole = images.float(), texts.float()
        expected = info_nce(*whole, torch.tensor(1000.0))
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
    whole, scale, world_size = (
        random_batch(4 * group_size(), 8, torch.float64),
        torch.tensor(5.0).double(),
        group_size(),
    )
    right = info_nce(*whole, scale)
    wrong = {"temperature": info_nce(*whole, scale * (1 + 1e-9)), "loss": right._replace(loss=right.loss * world_size)}
    if world_size > 1:
        wrong["image"] = right._replace(d_image=right.d_image / world_size)
        wrong["text"] = right._replace(d_text=right.d_text / world_size)
        wrong["logit_scale"] = right._replace(d_logit_scale=right.d_logit_scale * world_size)
    else:
        del wrong["loss"]
    return [
        problem
        for name, expected in wrong.items()
        for problem in unnoticed(comparisons(whole, scale, expected), f"a wrong {name}")
    ]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.image = nn.Parameter(torch.randn(6, 5, generator=generator, dtype=torch.float64))
        self.text = nn.Parameter(torch.randn(6, 5, generator=generator, dtype=torch.float64))
        self.logit_scale = nn.Parameter(torch.tensor([1.3], dtype=torch.float64))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        encoded = F.normalize(images @ self.image, dim=1), F.normalize(texts @ self.text, dim=1)
        return *encoded, self.logit_scale.exp()


def check_under_data_parallel() -> list[str]:
    """Check that parameter gradients after DDP's averaging, with `.exp()` of the log scale, equal one process."""
    images, texts = torch.randn(2, 4 * group_size(), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    serial = Towers()
    x, y, alpha = serial(images, texts)
    logits, labels = alpha * x @ y.T, torch.arange(len(x))
    ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
    found = []
    for exchange, reduction in WAYS:
        parallel = DistributedDataParallel(Towers())
        local = (whole.chunk(group_size())[group_rank()] for whole in (images, texts))
        ClipLoss(exchange=exchange, reduction=reduction)(*parallel(*local)).backward()
        for (name, got), wanted in zip(parallel.module.named_parameters(), serial.parameters(), strict=True):
            what = f"{name} under DDP with {exchange}, {reduction}"
            found += exceeded([compare(got.grad, wanted.grad, GRADIENT[torch.float64], what)])
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
    last = group_rank() == group_size() - 1
    scale = torch.tensor(1.0)

    def shorter_batch() -> None:
        features = torch.randn(3 if last else 4, 5)
        ClipLoss()(features, features, scale)

    def other_dtype() -> None:
        features = torch.randn(4, 5, dtype=torch.bfloat16 if last else torch.float32)
        ClipLoss()(features, features, scale)

    def unequal_towers() -> None:
        ClipLoss()(torch.randn(4, 5), torch.randn(4, 6 if last else 5), scale)

    def two_scales() -> None:
        ClipLoss()(torch.randn(4, 5), torch.randn(4, 5), torch.ones(2) if last else scale)

    def other_features(features: Any) -> Callable[[], Any]:
        good = torch.randn(4, 5)
        return lambda: ClipLoss()(good, features if last else good, 10.0)

    def no_images() -> None:
        SigLipLoss()(None if last else torch.randn(4, 5), torch.randn(4, 5), 10.0)

    def no_number(scale: Any, bias: Any = None) -> Callable[[], Any]:
        good = torch.randn(4, 5)
        return lambda: SigLipLoss()(good, good, scale if last else 10.0, bias if last else None)

    def other_way(loss: type[ClipLoss | SigLipLoss]) -> Callable[[], Any]:
        way = {"exchange": "ring", "reduction": "feature"} if last else {}
        return lambda: loss(**way)(torch.randn(4, 5), torch.randn(4, 5), 10.0)

    found = expect_same_error(no_images, "image_features is a NoneType on rank")
    found += expect_same_error(no_number(None), "logit_scale is a NoneType on rank")
    found += expect_same_error(no_number([10.0]), "logit_scale is a list on rank")
    found += expect_same_error(no_number(10.0, "-10"), "logit_bias is a str on rank")
    found += expect_same_error(no_number(np.ones(2)), "logit_scale is a ndarray on rank")  # it has a method __float__
    found += expect_same_error(other_features((torch.randn(4, 5),)), "text_features is a tuple on rank")
    found += expect_same_error(other_features(torch.randn(4, 5).to_sparse()), "torch.sparse_coo on cpu on rank")
    found += expect_same_error(other_features(torch.randn(4, 5, device="meta")), "torch.strided on meta on rank")
    found += expect_same_error(unequal_towers, "shapes (4, 5) and (4, 6) on rank")
    found += expect_same_error(two_scales, "logit_scale has shape (2,) on rank")
    nested = torch.nested.nested_tensor([torch.randn(4, 5)] * 2)  # PyTorch itself would raise a RuntimeError
    with pytest.raises((RuntimeError, MegaclipError)):
        other_features(nested)()
    if group_size() > 1:
        found += expect_same_error(
            shorter_batch,
            f"(4, 5) torch.float32 (CPU) on rank 0 and (3, 5) torch.float32 (CPU) on rank {group_size() - 1}",
        )
        found += expect_same_error(other_dtype, "torch.bfloat16 (CPU) on rank")
        for loss in (ClipLoss, SigLipLoss):
            differing = "are auto, auto, auto on rank 0 and ring, feature, auto on rank"
            found += expect_same_error(other_way(loss), differing)
    return found


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
    checks = (
        check_float64,
        check_other_dtypes,
        check_extreme_scales_and_vectors,
        check_that_wrong_scales_are_noticed,
        check_under_data_parallel,
        check_trainer_arguments,
        check_bf16_payload,
        check_errors,
    )
    return [problem for check in checks for problem in check()]


def check_a_subgroup() -> list[str]:
    """Check a group of ranks 0 and 2 of three. Rank 1 gets an error."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        features = torch.randn(2, 3)
        return expect_same_error(lambda: ClipLoss(group=group)(features, features, torch.tensor(1.0)), "not a member")
    whole, scale = random_batch(10, 7, torch.float64), torch.tensor(9.0).double()
    return in_every_way(whole, scale, group=group)


def check_torch_distributed_alone() -> list[str]:
    """Check a program that initialised torch.distributed but not deepspeed.comm."""
    dist.comm.cdb = None
    assert not dist.is_initialized() and torch.distributed.is_initialized()
    return in_every_way(random_batch(8, 7, torch.float64), torch.tensor(9.0).double())


# --------------------------------------------------------------------------------------------------------------- tests


def check_copies() -> list[str]:
    """Check that copies of losses in a subgroup of ranks compute the same loss as the originals, in the same group."""
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


def test_copies_keep_their_group() -> None:
    """Moving averages of weights copy the module that contains the loss, but process groups cannot be copied."""
    assert run_ranks(check_copies, 3) == [[]] * 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_one_process_on_the_whole_batch(world_size: int) -> None:
    assert run_ranks(check_everything, world_size) == [[]] * world_size


def test_a_subgroup_of_ranks() -> None:
    assert run_ranks(check_a_subgroup, 3) == [[]] * 3


def test_a_program_that_initialised_torch_distributed_only() -> None:
    assert run_ranks(check_torch_distributed_alone, 2) == [[]] * 2


def test_without_torch_distributed() -> None:
    assert not torch.distributed.is_initialized()
    assert in_every_way(random_batch(9, 7, torch.float64), torch.tensor([9.0]).double(), tile_budget_mib=0.001) == []


def test_autocast_does_not_reach_the_tiles() -> None:
    whole = random_batch(9, 7, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_every_way(whole, torch.tensor(50.0)) == []


@pytest.mark.parametrize("options", [{"exchange": "gather"}, {"reduction": "ring"}, {"payload": "fp8"}])
def test_unknown_choices_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=r"(exchange|reduction|payload): Input should be 'auto'.*, got '(gather|ring|fp8)'"
    ):
        ClipLoss(**options)
