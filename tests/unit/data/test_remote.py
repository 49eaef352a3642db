"""Remote data: the same samples in the same order as local ones, through faults, from a cache of bounded size."""

import contextlib
import dataclasses
import fcntl
import threading
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megaclip.data import ImageTransform, TrainLoader, check_manifest, open_labelled, open_pairs, remote, shard_cache
from megaclip.data.order import MixtureOrder, SampleOrder, mixture_batches
from megaclip.data.shard_cache import SUFFIX, RemoteShards, ShardCache
from megaclip.data.source import BESIDE
from megaclip.errors import DataError, public
from tests.unit.data.data_samples import CountingTokenizer, picture, write_shards, write_table, write_tar
from tests.unit.data.web_server import serving

SHARDS, SIZE = 12, 6
SECRET = "?X-Amz-Signature=c0ffee"
pytestmark = pytest.mark.timeout(120)  # a fault that these tests detect may hang


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Short pauses between attempts, and a cache of indices of its own."""
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server(tmp_path):
    write_shards(tmp_path / "shards", [SIZE] * SHARDS)
    with serving(tmp_path / "shards") as server:
        yield server


def pattern(place):
    return f"{place}/{{00000..{SHARDS - 1:05d}}}.tar"


def steps(dataset, count, **options):
    """Return the images and tokens of the first steps of 8 samples."""
    settings = {"micro_batch_size": 8, "seed": 3, "shard_order": "sequential", **options}
    loader = TrainLoader(dataset, ImageTransform(8, training=True), CountingTokenizer(), **settings)
    try:
        return [(batch.images, batch.tokens) for batch, _ in zip(loader, range(count), strict=False)]
    finally:
        loader.close()


def assert_same_steps(one, other):
    assert len(one) == len(other)
    assert all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


def test_urls_braces_globs_and_folders_give_the_samples_of_local_files(server):
    local = open_pairs([pattern(server.folder)])
    (described,) = local.manifest()["sources"]
    for spec in (pattern(server.url) + SECRET, server.url + "/*.tar" + SECRET, server.url + "/", server.url):
        dataset = open_pairs([spec])
        assert [dataset.read(row) for row in range(len(local))] == [local.read(row) for row in range(len(local))]
        (source,) = dataset.manifest()["sources"]
        versions = source.pop("versions")
        assert source == described and list(versions) == [f"{server.url}/{n:05d}.tar" for n in range(SHARDS)]
        check_manifest(local.manifest(), dataset.manifest())  # a run may resume with copies of its data elsewhere
        check_manifest(dataset.manifest(), local.manifest())


def test_a_folder_has_the_same_type_on_a_server_as_on_a_disk(tmp_path):
    write_table(tmp_path / "0.csv", [{"image": "0.png", "caption": "a"}])
    (tmp_path / "0.json").write_text('{"image": "0.png", "caption": "a"}')
    with serving(tmp_path) as server:
        assert [open_pairs([place]).sources[0].kind for place in (server.url, str(tmp_path))] == ["json", "json"]


def test_other_files_of_a_folder_are_counted(server):
    pq.write_table(pa.table({"caption": ["a"]}), server.folder / "00000.parquet")
    (server.folder / "00000_stats.json").write_text("{}")
    (account,) = open_pairs([server.url]).accounts
    assert account.left_out[BESIDE][0] == 2 and account.in_samples == 2 * SHARDS * SIZE


def test_the_index_is_made_once_by_few_requests(server):
    open_pairs([pattern(server.url)])
    assert server.requests.total() == 2 * SHARDS  # the look-up, and one block that holds the whole small shard
    open_pairs([pattern(server.url)])
    assert server.requests.total() == 3 * SHARDS


def test_large_members_are_skipped_and_small_ones_read_ahead(tmp_path):
    members = [(f"{n}.{end}", bytes(size)) for n in range(4) for end, size in (("jpg", 3 << 20), ("txt", 10))]
    members += [(f"small{n}.{end}", bytes(3000)) for n in range(500) for end in ("jpg", "txt")]
    write_tar(tmp_path / "shards" / "0.tar", members)
    with serving(tmp_path / "shards") as server:
        dataset = open_pairs([f"{server.url}/0.tar"], max_bad_fraction=1)
        assert len(dataset) == 504 and server.requests.total() < 20


def passing_faults(path, number):
    """Every shard is unavailable, busy, cut off, reset and slow in turn, between answers."""
    slow = 0.8 if path.endswith("3.tar") else None
    return (None, 503, None, "truncated", 429, None, "reset", None, slow)[number % 9]


@pytest.mark.parametrize("cached", [False, True])
def test_faults_that_pass_change_nothing(server, tmp_path, monkeypatch, cached):
    monkeypatch.setattr(remote, "_SILENCE_S", 0.4)
    server.fault = passing_faults
    options = {"shard_cache": tmp_path / "shard_cache"} if cached else {}
    got = steps(open_pairs([pattern(server.url)]), 12, num_workers=2, **options)
    assert_same_steps(got, steps(open_pairs([pattern(server.folder)]), 12))


@pytest.mark.parametrize(
    ("fault", "when", "problem"),
    [
        (404, "before opening", "does not exist"),
        (403, "after opening", "check the credentials"),
        (503, "before opening", "after 8 attempts: ClientResponseError: 503"),
        ("reset", "after opening", "after 8 attempts"),
    ],
)
def test_a_fault_that_stays_is_one_error_that_names_the_shard(server, fault, when, problem):
    def set_fault():
        server.fault = lambda path, number: fault if path.endswith("00007.tar") else None

    if when == "before opening":
        set_fault()
    with pytest.raises(DataError) as raised:
        dataset = open_pairs([pattern(server.url) + SECRET])
        set_fault()
        steps(dataset, 9)
    text = str(raised.value)
    assert f"{server.url}/00007.tar" in text and problem in text and "c0ffee" not in text
    if when == "after opening":
        assert "sample 4" in text and "bytes " in text  # the first of the shard in the order


def test_an_answer_with_fewer_bytes_is_asked_for_again(monkeypatch):
    answers = [b"12", b"1234"]
    store = SimpleNamespace(cat_file=lambda path, start, end: answers.pop(0))
    monkeypatch.setattr(remote, "_open", lambda url: (store, url))
    assert remote.RemoteFile("s3://bucket/0.tar", 9, "").read(3, 7) == b"1234"


def test_a_server_without_ranges_is_refused(server):
    server.fault = lambda path, number: "no ranges"
    write_shards(server.folder, [400])
    with pytest.raises(DataError, match="ignores ranges of bytes"):
        steps(open_pairs([f"{server.url}/00000.tar"]), 1)


@pytest.mark.parametrize("cached", [False, True])
def test_a_changed_shard_is_refused_during_the_run_and_on_resume(server, tmp_path, cached):
    before = open_pairs([pattern(server.url)])
    content = (server.folder / "00004.tar").read_bytes()
    changed = content.replace(b"caption 25", b"caption 97")
    (server.folder / "00004.tar").write_bytes(changed)
    with pytest.raises(DataError, match=r"00004\.tar has changed since the run began.*start a new run"):
        steps(before, 9, **({"shard_cache": tmp_path / "shard_cache"} if cached else {}))
    with pytest.raises(DataError, match=r"00004\.tar was changed after the checkpoint"):
        check_manifest(before.manifest(), open_pairs([pattern(server.url)]).manifest())
    (server.folder / "00004.tar").write_bytes(content)
    check_manifest(before.manifest(), open_pairs([pattern(server.url)]).manifest())


def test_the_cache_stays_within_its_limit_and_serves_later_passes(server, tmp_path):
    folder, limit = tmp_path / "shard_cache", 4 * (server.folder / "00000.tar").stat().st_size + 100
    largest, stop = [0], threading.Event()

    def watch():
        while not stop.wait(0.002):
            size = 0
            for path in folder.glob("*") if folder.exists() else ():
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    size += path.stat().st_blocks * 512 * (path.name not in ("lock", "holder"))
            largest[0] = max(largest[0], size)

    watcher = threading.Thread(target=watch)
    watcher.start()
    dataset = open_pairs([pattern(server.url)])
    loader = TrainLoader(
        dataset, ImageTransform(8), CountingTokenizer(), micro_batch_size=6, seed=3, shard_order="sequential",
        num_workers=1, shard_cache=folder, shard_cache_bytes=limit,
    )  # fmt: skip
    expected = steps(open_pairs([pattern(server.folder)]), 3 * SHARDS, micro_batch_size=6)
    served = server.requests.total()
    try:
        for number, (_, tokens) in enumerate(expected):
            time.sleep(0.05)  # as a step
            assert torch.equal(next(loader).tokens, tokens), number
    finally:
        loader.close()
        stop.set()
        watcher.join()
    assert 0 < largest[0] <= limit + 4 * 4096  # whole blocks
    # A shard is looked up and read in one block when it enters the cache. Without the cache, every sample is read.
    assert server.requests.total() - served < 3 * SHARDS * 2 + 3 * SHARDS * SIZE / 2


def wait_for_shards(folder):
    """Wait until a cache has all shards, and none of another run."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(FileNotFoundError):  # one is deleted at this moment
            if [path.stat().st_size > 0 for path in folder.glob(f"*{SUFFIX}")] == [True] * SHARDS:
                return
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.02)


def test_the_ranks_of_a_host_share_a_cache_and_replace_a_dead_fetcher(server, tmp_path):
    """The folder has files of an earlier run and of a killed process."""
    dataset, folder = open_pairs([pattern(server.url)]), tmp_path / "shard_cache"
    folder.mkdir()
    (folder / f"0{SUFFIX}").write_bytes(b"of an earlier run")
    settings = {"micro_batch_size": 4, "seed": 3, "world_size": 2, "shard_cache": folder}
    ranks = [TrainLoader(dataset, ImageTransform(8), CountingTokenizer(), rank=rank, **settings) for rank in (0, 1)]
    try:
        wait_for_shards(folder)
        downloads = server.requests.total()
        assert downloads == 4 * SHARDS  # look-up and index, then one download with its check
        for _ in range(30):
            next(ranks[0])
        assert server.requests.total() == downloads
        (folder / f".left{SUFFIX}.0.tmp").write_bytes(b"")
        ranks[0].close()
        for path in folder.glob(f"*{SUFFIX}"):
            path.unlink()
        wait_for_shards(folder)
        assert not list(folder.glob(".*"))
    finally:
        for one in ranks:
            one.close()


def test_shards_that_a_power_cut_has_emptied_are_read_by_range_and_downloaded_again(server, tmp_path, monkeypatch):
    dataset, folder = open_pairs([pattern(server.url)]), tmp_path / "shard_cache"
    folder.mkdir()
    for file in dataset.remote_shards(folder).values():
        (folder / (file.cache_name + SUFFIX)).touch()
    # The disk may be full at first: nothing that fails there may end the process.
    monkeypatch.setattr(shard_cache, "write_atomically", failing)
    loader = TrainLoader(
        dataset, ImageTransform(8, training=True), CountingTokenizer(), micro_batch_size=8, seed=3,
        shard_order="sequential", shard_cache=folder,
    )  # fmt: skip
    try:
        found = [(batch.images, batch.tokens) for batch, _ in zip(loader, range(4), strict=False)]
        wait_for_shards(folder)
    finally:
        loader.close()
    assert_same_steps(found, steps(open_pairs([pattern(server.folder)]), 4))


def test_a_shard_that_cannot_be_read_from_the_cache_is_read_by_range(server, tmp_path):
    file = next(iter(open_pairs([pattern(server.url)]).remote_shards(tmp_path).values()))
    cached = tmp_path / (file.cache_name + SUFFIX)
    cached.symlink_to(cached)  # opening it fails
    assert RemoteShards([file], tmp_path).read(0, 0, 9) == (server.folder / file.name).read_bytes()[:9]


def test_a_cache_in_a_folder_without_locks_is_not_used_with_a_warning(tmp_path, monkeypatch):
    cache, warnings = ShardCache(tmp_path, None, {}, lambda position: iter(()), 0), []
    cache.close()
    monkeypatch.setattr(fcntl, "flock", failing)
    monkeypatch.setattr(shard_cache, "_logger", SimpleNamespace(warning=lambda text, *parts: warnings.append(text)))
    cache._run()
    assert len(warnings) == 1 and "samples are read one by one" in warnings[0]


def failing(*_):
    raise OSError(28, "No space left on device")


def test_a_cache_without_remote_shards_is_refused(server, tmp_path):
    with pytest.raises(DataError, match="--shard-cache has no effect"):
        steps(open_pairs([pattern(server.folder)]), 1, shard_cache=tmp_path / "shard_cache")


@pytest.mark.parametrize("shard_order", ["shuffled", "sequential"])
@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("batch", [1, 24, 60])
def test_the_next_shards_are_those_of_the_next_samples(shard_order, mixture, batch):
    sizes = [[5, 0, 9, 30, 1, 17], [40, 3, 3]]

    def part(sizes, seed, batch_sizes):
        return SampleOrder(sizes, seed=seed, batch_sizes=batch_sizes, shard_order=shard_order, window_size=13)

    parts = [part(sizes[number], number, mixture_batches([3, 1], batch)[:, number]) for number in (0, 1)]
    order = MixtureOrder(parts, seed=0) if mixture else part(sizes[0] + sizes[1], 1, [batch])
    ends = np.cumsum(sizes[0] + sizes[1])
    for position in (0, 1, 12, 13, 61, 62, 107, 108, 500, 1999, 2345):
        ids, _ = order.visit(np.arange(position, position + 40))
        needed = np.searchsorted(ends, ids, side="right")
        uses = order.shards_from(position)
        found, begin = set(), -1
        while begin < position + 40:
            last, begin = begin, -1
            begin, shard = next(uses)
            assert begin >= last
            found.add(shard)
        assert set(needed.tolist()) <= found


def test_tables_and_zero_shot_sets_are_read_by_url(tmp_path):
    table = pa.table({"image": [picture(n) for n in range(5)], "caption": [f"caption {n}" for n in range(5)]})
    pq.write_table(table, tmp_path / "0.parquet")
    (tmp_path / "labelled").mkdir()
    (tmp_path / "labelled" / "classnames.txt").write_text("cat\ndog\n")
    write_tar(
        tmp_path / "labelled" / "test" / "0.tar",
        [m for n in range(4) for m in ((f"{n}.png", picture(n)), (f"{n}.cls", b"1"))],
    )
    with serving(tmp_path) as server:
        local, there = (open_pairs([f"{place}/0.parquet"]) for place in (tmp_path, server.url))
        assert [there.read(row).image for row in range(5)] == [local.read(row).image for row in range(5)]
        assert there.manifest()["sources"] == local.manifest()["sources"]
        (copy,) = remote.copied([remote.look_up(f"{server.url}/0.parquet")])
        copy.write_bytes(b"")  # a power cut
        assert open_pairs([f"{server.url}/0.parquet"]).read(4).image == picture(4)
        labelled = open_labelled(f"{server.url}/labelled")
        assert labelled.class_names == ["cat", "dog"] and labelled.read(3).image == picture(3)


def test_what_cannot_be_read_or_copied_is_one_error_with_its_cause(server, tmp_path, monkeypatch):
    (server.folder / "classnames.txt").write_text("cat\n")
    server.fault = lambda path, number: 403 if path.endswith(".tar") else None
    with pytest.raises(DataError, match="403"):
        open_labelled(server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(server.folder / "00000.tar"))
    with pytest.raises(DataError, match="Not a directory"):
        open_labelled(server.url)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(remote.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    with pytest.raises(DataError, match="no home folder; set XDG_CACHE_HOME"):
        open_labelled(server.url)


def test_files_that_differ_in_their_query_only_need_a_version(server, monkeypatch):
    look_up = remote.look_up
    assert len(remote.find_files(server.url + "/00000.tar?f={1,2}")) == 2
    monkeypatch.setattr(remote, "look_up", lambda *a, **b: dataclasses.replace(look_up(*a, **b), version=""))
    with pytest.raises(DataError, match="cannot be told apart"):
        remote.find_files(server.url + "/00000.tar?f={1,2}")


def test_a_folder_is_listed_with_the_password_of_its_url(monkeypatch):
    listed = []
    monkeypatch.setattr(remote, "_glob", lambda url: listed.append(url) or [])
    remote.files_in("https://user:pass@host/shards/?sig=1")
    assert listed == ["https://user:pass@host/shards/*"]
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(DataError, match=r"pip install 'megaclip\[gs\]'"):
        open_pairs(["gs://bucket/0.tar"])


def test_urls_are_shown_without_secrets():
    for text, shown in {
        "https://user:pass@host/a/{0..3}.tar?sig=1&b=2": "https://host/a/{0..3}.tar",
        "error for 'http://host/a.tar?X=1', twice": "error for 'http://host/a.tar', twice",
        "abfs://container@account/a.tar": "abfs://container@account/a.tar",
        "s3://key:secret@bucket/0000?.tar": "s3://bucket/0000?.tar",
        '["https://h/a.tar?s=1", "hf:NAME:train"]': '["https://h/a.tar", "hf:NAME:train"]',
    }.items():
        assert public(text) == shown and str(DataError(text)) == shown


def test_many_shards_are_looked_up_and_indexed_at_once(tmp_path):
    """One after the other, these requests would take 6 s."""
    write_shards(tmp_path / "shards", [1] * 60)
    with serving(tmp_path / "shards") as server:
        server.fault = lambda path, number: 0.05
        began = time.monotonic()
        assert len(open_pairs([server.url + "/{00000..00059}.tar"])) == 60
        assert time.monotonic() - began < 4


def test_shards_of_an_s3_server(server, tmp_path, monkeypatch):
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    s3 = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    try:
        for name, value in {
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*s3.get_host_and_port()),
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "s3cret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        store = s3fs.S3FileSystem()
        store.mkdir("bucket")
        store.put(str(server.folder) + "/", "bucket/train/", recursive=True)
        local = open_pairs([pattern(server.folder)])
        (described,) = local.manifest()["sources"]
        for spec in (pattern("s3://bucket/train"), "s3://bucket/train/0000?.tar", "s3://bucket/train/"):
            dataset = open_pairs([spec])
            names = [name for name, *_ in dataset.manifest()["sources"][0]["files"]]
            assert names == [name for name, *_ in described["files"]][: len(names)] and len(names) >= 10
        cache = {"shard_cache": tmp_path / "shard_cache", "shard_cache_bytes": 5 * described["files"][0][1]}
        assert_same_steps(steps(dataset, 12, num_workers=2, **cache), steps(local, 12))

        content = store.cat("bucket/train/00004.tar")
        store.pipe("bucket/train/00004.tar", content.replace(b"caption 25", b"caption 97"))
        with pytest.raises(DataError, match=r"00004\.tar was changed after the checkpoint"):
            check_manifest(dataset.manifest(), open_pairs(["s3://bucket/train/"]).manifest())
        with pytest.raises(DataError, match=r"s3://bucket/train/00004\.tar has changed since the run began"):
            steps(dataset, 9)
        store.rm("bucket/train/00004.tar")
        with pytest.raises(DataError, match=r"s3://bucket/train/00004\.tar: it does not exist"):
            open_pairs([pattern("s3://bucket/train")])
        with pytest.raises(DataError, match="s3://other/"):
            open_pairs(["s3://other/0.tar"])
    finally:
        s3.stop()
