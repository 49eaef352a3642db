"""The MLP of compiled blocks equals plain PyTorch's: outputs, gradients, and the bytes that a graph keeps."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from megaclip.errors import ConfigError
from megaclip.models import blocks, compilation
from megaclip.models.config import TextConfig
from megaclip.models.layers import LayerFactory
from megaclip.ops import mlp
from tests.tolerances import TOWER_GRADIENT, assert_close


def values_of(kind: str, compiled: bool, recomputes: bool) -> tuple[dict[str, Tensor], set[str], int]:
    """Return outputs and gradients of an MLP in float64, MegaCLIP's operations in its graphs, and the
    bytes that its graph keeps."""
    operations, kept = set(), []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        operations.update(
            str(node.target).split(".")[1] for node in graph.graph.nodes if "megaclip." in str(node.target)
        )
        outputs = [node.meta.get("val") for node in graph.graph.output_node().args[0] if node is not None]
        kept.append(sum(value.nbytes for value in outputs if isinstance(value, Tensor)))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compilation.BACKEND = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    torch.manual_seed(0)
    config = TextConfig(width=24, heads=2, layers=1, act_kwargs={"approximate": "none" if kind == "quick" else kind})
    module = blocks.Mlp(config, 40, kind == "quick", LayerFactory()).double()
    if compiled:
        module.__class__ = compilation.compiled_class(blocks.Mlp, recomputes=recomputes)
    x = torch.randn(3, 7, 24, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        values = {"output without a graph": module(x)}
    values["output"] = module(x * 1.0)
    values["output"].square().cumsum(0).sum().backward()
    gradients = {name: p.grad for name, p in [("x", x), *module.named_parameters()]}
    return values | gradients, operations, kept[1] if kept else 0


@pytest.mark.parametrize("kind", ["none", "tanh", "quick"])
def test_compiled_mlp_equals_the_plain_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "BACKEND", None)  # restored after the test
    plain, *_ = values_of(kind, compiled=False, recomputes=False)
    for recomputes in (False, True):
        with monkeypatch.context() as patches:
            _, none, kept = values_of("none", compiled=True, recomputes=recomputes)
            assert none == set(), "no kernels run for float64 or on CPUs"
            patches.setattr(blocks, "has_mlp", torch.compiler.assume_constant_result(lambda *_: True))
            got, operations, kept_now = values_of(kind, compiled=True, recomputes=recomputes)
            assert operations == {"mlp", "mlp_backward"}
            assert kept_now == kept, "bytes that a graph keeps"
            for name, value in plain.items():
                assert_close(got[name], value, TOWER_GRADIENT, f"{name}, recomputes {recomputes}")


def test_compiled_code_asks_once_whether_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question imports a package and writes to the log, which no graph can contain."""
    compilation.compiled_class(torch.nn.Linear)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "megaclip.ops.mlp_quack", None)
    asks = torch.compile(
        lambda x: x + mlp.has_mlp(torch.device("cuda"), torch.bfloat16, 8, 8), fullgraph=True, backend="eager"
    )
    assert asks(torch.zeros(1)) == 0


@pytest.mark.parametrize("error", [RuntimeError("no kernel image\nmore"), torch.OutOfMemoryError("out of memory")])
def test_a_broken_package_is_one_readable_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "megaclip.ops.mlp_quack", SimpleNamespace(linear_activation=Mock(side_effect=error))
    )
    with pytest.raises(ConfigError if type(error) is RuntimeError else torch.OutOfMemoryError) as caught:
        mlp._product("linear_activation", 1, 2)
    expected = "quack-kernels cannot compute an MLP: RuntimeError: no kernel image; mend its installation, or run  pip"
    assert str(caught.value).startswith(expected if type(error) is RuntimeError else "out of memory")
