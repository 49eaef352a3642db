"""The distillation loss and its gradients equal open_clip's `DistillClipLoss` on the whole batch of one process.

open_clip forms both matrices and lets autograd differentiate them, in float64. Its value is the cross entropy, so the
entropy of the teacher's rows is subtracted.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.comm.groups import group_rank, group_size, resolve
from megaclip.losses.distillation import DistillationLoss
from megaclip.open_clip_package import import_open_clip
from tests.distributed.harness import or_traceback, run_ranks
from tests.tolerances import GRADIENT, VALUE, compare, exceeded

D, E, TEACHER_SCALE = 9, 14, 60.0


class Case(NamedTuple):
    rows: int
    dtype: torch.dtype = torch.float64
    scale: float = 20.0
    tile_budget_mib: float = 128
    exchange: str = "ring"
    reduction: str = "feature"


CASES = [
    Case(2),
    Case(63, tile_budget_mib=0.02),
    Case(63, torch.float32, tile_budget_mib=0.02),
    Case(70, torch.bfloat16),
    Case(65, scale=100.0, tile_budget_mib=0.05, exchange="all_gather"),
    Case(7, exchange="ring", reduction="scalar"),
    Case(7, exchange="all_gather", reduction="scalar"),
]


class Result(NamedTuple):
    loss: Tensor
    x: Tensor
    y: Tensor
    scale: Tensor


def whole_batch(case: Case, ranks: int) -> list[Tensor]:
    """Return features of unit length: the student's of both sides (B, D), and the teacher's (B, E)."""
    generator = torch.Generator().manual_seed(case.rows)
    shapes = [(ranks * case.rows, size) for size in (D, D, E, E)]
    features = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [F.normalize(each, dim=-1).to(case.dtype) for each in features]


def oracle(case: Case, ranks: int) -> Result:
    x, y, u, v = (each.double() for each in whole_batch(case, ranks))
    scale = torch.tensor([case.scale], dtype=torch.float64).requires_grad_()
    x.requires_grad_(), y.requires_grad_()
    loss = import_open_clip().loss.DistillClipLoss()(x, y, scale, u, v, TEACHER_SCALE)[1]
    teacher = TEACHER_SCALE * u @ v.T
    entropies = [-(t.softmax(1) * t.log_softmax(1)).sum(1).mean() for t in (teacher, teacher.T)]
    loss.backward()
    return Result(loss.detach() - sum(entropies) / 2, x.grad, y.grad, scale.grad)


def evaluate(case: Case) -> Result:
    """Return the loss, its gradient by the scale, and those by all features, averaged as an engine does."""
    ranks, rank = group_size(), group_rank()
    x, y, u, v = (each.chunk(ranks)[rank].clone() for each in whole_batch(case, ranks))
    scale = torch.tensor([case.scale], dtype=torch.promote_types(case.dtype, torch.float32)).requires_grad_()
    x.requires_grad_(), y.requires_grad_()
    group = resolve()
    settings = {"exchange": case.exchange, "reduction": case.reduction, "tile_budget_mib": case.tile_budget_mib}
    loss = DistillationLoss(group=group, **settings)
    value = loss(x, y, scale, u, v, TEACHER_SCALE)
    (3 * value).backward()
    return Result(value.detach(), x.grad / ranks / 3, y.grad / ranks / 3, scale.grad / 3)


def evaluate_all() -> list[Result | str]:
    return [or_traceback(evaluate, case) for case in CASES]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long), 3])
def results(request) -> list[list[Result | str]]:
    """Return the results of each case on each rank."""
    return run_ranks(evaluate_all, request.param)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_loss_and_gradients_equal_those_of_open_clip(results, case):
    ranks = len(results)
    expected, dtype = oracle(CASES[case], ranks), CASES[case].dtype
    for rank, of_rank in enumerate(results):
        got = of_rank[case]
        assert isinstance(got, Result), got
        x, y = (each.chunk(ranks)[rank] for each in (expected.x, expected.y))
        found = [
            compare(got.loss, expected.loss, VALUE[dtype], "loss"),
            compare(got.x, x, GRADIENT[dtype], "images"),
            compare(got.y, y, GRADIENT[dtype], "texts"),
            compare(got.scale, expected.scale, GRADIENT[dtype], "scale"),
        ]
        assert exceeded(found) == []


def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient():
    x, y, _, _ = whole_batch(Case(40, torch.float32), 1)
    x.requires_grad_(), y.requires_grad_()
    loss = DistillationLoss()(x, y, 30.0, x.detach(), y.detach(), 30.0)
    loss.backward()
    assert loss.abs() < 1e-5
    assert x.grad.abs().max() < 1e-6 and y.grad.abs().max() < 1e-6


def test_memory_grows_linearly_with_the_batch():
    """No tensor that the loss keeps or allocates has B x B elements."""
    case = Case(1000, torch.float32, tile_budget_mib=0.5)
    features = whole_batch(case, 1)
    features[0].requires_grad_()
    loss = DistillationLoss(tile_budget_mib=case.tile_budget_mib)
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        loss(*features[:2], 30.0, *features[2:], 30.0).backward()
    largest = max(event.cpu_memory_usage for event in profile.events() if event.name.startswith("aten::"))
    assert largest <= case.tile_budget_mib * 2**20
