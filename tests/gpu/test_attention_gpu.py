"""Attention on a GPU: each shape compared with float64, and the kernels that are used."""

import pytest
import torch
import torch.nn.functional as F

from megaclip.models import compilation
from megaclip.models.attention import attend
from megaclip.ops.attention import attention, has_attention
from tests.tolerances import ATTENTION, assert_close

pytestmark = pytest.mark.gpu


@pytest.fixture
def requires_hopper() -> None:
    if not has_attention(torch.device("cuda"), torch.bfloat16):
        pytest.skip("requires a Hopper GPU")


SHORT = [(16, 64), (31, 64), (32, 32), (33, 16), (50, 64), (64, 64), (77, 64), (197, 64), (257, 64), (320, 64)]


@pytest.mark.usefixtures("requires_hopper")
@pytest.mark.parametrize(("tokens", "width"), SHORT)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_short_sequences_equal_float64(tokens: int, width: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [2 * torch.randn(16, tokens, 4 * width, generator=generator).bfloat16() for _ in range(4)]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        *leaves, gradient = (x.to("cuda", dtype).requires_grad_() for x in inputs)
        split = [x.unflatten(-1, (4, width)).transpose(1, 2) for x in leaves]
        if dtype == torch.float64:
            out = F.scaled_dot_product_attention(*split, is_causal=causal)
        else:
            out = attention(*split, causal)
        out = out.transpose(1, 2).flatten(2)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, gradient.detach())])
    for got, expected, name in zip(results[1], results[0], ("out", "q", "k", "v"), strict=True):
        assert_close(got, expected, ATTENTION, name)


@pytest.mark.usefixtures("requires_hopper")
def test_compiled_code_runs_the_kernels_of_short_sequences() -> None:
    q, k, v = (torch.randn(4, 197, 12, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    compilation.compiled_class(torch.nn.Linear)  # sets up the compiler
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compilation.compiled_function(attend)(q, k, v)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "_forward_kernel" in names, names


@pytest.mark.parametrize(("tokens", "width"), [(24, 64), (50, 64), (64, 64), (77, 64), (197, 64), (50, 88)])
@pytest.mark.parametrize("kind", ["all", "causal", "one masked query"])
def test_attention_and_its_gradients_equal_float64(tokens: int, width: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (16,), generator=generator)
    queries = 1 if kind == "one masked query" else tokens
    mask = torch.arange(tokens) < lengths[:, None, None, None] if queries == 1 else None
    inputs = [torch.randn(16, rows, 4 * width, generator=generator).bfloat16() for rows in (queries, tokens, tokens)]
    weights = torch.randn(16, queries, 4 * width, generator=generator)
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [x.to("cuda", dtype).requires_grad_() for x in inputs]
        split = [x.unflatten(-1, (4, width)).transpose(1, 2) for x in leaves]
        out = attend(*split, mask=None if mask is None else mask.cuda(), causal=kind == "causal")
        out = out.transpose(1, 2).flatten(2)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, weights.to("cuda", dtype))])
    for got, expected, name in zip(results[1], results[0], ("out", "q", "k", "v"), strict=True):
        assert_close(got, expected, ATTENTION, name)


@pytest.mark.parametrize(("tokens", "kernel"), [(50, "fmha"), (197, "cudnn")])
def test_the_fastest_kernels_run(tokens: int, kernel: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):  # on older GPUs the expectation for 197 tokens does not hold
        pytest.skip("PyTorch prefers cuDNN's kernels on GPUs of compute capability 9.0 and newer")
    shape = (8, tokens, 12, 64)  # the layout of the towers; PyTorch may choose other kernels without gradients
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend(q, k, v)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert kernel in names, names
