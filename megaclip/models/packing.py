"""Rows of several lengths in one tensor, without the padding between them.

A chunk of captions that are sorted by length is divided into pieces, and each piece is cut at its own longest caption.
The tokens of all pieces, one row after the other, are one packed tensor. Operations on single tokens run once over the
packed tensor. Only attention runs piece by piece.

Shapes: b rows of a chunk; T tokens of all its rows; C width.
"""

import itertools
from collections.abc import Sequence

import torch

Pieces = tuple[tuple[int, int], ...]
"""Number of rows, and of tokens per row, of each piece, in the order of the rows."""


def joined(pieces: Pieces) -> Pieces:
    """Return the pieces with neighbours of equal length joined to one: attention runs once per piece."""
    groups = itertools.groupby(pieces, key=lambda piece: piece[1])
    return tuple((sum(rows for rows, _ in group), tokens) for tokens, group in groups)


def rows_of(pieces: Pieces) -> list[int]:
    """Return the number of rows of each piece."""
    return [rows for rows, _ in pieces]


def cut(rows_bL: torch.Tensor, pieces: Pieces) -> list[torch.Tensor]:
    """Return the rows of each piece, cut at its length: (b, L) -> tensors (rows, tokens)."""
    parts = rows_bL.split(rows_of(pieces))
    return [part[:, :tokens] for part, (_, tokens) in zip(parts, pieces, strict=True)]


def pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join pieces (rows, tokens, ...) to a packed tensor (T, ...)."""
    return torch.cat([part.flatten(0, 1) for part in parts])


def unpack(packed_TC: torch.Tensor, pieces: Pieces) -> list[torch.Tensor]:
    """Return the pieces (rows, tokens, C) of a packed tensor (T, C), as views."""
    parts = packed_TC.split([rows * tokens for rows, tokens in pieces])
    return [part.unflatten(0, piece) for part, piece in zip(parts, pieces, strict=True)]


def first_tokens(pieces: Pieces, device: torch.device) -> torch.Tensor:
    """Return the position of the first token of every row in a packed tensor, (b,) int64."""
    places, start = [], 0
    for rows, tokens in pieces:
        end = start + rows * tokens
        places.append(torch.arange(start, end, tokens, device=device))
        start = end
    return torch.cat(places)
