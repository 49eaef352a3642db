"""Losses as graph operations on one rank, second derivatives of losses, and the names under which losses are found."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import megaclip
from megaclip import losses
from megaclip.comm.groups import resolve
from megaclip.losses import ClipLoss, FastClipLoss, SigLipLoss
from megaclip.losses.sums import LossInputs

REPOSITORY = Path(__file__).parents[3]


def batch(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x, y = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [F.normalize(features, dim=1).to(dtype).requires_grad_() for features in (x, y)]


def fastclip(variant: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    loss = FastClipLoss(variant, samples=9)
    return lambda x, y, scale: loss(x, y, scale, ids=torch.arange(6), epoch=0.5)


LOSSES = {
    "ClipLoss": ClipLoss,
    "SigLipLoss": SigLipLoss,
    "FastClipLoss": lambda: fastclip("fastclip_v3"),
    "FastClipLoss per sample": lambda: fastclip("isogclr"),
}


@pytest.mark.parametrize(
    ("name", "wrt"),
    # FastClipLoss does not use the scale.
    [(name, wrt) for name in LOSSES for wrt in range(3) if wrt < 2 or not name.startswith("FastClipLoss")],
)
def test_a_second_derivative_is_refused(name: str, wrt: int) -> None:
    """A gradient penalty must be refused. With PyTorch's once_differentiable it would silently have no gradient."""
    leaves = [*batch(), torch.tensor([4.0], dtype=torch.float64, requires_grad=True)]
    loss = LOSSES[name]()
    (plain,) = torch.autograd.grad(loss(*leaves), leaves[wrt])
    value = loss(*leaves)
    (gradient,) = torch.autograd.grad(value, leaves[wrt], create_graph=True)
    assert torch.equal(gradient, plain)
    penalty = value + gradient.square().sum()
    error = f"gradient of {name.split()[0]} was differentiated again.*: compute"
    with pytest.raises(RuntimeError, match=error):
        penalty.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=error):
        torch.autograd.grad(penalty, leaves, allow_unused=True)
    (gradient,) = torch.autograd.grad(loss(*leaves).square(), leaves[wrt], create_graph=True)  # depends on the loss
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(gradient.sum(), leaves[0])


def test_the_graph_may_be_created_and_used_once() -> None:
    """`create_graph=True` alone computes no second derivative. The kept graph must return the same gradient again."""
    x, y = batch()
    loss = ClipLoss()(x, y, 4.0)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_a_second_derivative_of_a_compiled_loss_is_refused() -> None:
    x, y = batch()
    loss = torch.compile(ClipLoss(), backend="eager", fullgraph=True)  # other backends refuse it themselves
    with pytest.raises(RuntimeError, match="differentiated again"):
        (gradient,) = torch.autograd.grad(loss(x, y, 4.0), x, create_graph=True)
        torch.autograd.grad(gradient.sum(), x)


@pytest.mark.parametrize(
    ("loss", "dtype"), [(ClipLoss(ids="mask"), torch.float64), (SigLipLoss(ids="positive"), torch.bfloat16)], ids=str
)
def test_operations(loss: ClipLoss | SigLipLoss, dtype: torch.dtype) -> None:
    """Run PyTorch's checks of an operation: schema, shared memory, fake results, and the trace of both passes."""
    sums = torch.promote_types(dtype, torch.float32)
    scale, bias = (torch.tensor(number, dtype=sums, requires_grad=True) for number in (4.0, -1.0))
    operation = torch.ops.megaclip.clip_loss if isinstance(loss, ClipLoss) else torch.ops.megaclip.siglip_loss
    for gradients in (True, False):
        x, y = batch(dtype)
        leaves = [tensor if gradients else tensor.detach() for tensor in (x, y, scale, bias, y[:3].detach().clone())]
        further = (torch.arange(6) // 2, torch.arange(3), None, None)
        torch.library.opcheck(operation, (*leaves, *further, loss.settings_json, loss.group_name, gradients, "source"))


def test_an_operation_without_gradients_computes_the_statistics_only() -> None:
    x, y = (features.detach() for features in batch())
    with FlopCounterMode(display=False) as counter:
        ClipLoss().evaluate(LossInputs(x, y, torch.tensor(4.0)), ranks=resolve(), gradients=False)
    assert counter.get_total_flops() == 2 * len(x) ** 2 * x.shape[1]


def test_losses_of_equal_settings_share_a_compilation() -> None:
    """Compile more losses than PyTorch's limit per function. Their settings and groups must be plain strings."""
    x, y = batch()
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        torch.compile(ClipLoss(exchange="ring"), backend="eager", fullgraph=True)(x, y, 4.0)


def test_the_package_has_the_losses() -> None:
    for name in ("ClipLoss", "SigLipLoss", "FastClipLoss"):
        assert getattr(megaclip, name) is getattr(losses, name) and name in dir(megaclip)
    with pytest.raises(AttributeError, match="has no attribute 'OtherLoss'"):
        megaclip.OtherLoss  # noqa: B018


@pytest.mark.long
def test_another_version_does_not_run_the_code_that_was_compiled_for_the_first(tmp_path: Path) -> None:
    """PyTorch caches compiled code on disk. A copy of the package with negated gradients shares this cache."""
    shutil.copytree(REPOSITORY / "megaclip", tmp_path / "megaclip", ignore=shutil.ignore_patterns("__pycache__"))
    sums = tmp_path / "megaclip" / "losses" / "sums.py"
    result = "return dx, dy, d_scale, d_bias"
    assert result in sums.read_text()
    sums.write_text(sums.read_text().replace(result, "return -dx, dy, d_scale, d_bias"))
    code = (
        "import torch\nfrom torch._dynamo.utils import counters\nfrom megaclip import ClipLoss\n"
        "x = torch.eye(3).requires_grad_()\nloss = torch.compile(ClipLoss(), fullgraph=True)\n"
        "loss(x, 2 * x.detach(), 1.0).backward()\n"
        "print(*x.grad.flatten().tolist())\nprint(counters['aot_autograd']['autograd_cache_hit'])"
    )
    kept = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept")}

    def run(folder: Path) -> tuple[list[float], int]:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        *gradient, hits = map(float, done.stdout.split())
        return gradient, int(hits)

    first, again, other = run(REPOSITORY), run(REPOSITORY), run(tmp_path)
    assert first[1] == 0 and again == (first[0], 1)  # the cache works
    assert other == ([-number for number in first[0]], 0) and any(first[0])


def test_a_scalar_without_effect_does_not_change_the_dtype_of_the_loss() -> None:
    x, y = batch(torch.float32)
    unused = torch.full((1,), -10.0, dtype=torch.float64, requires_grad=True)
    fastclip_loss = FastClipLoss(samples=9)
    values = [ClipLoss()(x, y, 10.0, unused), fastclip_loss(x, y, unused, ids=torch.arange(6), epoch=0.5)]
    for value, plain in zip(values, [ClipLoss()(x, y, 10.0), fastclip("fastclip_v3")(x, y, None)], strict=True):
        assert value.dtype == torch.float32 and value == plain
        value.backward()
        assert unused.grad == 0
