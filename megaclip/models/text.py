"""The text tower: token and position embeddings, pre-norm causal blocks, one embedding per caption.

Parameter names and semantics are those of open_clip's `TextTransformer`. Parameters that no submodule owns (positions,
final projection) are used only in this module's forward, because ZeRO-3 gathers them only there.

Shapes: b batch, L tokens, C width, D embedding.
"""

import torch
from torch import nn

from megaclip.models.blocks import Part, Position, Transformer
from megaclip.models.config import TextConfig
from megaclip.models.layers import LayerFactory


class TextTower(nn.Module):
    """Encode tokens as embeddings, which are not yet of unit length."""

    def __init__(self, config: TextConfig, embed_dim: int, quick_gelu: bool, factory: LayerFactory) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.positional_embedding = nn.Parameter(torch.empty(config.context_length, config.width))
        self.transformer = Transformer(
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            ls_init_value=config.ls_init_value,
            quick_gelu=quick_gelu,
            causal=not config.no_causal_mask,
            factory=factory,
        )
        self.ln_final = factory.norm(config.width)
        self.text_projection = nn.Parameter(torch.empty(config.width, embed_dim))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Encode tokens (b, context_length) int64 as (b, D) in the parameters' dtype."""
        x_bLC = self.token_embedding(tokens) + self.positional_embedding
        x_b1C = self.transformer(x_bLC, self._pooled_position(tokens))
        return self.ln_final(x_b1C.squeeze(1)) @ self.text_projection

    def _pooled_position(self, tokens: torch.Tensor) -> Position:
        """Return the position whose feature represents the caption: (b,) int64, or one integer for all captions."""
        pool_type = self.config.pool_type
        if pool_type == "argmax":
            return tokens.argmax(dim=1)
        if pool_type == "eos":
            return (tokens == self.config.eos_id).int().argmax(dim=1)
        return 0 if pool_type == "first" else -1

    def trainable_groups(self) -> list[list[Part]]:
        """Return the parts of the tower from input to output, in the groups that open_clip locks and unlocks."""
        blocks: list[list[Part]] = [[block] for block in self.transformer.resblocks]
        stem: list[Part] = [self.token_embedding, self.positional_embedding]
        return [stem, *blocks[:-1], [*blocks[-1], self.ln_final], [self.text_projection]]
