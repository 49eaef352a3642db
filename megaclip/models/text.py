"""The text tower: token and position embeddings, pre-norm blocks, causal or not, one embedding per caption.

Parameter names and semantics are those of open_clip's `TextTransformer`. Parameters that no submodule owns (positions,
final projection) are used only in this module's forward, because ZeRO-3 gathers them only there.

The tokenizer pads every caption to the context length. If the tokens after the pooled one cannot change the feature
(`is_cut_exact`), a batch of captions may be cut after its last pooled token.

Shapes: b batch, L tokens (the context length or fewer), C width, D embedding.
"""

import torch
from torch import nn

from megaclip.comm.collectives import gather_integers
from megaclip.comm.groups import RankGroup
from megaclip.models.blocks import Position, Transformer, project, projection
from megaclip.models.config import TextConfig
from megaclip.models.layers import LayerFactory
from megaclip.models.open_clip_config import OpenClipText
from megaclip.models.packing import Pieces, cut, pack

CUT_MULTIPLE = 8
"""Captions are cut at a multiple of this number of tokens, or at the context length. 8 bfloat16 numbers are the 16
bytes to which the fast matrix products and attention kernels of GPUs align. The multiple also bounds the number of
lengths that compiled blocks are compiled for: 10 for a context length of 77."""


def pooled_position(tokens: torch.Tensor, config: TextConfig | OpenClipText) -> Position:
    """Return the position whose feature represents the caption: (b,) int64, or one integer for all captions."""
    if config.pool_type == "argmax":
        return tokens.argmax(dim=1)
    if config.pool_type == "eos":  # the first token of a caption that has no end of text
        return (tokens == config.eos_id).int().argmax(dim=1)
    return 0 if config.pool_type == "first" else -1


def is_cut_exact(config: TextConfig | OpenClipText) -> bool:
    """Return whether the tokens after the pooled one cannot change the caption's feature."""
    return reason_not_to_cut(config) is None


def reason_not_to_cut(config: TextConfig | OpenClipText) -> str | None:
    """Return the reason why captions of this text tower cannot be cut without changing features, or None."""
    if isinstance(config, OpenClipText) and config.hf_model_name is not None:
        return "Hugging Face's text models read the padding"
    if isinstance(config, OpenClipText) and config.embed_cls:
        return "the text tower puts a class token after the padding"
    if config.no_causal_mask:
        return "the text tower's attention is not causal"
    if config.pool_type not in ("argmax", "eos"):
        return f'the text tower\'s "pool_type" is "{config.pool_type}"'
    return None


def caption_lengths(tokens: torch.Tensor, config: TextConfig | OpenClipText) -> torch.Tensor:
    """Return the number of tokens up to and including the pooled one, if `is_cut_exact`: (b, L) -> (b,) int64."""
    assert config.pool_type in ("argmax", "eos"), f"captions have no length with pool_type {config.pool_type!r}"
    if tokens.device.type != "cpu":
        position = pooled_position(tokens, config)
        assert isinstance(position, torch.Tensor)
        return position + 1
    of_rows = tokens.numpy()  # PyTorch's argmax takes 50 times as long
    return torch.from_numpy((of_rows if config.pool_type == "argmax" else of_rows == config.eos_id).argmax(axis=1) + 1)


def cut_length(longest: int, config: TextConfig | OpenClipText) -> int:
    """Return the length at which captions of up to `longest` tokens are cut."""
    return min(-(-longest // CUT_MULTIPLE) * CUT_MULTIPLE, config.context_length)


def cut_lengths(longest: list[int], config: TextConfig | OpenClipText, ranks: RankGroup) -> list[int]:
    """Return the length at which each of several chunks is cut, equal on all ranks.

    longest: number of tokens of the longest caption of each chunk on this rank.
    ranks: all of them must call this function with equally many chunks.
    """
    every_rank = gather_integers(longest, group=ranks)
    return [cut_length(max(of_chunk), config) for of_chunk in zip(*every_rank, strict=True)]


class TextTower(nn.Module):
    """Encode tokens as embeddings, which are not yet of unit length."""

    def __init__(self, config: TextConfig, embed_dim: int, quick_gelu: bool, factory: LayerFactory) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.positional_embedding = nn.Parameter(torch.empty(config.context_length, config.width))
        self.transformer = Transformer(config, quick_gelu, causal=not config.no_causal_mask, factory=factory)
        self.ln_final = factory.norm(config.width, config.norm_eps)
        self.text_projection = projection(config.projection, config.width, embed_dim)

    def forward(self, tokens: torch.Tensor, pieces: Pieces | None = None) -> torch.Tensor:
        """Encode tokens (b, L) int64 as (b, D) in the parameters' dtype.

        pieces: rows, in the order of `tokens`, that are cut at their own lengths; None: all rows have L tokens.
        """
        positions = self.positional_embedding
        if pieces is None:
            x_bLC = self.token_embedding(tokens) + positions[: tokens.shape[1]]
        else:
            of_rows = [positions[:length].expand(rows, -1, -1) for rows, length in pieces]
            x_bLC = self.token_embedding(pack(cut(tokens, pieces))) + pack(of_rows)
        x_b1C = self.transformer(x_bLC, pooled_position(tokens, self.config), pieces)
        return project(self.ln_final(x_b1C.squeeze(1)), self.text_projection)
