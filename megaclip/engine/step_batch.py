"""One rank's share of a contrastive batch, as the gradient cache asks for it: chunk by chunk, one tower at a time.

`StepBatch` is what the cache needs, whatever holds the samples. `DeviceFeed` brings chunks to the device ahead of their
use. Shapes: b rows of this rank, L tokens.
"""

from collections.abc import Callable, Iterable, Iterator
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
        """The tower's inputs from equal chunks in host memory (pixels uint8, or tokens of any integer type).

        On a GPU the next chunk is copied, on a stream of its own, while a chunk is used. When `chunks` is asked for
        the next one, the memory of the one before has been read and may be written again.
        """
        prepare = self._normalised if tower is Tower.IMAGE else _as_indices
        return map(prepare, chunks) if self.device.type == "cpu" else _one_ahead(chunks, self.device, prepare)

    def _normalised(self, pixels: Tensor) -> Tensor:
        return self.normalise(pixels, self.dtype)


def _as_indices(tokens: Tensor) -> Tensor:
    return tokens.to(torch.int64, copy=True)


def _one_ahead(chunks: Iterable[Tensor], device: torch.device, prepare: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """`prepare(chunk)` on the device for each chunk, through two buffers that a stream of its own fills in turn.

    prepare: returns a tensor of its own, never the buffer that it reads.
    """
    accelerator = get_accelerator()
    copies, compute = accelerator.Stream(device), accelerator.current_stream()
    buffers: list[Tensor] = []
    copied: list[Any] = []
    read: list[Any] = []

    def prepared(number: int) -> Tensor:
        compute.wait_event(copied[number % 2])
        result = prepare(buffers[number % 2])
        read[number % 2].record(compute)
        return result

    number = -1
    for number, chunk in enumerate(chunks):
        turn = number % 2
        if number < 2:
            buffers.append(torch.empty_like(chunk, device=device))
            copied.append(accelerator.Event())
            read.append(accelerator.Event())
            copies.wait_stream(compute)  # what used the buffer's memory before
        else:
            copies.wait_event(read[turn])
        with accelerator.stream(copies):
            buffers[turn].copy_(chunk, non_blocking=True)
        copied[turn].record(copies)
        if number > 0:
            yield prepared(number - 1)
        copied[turn].synchronize()  # the host's memory may now be written again
    if number >= 0:
        yield prepared(number)
