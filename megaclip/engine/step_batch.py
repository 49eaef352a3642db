"""One rank's share of a contrastive batch, as the gradient cache asks for it: chunk by chunk, one tower at a time.

`StepBatch` is what the cache needs, whatever holds the samples; `MemoryBatch` is the plain one, tensors that are there
already. `DeviceFeed` brings chunks to the device ahead of their use. Shapes: b rows of this rank, L tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


class Tower(IntEnum):
    """Which half of the model a chunk is for."""

    IMAGE = 0
    TEXT = 1


class StepBatch(Protocol):
    """b samples, cut into equal chunks, for each tower its own number."""

    def rows(self) -> int:
        """b."""
        ...

    def chunk_count(self, tower: Tower) -> int:
        """How many chunks a pass over this tower has."""
        ...

    def chunks(self, tower: Tower, *, again: bool) -> Iterator[Tensor]:
        """The tower's inputs on its device, in the order of the rows: normalised pixels, or tokens (_, L) int64.

        again: whether they will be asked for once more; if not, what holds them may let go of each after its use.
        """
        ...

    def blank(self, tower: Tower) -> Tensor:
        """One row of the same shape, for a tower that has to take part but has nothing to say."""
        ...

    def agree(self) -> None:
        """Raise on every rank if any rank's data have failed since the last time; called by all of them together."""
        ...


@dataclass(frozen=True)
class DeviceFeed:
    """How chunks get to the model: the device, and how pixels become its input there.

    normalise: pixels (_, 3, H, W) uint8 and a dtype -> input, as `data.ImageTransform.normalise`; dtype: the engine's.
    """

    device: torch.device
    dtype: torch.dtype
    normalise: Callable[[Tensor, torch.dtype], Tensor]

    def inputs(self, tower: Tower, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The tower's inputs from chunks in host memory (pixels uint8, or tokens of any integer type).

        On a GPU the next chunk is copied, on a stream of its own, while a chunk is used. When `chunks` is asked for
        the next one, the memory of the one before has been read and may be written again.
        """
        moved = chunks if self.device.type == "cpu" else _one_ahead(chunks, self.device)
        # No names for the tensors: a generator that waits would keep them alive.
        return map(self._as_input if tower is Tower.IMAGE else Tensor.long, moved)

    def _as_input(self, pixels: Tensor) -> Tensor:
        return self.normalise(pixels, self.dtype)


def _one_ahead(chunks: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    accelerator = get_accelerator()
    copies = accelerator.Stream(device)
    waiting: list[tuple[Tensor, Any]] = []
    for chunk in chunks:
        with accelerator.stream(copies):
            moved = chunk.to(device, non_blocking=True)
            copied = accelerator.Event()
            copied.record(copies)
        del chunk
        waiting.append((moved, copied))
        del moved
        if len(waiting) == 2:
            yield _ready(*waiting.pop(0))
        copied.synchronize()  # the host's memory may now be written again
    for moved, copied in waiting:
        yield _ready(moved, copied)


def _ready(moved: Tensor, copied: Any) -> Tensor:
    """The copy, for the stream that computes: it waits there, and its memory is not reused before it was read."""
    current = get_accelerator().current_stream()
    current.wait_event(copied)
    moved.record_stream(current)
    return moved


class MemoryBatch:
    """A `StepBatch` of tensors in host memory: pixels, one tensor (_, 3, H, W) uint8 per image chunk; tokens (b, L)."""

    def __init__(self, pixels: Sequence[Tensor], tokens: Tensor, feed: DeviceFeed, *, text_chunks: int) -> None:
        self._chunks = {Tower.IMAGE: list(pixels), Tower.TEXT: list(tokens.chunk(text_chunks))}
        self._feed = feed

    def rows(self) -> int:
        return sum(map(len, self._chunks[Tower.TEXT]))

    def chunk_count(self, tower: Tower) -> int:
        return len(self._chunks[tower])

    def chunks(self, tower: Tower, *, again: bool) -> Iterator[Tensor]:
        return self._feed.inputs(tower, self._chunks[tower])

    def blank(self, tower: Tower) -> Tensor:
        (row,) = self._feed.inputs(tower, [torch.zeros_like(self._chunks[tower][0][:1])])
        return row

    def agree(self) -> None:
        pass
