"""Transfer of chunks to a GPU: no copy overwrites data in use, and pixels equal torchvision's floats bit by bit."""

import itertools
from pathlib import Path

import pytest
import torch

from megaclip.data import ImageTransform
from megaclip.step.batch import DeviceFeed, Tower
from megaclip.step.sample_store import ImageSlots

pytestmark = pytest.mark.gpu

CHUNKS = 9


def feed() -> DeviceFeed:
    return DeviceFeed(torch.device("cuda", 0), torch.float32, ImageTransform(64).normalise)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_chunks_arrive_complete_though_their_slots_are_overwritten_at_once(place, tmp_path):
    """Chunks use two slots. A slot is overwritten when the next chunk is requested, while the GPU is busy."""
    generator = torch.Generator().manual_seed(0)
    expected = [torch.randint(256, (64, 3, 64, 64), generator=generator, dtype=torch.uint8) for _ in range(CHUNKS)]
    folder = Path(tmp_path) if place == "disk" else None
    slots = ImageSlots((2, 64, 3, 64, 64), folder)
    slots.lock_pages(torch.device("cuda", 0))
    assert slots.tensor.is_pinned() == (place == "cpu")

    def chunks():
        for number, chunk in enumerate(expected):
            yield slots.tensor[number % 2].copy_(chunk)
            slots.tensor[number % 2].zero_()

    busy = torch.randn(4096, 4096, device="cuda")
    for chunk, got in zip(expected, feed().inputs(Tower.IMAGE, chunks()), strict=True):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        assert torch.equal(got.cpu(), ImageTransform(64).normalise(chunk))  # CPU and GPU round equally
    slots.close()


def test_a_copy_that_was_begun_is_complete_when_its_input_is_taken():
    expected = torch.randint(256, (64, 3, 64, 64), dtype=torch.uint8)
    pixels, busy = expected.clone().pin_memory(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = (busy @ busy).clamp(-1, 1)
    finish = feed().begin(Tower.IMAGE, pixels)
    filled = [torch.full((64, 3, 64, 64), 255, dtype=torch.uint8, device="cuda") for _ in range(9)]
    got = finish()
    pixels.zero_()
    assert torch.equal(got.cpu(), ImageTransform(64).normalise(expected))
    assert all(bool((each == 255).all()) for each in filled)  # none has the memory of the copy


def test_no_more_than_two_chunks_of_pixels_are_on_the_device():
    pixels = [torch.zeros(256, 3, 64, 64, dtype=torch.uint8).pin_memory() for _ in range(CHUNKS)]
    inputs = feed().inputs(Tower.IMAGE, itertools.chain(pixels))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, chunk = torch.cuda.memory_allocated(), pixels[0].numel()
    for _ in map(lambda x: None, inputs):
        pass
    # two chunks of bytes, and two in float32: the result, and the next one that is being computed
    assert torch.cuda.max_memory_allocated() - before <= (2 + 4 + 4) * chunk + 2**20


def test_chunks_of_captions_may_become_shorter():
    tokens = torch.arange(9 * 64 * 77, dtype=torch.int32).view(9, 64, 77)
    lengths = [77, 40, 40, 32, 32, 24, 16, 16, 8]
    chunks = [chunk[:, :length] for chunk, length in zip(tokens, lengths, strict=True)]
    for got, chunk in zip(feed().inputs(Tower.TEXT, chunks), chunks, strict=True):
        assert torch.equal(got.cpu(), chunk.long())


def test_tokens_are_separate_copies():
    tokens = torch.arange(6 * 8, dtype=torch.int64).view(6, 8)
    got = list(feed().inputs(Tower.TEXT, tokens.split(1)))
    assert torch.equal(torch.cat(got).cpu(), tokens)
