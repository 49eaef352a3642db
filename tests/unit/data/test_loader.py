"""Loaders: each sample exactly once for any number of ranks and workers, exact resume, bad samples, dying workers."""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from megaclip.data import (
    PADDING_ID,
    EvaluationLoader,
    ImageTransform,
    TrainLoader,
    open_labelled,
    open_pairs,
    slots_ahead,
)
from megaclip.data import loader as loader_module
from megaclip.data import reading as reading_module
from megaclip.data.batch import BadSample
from megaclip.data.loader import SMALLEST_PART, parts_of
from megaclip.data.workers import WORKER_TIMEOUT_S, WorkerResults, shared_pixels
from megaclip.errors import DataError
from megaclip.planner import constants
from megaclip.planner.memory import slots_ahead as planned_slots_ahead
from tests.unit.data.data_samples import CountingTokenizer, pair_members, picture, write_shards, write_tar

SAMPLES = 60
STEP = 12


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    write_shards(folder, [7, 20, 3, 30])
    return open_pairs([str(folder / "*.tar")])


def loader_of(dataset, *, rank=0, world_size=1, micro_batches=1, **options):
    return TrainLoader(
        dataset,
        ImageTransform(8, training=True),
        CountingTokenizer(),
        micro_batch_size=STEP // world_size // micro_batches,
        micro_batches_per_step=micro_batches,
        rank=rank,
        world_size=world_size,
        **{"seed": 5, **options},
    )


def next_step(loader, micro_batches=1):
    """Return the ids of the loader's next step, and its images and first tokens in the same order."""
    ids = loader.ids_of_step(loader.samples_consumed)
    batches = [next(loader) for _ in range(micro_batches)]
    images = torch.cat([batch.images for batch in batches])
    return ids, images, torch.cat([batch.tokens[:, 0] for batch in batches])


def take_steps(dataset, count, *, world_size=1, micro_batches=1, **options):
    """Return ids (count, STEP) of all ranks in global order, images by (step, id), and the samples consumed."""
    ids = np.empty((count, STEP), dtype=np.int64)
    images: dict[tuple[int, int], torch.Tensor] = {}
    consumed = set()
    for rank in range(world_size):
        loader = loader_of(dataset, rank=rank, world_size=world_size, micro_batches=micro_batches, **options)
        for step in range(count):
            mine, pixels, tokens = next_step(loader, micro_batches)
            ids[step, rank::world_size] = mine
            images |= {(step, int(i)): image for i, image in zip(mine, pixels, strict=True)}
            assert torch.equal(tokens, mine)  # the caption of a sample is its id
        consumed.add(loader.samples_consumed)
        loader.close()
    assert len(consumed) == 1
    return ids, images, consumed.pop()


def test_an_epoch_has_each_sample_once_though_ranks_and_workers_change(pairs):
    """One rank, then 3, then 2, with 0, 1 and 2 workers: together they read exactly one epoch."""
    seen, consumed = [], 0
    for steps, world_size, workers, micro_batches in [(1, 1, 0, 2), (2, 3, 1, 1), (2, 2, 2, 3)]:
        ids, _, consumed = take_steps(
            pairs,
            steps,
            world_size=world_size,
            num_workers=workers,
            micro_batches=micro_batches,
            samples_consumed=consumed,
        )
        seen += ids.flatten().tolist()
    assert consumed == SAMPLES
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", [1, 3, 16])
@pytest.mark.parametrize("rows", [1, 31, 33, 64, 1000, 4096])
def test_the_parts_of_a_batch_are_its_rows_and_their_slots_are_planned(rows, workers):
    parts = parts_of(rows, workers)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    largest = max(part.stop - part.start for part in parts)
    assert len(parts) <= workers and largest <= max(-(-rows // workers), constants.SMALLEST_PART)
    assert constants.SMALLEST_PART == SMALLEST_PART
    workload = SimpleNamespace(workers=workers, batch=SimpleNamespace(micro_batch=rows))
    assert planned_slots_ahead(workload) == slots_ahead(rows, workers)


@pytest.mark.parametrize(
    ("workers", "rows", "kept"), [(0, 3, 1), (1, 3, 1), (2, 3, 1), (3, 3, 2), (3, 1, 4), (2, 4, 3)]
)
def test_pixels_stay_in_their_slots_as_long_as_the_loader_holds_them(pairs, workers, rows, kept, monkeypatch):
    """The caller keeps batches while the workers read ahead as far as they may."""
    monkeypatch.setattr(loader_module, "SMALLEST_PART", 1)
    settings = {"micro_batch_size": rows, "micro_batches_per_step": 12 // rows, "reread_from": 2, "seed": 5}
    data = (pairs, ImageTransform(8, training=True), CountingTokenizer())
    slots = shared_pixels((kept + slots_ahead(rows, workers), rows, 3, 8, 8))
    loader, expected = TrainLoader(*data, **settings, num_workers=workers, slots=slots), TrainLoader(*data, **settings)
    assert loader.held == kept
    held = deque(maxlen=kept)
    for _ in range(3 * len(slots)):
        held.append((loader.read().images, next(expected).images))
        time.sleep(0.02)
        assert all(torch.equal(*images) for images in held)
    loader.close()


class Slow:
    """Dataset that waits 4 ms for each sample, as for a disk."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def read(self, sample_id):
        time.sleep(0.004)
        return self._dataset.read(sample_id)


def test_workers_share_a_batch_so_the_first_one_takes_a_fraction_of_the_time(tmp_path):
    write_shards(tmp_path, [256])
    dataset, took = Slow(open_pairs([str(tmp_path)])), {}
    for workers in (1, 4):
        loader = TrainLoader(
            dataset, ImageTransform(8, training=True), CountingTokenizer(), micro_batch_size=256, num_workers=workers
        )
        began = time.perf_counter()
        next(loader)
        took[workers] = time.perf_counter() - began
        loader.close()
    assert took[4] < 0.6 * took[1]


@pytest.mark.parametrize(("world_size", "workers", "micro_batches"), [(1, 2, 1), (3, 0, 2), (2, 1, 3), (1, 5, 1)])
def test_ids_and_pixels_do_not_depend_on_ranks_workers_and_micro_batches(
    pairs, world_size, workers, micro_batches, monkeypatch
):
    ids, images, _ = take_steps(pairs, 7)  # these steps reach the second epoch
    monkeypatch.setattr(loader_module, "SMALLEST_PART", 1)  # so that workers share these small batches
    other_ids, other_images, _ = take_steps(
        pairs, 7, world_size=world_size, num_workers=workers, micro_batches=micro_batches
    )
    np.testing.assert_array_equal(ids, other_ids)
    assert all(torch.equal(images[key], other_images[key]) for key in images)


def test_resuming_from_samples_consumed_continues_the_sequence(pairs):
    whole, images, _ = take_steps(pairs, 8)
    rest, rest_images, consumed = take_steps(pairs, 5, samples_consumed=3 * STEP, world_size=2, num_workers=2)
    np.testing.assert_array_equal(rest, whole[3:])
    assert all(torch.equal(image, images[step + 3, i]) for (step, i), image in rest_images.items())
    assert consumed == 8 * STEP


def test_samples_consumed_grows_with_the_last_micro_batch(pairs):
    loader = loader_of(pairs, micro_batches=3)
    states = []
    for _ in range(6):
        next(loader)
        states.append(loader.samples_consumed)
    assert states == [0, 0, 12, 12, 12, 24]


@pytest.mark.parametrize("reread_from", [0, 1, 2, 3])
def test_a_step_can_be_read_twice_from_one_of_its_micro_batches_on(pairs, reread_from):
    once, twice = (loader_of(pairs, micro_batches=3, reread_from=first) for first in (None, reread_from))
    for _ in range(2):
        assert torch.equal(twice.ids_of_step(twice.samples_consumed), once.ids_of_step(once.samples_consumed))
        ids = once.ids_of_step(once.samples_consumed)
        expected = [next(once) for _ in range(3)]
        read = [next(twice) for _ in range(6 - reread_from)]
        for got, wanted in zip(read, [*expected, *expected[reread_from:]], strict=True):
            assert torch.equal(got.images, wanted.images)
        assert torch.equal(torch.cat([batch.tokens[:, 0] for batch in expected]), ids)
        assert twice.samples_consumed == once.samples_consumed


def test_an_image_with_three_captions_shows_each_once_in_three_epochs(tmp_path):
    rows = []
    for number in range(STEP):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
        rows.append({"image": f"{number}.png", "caption": [f"caption {3 * number + turn}" for turn in range(3)]})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loader = loader_of(open_pairs([str(tmp_path / "pairs.jsonl")]))
    shown = np.empty((3, STEP), dtype=np.int64)
    for epoch in range(3):
        ids, _, tokens = next_step(loader)
        shown[epoch, ids.numpy()] = tokens.numpy()
    assert np.sort(shown, axis=0).T.tolist() == np.arange(3 * STEP).reshape(STEP, 3).tolist()
    assert set(shown[0] % 3) == {0, 1, 2}  # an epoch shows caption 0 of some images and captions 1 and 2 of others


def test_pairs_have_equal_ids_if_what_the_key_names_is_equal(tmp_path):
    """The digests are equal in every process and version: a resumed run masks the same pairs."""
    rows = []
    for number in range(STEP):
        (tmp_path / f"{number}.png").write_bytes(picture(number // 3))
        rows.append({"image": f"{number}.png", "caption": f"a  {number % 4}" + " " * number, "page": number // 2})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    digests = {}
    for key, group in (("caption", lambda n: n % 4), ("image", lambda n: n // 3), ("page", lambda n: n // 2)):
        loader = loader_of(open_pairs([str(tmp_path / "pairs.jsonl")], id_key=key))
        ids = loader.ids_of_step(0)
        digests[key] = dict(zip(ids.tolist(), next(loader).pair_ids.tolist(), strict=True))
        for one, other in itertools.product(range(STEP), repeat=2):
            assert (digests[key][one] == digests[key][other]) == (group(one) == group(other)), (key, one, other)
    expected = hashlib.blake2b(b"a 0", digest_size=8).digest()
    assert digests["caption"][0] == int.from_bytes(expected, "little", signed=True)


def test_ids_of_a_column_that_is_missing_or_empty(tmp_path):
    write_shards(tmp_path, [1])
    with pytest.raises(DataError, match=r"has no columns, and --id-key is 'page'; use 'caption' or 'image'"):
        open_pairs([str(tmp_path / "*.tar")], id_key="page")
    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"image": "0.png", "caption": "a", "page": None}))
    Dataset.from_list([{"image": str(tmp_path / "0.png"), "caption": "a", "page": None}]).to_parquet(
        tmp_path / "pairs.parquet"
    )
    for name in ("pairs.jsonl", "pairs.parquet"):
        with pytest.raises(DataError, match=r"has no id column sheet; it has .*page; set --id-key to one of them"):
            open_pairs([str(tmp_path / name)], id_key="sheet")
        with pytest.raises(BadSample, match="missing id"):
            open_pairs([str(tmp_path / name)], id_key="page").read(0)


def test_augmentation_changes_with_the_epoch(pairs):
    _, images, _ = take_steps(pairs, 10)
    first = {i: image for (step, i), image in images.items() if step < 5}
    second = {i: image for (step, i), image in images.items() if step >= 5}
    different = [not torch.equal(first[i], second[i]) for i in range(SAMPLES)]
    assert sum(different) > SAMPLES // 2


def test_the_loader_does_not_draw_from_the_global_random_generator(pairs):
    """Dropout and patch dropout draw from it, and reading data must not change a training run."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1):
        loader = loader_of(pairs, num_workers=workers)
        next(loader)
        loader.close()
    assert torch.equal(before, torch.get_rng_state())


def test_an_exception_in_a_worker_is_not_reported_as_its_death():
    """It has its type, and its stack in the worker."""

    def broken(_):
        return b"\xff".decode()

    with pytest.raises(UnicodeDecodeError) as raised:
        next(WorkerResults(broken, [1], num_workers=1))
    assert "in broken" in str(raised.value.__cause__)
    with pytest.raises(ZeroDivisionError):
        next(WorkerResults(functools.partial(divmod, 1), [0], num_workers=1))


def test_a_batch_larger_than_the_dataset_is_an_error(pairs):
    with pytest.raises(DataError, match="contrastive batch of 61 requires as many different samples"):
        TrainLoader(pairs, ImageTransform(8), CountingTokenizer(), micro_batch_size=61)


def test_the_loader_follows_the_weights_of_a_mixture(tmp_path):
    write_shards(tmp_path / "a", [40])
    write_tar(tmp_path / "b" / "0.tar", pair_members(range(40, 60)))
    dataset = open_pairs([str(tmp_path / "a"), str(tmp_path / "b")], weights=[1, 3])
    ids, _, _ = take_steps(dataset, 50)
    share = (ids >= 40).mean()
    assert 0.70 < share < 0.80


# ---------------------------------------------------------------- bad samples


def make_bad(folder, bad):
    """Open 60 samples in two shards. `bad` maps the number of a sample to its members."""
    for shard in range(2):
        members = []
        for number in range(shard * 30, shard * 30 + 30):
            members += bad.get(number, pair_members([number]))
        write_tar(folder / f"{shard}.tar", members)
    return open_pairs([str(folder)])


BAD = {
    7: [("7.png", b"not an image"), ("7.txt", b"caption 7")],
    11: [("11.png", picture(11)[:200]), ("11.txt", b"caption 11")],
    20: [("20.png", picture(20)), ("20.txt", b" \n\t ")],
    41: [("41.png", picture(41))],
    42: [("42.txt", b"caption 42")],
}
KINDS = {"undecodable image": 2, "empty caption": 1, "missing caption": 1, "missing image": 1}


def test_bad_samples_are_counted_and_replaced_and_ids_do_not_shift(tmp_path):
    dataset = make_bad(tmp_path, BAD)
    loader = loader_of(dataset, max_bad_fraction=0.5, num_workers=1)
    steps = [next_step(loader) for _ in range(5)]
    ids, shown = (torch.cat([step[part] for step in steps]) for part in (0, 2))
    assert sorted(ids.tolist()) == list(range(SAMPLES))
    assert Counter(loader.bad_counts) >= Counter(KINDS)
    for number, caption in zip(ids.tolist(), shown.tolist(), strict=True):
        assert (caption == number) == (number not in BAD)
        assert caption not in BAD
    assert captions_shown_by_three_ranks(dataset) == dict(zip(ids.tolist(), shown.tolist(), strict=True))


def captions_shown_by_three_ranks(dataset):
    """Return the caption that three ranks show for each id. Substitutes must not depend on the number of ranks."""
    shown = {}
    for rank in range(3):
        loader = loader_of(dataset, rank=rank, world_size=3, max_bad_fraction=0.5)
        for _ in range(5):
            ids, _, tokens = next_step(loader)
            shown |= dict(zip(ids.tolist(), tokens.tolist(), strict=True))
    return shown


def test_reading_a_step_twice_counts_its_bad_samples_once(tmp_path):
    dataset = make_bad(tmp_path, BAD)
    once, twice = (loader_of(dataset, micro_batches=2, max_bad_fraction=0.5, reread_from=first) for first in (2, 0))
    for _ in range(5):
        for loader, taken in ((once, 2), (twice, 4)):
            for _ in range(taken):
                next(loader)
        assert twice.bad_counts == once.bad_counts
    assert Counter(once.bad_counts) >= Counter(KINDS)


def test_only_the_first_bad_sample_of_each_kind_is_logged(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(reading_module._logger, "warning", lambda message, *values: logged.append(message % values))
    loader = loader_of(make_bad(tmp_path, BAD), max_bad_fraction=0.5)
    for _ in range(10):
        next(loader)
    assert sorted(line.split(":")[0] for line in logged) == sorted(KINDS)
    places = {"undecodable image": ("0.tar/7:", "0.tar/11:"), "empty caption": ("0.tar/20",)}
    places |= {"missing caption": ("1.tar/41",), "missing image": ("1.tar/42",)}
    assert all(any(place in line for place in places[line.split(":")[0]]) for line in logged)


def test_the_log_names_table_row_and_file_of_a_bad_sample(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(reading_module._logger, "warning", lambda message, *values: logged.append(message % values))
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number) if number != 2 else b"not an image")
    rows = "".join(f"{number}.png,caption {number}\n" for number in range(4))
    (tmp_path / "t.csv").write_text(f"filepath,title\n{rows}")
    table = open_pairs([str(tmp_path / "t.csv")])
    list(EvaluationLoader(table, ImageTransform(8), CountingTokenizer(), batch_size=4))
    (line,) = logged
    assert line.startswith("undecodable image: t.csv row 3 (2.png): not a file of JPEG") and "0x" not in line


def test_too_many_bad_samples_are_an_error_that_names_the_shard(tmp_path):
    broken = {n: [(f"{n}.png", b"broken"), (f"{n}.txt", b"caption")] for n in range(30)}
    loader = loader_of(make_bad(tmp_path, broken), max_bad_fraction=0.01, num_workers=1)
    with pytest.raises(
        DataError,
        match=r"samples read so far are bad \(\d+ undecodable image\), over --max-bad-fraction 0\.01; .*/0\.tar.*"
        r"or set a larger --max-bad-fraction",
    ):
        for _ in range(5):
            next(loader)
    loader = loader_of(make_bad(tmp_path, {3: broken[3]}), max_bad_fraction=0.0)
    with pytest.raises(DataError, match="over --max-bad-fraction 0; "):
        for _ in range(5):
            next(loader)


def test_a_dataset_of_bad_samples_only_is_an_error(tmp_path):
    broken = {n: [(f"{n}.png", b"broken"), (f"{n}.txt", b"caption")] for n in range(60)}
    loader = loader_of(make_bad(tmp_path, broken), max_bad_fraction=1.0)
    with pytest.raises(DataError, match="16 substitutes for it are bad, last undecodable image"):
        next(loader)
    loader = loader_of(make_bad(tmp_path, broken), max_bad_fraction=0.01)
    # the total must include the substitutes that were read
    with pytest.raises(DataError, match=r"^17 of the 17 samples read so far are bad"):
        next(loader)


def test_bad_samples_are_counted_among_all_that_were_read(tmp_path):
    """Half of the data is bad, so about half of the reads, substitutes included, must be counted as bad."""
    broken = {n: [(f"{n}.png", b"broken"), (f"{n}.txt", b"caption")] for n in range(0, 60, 2)}
    log = reading_module.BadSampleLog(1.0, "")
    loader = loader_of(make_bad(tmp_path, broken), max_bad_fraction=1.0)
    loader._log = log
    for _ in range(20):
        next(loader)
    assert 0.35 < log.counts.total() / log._read < 0.65


def test_the_error_of_an_evaluation_names_only_flags_that_it_has(tmp_path):
    broken = {n: [(f"{n}.png", b"broken"), (f"{n}.txt", b"caption")] for n in range(30)}
    loader = EvaluationLoader(make_bad(tmp_path, broken), ImageTransform(8), CountingTokenizer(), batch_size=50)
    with pytest.raises(DataError, match=r"^30 of the 50 samples read so far are bad .*over the limit 0\.01;") as caught:
        list(loader)
    assert "--max-bad-fraction" not in str(caught.value)


def test_the_error_for_labelled_images_does_not_name_inspect(tmp_path):
    """`megaclip inspect` reads pairs. It refuses a folder with one folder of images per class."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f"{number}.png").write_bytes(b"broken")
    loader = EvaluationLoader(open_labelled(tmp_path), ImageTransform(8), None, batch_size=20)
    with pytest.raises(DataError, match=r"^20 of the 20 samples .*; repair the data$"):
        list(loader)


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 1), (3, 2)])
def test_evaluation_yields_each_sample_once_in_equally_many_batches(pairs, world_size, workers):
    seen, lengths = [], set()
    for rank in range(world_size):
        loader = EvaluationLoader(
            pairs,
            ImageTransform(8),
            CountingTokenizer(),
            batch_size=7,
            rank=rank,
            world_size=world_size,
            num_workers=workers,
        )
        batches = list(loader)
        lengths |= {len(loader), len(batches)}
        assert all(batch.images.shape == (7, 3, 8, 8) for batch in batches)
        seen += [int(i) for batch in batches for i in batch.ids if i != PADDING_ID]
        assert torch.equal(batches[0].images, next(iter(loader)).images)  # a second iteration starts again
    assert sorted(seen) == list(range(SAMPLES))
    assert len(lengths) == 1


def test_evaluation_takes_the_first_of_several_captions(tmp_path):
    """A text of all captions joined would be easier to retrieve than any of them."""
    (tmp_path / "0.png").write_bytes(picture(0))
    row = {"image": "0.png", "caption": ["caption 3", "caption 4"]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    pairs = open_pairs([str(tmp_path / "pairs.jsonl")])
    (batch,) = EvaluationLoader(pairs, ImageTransform(8), CountingTokenizer(), batch_size=1)
    assert batch.tokens[0, 0] == 3


def test_evaluation_omits_bad_samples(tmp_path):
    loader = EvaluationLoader(
        make_bad(tmp_path, BAD), ImageTransform(8), CountingTokenizer(), batch_size=16, max_bad_fraction=0.5
    )
    ids = torch.cat([batch.ids for batch in loader])
    assert sorted(i for i in ids.tolist() if i != PADDING_ID) == [n for n in range(SAMPLES) if n not in BAD]
    assert loader.bad_counts == KINDS


def test_labelled_batches_hold_labels_and_padding(tmp_path):
    members = [m for n in range(10) for m in ((f"{n}.png", picture(n)), (f"{n}.cls", str(n % 3).encode()))]
    write_tar(tmp_path / "0.tar", members)
    (tmp_path / "classnames.txt").write_text("a\nb\nc\n")
    batches = list(EvaluationLoader(open_labelled(tmp_path), ImageTransform(8), None, batch_size=6))
    assert torch.cat([b.labels for b in batches]).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, -1, -1]
    assert torch.cat([b.ids for b in batches]).tolist() == [*range(10), -1, -1]


# ---------------------------------------------------------------- workers


def _die_at(limit, may_die, item):
    if item == limit:
        may_die.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_worker_that_dies_while_the_main_thread_waits_is_a_data_error():
    may_die = multiprocessing.get_context("fork").Event()
    may_die.set()
    began = time.monotonic()
    with pytest.raises(DataError, match="data worker died"):
        list(WorkerResults(functools.partial(_die_at, 3, may_die), range(100), num_workers=1))
    assert time.monotonic() - began < WORKER_TIMEOUT_S / 2


def test_a_worker_that_dies_during_a_training_step_is_a_data_error():
    may_die = multiprocessing.get_context("fork").Event()
    batches = WorkerResults(functools.partial(_die_at, 2, may_die), range(100), num_workers=1)
    next(batches)
    began = time.monotonic()
    may_die.set()  # the worker dies after its second result, and not before the first one is taken
    time.sleep(0.5)  # a training step, which the death does not interrupt
    with pytest.raises(DataError, match="data worker died"):
        list(batches)
    assert time.monotonic() - began < WORKER_TIMEOUT_S / 2


_READ_WITH_LITTLE_SHARED_MEMORY = """
import sys
from megaclip.data import EvaluationLoader, ImageTransform, TrainLoader, load_tokenizer, open_pairs

data = open_pairs([sys.argv[1]]), ImageTransform(224), load_tokenizer("clip", 77)
training = TrainLoader(*data, micro_batch_size=32, num_workers=2)
for _ in range(4):
    next(training)
print(sum(len(batch.images) for batch in EvaluationLoader(*data, batch_size=16, num_workers=2)))
"""


def test_a_small_dev_shm_is_enough(tmp_path):
    """Containers have 64 MiB by default, and torch's way of passing tensors would fill it."""
    own_mounts = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("mounting a small /dev/shm needs root on Linux")
    write_shards(tmp_path, [64])
    command = [*own_mounts, sys.executable, "-c", _READ_WITH_LITTLE_SHARED_MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout == "64\n", done.stderr


@pytest.mark.parametrize(
    ("per_image", "id_key", "blank", "reports"),
    [(5, "caption", 0, 1), (1, "caption", 0, 0), (5, "image", 0, 0), (1, "caption", STEP // 2, 0)],
    ids=["repeated", "different", "known to the loss", "substitutes"],
)
def test_equal_images_in_a_micro_batch_are_reported_once(tmp_path, caplog, per_image, id_key, blank, reports):
    """One row per caption, as in Flickr30k: an image is then a negative of its own captions. Substitutes are not."""
    captions = [b"" if n < blank else b"caption %d" % n for n in range(STEP)]
    members = [m for n in range(STEP) for m in ((f"{n}.png", picture(n // per_image)), (f"{n}.txt", captions[n]))]
    shard = write_tar(tmp_path / "x.tar", members)
    loader = loader_of(open_pairs([str(shard)], id_key=id_key), max_bad_fraction=1.0)
    for _ in range(3):
        next(loader)
    assert caplog.text.count("is a negative of the others' captions") == reports


def test_held_out_samples_are_those_of_whole_images(tmp_path):
    """No image is in both parts, no sample is in neither, and the parts are equal in every run."""
    rows = [{"image": f"{n // 5}.png", "text": f"caption {n}"} for n in range(200)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_shards(tmp_path, [40, 60])
    for spec, group in (("x.jsonl", 5), ("*.tar", 1)):
        whole = open_pairs([str(tmp_path / spec)])
        parts = whole.split(0.2)
        found = [{int(part.caption(n).split()[-1]) for n in range(len(part))} for part in parts]
        assert found[0] | found[1] == set(range(len(whole))) and not found[0] & found[1]
        assert not {n // group for n in found[0]} & {n // group for n in found[1]}
        assert 0.1 < len(found[1]) / len(whole) < 0.35
        assert [part.shard_sizes.sum() for part in parts] == [len(part) for part in parts]
        again = open_pairs([str(tmp_path / spec)]).split(0.2)
        assert [part.manifest() for part in again] == [part.manifest() for part in parts]
        ids, _ = parts[0].order(4, seed=0).visit(np.arange(len(parts[0])))
        assert sorted(ids) == list(range(len(parts[0])))
        with pytest.raises(DataError, match=r"--val-fraction is 1e-06, .* has too few images"):
            whole.split(1e-6)
