"""Text chunks of a run and of its plan: how many captions they hold, and how long planned captions are.

A text chunk takes about as much memory as an image chunk.

Plans and benchmarks assume this distribution of caption lengths: 90 % of the captions have 8 to 32 tokens, start and
end of text included, and 10 % have 33 to 77. In both ranges all lengths are equally frequent. The mean is 23.5 tokens.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import replace

from megaclip.config import TrainingConfig
from megaclip.config.training import TextChunks
from megaclip.models import ModelDescription, OpenClipConfig, OpenClipText, TextConfig
from megaclip.models.packing import Pieces
from megaclip.models.text import cut_length
from megaclip.planner.constants import LEAST_CUT_CHUNKS
from megaclip.planner.tower_costs import tower_costs
from megaclip.step.layout import cuts_captions, piece_rows

_USUAL, _LONG = (8, 32), (33, 77)
_LONG_SHARE = 0.1


def text_chunks_for(
    model: ModelDescription, compute_bytes: int, cut_captions: bool | str, *, pairs: bool = False
) -> TextChunks:
    """Return the limits of a run's text chunks: the number of captions that take about as much memory as one image.

    Chunks of open_clip's text towers are not divided into pieces. They contain as little padding as the captions of an
    image chunk only if there are several text chunks. compute_bytes: bytes of an activation. cut_captions:
    megaclip.cut_captions. pairs: an objective pairs images with captions, so their chunks have the same samples.
    """
    if pairs or model.has_decoder:
        return TextChunks()
    if isinstance(model, OpenClipConfig):
        image, text = (tower_costs(model, tower, compute_bytes) for tower in ("image", "text"))
        least = LEAST_CUT_CHUNKS if cuts_captions(cut_captions, model.text_cfg) else 1
        return TextChunks(max(1, int(image.backward_peak / text.backward_peak)), least)
    tower, captions = model.vision_cfg, model.text_cfg
    tokens = tower.tokens - tower.grid_size**2 * tower.patch_dropout
    numbers = captions.context_length * captions.width * captions.layers
    return TextChunks(max(1, round(tokens * tower.width * tower.layers / numbers)))


def fitted(config: TrainingConfig, model: ModelDescription, *, pairs: bool = False) -> TrainingConfig:
    """Return the settings of a run with the sizes of text chunks for the model. pairs: as for `text_chunks_for`."""
    limits = text_chunks_for(model, 2 if config.bf16 else 4, config.megaclip.cut_captions, pairs=pairs)
    return replace(config, text_chunks=limits)


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
