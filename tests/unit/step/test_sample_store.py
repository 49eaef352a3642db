"""The step store: every pass of a step gets its own chunks, with few and many slots, also with kept graphs."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megaclip.data import ImageTransform, PairDataset, TrainBatch, TrainLoader, open_pairs, slots_ahead
from megaclip.data.fields import Field
from megaclip.errors import ConfigError
from megaclip.step.batch import DeviceFeed, Tower
from megaclip.step.caption_chunks import CaptionChunks
from megaclip.step.sample_store import ImageSlots, StepStore
from tests.unit.data.data_samples import CountingTokenizer, write_shards

CHUNKS, ROWS = 4, 2


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> PairDataset:
    folder = tmp_path_factory.mktemp("pairs")
    write_shards(folder, [300])
    return open_pairs([str(folder)])


class Loader:
    """Yields the chunks of every step, then those from `reread_from` on again. Pixels and tokens are sample numbers.

    taken: number of chunks taken from the loader. A chunk's slot is overwritten as early as `TrainLoader.held` allows.
    """

    def __init__(self, reread_from: int, held: int) -> None:
        self.held, self.slots = held, torch.empty(held, ROWS, 1, 1, 1, dtype=torch.uint8)
        self.samples_consumed, self.bad_counts, self.taken = 0, {}, 0
        self.fields = {"number": Field("number", dtype=torch.int64)}
        self.micro_batches_per_step, self.readings_per_step = CHUNKS, 2 * CHUNKS - reread_from
        self._batches = self._all(reread_from)

    def _all(self, reread_from: int) -> Iterator[TrainBatch]:
        for step in itertools.count():
            for chunk in (*range(CHUNKS), *range(reread_from, CHUNKS)):
                numbers = torch.arange(ROWS) + (step * CHUNKS + chunk) * ROWS
                self.taken += 1
                fields = {"number": numbers}
                yield TrainBatch(numbers.to(torch.uint8).view(ROWS, 1, 1, 1), numbers.view(ROWS, 1), numbers, fields)

    def read(self) -> TrainBatch:
        slot = self.slots[self.taken % len(self.slots)]
        batch = next(self._batches)
        slot.copy_(batch.images)
        return batch

    def close(self) -> None: ...


def numbers_of(step: int, first_row: int) -> list[int]:
    return list(range(step * CHUNKS * ROWS + first_row, (step + 1) * CHUNKS * ROWS))


def read(store: StepStore, tower: Tower, read_once: int, *, again: bool) -> list[int]:
    chunks = store.chunks(tower, read_once=read_once, again=again)
    return [int(number) for chunk in chunks for number in chunk.flatten()]


def open_store(loader: Loader, *, pairs: bool = False) -> StepStore:
    feed = DeviceFeed(torch.device("cpu"), torch.float32, lambda pixels, dtype: pixels.to(dtype))
    chunks, divide = (CHUNKS, None) if pairs else (CHUNKS // 2, CaptionChunks.whole)
    return StepStore(loader, feed, text_chunks=chunks, context_length=1, divide_captions=divide)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("slots", "reread_from", "read_once"),
    [
        # The number of image chunks that are read only once, for each step. It may grow.
        (CHUNKS, CHUNKS, (0, 0, 0)),
        (CHUNKS, CHUNKS, (1, 1, 3, 4, 4)),
        (2, 0, (0, 0, 1, 3)),
        (2, 1, (1, 1, 1)),
        (2, 1, (1, 1, 3, 4, 4, 4)),
        (1, 3, (3, 3, 4, 4)),
        (2, CHUNKS, (4, 4, 4)),
    ],
)
def test_every_pass_gets_its_chunks(slots: int, reread_from: int, read_once: tuple[int, ...]) -> None:
    storages: list[int] = []
    with open_store(Loader(reread_from, slots)) as store:
        for step, images in enumerate(read_once):
            texts = step % 3  # of two text chunks
            assert read(store, Tower.IMAGE, images, again=False) == numbers_of(step, 0)
            assert read(store, Tower.TEXT, texts, again=False) == numbers_of(step, 0)
            assert store.pair_ids().tolist() == store.fields()["number"].tolist() == numbers_of(step, 0)
            # A graph may keep a field; autograd would refuse it if the next step's field were a part of one tensor.
            assert store.fields()["number"].untyped_storage().data_ptr() not in storages[-1:]
            storages.append(store.fields()["number"].untyped_storage().data_ptr())
            assert read(store, Tower.IMAGE, images, again=True) == numbers_of(step, images * ROWS)
            assert read(store, Tower.TEXT, texts, again=True) == numbers_of(step, texts * 2 * ROWS)
            store.next_step()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("slots", "reread_from", "kept"), [(CHUNKS, CHUNKS, 1), (1, 0, 0), (2, 3, 3)])
def test_chunks_of_images_arrive_with_their_captions(slots: int, reread_from: int, kept: int) -> None:
    """Few slots hold the images of a step only one after the other, so captions must not wait for all of them."""
    with open_store(Loader(reread_from, slots), pairs=True) as store:
        for step in range(3):
            for again in (False, True):
                towers = (store.chunks(tower, read_once=kept, again=again) for tower in Tower)
                found = [
                    (image.flatten().tolist(), text.flatten().tolist()) for image, text in zip(*towers, strict=True)
                ]
                numbers = numbers_of(step, kept * ROWS if again else 0)
                rows = [numbers[first : first + ROWS] for first in range(0, len(numbers), ROWS)]
                assert found == [(each, each) for each in rows]
                assert store.pieces(0) is store.order(Tower.TEXT) is None
            store.next_step()


@pytest.mark.timeout(60)
def test_a_step_divides_the_captions_of_the_next_one_and_keeps_its_own(monkeypatch) -> None:
    monkeypatch.setitem(globals(), "CHUNKS", 1)
    divided = []

    def divide(tokens: torch.Tensor, count: int) -> CaptionChunks:
        divided.append(tokens.flatten().tolist())
        return CaptionChunks.whole(tokens, count)

    feed = DeviceFeed(torch.device("cpu"), torch.float32, lambda pixels, dtype: pixels.to(dtype))
    loader = Loader(1, 1)
    loader.slots = loader.slots.repeat(2, 1, 1, 1, 1)  # one more for a chunk that is read ahead
    with StepStore(loader, feed, text_chunks=1, context_length=1, divide_captions=divide) as store:
        for step in range(4):
            for tower in Tower:
                assert read(store, tower, 1, again=False) == numbers_of(step, 0)
            store.agree()
            if step != 1:  # a step whose loss is refused does not look ahead
                store.look_ahead()
                assert divided == [numbers_of(each, 0) for each in range(step + 2)]
            assert store.captions().tokens.flatten().tolist() == numbers_of(step, 0)
            store.next_step()


@pytest.mark.timeout(60)
def test_slots_of_chunks_that_are_read_once_are_free_in_the_first_pass() -> None:
    """Then the loader can read the next step while the other chunks wait for their second pass.

    The last chunk's slot is free when all chunks have been encoded: reading takes Python's lock from the encoding.
    """
    for read_once in (0, 3, CHUNKS):
        loader = Loader(CHUNKS, CHUNKS)
        with open_store(loader) as store:
            assert read(store, Tower.IMAGE, read_once, again=False) == numbers_of(0, 0)
            for free in (min(read_once, CHUNKS - 1), read_once):
                while loader.taken < CHUNKS + free:
                    store._thread.join(0.01)
                store._thread.join(0.1)
                assert loader.taken == CHUNKS + free
                store.agree()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("held", "reread_from", "kept", "on_disk"),
    [(4, 4, 0, True), (4, 4, 1, False), (3, 0, 0, False), (3, 2, 3, True), (1, 4, 4, False)],
)
def test_workers_do_not_overwrite_slots_that_a_pass_still_reads(pairs, tmp_path, held, reread_from, kept, on_disk):
    """Each chunk is used slowly, so that the workers read ahead as far as they may."""
    data = (pairs, ImageTransform(8, training=True), CountingTokenizer())
    settings = {"micro_batch_size": 40, "micro_batches_per_step": CHUNKS}
    slots = ImageSlots((held + slots_ahead(40, 2), 40, 3, 8, 8), tmp_path if on_disk else None)
    loader = TrainLoader(*data, **settings, reread_from=reread_from, num_workers=2, slots=slots.tensor)
    feed = DeviceFeed(torch.device("cpu"), torch.uint8, lambda pixels, _: pixels)
    expected = TrainLoader(*data, **settings)
    with StepStore(loader, feed, text_chunks=1, context_length=2, divide_captions=CaptionChunks.whole) as store:
        for _ in range(2):
            step = [next(expected).images for _ in range(CHUNKS)]
            for again, chunks in ((False, step), (True, step[kept:])):
                passed = store.chunks(Tower.IMAGE, read_once=kept, again=again)
                for pixels, wanted in zip(passed, chunks, strict=True):
                    time.sleep(0.02)
                    assert torch.equal(pixels, wanted)
            store.next_step()
    slots.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_slots_return_what_is_written_and_leave_no_file(on_disk, tmp_path):
    slots = ImageSlots((3, 2, 3, 5, 5), tmp_path if on_disk else None)
    pixels = torch.randint(256, (3, 2, 3, 5, 5), dtype=torch.uint8)
    slots.tensor.copy_(pixels)
    assert torch.equal(slots.tensor, pixels) and list(tmp_path.iterdir()) == []
    slots.close()


def test_slots_that_cannot_be_reserved_are_one_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot reserve 0\.0 MiB in .*gone.*--data-offload-dir"):
        ImageSlots((1, 1, 3, 5, 5), Path(tmp_path / "gone"))
