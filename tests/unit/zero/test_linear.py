"""The linear function of ZeRO-3 compared with PyTorch's: values, gradients, and what autograd keeps."""

import pytest
import torch
from torch.nn import functional

from megaclip.zero.linear import linear


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (2, 5, 4, 3)])
def test_values_and_gradients_are_pytorchs(shape: tuple[int, ...], with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()

    operands = [leaf(*shape), leaf(6, 3), *([leaf(6)] if with_bias else [])]
    found, expected = (function(*operands) for function in (linear, functional.linear))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad(result, operands, gradient) for result in (found, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def kept_weights(function, weight: torch.nn.Parameter) -> list[torch.Tensor]:
    """Return what autograd keeps of the weight for the backward pass of a batch of sequences."""
    kept: list[torch.Tensor] = []
    x = torch.randn(2, 4, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: None):
        function(x, weight, torch.zeros(6, requires_grad=True))
    return [tensor for tensor in kept if tensor.data_ptr() == weight.data_ptr()]


def test_autograd_keeps_the_parameter_itself() -> None:
    """A view would keep the gathered weight in memory after ZeRO-3 has freed it."""
    weight = torch.nn.Parameter(torch.randn(6, 3))
    assert [tensor is weight for tensor in kept_weights(linear, weight)] == [True]
    assert [tensor is weight for tensor in kept_weights(functional.linear, weight)] == [False]
