"""Attention of short sequences for compiled towers on Hopper, faster than the libraries' kernels.

The kernels of cuDNN and FlashAttention are made for long sequences: their tiles have many rows that a short sequence
does not fill, and their backward passes add up the gradient of the queries in float32 in device memory. The kernels of
`attention_triton.py` have neither. Their times beside those of the libraries are in docs/performance.md, "Attention and
products".

Shapes: b batch, L tokens, H heads, K channels per head.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megaclip.ops.tiles import reason_without_kernels

_HOPPER = (9, 0)
_MOST_TOKENS = 320
_CHANNELS = (16, 32, 64)


def has_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels run for tensors of this kind, with the shapes that `is_short` accepts."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not is_half or reason_without_kernels(device):
        return False
    return torch.cuda.get_device_capability(device) == _HOPPER


def is_short(q_bHQK: Tensor, k_bHLK: Tensor) -> bool:
    """Return whether every token attends, and the sequence is as short and the heads as wide as the kernels require."""
    tokens, channels = k_bHLK.shape[2:]
    return q_bHQK.shape[2] == tokens and fits_kernels(tokens, channels)


def fits_kernels(tokens: int, channels: int) -> bool:
    """Return whether the kernels run for sequences of this length with heads of so many channels."""
    return tokens <= _MOST_TOKENS and channels in _CHANNELS


def attention(q_bHLK: Tensor, k_bHLK: Tensor, v_bHLK: Tensor, causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, (b, H, L, K), as the transpose of a contiguous tensor (b, L, H, K)."""
    return _forward(*(x.transpose(1, 2) for x in (q_bHLK, k_bHLK, v_bHLK)), causal)[0].transpose(1, 2)


@torch.library.custom_op("megaclip::attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (b, L, H, K), and log-sum-exps (b, H, L) for the backward pass."""
    if q.is_cuda:
        return _kernels().attention(q.contiguous(), k.contiguous(), v.contiguous(), causal)
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhlm,bmhk->blhk", (scores - lse[..., None]).exp(), v).contiguous(), lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    b, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, heads, tokens), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("megaclip::attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, (b, L, H, K), from that of the output."""
    if q.is_cuda:
        q, k, v, gradient = (x.contiguous() for x in (q, k, v, gradient))
        return _kernels().attention_backward(q, k, v, out, lse, gradient, causal)
    p = (_scores(q, k, causal) - lse[..., None]).exp()
    delta = (out * gradient).sum(-1).transpose(1, 2)
    ds = p * (torch.einsum("blhk,bmhk->bhlm", gradient, v) - delta[..., None]) * q.shape[3] ** -0.5
    dq, dk = torch.einsum("bhlm,bmhk->blhk", ds, k), torch.einsum("bhlm,blhk->bmhk", ds, q)
    return dq.contiguous(), dk.contiguous(), torch.einsum("bhlm,blhk->bmhk", p, gradient).contiguous()


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return q k^T / sqrt(K), (b, H, L, L), with -inf where a token does not see another."""
    scores = torch.einsum("blhk,bmhk->bhlm", q, k) * q.shape[3] ** -0.5
    hidden = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, gradient, ctx.causal), None


_forward.register_autograd(_gradients, setup_context=_keep)


def _kernels() -> ModuleType:
    return importlib.import_module("megaclip.ops.attention_triton")
