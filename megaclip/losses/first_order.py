"""Refuse second derivatives of a loss, which would be silently wrong.

The losses compute their gradients without autograd. For autograd these gradients are constants, so a penalty on them
would have no gradient. PyTorch's `once_differentiable` does not detect this. It checks only the upstream gradient,
which is a constant in `torch.autograd.grad(loss, features, create_graph=True)`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(loss: str) -> Callable[[Backward], Backward]:
    """Decorate the backward function of a loss: it runs without autograd, and refuses a second derivative.

    loss: name of the loss, for the error. With `create_graph=True` the gradients depend on the upstream gradient and on
    the saved tensors. Differentiating them raises RuntimeError.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
            if not torch.is_grad_enabled():
                return backward(ctx, *d_outputs)
            with torch.no_grad():
                gradients = backward(ctx, *d_outputs)
            sources = [t for t in (*d_outputs, *ctx.saved_tensors) if t is not None and t.requires_grad]
            return tuple(
                None if gradient is None else _Refusal.apply(loss, gradient, *sources) for gradient in gradients
            )

        return run

    return decorate


class _Refusal(torch.autograd.Function):
    """Gradient of a loss as a function of its sources, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, loss: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.loss = loss
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> None:
        raise RuntimeError(
            f"the gradient of {ctx.loss} was differentiated again, for example by a gradient penalty with "
            "create_graph=True; its gradients are exact but cannot be differentiated: compute the loss of the penalty "
            "with plain PyTorch operations"
        )
