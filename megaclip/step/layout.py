"""Rules by which a step is laid out, shared by the step and its plan: which graphs are kept, and how captions are cut.

Each rule is a function of plain numbers. The planner applies the rules to planned figures, and the step follows them.
After its first steps a run applies `graphs_that_fit` again, to the memory that these steps left free.

If an argument describes both towers, the image tower comes first.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from megaclip.models import OpenClipText, TextConfig
from megaclip.models.text import is_cut_exact

LEAST_KEPT_SHARE = 0.01
"""Share of a step's graphs below which `graphs_that_fit` keeps none. They would save less than half a percent of the
step's time."""

_WINDOW = 3
"""Number of image chunks in the step store if no images are kept: one is used, one is copied to the device, and one has
arrived."""


class KeptGraphs(NamedTuple):
    """Number of chunks of each tower whose graphs a step keeps from their forward pass to their backward pass: the
    first chunks of the tower. The others are encoded twice, without and with a graph."""

    image: int
    text: int


def one_chunk_each(chunks: Sequence[int], trained: Sequence[bool], pairs: bool = False) -> bool:
    """Return whether each trained tower has one chunk. Then the graphs of a step are always kept.

    pairs: one pass encodes a chunk of both towers, because a caption decoder reads the tokens of both.
    """
    return chunks[0] == 1 if pairs else all(count <= 1 for count in _graphs(chunks, trained))


def has_cheap_passes(zero_stage: int, *, coalesces: bool, offloads_optimizer: bool) -> bool:
    """Return whether another backward pass costs nothing but its launch.

    Otherwise DeepSpeed gathers parameters again, or adds and moves the gradients of each pass.
    """
    return zero_stage < (3 if coalesces else 2) and not offloads_optimizer


def encodes_together(chunks: Sequence[int], trained: Sequence[bool], cheap_passes: bool) -> bool:
    """Return whether one forward pass encodes the whole share of a rank: both towers are trained, in one chunk each.

    With cheap passes (`has_cheap_passes`) each tower has its own, and the image tower is back-propagated first. The
    text tower has many small kernels. In one pass autograd starts with them, and the GPU waits for the host.
    """
    return all(trained) and all(count == 1 for count in chunks) and not cheap_passes


def text_first(chunks: Sequence[int], trained: Sequence[bool]) -> bool:
    """Return whether the text tower encodes the batch first, if the towers do not encode it together.

    A text tower that is not trained keeps no graph, so it runs first, unless it has to wait for several chunks of
    images (`StepStore.chunks`).
    """
    return not trained[1] and chunks[0] == 1


def kept_graphs(number: int, chunks: Sequence[int], trained: Sequence[bool], pairs: bool = False) -> KeptGraphs:
    """Return the kept graphs of each tower if a step keeps `number` graphs, or all if it has fewer.

    The image tower's graphs come first. Memory is planned for captions of full length, and most captions are shorter,
    so per byte an image graph saves more computation. It also saves reading its images again. If each trained tower has
    one chunk, all graphs are kept.

    chunks: number of chunks of each tower in a step. trained: whether the tower has trainable parameters. pairs: a pass
    encodes a chunk of both towers, and has the graphs of both.
    """
    image, text = _graphs(chunks, trained)
    if one_chunk_each(chunks, trained, pairs):
        number = image + text
    if pairs:
        number = min(number // 2, image)
        return KeptGraphs(image=number, text=number)
    images = min(number, image)
    return KeptGraphs(image=images, text=min(number - images, text))


def graphs_that_fit(kept: int, graph_bytes: Sequence[float], free: float) -> int:
    """Return the number of graphs that fit if a step keeps `kept` graphs now and has `free` bytes left at its peak.

    The number does not increase if all graphs that fit are fewer than LEAST_KEPT_SHARE of the step's graphs.

    graph_bytes: largest number of bytes by which each graph of the step raises the peak, in the order of `kept_graphs`.
    """
    fitting = sum(total <= free for total in itertools.accumulate(graph_bytes[kept:]))
    return kept + fitting if kept + fitting >= LEAST_KEPT_SHARE * len(graph_bytes) else kept


def chunks_held(chunks: int, read_again: int, *, keeps: bool) -> int:
    """Return the number of image chunks in a rank's step store.

    chunks: image chunks of a step. read_again: number of them that the loader reads twice. keeps: whether the store
    keeps the images of a step.
    """
    return chunks if keeps else min(_WINDOW, chunks + read_again)


def _graphs(chunks: Sequence[int], trained: Sequence[bool]) -> list[int]:
    """Return the number of graphs of each tower in a step."""
    return [count if is_trained else 0 for count, is_trained in zip(chunks, trained, strict=True)]


def cuts_captions(setting: bool | str, text: TextConfig | OpenClipText) -> bool:
    """Return whether each chunk of captions is cut at its longest caption. setting: megaclip.cut_captions."""
    return setting is not False and is_cut_exact(text)


def piece_rows(rows: int, chunk: int, chunks: int, text: TextConfig | OpenClipText, tensor_ranks: int) -> list[int]:
    """Return the number of rows of each piece that a chunk of sorted captions is divided into.

    The first of one or two chunks is divided into an eighth, an eighth, a quarter and a half: usual captions have a few
    long ones and many of similar lengths. With more chunks the first one has long captions only. Their lengths differ
    from step to step, and torch.compile would compile the blocks for each combination of lengths. Tensor-parallel ranks
    encode their rows together, so they cannot sort them together. open_clip's text towers take rows of one length.
    """
    if chunk > 0 or chunks > 2 or rows < 8 or tensor_ranks > 1 or isinstance(text, OpenClipText):
        return [rows]
    eighth = rows // 8
    return [eighth, eighth, 2 * eighth, rows - 4 * eighth]
