"""The MLP of compiled blocks in bfloat16, with its kernels, equals a float64 computation: outputs and gradients."""

import copy

import pytest
import torch

from megaclip.models import blocks, compilation
from megaclip.models.config import TextConfig
from megaclip.models.layers import LayerFactory
from megaclip.ops.mlp import has_mlp
from tests.tolerances import MLP, assert_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["none", "tanh", "quick"])
def test_bfloat16_equals_float64(kind: str, recomputes: bool) -> None:
    if not has_mlp(torch.device("cuda"), torch.bfloat16, 712, 200):
        pytest.skip("requires a Hopper GPU and quack-kernels")
    torch.compiler.reset()
    torch.manual_seed(0)
    config = TextConfig(width=200, heads=2, layers=1, act_kwargs={"approximate": "none" if kind == "quick" else kind})
    module = blocks.Mlp(config, 712, kind == "quick", LayerFactory()).cuda().bfloat16()
    wide = copy.deepcopy(module).double()
    module.__class__ = compilation.compiled_class(blocks.Mlp, recomputes=recomputes)
    x = torch.randn(37, 31, 200, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # 1,147 rows
    gradient = torch.randn_like(x)
    wide_x = x.detach().double().requires_grad_()
    output, expected = module(x), wide(wide_x)
    with torch.no_grad():
        assert_close(module(x), expected, MLP, "output without a graph")
    assert_close(output, expected, MLP, "output")
    output.backward(gradient)
    expected.backward(gradient.double())
    assert_close(x.grad, wide_x.grad, MLP, "gradient of the input")
    for (name, got), parameter in zip(module.named_parameters(), wide.parameters(), strict=True):
        assert_close(got.grad, parameter.grad, MLP, name)
