"""Autograd function of a loss that computes the sums of its gradients in the forward pass.

The backward pass multiplies these sums by the upstream gradient, adds the positives and rounds. It does not
communicate.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaclip.losses.first_order import first_order
from megaclip.ops.rows import finish_gradients as finish_both


class LossAndSums(NamedTuple):
    """The loss and everything that its backward pass needs besides its arguments, in the dtype of sums."""

    loss: Tensor
    """() the mean over the whole batch. It is not a view, because trainers divide losses in place."""
    dx: Tensor
    """(b, D) sum over the negatives of this rank's images, without `factor`."""
    dy: Tensor
    """(b, D) sum over the negatives of this rank's texts, without `factor`."""
    pull: Tensor
    """(b,) weight of each positive, without `factor`."""
    factor: Tensor
    """() factor of the gradients of the features."""
    d_alpha: Tensor
    """() gradient of logit_scale."""
    d_beta: Tensor
    """() gradient of logit_bias."""


def finish_gradients(
    d_loss: Tensor,
    sums: LossAndSums,
    x: Tensor,
    y: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None,
    finish: Callable[..., tuple[Tensor, Tensor, Tensor]] = finish_both,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, y (b, D), logit_scale and logit_bias, in their dtypes and shapes.

    d_loss: (), the upstream gradient. sums: its field `loss` is not used.
    """
    dx, dy, _ = finish(sums.dx, sums.dy, x, y, sums.pull, sums.factor, d_loss)
    d_scale = gradient_of_scalar(sums.d_alpha * d_loss, logit_scale)
    if logit_bias is None:
        return dx, dy, d_scale, None
    return dx, dy, d_scale, gradient_of_scalar(sums.d_beta * d_loss, logit_bias)


def gradient_of_scalar(gradient: Tensor, scalar: Tensor) -> Tensor:
    """Return the gradient () with the device, dtype and shape of its scalar, which may be on the host."""
    return gradient.to(scalar.device, scalar.dtype).reshape(scalar.shape)


Evaluate = Callable[[Tensor, Tensor, Tensor, Tensor | None], LossAndSums]
"""Function of x, y (b, D), logit_scale and logit_bias."""


@functools.cache
def function_of_sums(name: str) -> type[torch.autograd.Function]:
    """Return the autograd function of (x, y, logit_scale, logit_bias, evaluate), whose value is the loss ().

    name: name of the loss, for the error of a second derivative.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, y: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, evaluate: Evaluate
        ) -> Tensor:
            loss, *sums = evaluate(x, y, logit_scale, logit_bias)
            ctx.save_for_backward(x, y, logit_scale, logit_bias, *sums)
            return loss

        @staticmethod
        @first_order(name)
        def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
            x, y, logit_scale, logit_bias, *sums = ctx.saved_tensors
            return *finish_gradients(d_loss, LossAndSums(d_loss, *sums), x, y, logit_scale, logit_bias), None

    return Function
