"""Tar shards: the header walk compared with tarfile, damaged shards, and the index on disk."""

import bz2
import errno
import fcntl
import gzip
import io
import json
import lzma
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from megaclip.data import tar_shards
from megaclip.data.index import INDEX_FOLDER
from megaclip.data.source import REPEATED
from megaclip.data.tar_shards import TarShards
from megaclip.data.tar_walk import walk_shard
from megaclip.errors import DataError
from tests.unit.data.data_samples import captions, images, outcomes, pair_members, picture, write_shards, write_tar

LONG = "a-rather-long-directory-name/" * 6


def archive(numbers: range) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_tar(Path(folder) / "shard.tar", pair_members(numbers)).read_bytes()


WHOLE = archive(range(5)), archive(range(5, 8))


def walk(path):
    return walk_shard(path, ("jpg", "png"), (("txt",),))


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_walk_finds_the_same_members_as_tarfile(tmp_path, format):
    """Long names, non-ASCII names and fractional times cause the extension headers of each format."""
    names = ["000.png", "deep/er/001.png", LONG + "002.png"]
    if format != tarfile.USTAR_FORMAT:
        names += ["caf\u00e9.png", "x" * 200 + ".png"]
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w", format=format) as tar:
        for number, name in enumerate(names):
            for suffix, content in ((".png", picture(number)), (".txt", f"caption {number}".encode())):
                member = tarfile.TarInfo(name.replace(".png", suffix))
                member.size, member.mtime = len(content), 1e9 + 0.5
                tar.addfile(member, io.BytesIO(content))
    contents = walk(path)
    assert contents.damage == ""
    with tarfile.open(path) as tar:
        expected = [(m.offset_data, m.size) for m in tar.getmembers()]
    found = [
        pair
        for entry in contents.entries
        for pair in ((entry["image_offset"], entry["image_size"]), (entry["caption_offset"], entry["caption_size"]))
    ]
    assert found == expected


def test_members_may_come_in_any_order_and_others_are_ignored(tmp_path):
    """Names with parent folders write no files."""
    path = tmp_path / "shards" / "shard.tar"
    path.parent.mkdir()
    kinds = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
    with tarfile.open(path, "w") as tar:
        for number, kind in enumerate(kinds):
            member = tarfile.TarInfo(f"images/{number}.png")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        others = [("images/b.TXT", b"two"), ("images/._a.png", b"mac"), ("images/a.json", b"{}")]
        others += [("../../evil.txt", b"three"), ("../../evil.png", b"y")]
        for name, content in [*others, ("images/a.png", picture(0)), ("images/a.txt", b"one"), ("images/b.png", b"x")]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    shards = TarShards([path])
    assert captions(shards) == ["two", "three", "one"] and images(shards) == [b"x", b"y", picture(0)]
    assert shards.read(1).key == "shard.tar/../../evil" and not list(tmp_path.parent.rglob("evil.png"))


def damaged_shards(content: bytes, other: bytes) -> dict[str, tuple[bytes, int, str]]:
    """Return damaged contents of a shard of 5 samples, the number of complete ones, and the reported damage."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        third, fourth = (tar.getmember(name) for name in ("000002.png", "000003.txt"))
    huge = tarfile.TarInfo("000.png")
    huge.size = 1 << 60  # the walk must not read or allocate as many bytes as a header specifies
    huge_file = huge.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    huge.type = tarfile.XHDTYPE
    end = fourth.offset_data + 512
    return {
        "cut in the padding": (content[: end - 490], 4, f"no end of the archive at byte {end - 490}"),
        "cut behind a member": (content[:end], 4, f"no end of the archive at byte {end}"),
        "cut in a header": (content[: end + 100], 4, f"cut off at byte {end + 100}"),
        "cut in a member": (content[: end + 515], 4, f"cut off at byte {end + 515}"),
        "empty": (b"", 0, "an empty file"),
        "archives joined by cat": (content + other, 5, "data after the end of the archive"),
        "garbage": (content[: third.offset + 3] + b"garbage" + content[third.offset + 10 :], 2, "wrong checksum"),
        "huge file": (huge_file, 0, "cut off"),
        "huge header": (huge.tobuf(tarfile.GNU_FORMAT) + bytes(1024), 0, "an extended header of"),
    }


@pytest.mark.parametrize("name", damaged_shards(*WHOLE))
def test_a_damaged_shard_yields_its_complete_samples_and_is_reported(tmp_path, caplog, name):
    """No sample may be lost silently."""
    content, complete, damage = damaged_shards(*WHOLE)[name]
    path, whole = write_shards(tmp_path, [5, 1])
    path.write_bytes(content)
    shards = TarShards([path, whole])
    assert captions(shards) == [*(f"caption {number}" for number in range(complete)), "caption 5"]
    assert shards.account.problems["damaged shard"] == 1 and f"{path.name} ({damage}" in caplog.text


def test_repeated_names_in_a_shard_are_reported(tmp_path):
    """`tar --concatenate` makes such shards if the members of each archive were numbered from 0.

    Samples of equal names must not be lost silently.
    """
    members = [("0.png", picture(0)), ("0.txt", b"first"), ("0.png", picture(1)), ("0.txt", b"second")]
    shards = TarShards([write_tar(tmp_path / "shard.tar", members)])
    assert captions(shards) == ["first"]
    assert shards.account.left_out == {REPEATED: [2, 1, ["shard.tar/0.png"]]} and shards.account.seen == 4


def test_members_that_are_missing_too_large_or_cut_off_are_bad_samples(tmp_path):
    members = [("a.png", picture(0)), ("b.txt", b"only text"), ("c.png", picture(0)), ("c.txt", b"x" * (2 << 20))]
    path = write_tar(tmp_path / "shard.tar", [*members, *pair_members([1, 2])])
    shards = TarShards([path])
    with path.open("r+b") as file:
        file.truncate(int(shards._entries[4]["image_offset"]) + 10)  # after it was indexed
    assert outcomes(shards) == [
        "missing caption",
        "missing image",
        "caption too large",
        "caption 1",
        "unreadable shard",
    ]


def make_folder(path):
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_folder, r"cannot read .*0\.tar.*[Dd]irectory"),
        (lambda path: None, r"cannot read .*0\.tar.*No such file"),
        (lambda path: path.write_text("this is no tar file" * 100), r"0\.tar.*no tar header"),
        (lambda path: write_tar(path, []), "no samples"),
        *(
            (lambda path, pack=pack: path.write_bytes(pack(WHOLE[0])), f"compressed with {program}; decompress it")
            for pack, program in ((gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz"))
        ),
    ],
)
def test_what_is_no_tar_file_or_has_no_samples_is_one_error(tmp_path, make, message):
    make(tmp_path / "0.tar")
    with pytest.raises(DataError, match=message):
        TarShards([tmp_path / "0.tar"])


def test_the_index_is_reused_until_a_shard_changes(tmp_path, monkeypatch):
    tmp_path /= os.fsdecode(b"gr\xfcn")  # a name in Latin-1
    paths = write_shards(tmp_path, [3, 4])
    assert len(TarShards(paths)) == 7
    monkeypatch.setattr(tar_shards, "walk_shard", _must_not_walk)
    again = TarShards(paths)
    assert again.shard_sizes.tolist() == [3, 4] and again.read(6).caption == "caption 6"
    monkeypatch.undo()
    write_tar(paths[1], pair_members(range(90, 95)))
    assert len(TarShards(paths)) == 8 and TarShards(paths).read(7).caption == "caption 94"
    assert not [name for name in os.listdir(tmp_path / ".megaclip") if name.endswith((".lock", ".tmp"))]


def _must_not_walk(*_, **__):
    raise AssertionError("the shards were walked again")


@pytest.mark.parametrize(
    "damaged", ["truncated.npy", "empty.npy", "no.npy", "longer.npy", "truncated.json", "other.json"]
)
def test_a_damaged_index_is_made_again(tmp_path, caplog, damaged):
    """A truncated array would be mapped into memory, and reading past its end would kill the process."""
    paths = write_shards(tmp_path, [4, 5])
    expected = captions(TarShards(paths))
    (array,), (manifest,) = (list((tmp_path / INDEX_FOLDER).glob(f"*.{suffix}")) for suffix in ("npy", "json"))
    whole, text = array.read_bytes(), manifest.read_text()
    content = {
        "truncated.npy": whole[: len(whole) // 3],
        "empty.npy": b"",
        "no.npy": None,
        "longer.npy": whole + b"0",
        "truncated.json": text[: len(text) // 2].encode(),
        "other.json": text.replace('"samples": 4', '"samples": 3').encode(),
    }[damaged]
    file = array if damaged.endswith("npy") else manifest
    file.unlink() if content is None else file.write_bytes(content)
    shards = TarShards(paths)
    assert "is damaged and is rebuilt" in caplog.text
    assert captions(shards) == expected == [f"caption {number}" for number in range(9)]
    assert array.read_bytes() == whole and json.loads(manifest.read_text()) == json.loads(text)


def test_an_index_that_cannot_be_written_beside_the_shards_is_in_the_users_cache_or_one_error(tmp_path, monkeypatch):
    (path,) = write_shards(tmp_path / "shards", [2])
    # The index folder cannot be created where a file has its name. Root would ignore permissions.
    (tmp_path / "shards" / ".megaclip").write_text("")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"index .* to .*shards/\.megaclip or .*file/megaclip/.*set XDG_CACHE_HOME"):
        TarShards([path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert captions(TarShards([path])) == ["caption 0", "caption 1"]
    assert list((tmp_path / "cache" / "megaclip").rglob("*.npy"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    with pytest.raises(DataError, match=r"index .* to .*shards/\.megaclip; .*set XDG_CACHE_HOME"):
        TarShards([path])


def test_a_cache_that_cannot_be_looked_at_is_not_used(tmp_path, monkeypatch):
    """As the home folder of root for other users: a look into it is an error."""
    (path,) = write_shards(tmp_path, [2])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    assert captions(TarShards([path])) == ["caption 0", "caption 1"]
    shutil.rmtree(tmp_path / ".megaclip")
    (tmp_path / ".megaclip").write_text("")
    with pytest.raises(DataError, match=r"index .* cannot be written to .*; make one of these folders writable"):
        TarShards([path])


def test_a_shard_stays_open_while_a_thread_reads_it(tmp_path, monkeypatch):
    """Between two steps of a read, another thread reads more shards than may be open."""
    shards, pread = TarShards(write_shards(tmp_path, [1, 1])), os.pread
    monkeypatch.setattr(tar_shards, "_OPEN_SHARDS", 1)

    def interrupted(*arguments):
        monkeypatch.setattr(os, "pread", pread)
        assert shards.read(1).caption == "caption 1"
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", interrupted)
    assert shards.read(0).caption == "caption 0"


def test_a_full_disk_is_one_error_that_names_the_index(tmp_path, monkeypatch):
    (path,) = write_shards(tmp_path, [2])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tar_shards.np, "save", full)
    with pytest.raises(DataError, match=r"cannot write the index .*/\.megaclip/.*\.npy: No space left on device; free"):
        TarShards([path])
    assert not list((tmp_path / ".megaclip").glob(".*.tmp"))


def test_processes_that_open_shards_at_once_walk_them_once(tmp_path):
    paths = write_shards(tmp_path, [3, 3])
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.map(_open_and_record_walks, [(paths, tmp_path / "walks")] * 4)
    assert results == [6] * 4
    assert len((tmp_path / "walks").read_text().split()) == 2  # two shards, each walked once


def _open_and_record_walks(job):
    paths, record = job
    real = tar_shards.walk_shard

    def recorded(path, *extensions, **options):
        with open(record, "a") as file:
            file.write(f"{path.name}\n")
        time.sleep(0.1)
        return real(path, *extensions, **options)

    tar_shards.walk_shard = recorded
    return len(TarShards(paths))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_gets_an_index_too(tmp_path, monkeypatch, code):
    """Lustre without -o flock reports ENOSYS, NFS without a lock service ENOLCK."""

    def no_locks(*_):
        raise OSError(code, os.strerror(code))

    paths = write_shards(tmp_path, [3])
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert TarShards(paths).read(2).caption == "caption 2"
    assert sorted(path.suffix for path in (tmp_path / ".megaclip").iterdir()) == [".json", ".npy"]


def test_few_of_many_shards_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_shards, "_OPEN_SHARDS", 3)
    paths, before = write_shards(tmp_path, [1] * 10), len(os.listdir("/proc/self/fd"))
    for _ in range(3):  # shards that are no longer used are closed
        shards = TarShards(paths)
        assert captions(shards) * 2 == [f"caption {n}" for n in range(10)] * 2 == captions(shards) * 2
        assert len(os.listdir("/proc/self/fd")) <= before + 3 + 1
