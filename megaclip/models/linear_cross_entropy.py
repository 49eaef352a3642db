"""Cross entropy of the logits of a linear layer, without keeping logits.

A caption decoder has one logit per word of the vocabulary for each token. They are the largest tensor of a step: 19,000
tokens and 49,408 words are 3.8 GB in float32. Here they are computed for some tokens at a time, and again in the
backward pass.

Shapes: T tokens, C channels, V words.
"""

from typing import Any

import torch
import torch.nn.functional as F

LOGITS_AT_ONCE = 1 << 27
"""Largest number of logits that exist at a time. Their temporary values take up to 12 bytes each."""


def linear_cross_entropy(hidden_TC: torch.Tensor, weight_CV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of the cross entropies of `hidden_TC @ weight_CV`, () in float32 or higher precision.

    Softmax and sums are computed in float32 or higher precision, matrix products in the dtype of `hidden_TC`.

    labels_T: int64, below V.
    """
    result: torch.Tensor = _LinearCrossEntropy.apply(hidden_TC, weight_CV, labels_T)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TC: torch.Tensor, weight_CV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_TC, weight_CV, labels_T)  # a parameter that ZeRO-3 frees is saved as itself
        total = hidden_TC.new_zeros((), dtype=_wide(hidden_TC))
        for hidden, labels in _parts(hidden_TC, labels_T, weight_CV):
            total += F.cross_entropy((hidden @ weight_CV).to(total.dtype), labels, reduction="sum")
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden_TC, weight_CV, labels_T = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden_TC)
        weight_gradient = torch.zeros_like(weight_CV, dtype=_wide(weight_CV))
        gradients = hidden_gradient.split(_tokens_at_once(weight_CV))
        for (hidden, labels), of_hidden in zip(_parts(hidden_TC, labels_T, weight_CV), gradients, strict=True):
            of_logits = (hidden @ weight_CV).softmax(dim=1, dtype=gradient.dtype)
            of_logits[torch.arange(len(labels), device=labels.device), labels] -= 1
            of_logits = of_logits.mul_(gradient).to(hidden.dtype)
            torch.mm(of_logits, weight_CV.t(), out=of_hidden)
            weight_gradient += hidden.t() @ of_logits
        return hidden_gradient, weight_gradient.to(weight_CV.dtype), None


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _tokens_at_once(weight_CV: torch.Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // weight_CV.shape[1])


def _parts(hidden_TC: torch.Tensor, labels_T: torch.Tensor, weight_CV: torch.Tensor) -> Any:
    """Return pairs of some tokens and their labels."""
    count = _tokens_at_once(weight_CV)
    return zip(hidden_TC.split(count), labels_T.split(count), strict=True)
