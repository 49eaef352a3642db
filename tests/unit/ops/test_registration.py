"""The tile operations are registered with DeepSpeed, and the last step of a gradient with torch.ops."""

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
from tests.tolerances import GRADIENT, VALUE, assert_close

REPOSITORY = Path(__file__).parents[3]


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


NEW_PROCESS = """
import sys, megaclip
print("torch" in sys.modules, "deepspeed" in sys.modules)
import megaclip.ops.tiles
print("deepspeed" in sys.modules)

import torch.distributed.fsdp
imported_by_torch = "torch._dynamo" in sys.modules  # 2.8
from megaclip import ClipLoss
import deepspeed.ops, megaclip.models, megaclip.planner, torch
print("torch._dynamo" in sys.modules and not imported_by_torch)
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ContrastiveTilesBuilder")
print(builder.name, torch.ops.megaclip.clip_loss, deepspeed.ops.__compatible_ops__[builder.name])

sys.argv[1:] = ["report"]
from megaclip.commands import main
main()
"""


def test_a_new_process_imports_little_then_registers_losses_and_reports_the_op() -> None:
    command = [sys.executable, "-c", NEW_PROCESS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("False", "True", "contrastive"))]
    light, registered = ["False False", "False", "False"], "contrastive_tiles megaclip.clip_loss False"
    assert lines[:4] == [*light, registered], done.stdout
    assert len(lines) == 5 and lines[4].startswith("contrastive_tiles "), done.stdout


def batch(count: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, 8, generator=generator, dtype=torch.float64), dim=1).to(dtype)


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
