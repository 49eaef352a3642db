"""The transformer blocks of both towers.

The blocks are pre-norm residual blocks with open_clip's parameter semantics. Query, key and value projections are
separate, because tensor parallelism splits each of them by heads, which one fused matrix does not allow. Joining the
weights in every call for one product saves no time overall: on an H200 compiled blocks take 10.39 ms instead of 10.16
(ViT-B/16, 512 images), 10.59 instead of 10.86 (ViT-L/14, 256), and 2.83 instead of 2.29 (512 captions of 77 tokens).
Every tensor is batch first.

Some towers read only one token per row: the class token, or the end of the text. Their last block computes keys and
values for all tokens, and everything else for that token only. The result is the same, and most of one block's
computation is saved.

Shapes: b batch, L tokens, Q queries (L, or 1), C width, H heads (of this rank), K channels per head. Where a function
has an argument `pieces`, its input may be packed (`megaclip.models.packing`): (T, C) instead of (b, L, C), and the same
for its output, except that the output for one position per row is (b, 1, C).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megaclip.models.attention import attend
from megaclip.models.config import Projection, TextConfig, VisionConfig
from megaclip.models.layers import LayerFactory, check_split
from megaclip.models.packing import Pieces, first_tokens, pack, rows_of, unpack
from megaclip.models.rotary import rotate
from megaclip.ops.mlp import has_mlp, mlp

CheckpointFunction = Callable[..., Any]
"""checkpoint_fn(function, *arguments, **options) returns function(*arguments, **options), and recomputes it in the
backward pass."""

Position = torch.Tensor | int
"""Position of one token in every row: (b,) int64, or one integer for all rows, negative from the end."""


def projection(kind: Projection, width: int, embed_dim: int) -> nn.Parameter | nn.Linear | None:
    """Return a projection to the embedding without values."""
    if kind == "matrix":
        return nn.Parameter(torch.empty(width, embed_dim))
    return nn.Linear(width, embed_dim) if kind == "linear" else None


def project(x_bC: torch.Tensor, by: nn.Parameter | nn.Linear | None) -> torch.Tensor:
    """Return what `projection` makes of (b, C): (b, D)."""
    if by is None:
        return x_bC
    return by(x_bC) if isinstance(by, nn.Module) else x_bC @ by


def select_token(x_bLC: torch.Tensor, position: Position, pieces: Pieces | None) -> torch.Tensor:
    """Return the token at `position` of every row: (b, L, C) -> (b, 1, C)."""
    if pieces is not None:
        return x_bLC.index_select(0, first_tokens(pieces, x_bLC.device) + position).unsqueeze(1)
    if isinstance(position, int):
        return x_bLC[:, position].unsqueeze(1)
    return x_bLC.gather(1, position[:, None, None].expand(-1, 1, x_bLC.shape[2]))


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU: x * sigmoid(1.702 x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape in, same shape out."""
        return x * torch.sigmoid(1.702 * x)


class LayerScale(nn.Module):
    """Multiply each channel by a learnt factor (arXiv:2103.17239)."""

    def __init__(self, width: int, initial_value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial_value))

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out."""
        return x_bLC * self.gamma


class Attention(nn.Module):
    """Multi-head self-attention; each head attends with scale K ** -0.5.

    config: settings of the tower's blocks, which attention pooling does not share.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        factory: LayerFactory,
        config: VisionConfig | TextConfig | None = None,
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.causal = causal
        self.factory = factory
        self.q_proj = factory.by_output(width, width, shares_input=True)
        self.k_proj = factory.by_output(width, width, shares_input=True, bias=config is None or config.key_bias)
        self.v_proj = factory.by_output(width, width, shares_input=True)
        self.ln_inner: nn.Module = nn.Identity()
        if config is not None and config.gated:
            self.ln_inner = factory.norm(width, config.norm_eps)
        self.out_proj = factory.by_input(width, width)

    def forward(
        self,
        x_bLC: torch.Tensor,
        position: Position | None = None,
        pieces: Pieces | None = None,
        *,
        rotation: torch.Tensor | None = None,
        query_11C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out, or (b, 1, C) for one position; with `causal`, position i sees 0..i.

        With pieces, a position is a tensor or None. rotation: of all tokens, as `megaclip.models.rotary` describes; a
        position is then 0. query_11C: attends instead of the tokens, once per row.
        """
        x_bLC = self.factory.shared_input(x_bLC)
        k_bLC, v_bLC = self.k_proj(x_bLC), self.v_proj(x_bLC)
        if query_11C is not None:
            q_bQC = self.q_proj(self.factory.shared_input(query_11C)).expand(len(x_bLC), -1, -1)
        else:
            q_bQC = self.q_proj(x_bLC if position is None else select_token(x_bLC, position, pieces))
        if pieces is None:
            return self.out_proj(self.ln_inner(self._attend(q_bQC, k_bLC, v_bLC, position, rotation)))
        keys, values = unpack(k_bLC, pieces), unpack(v_bLC, pieces)
        if position is None:
            queries = unpack(q_bQC, pieces)
            return self.out_proj(pack([self._attend(*part) for part in zip(queries, keys, values, strict=True)]))
        assert isinstance(position, torch.Tensor), "rows of several lengths have several positions"
        counts = rows_of(pieces)
        parts = zip(q_bQC.split(counts), keys, values, position.split(counts), strict=True)
        return self.out_proj(torch.cat([self._attend(*part) for part in parts]))

    def _attend(
        self,
        q_bQC: torch.Tensor,
        k_bLC: torch.Tensor,
        v_bLC: torch.Tensor,
        position: Position | None = None,
        rotation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the heads' weighted means of the values, (b, Q, C)."""
        # -1, because a rank has fewer heads if the projections are split over tensor-parallel ranks.
        heads = [x.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for x in (q_bQC, k_bLC, v_bLC)]
        if rotation is not None:
            heads[:2] = [rotate(x, rotation[..., : x.shape[2], :]) for x in heads[:2]]
        if position is None:
            out_bHQK = attend(*heads, causal=self.causal)
        else:
            out_bHQK = attend(*heads, mask=self._attention_mask(position, k_bLC))
        return out_bHQK.transpose(1, 2).flatten(2)

    def _attention_mask(self, position: Position, x_bLC: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of tokens that the query at `position` attends to: (b, 1, 1, L) or (1, L), None for all."""
        tokens = x_bLC.shape[1]
        if not self.causal:
            return None
        every = torch.arange(tokens, device=x_bLC.device)
        if isinstance(position, int):
            return None if position % tokens == tokens - 1 else (every <= position % tokens)[None]
        return every <= position[:, None, None, None]


class Mlp(nn.Module):
    """Two projections with an activation between them, or SwiGLU (arXiv:2002.05202) with a layer norm."""

    def __init__(
        self, config: VisionConfig | TextConfig, hidden_width: int, quick_gelu: bool, factory: LayerFactory
    ) -> None:
        super().__init__()
        width, gated = config.width, config.gated
        self.c_gate = factory.by_output(width, hidden_width) if gated else None
        self.c_fc = factory.by_output(width, hidden_width)
        self.activation = "quick" if quick_gelu else config.gelu
        self.gelu = QuickGELU() if quick_gelu else nn.GELU(config.gelu)
        self.ln_inner = factory.norm(hidden_width, config.norm_eps) if gated else nn.Identity()
        self.c_proj = factory.by_input(hidden_width, width)

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out."""
        if self.c_gate is not None:
            return self.c_proj(self.ln_inner(F.silu(self.c_gate(x_bLC)) * self.c_fc(x_bLC)))
        first, second = self.c_fc, self.c_proj
        if (
            torch.compiler.is_compiling()
            and type(first) is nn.Linear  # neither split over ranks nor with an adapter
            and type(second) is nn.Linear
            and has_mlp(x_bLC.device, x_bLC.dtype, *first.weight.shape)
        ):
            return mlp(x_bLC, first, second, self.activation)
        return second(self.gelu(first(x_bLC)))


class ResidualBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `norms_behind` x + norm(attention(x)), x + norm(mlp(x))."""

    def __init__(
        self, config: VisionConfig | TextConfig, quick_gelu: bool, causal: bool, factory: LayerFactory
    ) -> None:
        super().__init__()
        width, scale = config.width, config.ls_init_value
        check_split(factory.group.size, config)
        self.norms_behind = config.norms_behind
        self.ln_1 = factory.norm(width, config.norm_eps)
        self.attn = Attention(width, config.heads, causal, factory, config)
        self.ls_1 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.ln_2 = factory.norm(width, config.norm_eps)
        self.mlp = Mlp(config, int(width * config.mlp_ratio), quick_gelu, factory)
        self.ls_2 = nn.Identity() if scale is None else LayerScale(width, scale)

    def forward(
        self,
        x_bLC: torch.Tensor,
        position: Position | None = None,
        pieces: Pieces | None = None,
        rotation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out, or (b, 1, C) for one position. rotation: see `Attention`."""
        x_bQC = x_bLC if position is None else select_token(x_bLC, position, pieces)
        if self.norms_behind:
            x_bQC = x_bQC + self.ls_1(self.ln_1(self.attn(x_bLC, position, pieces, rotation=rotation)))
            return x_bQC + self.ls_2(self.ln_2(self.mlp(x_bQC)))
        x_bQC = x_bQC + self.ls_1(self.attn(self.ln_1(x_bLC), position, pieces, rotation=rotation))
        return x_bQC + self.ls_2(self.mlp(self.ln_2(x_bQC)))


class AttentionPooling(nn.Module):
    """Attention of one learnt query to all tokens, then x + mlp(norm(x)) (timm's `AttentionPoolLatent`)."""

    def __init__(self, config: VisionConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.empty(1, 1, config.width))
        self.attn = Attention(config.width, config.pool_heads, causal=False, factory=factory)
        self.ln_2 = factory.norm(config.width, config.norm_eps)
        self.mlp = Mlp(config, int(config.width * config.pool_mlp_ratio), quick_gelu=False, factory=factory)

    def forward(self, x_bLC: torch.Tensor) -> torch.Tensor:
        """(b, L, C) in, (b, C) out."""
        x_b1C = self.attn(x_bLC, query_11C=self.latent)
        return (x_b1C + self.mlp(self.ln_2(x_b1C))).squeeze(1)


class Transformer(nn.Module):
    """The stack of residual blocks of a tower."""

    def __init__(
        self, config: VisionConfig | TextConfig, quick_gelu: bool, causal: bool, factory: LayerFactory
    ) -> None:
        super().__init__()
        blocks = (ResidualBlock(config, quick_gelu, causal, factory) for _ in range(config.layers))
        self.resblocks = nn.ModuleList(blocks)

    def forward(
        self,
        x_bLC: torch.Tensor,
        position: Position | None = None,
        pieces: Pieces | None = None,
        rotation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(b, L, C) in, (b, L, C) out, or (b, 1, C) for one position. rotation: see `Attention`."""
        last = len(self.resblocks) - 1
        for index, block in enumerate(self.resblocks):
            x_bLC = block(x_bLC, position if index == last else None, pieces, rotation)
        return x_bLC
