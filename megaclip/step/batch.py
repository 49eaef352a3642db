"""`DeviceFeed`, which copies chunks of a contrastive batch to the device before a tower uses them."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


class Tower(IntEnum):
    """Tower of the model that a chunk is for."""

    IMAGE = 0
    TEXT = 1


@dataclass(frozen=True)
class DeviceFeed:
    """Copy chunks to the model's device and convert pixels to the model's input there.

    normalise: pixels (_, 3, H, W) uint8 and a dtype -> input (`data.ImageTransform.normalise`). dtype: the engine's.
    """

    device: torch.device
    dtype: torch.dtype
    normalise: Callable[[Tensor, torch.dtype], Tensor]

    def begin(self, tower: Tower, chunk: Tensor) -> Callable[[], Tensor]:
        """Start to copy a chunk to the device; return a function that returns the tower's input, made of the copy.

        The copy begins when the device has done what is queued. After the call of the function the memory of `chunk`
        may be overwritten.
        """
        prepare = self._preparation(tower)
        if self.device.type == "cpu":
            return functools.partial(prepare, chunk)
        chunk = _pinned(tower, chunk)
        accelerator = get_accelerator()
        copies, compute = accelerator.Stream(self.device), accelerator.current_stream()
        buffer, copied = torch.empty_like(chunk, device=self.device), accelerator.Event()
        buffer.record_stream(copies)  # if the function is never called
        copies.wait_stream(compute)
        with accelerator.stream(copies):
            buffer.copy_(chunk, non_blocking=True)
        copied.record(copies)

        def finish() -> Tensor:
            copied.synchronize()
            return prepare(buffer)

        return finish

    def inputs(self, tower: Tower, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tower's inputs from chunks in host memory (pixels uint8, or tokens of any integer type).

        No chunk is larger than the one before it. On a GPU the next chunk is copied on a separate stream while a chunk
        is used. When `chunks` is asked for the next chunk, the previous one has been copied, and its memory may be
        overwritten.
        """
        prepare = self._preparation(tower)
        if self.device.type == "cpu":
            return map(prepare, chunks)
        return _one_ahead((_pinned(tower, chunk) for chunk in chunks), self.device, prepare)

    def _preparation(self, tower: Tower) -> Callable[[Tensor], Tensor]:
        return _as_indices if tower is Tower.TEXT else lambda pixels: self.normalise(pixels, self.dtype)


def _pinned(tower: Tower, chunk: Tensor) -> Tensor:
    """Return the chunk in page-locked memory, as pixels are: from other memory the host would wait for the copy."""
    return chunk.pin_memory() if tower is Tower.TEXT else chunk


def _as_indices(tokens: Tensor) -> Tensor:
    return tokens.to(torch.int64, copy=True)


def _one_ahead(chunks: Iterable[Tensor], device: torch.device, prepare: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield `prepare(chunk)` on the device for each chunk, through two buffers that a separate stream fills in turn.

    chunks: the first two have the size of the buffers. A smaller chunk takes the first part of its buffer.
    prepare: must return a new tensor, never the buffer that it reads.
    """
    accelerator = get_accelerator()
    copies, compute = accelerator.Stream(device), accelerator.current_stream()
    buffers: list[Tensor] = []
    filled: dict[int, Tensor] = {}  # the chunk in each buffer
    copied: list[Any] = []
    read: list[Any] = []

    def prepared(number: int) -> Tensor:
        compute.wait_event(copied[number % 2])
        result = prepare(filled[number % 2])
        read[number % 2].record(compute)
        return result

    number = -1
    for number, chunk in enumerate(chunks):
        turn = number % 2
        if number < 2:
            buffers.append(torch.empty(chunk.numel(), dtype=chunk.dtype, device=device))
            copied.append(accelerator.Event())
            read.append(accelerator.Event())
            copies.wait_stream(compute)  # wait until the previous use of the buffer has ended
        else:
            copies.wait_event(read[turn])
        filled[turn] = buffers[turn][: chunk.numel()].view(chunk.shape)
        with accelerator.stream(copies):
            filled[turn].copy_(chunk, non_blocking=True)
        copied[turn].record(copies)
        if number > 0:
            yield prepared(number - 1)
        copied[turn].synchronize()  # from here on the chunk's host memory may be overwritten
    if number >= 0:
        yield prepared(number)
