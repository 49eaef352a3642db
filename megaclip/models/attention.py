"""Scaled dot-product attention by the fastest kernels for the shape.

Compiled towers on Hopper GPUs run the kernels of `ops/attention.py` for short sequences. Otherwise one of PyTorch's
backends runs. On recent GPUs PyTorch prefers cuDNN's kernels. The memory-efficient kernels are faster for at most 64
tokens, the size of their tile, with heads of at most 64 channels. Forward and backward on an H200, bfloat16, 12 heads
of 64 channels, 1,024 samples, in ms (`python tools/bench_towers.py attention` prints every shape):

    tokens                    24     32     50     64     77    197
    cuDNN                   0.63   0.68   0.80   0.89   1.03   2.94
    memory-efficient        0.45   0.45   0.50   0.50   1.51   7.04
    flash                   1.37   1.39   1.44   1.47   1.50   4.20

Causal attention and one masked query per sample give the same order. One query without a mask is as fast with cuDNN.
For wider heads cuDNN is the fastest at every length: 88 channels, 50 tokens, 16 heads: 1.44 against 2.73 and 1.82.
Heads of 72 (SO400M), 96 (gopt), and 128 and 192 channels (pooling of PE) follow this rule and were not measured.

Shapes: b batch, H heads, Q queries, L keys, K channels per head.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaclip.ops.attention import attention, has_attention, is_short

_TILE = 64
_EFFICIENT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends for small shapes. Without an order of priority: PyTorch puts cuDNN first at its first attention, for the
whole process, and leaving a context with an order would take that back."""


def attend(
    q_bHQK: torch.Tensor,
    k_bHLK: torch.Tensor,
    v_bHLK: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(K)) v, (b, H, Q, K). mask: True for the keys that a query attends to."""
    if (
        torch.compiler.is_compiling()
        and mask is None
        and is_short(q_bHQK, k_bHLK)
        and has_attention(q_bHQK.device, q_bHQK.dtype)
    ):
        return attention(q_bHQK, k_bHLK, v_bHLK, causal)
    if _prefers_efficient(q_bHQK, k_bHLK, mask):
        with sdpa_kernel(_EFFICIENT):
            return F.scaled_dot_product_attention(q_bHQK, k_bHLK, v_bHLK, attn_mask=mask, is_causal=causal)
    return F.scaled_dot_product_attention(q_bHQK, k_bHLK, v_bHLK, attn_mask=mask, is_causal=causal)


def _prefers_efficient(q_bHQK: torch.Tensor, k_bHLK: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether the memory-efficient kernels are the fastest."""
    queries, tokens = q_bHQK.shape[2], k_bHLK.shape[2]
    small = tokens <= _TILE and k_bHLK.shape[3] <= _TILE and k_bHLK.shape[3] % 8 == 0
    return q_bHQK.is_cuda and small and (queries == tokens or mask is not None)
