"""Compiled losses equal plain ones bit by bit on 2 ranks, and training steps equal those of one process.

The first loss call of every launch is compiled. `fullgraph=True` raises an error at any graph break. The backend
"aot_eager" traces both passes as inductor does, and runs the graphs without compiling them. The long test uses
inductor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from megaclip.comm.groups import group_rank, group_size
from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss
from tests.distributed.harness import run_ranks
from tests.distributed.test_clip_loss import expect_same_error, random_batch
from tests.tolerances import GRADIENT, VALUE, compare, exceeded

SCALE, BIAS = 9.0, -3.0


class Evaluated(NamedTuple):
    """A loss and its gradients with respect to the features of this rank, logit_scale and logit_bias."""

    loss: Tensor
    d_image: Tensor
    d_text: Tensor
    d_scale: Tensor
    d_bias: Tensor


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    """Compile the function as one graph. Earlier compilations are cleared, because PyTorch limits their number."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def evaluate(loss: Callable[..., Tensor], whole: tuple[Tensor, Tensor], group: Any = None) -> Evaluated:
    """Return the loss times 3 and its gradients on this rank's part of the batch."""
    sums = torch.float64 if whole[0].dtype == torch.float64 else torch.float32
    features = [part.chunk(group_size(group))[group_rank(group)].clone() for part in whole]
    scalars = [torch.tensor([SCALE], dtype=sums), torch.tensor(BIAS, dtype=sums)]
    leaves = [tensor.requires_grad_() for tensor in (*features, *scalars)]
    value = 3 * loss(*leaves)
    return Evaluated(value.detach(), *torch.autograd.grad(value, leaves))


def differences(loss_class: type, *batches: tuple[Tensor, Tensor], group: Any = None, **settings: Any) -> list[str]:
    """Compare the compiled loss with the plain one, for several batches."""
    loss = loss_class(group=group, **settings)
    step = compiled(loss)
    found = []
    for whole in batches:
        case = f"{loss} {settings} W={group_size(group)} {tuple(whole[0].shape)}"
        got = evaluate(step, whole, group)
        plain = evaluate(loss, whole, group)
        found += [
            f"{name} is not that of the plain loss, {case}"
            for name, ours, theirs in zip(Evaluated._fields, got, plain, strict=True)
            if not torch.equal(ours, theirs) or ours.dtype != theirs.dtype
        ]
    return found


# ------------------------------------------------------------------------------------------ cases, run on every rank


def check_first_calls() -> list[str]:
    """Check the first call of a process, in which compiled code creates groups and plans. Then check other shapes."""
    batches = [random_batch(batch * group_size(), 7, torch.float64) for batch in (5, 7, 8)]
    return [problem for loss in (SigLipLoss, ClipLoss) for problem in differences(loss, *batches)]


def check_ways() -> list[str]:
    whole = random_batch(6 * group_size(), 8, torch.bfloat16)
    found = []
    for exchange, reduction in (("ring", "feature"), ("all_gather", "scalar")):
        found += differences(ClipLoss, whole, exchange=exchange, reduction=reduction)
    return found + differences(SigLipLoss, whole, exchange="ring", reduction="scalar")


def check_without_gradients() -> list[str]:
    """Check an evaluation: no gradients are computed, and numbers instead of tensors are accepted."""
    x, y = (part.chunk(group_size())[group_rank()] for part in random_batch(5 * group_size(), 6, torch.float32))
    found = []
    for loss in (ClipLoss(), SigLipLoss()):
        step = compiled(loss)
        for scale in (2.0, 3.5):
            outputs = step(x, y, scale, output_dict=True)
            if not torch.equal(outputs["contrastive_loss"], loss(x, y, scale)):
                found.append(f"{loss} at scale {scale}: {outputs}")
    return found


def check_errors() -> list[str]:
    """Check that a mistake on the last rank raises the error of the plain loss on all ranks."""
    last, scale = group_rank() == group_size() - 1, torch.tensor(1.0)
    found = []
    for loss in (ClipLoss(), SigLipLoss()):
        step = compiled(loss, dynamic=False)
        features = torch.randn(4, 5)
        other = torch.randn(4, 6 if last else 5)
        found += expect_same_error(lambda: step(features, other, scale), "shapes (4, 5) and (4, 6) on rank")  # noqa: B023
    return found


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


class TowersAndLoss(nn.Module):
    """Training step as one module: the towers and the loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.towers, self.loss = Towers(), loss

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.loss(*self.towers(images, texts))


def step_around(loss: nn.Module, backend: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return a parallel model and a compiled step: the model, then the loss. DDP's own code breaks the graph."""
    model = DistributedDataParallel(Towers())
    torch._dynamo.reset()
    return model, torch.compile(lambda images, texts: loss(*model(images, texts)), backend=backend)


def step_inside(loss: nn.Module, backend: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return a parallel model that contains towers and loss and is compiled as one graph, and its call."""
    model = DistributedDataParallel(compiled(TowersAndLoss(loss), backend))
    return model, model


def one_process(loss: nn.Module, x: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """Return the loss of the whole batch, in plain PyTorch."""
    logits, labels = alpha * x @ y.T, torch.arange(len(x))
    if isinstance(loss, SigLipLoss):
        return -F.logsigmoid((2 * torch.eye(len(x), dtype=x.dtype) - 1) * logits).sum() / len(x)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def data_parallel_steps(backend: str) -> list[str]:
    """Compare compiled training steps under DDP with one process on the whole batch."""
    images, texts = torch.randn(2, 4 * group_size(), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = [part.chunk(group_size())[group_rank()] for part in (images, texts)]
    found = []
    for loss, build in ((ClipLoss(), step_around), (ClipLoss(), step_inside), (SigLipLoss(), step_inside)):
        whole = Towers()
        model, step = build(loss, backend)
        optimizers = [torch.optim.SGD(towers.parameters(), lr=0.1) for towers in (whole, model)]
        for number in range(2):
            what = f"step {number} of {build.__name__} {loss}, {backend}"
            values = one_process(loss, *whole(images, texts)), step(*mine)
            found += exceeded([compare(values[1], values[0], VALUE[torch.float64], what)])
            for value, optimizer in zip(values, optimizers, strict=True):
                optimizer.zero_grad()
                value.backward()
            for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
                found += exceeded([compare(ours.grad, theirs.grad, GRADIENT[torch.float64], f"{name}, {what}")])
            for optimizer in optimizers:
                optimizer.step()
    return found


def check_steps_under_data_parallel() -> list[str]:
    return data_parallel_steps("aot_eager")


def check_fastclip() -> list[str]:
    """Check steps of FastClipLoss in a compiled function: results equal to plain steps, with one graph break."""
    counters.clear()
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    images, texts = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(group_rank()))
    ids = torch.arange(4) + 4 * group_rank()

    def value_of(loss: FastClipLoss, epoch: float) -> Tensor:
        x, y = F.normalize(images @ weight, dim=1), F.normalize(texts @ weight, dim=1)
        return 2 * loss(x, y, ids=ids, epoch=epoch)

    found = []
    for variant in ("fastclip_v3", "isogclr"):
        losses = [FastClipLoss(variant, samples=12) for _ in range(2)]
        torch._dynamo.reset()
        before = counters["stats"]["unique_graphs"]
        steps = [torch.compile(value_of, backend="aot_eager", dynamic=True), value_of]
        for epoch in (0.0, 0.0, 0.0):
            values = [step(loss, epoch) for step, loss in zip(steps, losses, strict=True)]
            gradients = []
            for value, loss in zip(values, losses, strict=True):
                weight.grad = None
                value.backward()
                gradients.append(weight.grad)
                loss.step()
            if not (torch.equal(*values) and torch.equal(*gradients)):
                found.append(f"{variant}: {values}, {gradients}")
        graphs = counters["stats"]["unique_graphs"] - before
        if graphs != 2:
            found.append(f"{variant}: {graphs} graphs, not one before the loss and one after it")
    return found


def check_everything() -> list[str]:
    checks = (
        check_first_calls,
        check_ways,
        check_steps_under_data_parallel,
        check_without_gradients,
        check_errors,
        check_fastclip,
    )
    return [problem for check in checks for problem in check()]


def check_a_subgroup() -> list[str]:
    """Check a group of ranks 0 and 2 of three. Rank 1 gets an error."""
    group = dist.new_group([0, 2])
    whole = random_batch(10, 7, torch.float64)
    if dist.get_rank() == 1:
        return expect_same_error(lambda: compiled(ClipLoss(group=group))(*whole, torch.tensor(1.0)), "not a member")
    return [problem for loss in (ClipLoss, SigLipLoss) for problem in differences(loss, whole, group=group)]


def check_inductor() -> list[str]:
    found = data_parallel_steps("inductor")
    whole = random_batch(6 * group_size(), 8, torch.bfloat16)
    for loss in (ClipLoss(), SigLipLoss()):
        pairs = zip(Evaluated._fields, evaluate(compiled(loss, "inductor"), whole), evaluate(loss, whole), strict=True)
        found += [f"{loss}: {name}" for name, ours, theirs in pairs if not torch.equal(ours, theirs)]
    return found


# --------------------------------------------------------------------------------------------------------------- tests


def test_equals_the_plain_loss_also_in_training_steps() -> None:
    assert run_ranks(check_everything, 2) == [[]] * 2


def test_a_subgroup_of_ranks() -> None:
    assert run_ranks(check_a_subgroup, 3) == [[]] * 3


@pytest.mark.long
def test_with_inductor() -> None:
    assert run_ranks(check_inductor, 2) == [[]] * 2
