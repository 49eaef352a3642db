"""Compare ids, negatives, one direction and weights of ClipLoss and SigLipLoss with autograd on the whole matrix.

The oracle forms the matrices of one process and masks them. It uses none of the tile code. Rows of settings that cover
all pairs replace the grid.
"""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import ClipLoss, SigLipLoss
from megaclip.ops.types import NO_NEGATIVE
from tests.distributed.checks import covering_rows
from tests.distributed.harness import run_ranks
from tests.distributed.test_clip_loss import expect_same_error, random_batch
from tests.distributed.test_compiled_losses import compiled
from tests.tolerances import BF16_PAYLOAD, GRADIENT, VALUE, compare, exceeded


class Case(NamedTuple):
    """Settings of one comparison."""

    kind: type[ClipLoss] | type[SigLipLoss]
    exchange: str
    reduction: str
    ids: str
    negatives: str
    """"none", "shared" or "private", with a further "ids" if the negatives have ids."""
    symmetric: bool
    weighted: bool
    same_side: bool
    margin: float | None
    payload: str = "auto"


def is_possible(row: dict[str, Any]) -> bool:
    if row.get("ids") == "ignore" and "ids" in row.get("negatives", ""):
        return False
    if row.get("ids") == "positive" and row.get("margin"):
        return False
    only_clip = not row.get("symmetric", True) or row.get("weighted") or row.get("same_side") or row.get("margin")
    return not only_clip or row.get("kind") is not SigLipLoss


CASES = [
    Case(**row)
    for row in covering_rows(
        is_possible,
        kind=(ClipLoss, SigLipLoss),
        exchange=("ring", "all_gather"),
        reduction=("feature", "scalar"),
        ids=("ignore", "mask", "positive"),
        negatives=("none", "shared", "shared ids", "private", "private ids"),
        symmetric=(True, False),
        weighted=(False, True),
        same_side=(False, True),
        margin=(None, 0.01),
    )
]


class Batch(NamedTuple):
    """The batch of all ranks; negatives follow one another in the order of the ranks."""

    x: Tensor
    y: Tensor
    ids: Tensor
    negatives: Tensor
    negative_ids: Tensor
    negative_rows: Tensor  # in the whole batch
    weights: Tensor
    counts: list[int]  # negatives of each rank


def batch_of(case: Case, dtype: torch.dtype, local: int) -> Batch:
    """Return a batch that is equal on every rank: a third of the pairs share ids, across ranks too."""
    size, generator = group_size(), torch.Generator().manual_seed(local)
    x, y = random_batch(local * size, 7, dtype)
    counts = [(5, 0, 11)[rank] for rank in range(size)]
    negatives, _ = random_batch(sum(counts), 7, dtype, seed=8)
    rows = torch.cat(
        [rank * local + torch.randint(local, (count,), generator=generator) for rank, count in enumerate(counts)]
    )
    ids = torch.randint(2 * local * size // 3 + 1, (local * size,), generator=generator) * 2**33 - 9
    negative_ids = ids[torch.randint(len(ids), (sum(counts),), generator=generator)]
    negative_ids[::3] = 1
    negative_ids[1::5] = NO_NEGATIVE
    weights = torch.rand(len(x), generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    weights[0] = 0
    return Batch(x, y, ids, negatives, negative_ids, rows, weights, counts)


def oracle(case: Case, batch: Batch, scalars: list[Tensor]) -> list[Tensor]:
    """Return the loss and the gradients of images, texts, negatives and scalars, float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (batch.x, batch.y, batch.negatives, *scalars)]
    x, y, negatives, alpha, *beta = leaves
    logits, own = alpha * x @ y.T, torch.eye(len(x), dtype=torch.bool)
    equal = batch.ids[:, None] == batch.ids if case.ids != "ignore" else own
    others = alpha * x @ negatives.T
    left_out = (
        torch.zeros_like(others, dtype=torch.bool)
        if case.negatives != "none"
        else torch.ones_like(others, dtype=torch.bool)
    )
    if "private" in case.negatives:
        left_out |= torch.arange(len(x))[:, None] != batch.negative_rows
    if "ids" in case.negatives:
        left_out |= (batch.ids[:, None] == batch.negative_ids) | (batch.negative_ids == NO_NEGATIVE)
    masked = equal & ~own if case.ids == "mask" else torch.zeros_like(own)
    positives = equal if case.ids == "positive" else own
    if case.kind is SigLipLoss:
        signs = 2 * positives.double() - 1
        terms = -F.logsigmoid(signs * (logits + beta[0])).masked_fill(masked, 0.0)
        more = -F.logsigmoid(-(others + beta[0])).masked_fill(left_out, 0.0)
        loss = (terms.sum() + more.sum()) / len(x)
    else:
        limit = (x * y).sum(1).detach() + (torch.inf if case.margin is None else case.margin)
        kept = logits.masked_fill(masked, -torch.inf)
        for_rows = kept.masked_fill(x @ y.T > limit[:, None], -torch.inf)
        for_columns = kept.masked_fill(x @ y.T > limit, -torch.inf).T
        left_out |= x @ negatives.T > limit[:, None]
        targets = positives.double() / positives.sum(1, keepdim=True) * logits
        wide = torch.cat([for_rows, others.masked_fill(left_out, -torch.inf)], dim=1)
        row = torch.logsumexp(wide, dim=1) - targets.sum(1)
        column = torch.logsumexp(for_columns, dim=1) - targets.sum(0)
        if case.same_side:
            products = [side @ side.T for side in (x, y)]
            gone = [masked | own | (product > limit[:, None]) for product in products]
            sides = [(alpha * s).masked_fill(out, -torch.inf) for s, out in zip(products, gone, strict=True)]
            row = torch.logsumexp(torch.cat([wide, *sides], dim=1), dim=1) - targets.sum(1)
            column = torch.logsumexp(torch.cat([for_columns, *sides], dim=1), dim=1) - targets.sum(0)
        per_pair = (row + column) / 2 if case.symmetric else row
        loss = (per_pair * batch.weights if case.weighted else per_pair).mean()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients]


def differences(case: Case, dtype: torch.dtype, local: int, compile_: bool = False) -> list[str]:
    """Compare this rank's loss and gradients with the oracle."""
    batch, size, rank = batch_of(case, dtype, local), group_size(), group_rank()
    sums = torch.promote_types(dtype, torch.float32)
    scalars = [torch.tensor(value, dtype=sums) for value in ((9.0,) if case.kind is ClipLoss else (9.0, -3.0))]
    expected = oracle(case, batch, scalars)
    mine, own = slice(rank * local, (rank + 1) * local), slice(sum(batch.counts[:rank]), sum(batch.counts[: rank + 1]))
    parts = (batch.x[mine], batch.y[mine], batch.negatives[own], *scalars)
    leaves = [tensor.clone().requires_grad_() for tensor in parts]
    x, y, negatives, *numbers = leaves
    given: dict[str, Any] = {}
    if case.ids != "ignore":
        given["ids"] = batch.ids[mine]
    if case.negatives != "none":
        given["negatives"] = negatives
        if "private" in case.negatives:
            given["negative_rows"] = batch.negative_rows[own] - rank * local
        if "ids" in case.negatives:
            given["negative_ids"] = batch.negative_ids[own]
    if case.weighted:
        given["weights"] = batch.weights[mine]
    settings = {"exchange": case.exchange, "reduction": case.reduction, "ids": case.ids, "payload": case.payload}
    if case.kind is ClipLoss:
        settings |= {"symmetric": case.symmetric, "same_side": case.same_side, "margin": case.margin}
    function = case.kind(**settings, tile_budget_mib=0.002)
    with torch.no_grad():
        value = function(x, y, *numbers, **given)
    loss = (compiled(function) if compile_ else function)(x, y, *numbers, **given)
    loss.backward()
    wanted = [size * expected[1][mine], size * expected[2][mine], size * expected[3][own], *expected[4:]]
    # Unlike the gradient of a plain batch, which consists of terms that cancel, these are small sums of larger terms.
    bounds = GRADIENT[dtype].magnified(3)
    if case.payload == "bf16":
        bounds = BF16_PAYLOAD.magnified(30)
    found = [
        compare(loss, expected[0], VALUE[dtype] if case.payload == "auto" else bounds, f"loss {case} W={size}", size=1)
    ]
    if not torch.equal(value, loss):
        return [f"the value without gradients is another one, {case}"]
    names = ("image", "text", "negatives", "scale", "bias")
    for name, leaf, gradient in zip(names, leaves, wanted, strict=False):
        got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        found.append(compare(got, gradient, bounds, f"{name} gradient, {case} W={size} {dtype}", size=1))
    return exceeded(found)


def check_cases() -> list[str]:
    found = [problem for case in CASES for problem in differences(case, torch.float64, 6)]
    for case in (
        Case(ClipLoss, "ring", "feature", "mask", "shared ids", True, False, True, None),
        Case(ClipLoss, "all_gather", "scalar", "positive", "private ids", False, True, False, None),
        Case(SigLipLoss, "ring", "scalar", "positive", "shared ids", True, False, False, None),
    ):
        found += differences(case, torch.bfloat16, 5)
        found += differences(case, torch.float64, 1)
        found += differences(case, torch.float64, 4, compile_=True) if group_size() == 3 else []
        found += differences(case._replace(payload="bf16"), torch.float32, 6)
    return found + check_errors()


def check_errors() -> list[str]:
    """Check that arguments of one rank that do not fit raise one error on all ranks."""
    x, scale, ids = torch.randn(4, 5), torch.tensor(1.0), torch.arange(4)
    is_last = group_rank() == group_size() - 1
    cases = [
        ("mask", {}, "ids are missing on rank"),
        ("ignore", {"ids": ids}, "ids are given on rank"),
        ("mask", {"ids": ids[:3] if is_last else ids}, "ids are (3,) torch.int64 on cpu on rank"),
        ("mask", {"ids": ids.float()}, "ids are (4,) torch.float32 on cpu on rank"),
        ("ignore", {"negatives": x[:, :4]}, "negatives are (4, 4) torch.float32 on cpu on rank"),
        ("ignore", {"negative_rows": ids}, "negative_rows are given without negatives"),
        ("ignore", {"negatives": x, "negative_ids": ids}, "negative_ids are given without ids"),
        ("ignore", {"negatives": x, "negative_rows": ids + 1}, "negative_rows are 1 to 4 on rank"),
        ("ignore", {"weights": torch.ones(4).double()}, "weights are (4,) torch.float64"),
    ]
    if group_size() > 1:
        cases += [("ignore", {"negatives": x} if is_last else {}, " with negatives on rank")]
    found = []
    for name, value in ({"same_side": True, "symmetric": False, "margin": 0.1} if group_size() > 1 else {}).items():
        loss = ClipLoss(**{name: value} if is_last else {})
        found += expect_same_error(
            functools.partial(loss, x, x, scale),
            f"{name} of the loss is {getattr(ClipLoss().settings, name)} on rank 0 and {value} on rank",
        )
    for meaning, given, text in cases:
        found += expect_same_error(lambda: ClipLoss(ids=meaning)(x, x, scale, **given), text)  # noqa: B023
    found += expect_same_error(lambda: ClipLoss(ids="positive", margin=0.1), "margin: requires ids 'mask' or 'ignore'")
    return found + expect_same_error(lambda: SigLipLoss()(x, x, scale, weights=torch.ones(4)), "weights are given to")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_equal_one_process_on_the_whole_matrix(world_size: int) -> None:
    assert run_ranks(check_cases, world_size) == [[]] * world_size
