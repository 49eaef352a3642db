"""The transformer block both towers are made of.

Pre-norm residual blocks with open_clip's parameter semantics, but separate query, key and value projections: tensor
parallelism splits each by heads, which one fused matrix does not allow. Attention is PyTorch's
`scaled_dot_product_attention`. Every tensor is batch first.

Shapes: b batch, L tokens, C width, H heads (of this rank), K channels per head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

CheckpointFunction = Callable[..., torch.Tensor]
"""checkpoint_fn(function, *tensors) -> function(*tensors), recomputing inside in the backward pass."""

Part = nn.Module | nn.Parameter
"""What is locked or unlocked as one."""


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU: x * sigmoid(1.702 x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape in, same shape out."""
        return x * torch.sigmoid(1.702 * x)


class LayerScale(nn.Module):
    """Multiply each channel by a learnt factor (arXiv:2103.17239)."""

    def __init__(self, width: int, initial_value: float) -> None:
        super().__init__()
        self.initial_value = initial_value
        self.gamma = nn.Parameter(torch.full((width,), initial_value))

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out."""
        return x_bLC * self.gamma


class Attention(nn.Module):
    """Multi-head self-attention; each head attends with scale K ** -0.5."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.head_width = width // heads
        self.causal = causal
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out; with `causal`, position i sees positions 0..i."""
        q_bHLK = self._split_heads(self.q_proj(x_bLC))
        k_bHLK = self._split_heads(self.k_proj(x_bLC))
        v_bHLK = self._split_heads(self.v_proj(x_bLC))
        out_bHLK = F.scaled_dot_product_attention(q_bHLK, k_bHLK, v_bHLK, is_causal=self.causal)
        return self.out_proj(out_bHLK.transpose(1, 2).flatten(2))

    def _split_heads(self, x_bLC: torch.Tensor) -> torch.Tensor:
        # -1: the number of heads here is smaller when the projections are split over tensor-parallel ranks.
        return x_bLC.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Mlp(nn.Module):
    """Two projections with an activation between them."""

    def __init__(self, width: int, hidden_width: int, quick_gelu: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, hidden_width)
        self.gelu = QuickGELU() if quick_gelu else nn.GELU()
        self.c_proj = nn.Linear(hidden_width, width)

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out."""
        return self.c_proj(self.gelu(self.c_fc(x_bLC)))


class ResidualBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, width: int, heads: int, mlp_ratio: float, ls_init_value: float | None, quick_gelu: bool, causal: bool
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.ls_1 = nn.Identity() if ls_init_value is None else LayerScale(width, ls_init_value)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, int(width * mlp_ratio), quick_gelu)
        self.ls_2 = nn.Identity() if ls_init_value is None else LayerScale(width, ls_init_value)

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out."""
        x_bLC = x_bLC + self.ls_1(self.attn(self.ln_1(x_bLC)))
        return x_bLC + self.ls_2(self.mlp(self.ln_2(x_bLC)))


class Transformer(nn.Module):
    """A stack of residual blocks, each of which may be recomputed in the backward pass."""

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        mlp_ratio: float,
        ls_init_value: float | None,
        quick_gelu: bool,
        causal: bool,
    ) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, heads, mlp_ratio, ls_init_value, quick_gelu, causal) for _ in range(layers)
        )
        self.checkpoint_fn: CheckpointFunction | None = None

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out."""
        for block in self.resblocks:
            if self.checkpoint_fn is not None and torch.is_grad_enabled():
                x_bLC = self.checkpoint_fn(block, x_bLC)
            else:
                x_bLC = block(x_bLC)
        return x_bLC
