"""Autograd function of a loss that computes the sums of its gradients in the forward pass.

The backward pass multiplies these sums by the upstream gradient, adds the positives and rounds. It does not
communicate.

For autograd these gradients are constants, so second derivatives, such as those of a penalty on the gradients, would be
silently wrong. `first_order` refuses them. PyTorch's `once_differentiable` does not detect them: it checks only the
upstream gradient, which is a constant in `torch.autograd.grad(loss, features, create_graph=True)`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaclip.ops.rows import finish_gradients as finish_both


class LossInputs(NamedTuple):
    """Tensors of one call of `ClipLoss` or `SigLipLoss`, which documents them. b local samples, e negatives."""

    x: Tensor  # (b, D)
    y: Tensor  # (b, D)
    logit_scale: Tensor
    logit_bias: Tensor | None = None
    negatives: Tensor | None = None  # (e, D); the loss has a gradient with respect to the tensors so far
    ids: Tensor | None = None  # (b,)
    negative_ids: Tensor | None = None  # (e,)
    negative_rows: Tensor | None = None  # (e,)
    weights: Tensor | None = None  # (b,)


DIFFERENTIABLE = 5
"""Number of the inputs with respect to which the loss has a gradient."""


class LossAndSums(NamedTuple):
    """The loss and everything that its backward pass needs besides its arguments, in the dtype of sums."""

    loss: Tensor
    """() the mean over the whole batch. It is not a view, because trainers divide losses in place."""
    dx: Tensor
    """(b, D) sum over the negatives of this rank's images, without `factor`; their order is that of `places`."""
    dy: Tensor
    """(b, D) sum over the negatives of this rank's texts, likewise."""
    pull: Tensor
    """(b,) weight of each positive, without `factor`, likewise."""
    factor: Tensor
    """() factor of the gradients of the features."""
    d_alpha: Tensor
    """() gradient of logit_scale."""
    d_beta: Tensor
    """() gradient of logit_bias."""
    d_negatives: Tensor
    """(e, D) sum of this rank's negatives, without `factor`; (0,) without negatives."""
    places: Tensor | None = None
    """(b,) int64, the row of `dx`, `dy` and `pull` that belongs to each pair; None or (0,): row i to pair i."""


def finish_gradients(
    d_loss: Tensor, ctx: Any, finish: Callable[..., tuple[Tensor, Tensor, Tensor]] = finish_both
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs, in their dtypes and shapes; None where there is none.

    d_loss: (), the upstream gradient. ctx: has saved the inputs and then the sums, without the loss.
    """
    count = len(LossInputs._fields)
    inputs, sums = LossInputs(*ctx.saved_tensors[:count]), LossAndSums(d_loss, *ctx.saved_tensors[count:])
    x, y, logit_scale, logit_bias, negatives, *others = inputs
    places = sums.places if sums.places is not None and len(sums.places) else None
    dx, dy, _ = finish(sums.dx, sums.dy, x, y, sums.pull, sums.factor, d_loss, places)
    d_scale = gradient_of_scalar(sums.d_alpha * d_loss, logit_scale)
    d_bias = None if logit_bias is None else gradient_of_scalar(sums.d_beta * d_loss, logit_bias)
    d_negatives = None if negatives is None else (sums.d_negatives * (sums.factor * d_loss)).to(negatives.dtype)
    return dx, dy, d_scale, d_bias, d_negatives, *(None for _ in others)


def gradient_of_scalar(gradient: Tensor, scalar: Tensor) -> Tensor:
    """Return the gradient () with the device, dtype and shape of its scalar, which may be on the host."""
    return gradient.to(scalar.device, scalar.dtype).reshape(scalar.shape)


Evaluate = Callable[[LossInputs], LossAndSums]


Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: Backward) -> Backward:
    """Decorate the backward function of a loss: it runs without autograd, and refuses a second derivative.

    `ctx.loss` is the name of the loss, for the error. With `create_graph=True` the gradients depend on the upstream
    gradient and on the saved tensors. Differentiating them raises RuntimeError.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *d_outputs)
        with torch.no_grad():
            gradients = backward(ctx, *d_outputs)
        sources = [t for t in (*d_outputs, *ctx.saved_tensors) if t is not None and t.requires_grad]
        return tuple(
            None if gradient is None else _Refusal.apply(ctx.loss, gradient, *sources) for gradient in gradients
        )

    return run


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


class FunctionOfSums(torch.autograd.Function):
    """The loss () as a function of its name, of what evaluates it, and of `LossInputs`."""

    @staticmethod
    def forward(ctx: Any, name: str, evaluate: Evaluate, *inputs: Any) -> Tensor:
        loss, *sums = evaluate(LossInputs(*inputs))
        ctx.loss = name
        ctx.save_for_backward(*inputs, *sums)
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *finish_gradients(d_loss, ctx)
