"""The caption decoder of CoCa (arXiv:2205.01917), which predicts each token of a caption from those before it.

Blocks with causal attention over the caption alternate with blocks that attend to the tokens of the image. Parameters
have the names of open_clip's `MultimodalTransformer`. Padding is no label, and its logits are not computed.

Logits, one per word of the vocabulary for each token, are the largest tensor of a step: 19,000 tokens and 49,408 words
are 3.8 GB in float32. They are computed for some tokens at a time, and again in the backward pass.

Shapes: b captions, L tokens, T tokens of all captions, P tokens of an image, C channels, V words.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LOGITS_AT_ONCE = 1 << 27
"""Largest number of logits that exist at a time. Their temporary values take up to 12 bytes each."""


class CaptionDecoder(nn.Module):
    """open_clip's decoder with the sum of the captions' cross entropies as output."""

    attn_mask: torch.Tensor

    def __init__(self, built: Any, pad_id: int) -> None:
        """built: open_clip's `MultimodalTransformer`, whose modules are used. pad_id: id of the padding."""
        super().__init__()
        self.resblocks, self.cross_attn, self.ln_final = built.resblocks, built.cross_attn, built.ln_final
        self.text_projection = built.text_projection
        self.pad_id, self.vocab_size = pad_id, self.text_projection.shape[1]
        for block in self.resblocks:
            if isinstance(block.attn, nn.MultiheadAttention):  # open_clip 4 has an attention module of its own
                kind: Any = type(block)
                block.__class__ = _causal(kind)
        self.register_buffer("attn_mask", built.attn_mask, persistent=False)
        if not self.text_projection.is_meta:
            # open_clip leaves the values of this memory as they are; its `init_parameters` names the distribution.
            nn.init.normal_(self.text_projection, std=self.text_projection.shape[0] ** -0.5)

    def forward(
        self, image_tokens: torch.Tensor, text_tokens: torch.Tensor, tokens: torch.Tensor, count: int | None = None
    ) -> torch.Tensor:
        """Return the sum of the cross entropies of all labels, () in float32 or higher precision.

        image_tokens: (b, P, C). text_tokens: (b, L, C). tokens: (b, L) int64. The label of a token is the next one.
        count: `label_count` of these captions. Default: it is computed, for which the host waits for the device.
        """
        x_bLC, length = text_tokens[:, :-1], text_tokens.shape[1] - 1
        mask = self.attn_mask[:length, :length]
        for block, cross_block in zip(self.resblocks, self.cross_attn, strict=True):
            x_bLC = block(x_bLC, attn_mask=mask)
            x_bLC = cross_block(x_bLC, image_tokens, image_tokens)  # ZeRO-3's hooks see positional arguments only
        labels = tokens[:, 1:].flatten()
        is_label = self.is_label(labels)
        count = int(is_label.sum()) if count is None else count
        chosen = is_label.logical_not().to(torch.uint8).argsort(stable=True)[:count]
        hidden_TC = self.ln_final(x_bLC.flatten(0, 1).index_select(0, chosen))
        return linear_cross_entropy(hidden_TC, self.text_projection, labels.index_select(0, chosen))

    def label_count(self, tokens: torch.Tensor) -> int:
        """Return the number of labels of captions (b, L), which the caption loss is the mean over."""
        return int(self.is_label(tokens[:, 1:]).sum())

    def is_label(self, labels: torch.Tensor) -> torch.Tensor:
        """Return True for tokens that are no padding, and that the decoder has a logit for."""
        return (labels != self.pad_id) & (labels < self.vocab_size)


@functools.cache
def _causal(kind: type) -> type:
    """Return a subclass of open_clip's block whose attention runs in the kernel for causal attention, without a mask in
    memory."""

    class _CausalBlock(kind):
        def attention(self, q_x: torch.Tensor, attn_mask: torch.Tensor, **_: Any) -> torch.Tensor:
            options = {"need_weights": False, "attn_mask": attn_mask.to(q_x.dtype), "is_causal": True}
            result: torch.Tensor = self.attn(q_x, q_x, q_x, **options)[0]
            return result

    return _CausalBlock


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
        for hidden, labels in _parts(weight_CV, hidden_TC, labels_T):
            total += F.cross_entropy((hidden @ weight_CV).to(total.dtype), labels, reduction="sum")
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden_TC, weight_CV, labels_T = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden_TC)
        weight_gradient = torch.zeros_like(weight_CV, dtype=_wide(weight_CV))
        for hidden, labels, of_hidden in _parts(weight_CV, hidden_TC, labels_T, hidden_gradient):
            of_logits = (hidden @ weight_CV).softmax(dim=1, dtype=gradient.dtype)
            of_logits[torch.arange(len(labels), device=labels.device), labels] -= 1
            of_logits = of_logits.mul_(gradient).to(hidden.dtype)
            torch.mm(of_logits, weight_CV.t(), out=of_hidden)
            weight_gradient += hidden.t() @ of_logits
        return hidden_gradient, weight_gradient.to(weight_CV.dtype), None


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _parts(weight_CV: torch.Tensor, *tensors: torch.Tensor) -> Any:
    """Return parts of tensors (T, ...), those of the same tokens together, of at most `LOGITS_AT_ONCE` logits."""
    count = max(1, LOGITS_AT_ONCE // weight_CV.shape[1])
    return zip(*(tensor.split(count) for tensor in tensors), strict=True)
