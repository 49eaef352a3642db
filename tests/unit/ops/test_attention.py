"""Attention of short sequences in compiled towers: the operation in float64, and its kernels in Triton's interpreter.

Triton selects the interpreter when it is imported, for the whole process, so the test of the kernels runs this file in
a second process with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from megaclip.models import attention as models_attention
from megaclip.ops.attention import attention, is_short
from tests.tolerances import FLOAT32_ATTENTION, TOWER_GRADIENT, assert_close

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"


def leaves(tokens: int, channels: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the output, (2, 3, L, K), as the towers lay them out."""
    generator = torch.Generator().manual_seed(tokens)
    made = [torch.randn(2, tokens, 3, channels, generator=generator, dtype=dtype) for _ in range(4)]
    return [x.transpose(1, 2).requires_grad_(index < 3) for index, x in enumerate(made)]


def expected(inputs: list[Tensor], causal: bool) -> list[Tensor]:
    """Return the output, and the gradients of queries, keys and values, of PyTorch in float64."""
    *wide, gradient = (x.detach().double().requires_grad_() for x in inputs)
    out = F.scaled_dot_product_attention(*wide, is_causal=causal)
    return [out, *torch.autograd.grad(out, wide, gradient.detach())]


if INTERPRETS:

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("tokens", "channels"), [(2, 16), (32, 32), (33, 64), (49, 16), (96, 16)])
    def test_kernels_equal_pytorch(tokens: int, channels: int, causal: bool) -> None:
        from megaclip.ops import attention_triton as kernels

        inputs = leaves(tokens, channels, torch.float32)
        *tensors, gradient = (x.detach().transpose(1, 2) for x in inputs)
        out, lse = kernels.attention(*tensors, causal)
        got = [out, *kernels.attention_backward(*tensors, out, lse, gradient, causal)]
        for name, value, right in zip("oqkv", got, expected(inputs, causal), strict=True):
            assert_close(value.transpose(1, 2), right, FLOAT32_ATTENTION, name)

else:

    def test_kernels_in_the_interpreter() -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        done = subprocess.run(
            [*command, f"{__file__}::test_kernels_equal_pytorch"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_towers_run_the_operation(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the values and gradients of PyTorch's own."""
    monkeypatch.setattr(models_attention, "has_attention", torch.compiler.assume_constant_result(lambda *_: True))
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(models_attention.attend, fullgraph=True, backend=backend)
    inputs = leaves(7, 16, torch.float64)
    out = compiled(*inputs[:3], causal=causal)
    got = [out, *torch.autograd.grad(out, inputs[:3], inputs[3])]
    assert "megaclip.attention" in str(backend.graphs[0].code)
    for name, value, right in zip("oqkv", got, expected(inputs, causal), strict=True):
        assert_close(value, right, TOWER_GRADIENT, name)


def test_which_sequences_are_short() -> None:
    def short(queries: int, tokens: int, channels: int) -> bool:
        return is_short(torch.empty(1, 1, queries, channels), torch.empty(1, 1, tokens, channels))

    assert short(257, 257, 64) and short(1, 1, 16)
    assert not short(1, 257, 64) and not short(577, 577, 64) and not short(50, 50, 88)


def test_the_operation_follows_pytorchs_rules() -> None:
    inputs = leaves(5, 16, torch.float64)
    tensors = [x.transpose(1, 2).contiguous().detach().requires_grad_() for x in inputs[:3]]
    torch.library.opcheck(torch.ops.megaclip.attention.default, (*tensors, True))
    assert attention(*inputs[:3], True).shape == (2, 3, 5, 16)
