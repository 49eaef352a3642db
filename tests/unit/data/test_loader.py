"""Loaders: each sample exactly once for any number of ranks and workers, exact resume, bad samples, dying workers."""

import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import time
from collections import Counter, deque

import numpy as np
import pytest
import torch

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
from megaclip.data.workers import shared_pixels
from megaclip.errors import DataError
from tests.unit.data.data_samples import CountingTokenizer, pair_members, picture, write_shards, write_table, write_tar

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


@pytest.mark.parametrize("workers", [1, 3, 16])
@pytest.mark.parametrize("rows", [1, 31, 33, 64, 1000, 4096])
def test_the_parts_of_a_batch_are_its_rows(rows, workers):
    parts = parts_of(rows, workers)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    largest = max(part.stop - part.start for part in parts)
    assert len(parts) <= workers and largest <= max(-(-rows // workers), SMALLEST_PART)


@pytest.mark.parametrize(("workers", "rows", "kept"), [(0, 3, 1), (1, 3, 1), (3, 1, 4), (2, 4, 3)])
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
        time.sleep(0.005)
        assert all(torch.equal(*images) for images in held)
    loader.close()


class NameOfProcess(CountingTokenizer):
    """Tokenizer stand-in: the process that reads a sample."""

    def __call__(self, captions):
        return torch.full((len(captions), 2), os.getpid())


def test_workers_share_a_batch_so_the_first_one_takes_a_fraction_of_the_time(tmp_path):
    write_shards(tmp_path, [4 * SMALLEST_PART])
    data = (open_pairs([str(tmp_path)]), ImageTransform(8, training=True), NameOfProcess())
    loader = TrainLoader(*data, micro_batch_size=4 * SMALLEST_PART, num_workers=4)
    shares = Counter(next(loader).tokens[:, 0].tolist())
    loader.close()
    assert list(shares.values()) == [SMALLEST_PART] * 4 and os.getpid() not in shares


@pytest.mark.parametrize(
    ("world_size", "workers", "micro_batches", "first"), [(1, 2, 1, 0), (3, 0, 2, 3), (2, 1, 3, 1), (1, 5, 1, 4)]
)
def test_ids_and_pixels_do_not_depend_on_ranks_workers_micro_batches_and_a_resume(
    pairs, world_size, workers, micro_batches, first, monkeypatch
):
    """first: number of the step from which the run is resumed."""
    ids, images, _ = take_steps(pairs, 7)  # these steps reach the second epoch
    monkeypatch.setattr(loader_module, "SMALLEST_PART", 1)  # so that workers share these small batches
    other_ids, other_images, consumed = take_steps(
        pairs,
        7 - first,
        world_size=world_size,
        num_workers=workers,
        micro_batches=micro_batches,
        samples_consumed=first * STEP,
    )
    np.testing.assert_array_equal(ids[first:], other_ids)
    assert all(torch.equal(image, images[step + first, i]) for (step, i), image in other_images.items())
    assert consumed == 7 * STEP
    again = [(image, images[step, i]) for (later, i), image in images.items() if later > 4 for step in range(5)
             if (step, i) in images]  # fmt: skip
    assert sum(not torch.equal(*both) for both in again) > STEP  # other crops in the second epoch


@pytest.mark.parametrize("reread_from", [0, 1, 2, 3])
def test_a_step_can_be_read_twice_from_one_of_its_micro_batches_on(pairs, reread_from):
    once, twice = (loader_of(pairs, micro_batches=3, reread_from=first) for first in (None, reread_from))
    for step in range(2):
        ids = once.ids_of_step(once.samples_consumed)
        assert torch.equal(twice.ids_of_step(twice.samples_consumed), ids)
        expected = [next(once) for _ in range(3)]
        for wanted in [*expected, *expected[reread_from:]]:
            assert twice.samples_consumed == step * STEP
            assert torch.equal(next(twice).images, wanted.images)
        assert torch.equal(torch.cat([batch.tokens[:, 0] for batch in expected]), ids)
        assert twice.samples_consumed == once.samples_consumed == (step + 1) * STEP


@pytest.mark.parametrize(
    ("kind", "key", "group"),
    [
        ("jsonl", "caption", lambda n: n % 4),
        ("tar", "caption", lambda n: n % 4),
        ("jsonl", "image", lambda n: n // 3),
        ("jsonl", "page", lambda n: n // 2),
    ],
)
def test_pairs_have_equal_ids_if_what_the_key_names_is_equal(tmp_path, kind, key, group):
    """The digests are equal in every process and version: a resumed run masks the same pairs."""
    rows, members = [], []
    for number in range(STEP):
        content, caption = picture(number // 3), f"a  {number % 4}" + " " * number
        (tmp_path / f"{number}.png").write_bytes(content)
        rows.append({"image": f"{number}.png", "caption": caption, "page": number // 2})
        members += [(f"{number:02}.png", content), (f"{number:02}.txt", caption.encode())]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_tar(tmp_path / "pairs.tar", members)
    loader = loader_of(open_pairs([str(tmp_path / f"pairs.{kind}")], id_key=key))
    digests = dict(zip(loader.ids_of_step(0).tolist(), next(loader).pair_ids.tolist(), strict=True))
    for one, other in itertools.product(range(STEP), repeat=2):
        assert (digests[one] == digests[other]) == (group(one) == group(other)), (one, other)
    if key == "caption":
        expected = hashlib.blake2b(b"a 0", digest_size=8).digest()
        assert digests[0] == int.from_bytes(expected, "little", signed=True)


def test_ids_of_a_column_that_is_missing_or_empty(tmp_path):
    write_shards(tmp_path, [1])
    with pytest.raises(DataError, match=r"has no columns, and --id-key is 'page'; use 'caption' or 'image'"):
        open_pairs([str(tmp_path / "*.tar")], id_key="page")
    (tmp_path / "0.png").write_bytes(picture(0))
    for name in ("pairs.jsonl", "pairs.parquet"):
        write_table(tmp_path / name, [{"image": "0.png", "caption": "a", "page": None}])
        with pytest.raises(DataError, match=r"has no id column sheet; it has .*page; set --id-key to one of them"):
            open_pairs([str(tmp_path / name)], id_key="sheet")
        with pytest.raises(BadSample, match="missing id"):
            open_pairs([str(tmp_path / name)], id_key="page").read(0)


def test_the_loader_does_not_draw_from_the_global_random_generator(pairs):
    """Dropout and patch dropout draw from it, and reading data must not change a training run."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1):
        loader = loader_of(pairs, num_workers=workers)
        next(loader)
        loader.close()
    assert torch.equal(before, torch.get_rng_state())


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


def test_only_the_first_bad_sample_of_each_kind_is_logged_with_its_place(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(reading_module._logger, "warning", lambda message, *values: logged.append(message % values))
    loader = loader_of(make_bad(tmp_path, BAD), max_bad_fraction=0.5)
    for _ in range(10):
        next(loader)
    assert sorted(line.split(":")[0] for line in logged) == sorted(KINDS)
    places = {"undecodable image": ("0.tar/7:", "0.tar/11:"), "empty caption": ("0.tar/20",)}
    places |= {"missing caption": ("1.tar/41",), "missing image": ("1.tar/42",)}
    assert all(any(place in line for place in places[line.split(":")[0]]) for line in logged)
    logged.clear()
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(picture(0) if number == 0 else b"not an image")
    (tmp_path / "t.csv").write_text("filepath,title\n0.png,caption 0\n1.png,caption 1\n")
    list(EvaluationLoader(open_pairs([str(tmp_path / "t.csv")]), ImageTransform(8), CountingTokenizer(), batch_size=4))
    (line,) = logged
    assert line.startswith("undecodable image: t.csv row 2 (1.png): it begins with b'not an image', and is not a file")


def test_bad_samples_are_counted_among_all_that_were_read(tmp_path):
    """Substitutes are read too, and are bad as often as other samples. A few bad samples among many end no run."""
    broken = {n: [(f"{n}.png", b"broken"), (f"{n}.txt", b"caption")] for n in range(0, 60, 2)}
    loader = loader_of(make_bad(tmp_path, broken), max_bad_fraction=1.0)
    for _ in range(5):
        next(loader)
    assert loader._log._read == 5 * STEP + loader._log.counts.total() > 5 * STEP
    log, bad = reading_module.BadSampleLog(0.01, ""), BadSample("missing image", "0", "0.tar")
    log.add([bad] * 20, reads=2000)
    with pytest.raises(DataError, match=r"21 of the 2001 samples read so far are bad"):
        log.add([bad], reads=1)


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


@pytest.mark.parametrize("labelled", [False, True])
def test_the_error_of_an_evaluation_names_only_flags_and_commands_that_it_has(tmp_path, labelled):
    """`megaclip inspect` reads pairs. It refuses a folder with one folder of images per class."""
    if labelled:
        for number in range(30):
            (tmp_path / str(number % 2)).mkdir(exist_ok=True)
            (tmp_path / str(number % 2) / f"{number}.png").write_bytes(b"broken")
        data = (open_labelled(tmp_path), ImageTransform(8), None)
    else:
        broken = {n: [(f"{n}.png", b"broken"), (f"{n}.txt", b"caption")] for n in range(30)}
        data = (make_bad(tmp_path, broken), ImageTransform(8), CountingTokenizer())
    with pytest.raises(DataError, match=r"^30 of the (30|50) samples read so far .* over the limit 0\.01;") as caught:
        list(EvaluationLoader(*data, batch_size=50))
    assert "--max-bad-fraction" not in str(caught.value) and ("`megaclip inspect`" in str(caught.value)) != labelled


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 2)])
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


@pytest.mark.parametrize("by_line", [False, True])
def test_evaluation_takes_all_captions_of_an_image_one_by_one(tmp_path, by_line):
    """A text of all captions joined would be easier to retrieve than any of them. by_line divides a text by lines."""
    for name in ("0.png", "1.png"):
        (tmp_path / name).write_bytes(picture(0))
    (tmp_path / "0.txt").write_text("caption 3\n\ncaption 4\n")
    (tmp_path / "1.json").write_text(json.dumps({"text": ["caption 5", "caption 6"]}))
    pairs = open_pairs([str(tmp_path)], caption_key="txt;json.text")
    data = (pairs, ImageTransform(8), CountingTokenizer())
    (batch,) = EvaluationLoader(*data, batch_size=2, by_line=by_line)
    assert batch.tokens[:, 0].tolist() == [*([3, 4] if by_line else [4]), 5, 6]
    assert batch.caption_rows.tolist() == [*([0, 0] if by_line else [0]), 1, 1]
    assert batch.caption_lines.tolist() == [1 if by_line else 2, 1]


def test_evaluation_omits_bad_samples(tmp_path):
    loader = EvaluationLoader(
        make_bad(tmp_path, BAD), ImageTransform(8), CountingTokenizer(), batch_size=16, max_bad_fraction=0.5
    )
    batches = list(loader)
    assert all(torch.equal(batch.tokens[:, 0], batch.ids) for batch in batches)  # -1 for padding
    ids = torch.cat([batch.ids for batch in batches])
    assert sorted(i for i in ids.tolist() if i != PADDING_ID) == [n for n in range(SAMPLES) if n not in BAD]
    assert loader.bad_counts == KINDS


def test_labelled_batches_hold_labels_and_padding(tmp_path):
    members = [m for n in range(10) for m in ((f"{n}.png", picture(n)), (f"{n}.cls", str(n % 3).encode()))]
    write_tar(tmp_path / "0.tar", members)
    (tmp_path / "classnames.txt").write_text("a\nb\nc\n")
    batches = list(EvaluationLoader(open_labelled(tmp_path), ImageTransform(8), None, batch_size=6))
    assert torch.cat([b.labels for b in batches]).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, -1, -1]
    assert torch.cat([b.ids for b in batches]).tolist() == [*range(10), -1, -1]
    (tmp_path / "classnames.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"^0\.tar/2 has the label 2"):
        list(EvaluationLoader(open_labelled(tmp_path), ImageTransform(8), None, batch_size=6))


def read_with_little_shared_memory(folder, connection):
    """Read batches of 4 MiB in a process whose /dev/shm has 1 MiB; send the reason if the system refuses that."""
    libc, own_mounts, private = ctypes.CDLL(None, use_errno=True), 0x20000, 0x44000  # CLONE_NEWNS, MS_REC | MS_PRIVATE
    if libc.unshare(own_mounts) or libc.mount(b"none", b"/", None, private, None):
        connection.send(os.strerror(ctypes.get_errno()))
        return
    assert not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m")
    data = (open_pairs([str(folder)]), ImageTransform(224), CountingTokenizer())
    training = TrainLoader(*data, micro_batch_size=32, num_workers=2)
    read = [len(next(training).images) for _ in range(3)]
    training.close()
    connection.send([*read, *(len(batch.images) for batch in EvaluationLoader(*data, batch_size=32, num_workers=2))])


def test_a_small_dev_shm_is_enough(tmp_path):
    """Containers have 64 MiB by default, and torch's way of passing tensors would fill it."""
    write_shards(tmp_path, [64])
    context = multiprocessing.get_context("fork")
    connection, other = context.Pipe()
    process = context.Process(target=read_with_little_shared_memory, args=(tmp_path, other))
    process.start()
    other.close()
    found = connection.recv()
    process.join()
    if isinstance(found, str):
        pytest.skip(f"mounting a small /dev/shm needs root on Linux: {found}")
    assert found == [32] * 5


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
