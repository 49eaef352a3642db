"""Caption lengths that plans and benchmarks assume, and the token positions that remain after captions are cut.

The assumed distribution: 90 % of the captions have 8 to 32 tokens, start and end of text included, and 10 % have 33 to
77. In both ranges all lengths are equally frequent. The mean is 23.5 tokens.
"""

from bisect import bisect_left
from collections import Counter

from megaclip.models import OpenClipText, TextConfig
from megaclip.models.packing import Pieces
from megaclip.models.text import cut_length
from megaclip.step.layout import piece_rows

_USUAL, _LONG = (8, 32), (33, 77)
_LONG_SHARE = 0.1


def assumed_length(share: float) -> int:
    """Return the number of tokens that `share` of the captions, from 0 to 1, do not exceed."""
    usual = 1 - _LONG_SHARE
    (least, most), part = (_USUAL, share / usual) if share <= usual else (_LONG, (share - usual) / _LONG_SHARE)
    return min(least + int(part * (most - least + 1)), most)


def planned_pieces(rows: int, chunks: int, text: TextConfig | OpenClipText, tensor_ranks: int) -> Counter[Pieces]:
    """Return the pieces of sorted and cut chunks of `rows` captions, with the number of chunks that have them.

    The longest caption of a piece is that of a large batch: in the first piece, the longest of all captions.
    """

    def pieces_of(chunk: int) -> Pieces:
        longer, pieces = rows * chunk, []  # number of captions before the piece
        for count in piece_rows(rows, chunk, chunks, text, tensor_ranks):
            pieces.append((count, cut_length(assumed_length(1 - longer / (rows * chunks)), text)))
            longer += count
        return tuple(pieces)

    planned = Counter([pieces_of(0)])
    first = 1
    while first < chunks:  # lengths decrease, so equal chunks are adjacent
        pieces = pieces_of(first)
        end = bisect_left(range(chunks), True, first + 1, key=lambda chunk: pieces_of(chunk) != pieces)
        planned[pieces] += end - first
        first = end
    return planned


def mean_positions(rows: int, chunks: int, text: TextConfig | OpenClipText, tensor_ranks: int = 1) -> float:
    """Return the mean number of token positions per caption after sorting and cutting."""
    planned = planned_pieces(rows, chunks, text, tensor_ranks)
    total = sum(equal * count * length for pieces, equal in planned.items() for count, length in pieces)
    return total / (rows * chunks)
