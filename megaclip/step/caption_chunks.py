"""Divide a rank's captions of one step into chunks and pieces of similar length, and cut each at its longest caption.

The tokenizer pads every caption to the context length, usually to several times its own length. The text tower ignores
the padding (`megaclip.models.text.is_cut_exact`) but would still compute it. So the captions are sorted by length, the
longest first, and divided into equal chunks. If there are one or two chunks, the first has captions of many lengths. It
is divided again, into pieces (`megaclip.step.layout.piece_rows`). Every piece is cut at the end of its longest
caption. The embeddings are then in the order of the sorted captions; the gradient cache puts them back into the order
of the batch (`CaptionChunks.order`).

All ranks cut at the same lengths, those of their longest captions. The ranks of a tensor-parallel replica encode their
rows together. The others wait for the slowest rank anyway. And each combination of lengths is compiled in one step: if
a rank compiled it alone, all other ranks would wait, for every rank again.

The longest captions come first, so that a chunk's tensors fit into the memory that the previous chunk has freed.

Shapes: b rows of this rank, n chunks, L context length.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.logging import get_logger
from megaclip.models import OpenClipText, TextConfig
from megaclip.models.packing import Pieces, joined
from megaclip.models.text import caption_lengths, cut_lengths, reason_not_to_cut
from megaclip.step.layout import cuts_captions, piece_rows

logger = get_logger(__name__)

_SHOWN = 8
"""Number of pieces whose length the log shows."""


@dataclass(frozen=True)
class CaptionChunks:
    """The captions of one step on one rank, in host memory. Iterating yields the tokens of each chunk."""

    tokens: Tensor
    """Token ids (b, L) of any integer type, in the order of the batch."""
    pieces: list[Pieces]
    """Pieces of each chunk, (n,), in order of decreasing length."""
    packed: bool = False
    """True if the first chunk is encoded piece by piece. A chunk of one piece may be encoded this way too.

    All ranks have the same value. Different code would compute the parameters' gradients in a different order, and
    DeepSpeed sums the ranks' gradients in the order in which they become ready.
    """
    order: Tensor | None = None
    """Row of the batch at each position in the chunks, (b,) int64. None: the chunks are in the order of the batch."""
    mean_tokens: float | None = None
    """Mean number of tokens per caption before padding. None: captions are not cut."""

    @classmethod
    def whole(cls, tokens: Tensor, count: int) -> "CaptionChunks":
        """Return `count` chunks of captions of full length, in the order of the batch."""
        return cls(tokens, [((len(tokens) // count, tokens.shape[1]),)] * count)

    @classmethod
    def cut(
        cls,
        tokens: Tensor,
        count: int,
        config: TextConfig | OpenClipText,
        *,
        tensor_ranks: int = 1,
        ranks: RankGroup = ONE_RANK,
    ) -> "CaptionChunks":
        """Return `count` chunks of captions that are sorted by length and cut.

        Args:
            config: the text tower, for which `is_cut_exact` returns True.
            tensor_ranks: the tensor-parallel size.
            ranks: the ranks that cut at the same lengths. All of them call this function.
        """
        own = caption_lengths(tokens, config)
        rows = [piece_rows(len(tokens) // count, chunk, count, config, tensor_ranks) for chunk in range(count)]
        counts = list(itertools.chain.from_iterable(rows))
        order = own.argsort(descending=True, stable=True)
        lengths = cut_lengths([int(part.max()) for part in own[order].split(counts)], config, ranks)
        pieces = iter(zip(counts, lengths, strict=True))
        by_chunk = [joined(tuple(itertools.islice(pieces, len(of_chunk)))) for of_chunk in rows]
        mean_tokens = float(own.double().mean())
        return cls(tokens, by_chunk, len(rows[0]) > 1, order if len(set(lengths)) > 1 else None, mean_tokens)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the tokens of each chunk, (b / n, L') with the length L' of its first piece."""
        bounds = range(0, len(self.tokens) + 1, len(self.tokens) // len(self.pieces))
        for (start, end), pieces in zip(pairwise(bounds), self.pieces, strict=True):
            tokens = self.tokens[:, : pieces[0][1]]
            yield tokens[start:end] if self.order is None else tokens.index_select(0, self.order[start:end])

    def pieces_of(self, chunk: int) -> Pieces | None:
        """Return the pieces of a chunk; None if it is not packed."""
        return self.pieces[chunk] if self.packed and chunk == 0 else None

    @property
    def saved_share(self) -> float:
        """Share of the token positions that the text tower does not process because captions are cut."""
        return 1 - sum(rows * length for pieces in self.pieces for rows, length in pieces) / self.tokens.numel()

    def summary(self) -> str:
        """Return one line about cut captions, for a log."""
        context_length = self.tokens.shape[1]
        lengths = [length for pieces in self.pieces for _, length in pieces]
        parts = "pieces" if len(lengths) > len(self.pieces) else "chunks"
        shown = ", ".join(map(str, lengths[:_SHOWN])) + (", ..." if len(lengths) > _SHOWN else "")
        return (
            f"captions of {self.mean_tokens:.1f} tokens on average, in {parts} cut at {shown} of {context_length}: "
            f"{self.saved_share:.0%} of the text tower's token positions are saved"
        )


DivideCaptions = Callable[[Tensor, int], CaptionChunks]
"""Function that divides a step's captions: (tokens (b, L), number of chunks) -> their chunks."""


def division_of_captions(
    setting: bool | str, text: TextConfig | OpenClipText, *, tensor_ranks: int, ranks: RankGroup, pairs: bool
) -> DivideCaptions | None:
    """Return the function that divides the captions of every step of a run. If it does not cut them, log why.

    setting: megaclip.cut_captions. tensor_ranks, ranks: as for `CaptionChunks.cut`. pairs: each chunk of images is
    encoded together with its captions, so there is no such function.
    """
    if not pairs and cuts_captions(setting, text):
        return functools.partial(CaptionChunks.cut, config=text, tensor_ranks=tensor_ranks, ranks=ranks)
    reason = "megaclip.cut_captions is false" if setting is False else reason_not_to_cut(text)
    reason = "they are encoded together with their images" if pairs else reason
    logger.info("captions are encoded with their padding, %d tokens each: %s", text.context_length, reason)
    return None if pairs else CaptionChunks.whole
