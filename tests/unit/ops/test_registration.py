"""The tile operations are registered with DeepSpeed and torch.ops, and torch.compile keeps them in one graph."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import probe_is_compatible
from torch import Tensor

import megaclip.losses  # noqa: F401  (registers the operations)
from megaclip.ops import tiles
from tests import reference
from tests.tolerances import GRADIENT, VALUE, assert_close

REPOSITORY = Path(__file__).parents[3]


def output_of(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_deepspeed_finds_and_probes_the_builder_like_its_own_builders() -> None:
    builder = get_accelerator().create_op_builder("ContrastiveTilesBuilder")
    assert type(builder).__name__ == "ContrastiveTilesBuilder" and builder.load() is tiles
    assert probe_is_compatible(ALL_OPS["contrastive_tiles"]) is builder.is_compatible()
    # DeepSpeed still finds its own builders.
    assert type(get_accelerator().create_op_builder("CPUAdamBuilder")).__name__ == "CPUAdamBuilder"


def test_not_compatible_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    builder = get_accelerator().create_op_builder("ContrastiveTilesBuilder")
    assert get_accelerator().device_name() == "cpu" and not builder.is_compatible(verbose=True)
    assert "the tiles run in PyTorch instead" in capsys.readouterr().out


def test_the_op_report_lists_the_builder() -> None:
    lines = [
        line for line in output_of("-m", "megaclip", "report").splitlines() if line.startswith("contrastive_tiles ")
    ]
    assert len(lines) == 1


def test_a_loss_registers_the_operations() -> None:
    code = (
        "from megaclip import ClipLoss\nimport deepspeed.ops, torch\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "builder = get_accelerator().create_op_builder('ContrastiveTilesBuilder')\n"
        "print(builder.name, torch.ops.megaclip.tile_stats, deepspeed.ops.__compatible_ops__[builder.name])"
    )
    assert "contrastive_tiles megaclip.tile_stats False" in output_of("-c", code)


def test_importing_megaclip_or_its_ops_is_light() -> None:
    code = "import sys, megaclip; print('torch' in sys.modules, 'deepspeed' in sys.modules); import megaclip.ops.tiles"
    assert output_of("-c", code + "; print('deepspeed' in sys.modules)").split() == ["False", "False", "False"]


def batch(count: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, 8, generator=generator, dtype=torch.float64), dim=1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_schemas_fakes_and_results(dtype: torch.dtype) -> None:
    """Run PyTorch's checks of each operation (schema, fake results, aliasing), and compare one result of each."""
    x, y = batch(7, 0, dtype), batch(5, 1, dtype)
    one = torch.ones(1, dtype=tiles.accumulation_dtype(x))
    checks = ("test_schema", "test_faketensor")
    terms = tiles.Terms(2 * one, one, one)
    for operation, arguments, expected in (
        (
            torch.ops.megaclip.tile_stats,
            (x, y, 5 * one, 3 * one),
            reference.tile_stats(x, y, 5 * one, 3 * one, diagonal=1),
        ),
        (
            torch.ops.megaclip.tile_grads,
            (x, y, *terms, *terms),
            reference.tile_grads(x, y, terms, terms, diagonal=1),
        ),
        (
            torch.ops.megaclip.tile_sigmoid,
            (x, y, 5 * one, -one),
            reference.tile_sigmoid(x, y, 5 * one, -one, diagonal=1),
        ),
    ):
        torch.library.opcheck(operation, arguments, {"diagonal": 1}, test_utils=checks)
        got = operation(*arguments, diagonal=1)
        for result, wanted in zip(got, expected, strict=True):
            assert_close(result, wanted, VALUE[dtype], operation._qualified_op_name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_last_step_of_a_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = batch(8, 0, dtype).T, batch(8, 1, dtype)  # a matrix whose columns are not adjacent
    total, pull = torch.randn(8, 8, dtype=tiles.accumulation_dtype(x)), torch.rand(8, dtype=tiles.accumulation_dtype(x))
    operation = torch.ops.megaclip.finish_gradients
    arguments = (total, total.flip(0), x, y, pull, pull[0], torch.full_like(pull[0], 3.0))
    for given in (arguments, arguments[:-1]):
        torch.library.opcheck(operation, given, test_utils=("test_schema", "test_faketensor"))
    d = total.double() - pull.double()[:, None] * y.double()
    d_y = total.double().flip(0) - pull.double()[:, None] * x.double()
    *gradients, dots = operation(*arguments)
    for gradient, wanted in zip(gradients, (d, d_y), strict=True):
        assert_close(gradient, 3 * pull[0] * wanted, GRADIENT[dtype])
    assert_close(dots, (x.double() * d).sum(1), VALUE[dtype])


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_compiled_step_is_one_graph(loss: str) -> None:
    """Compile towers, tiles and the gradient in one function. `fullgraph` raises at any graph break."""
    x, y = batch(9, 0, torch.float32), batch(9, 1, torch.float32)
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(2), requires_grad=True)

    def step(weight: Tensor) -> Tensor:
        images, texts = F.normalize(x @ weight, dim=1), F.normalize(y @ weight, dim=1)
        a, b = images.detach(), texts.detach()
        one = torch.ones(1)
        if loss == "clip":
            row_lse, col_lse = torch.ops.megaclip.tile_stats(a, b, 5 * one, 5 * one)
            dx, dy, _, _ = torch.ops.megaclip.tile_grads(a, b, 5 * one, row_lse, one, 5 * one, col_lse, one)
        else:
            _, dx, dy, _, _ = torch.ops.megaclip.tile_sigmoid(a, b, 5 * one, -one, diagonal=0)
        return (images * dx).sum() + (texts * dy).sum()

    (expected,) = torch.autograd.grad(step(weight), weight)
    (got,) = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(weight), weight)
    assert expected.abs().max() > 0.01
    assert_close(got, expected, GRADIENT[torch.float32])
