"""Caption lengths that a plan and a benchmark assume, and what cutting captions leaves the text tower to compute.

The assumed distribution: 90 % of the captions have 8 to 32 tokens, start and end of text included, and 10 % have 33 to
77. In both ranges all lengths are equally frequent. The mean is 23.5 tokens.
"""

from megaclip.models import TextConfig
from megaclip.models.text import cut_length

_USUAL, _LONG = (8, 32), (33, 77)
_LONG_SHARE = 0.1


def assumed_length(share: float) -> int:
    """Return the number of tokens that `share` of the captions, from 0 to 1, do not exceed."""
    usual = 1 - _LONG_SHARE
    (least, most), part = (_USUAL, share / usual) if share <= usual else (_LONG, (share - usual) / _LONG_SHARE)
    return min(least + int(part * (most - least + 1)), most)


def chunk_positions(chunks: int, text: TextConfig) -> list[int]:
    """Return the number of token positions of each chunk after sorting and cutting captions in `chunks` chunks.

    The longest caption of a chunk is that of a large batch: with one chunk, the longest of all captions.
    """
    return [cut_length(assumed_length(1 - chunk / chunks), text) for chunk in range(chunks)]


def mean_positions(chunks: int, text: TextConfig) -> float:
    """Return the mean number of token positions per caption after sorting and cutting captions in `chunks` chunks."""
    return sum(chunk_positions(chunks, text)) / chunks
