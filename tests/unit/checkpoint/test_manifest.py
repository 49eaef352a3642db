"""Manifests report every kind of damage, use little memory, and cannot make a reader open other files or run code."""

import json
import os
import subprocess
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch

from megaclip.checkpoint import durable, manifest
from megaclip.checkpoint.manifest import MANIFEST, find_damage, require_whole
from megaclip.errors import CheckpointError

SIZES = {"a.pt": 70_000, "b.pt": 50_000, "c.pt": 30_000, "sub/d.swp": 20_000, "e.json": 10}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of files with random bytes, and their manifest."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name, size in SIZES.items():
        (folder / name).write_bytes(os.urandom(size))
    manifest.write(folder, run="this run")
    return folder


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero_a_block(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(4096) + content[8192:])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "a flipped bit": (flip_a_bit, "b.pt has changed: its CRC-32 is "),
    "a zeroed block": (zero_a_block, "b.pt has changed: its CRC-32 is "),
    "a truncated file": (truncate, "b.pt has 49999 bytes instead of 50000"),
    "an empty file": (lambda path: path.write_bytes(b""), "b.pt has 0 bytes instead of 50000"),
    "a file of an older step": (lambda path: path.write_bytes(os.urandom(50_000)), "b.pt has changed: its CRC-32 is "),
    "a missing file": (Path.unlink, "b.pt is missing"),
    "a folder in its place": (replace_by_folder, "b.pt is missing"),
    "a file of another number of ranks": (lambda path: (path.parent / "f.pt").touch(), "f.pt is not listed in"),
    "a file in a subfolder": (lambda path: flip_a_bit(path.parent / "sub" / "d.swp"), "sub/d.swp has changed: "),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_file_is_named(folder, name):
    assert find_damage(folder) == []
    damage, expected = DAMAGES[name]
    damage(folder / "b.pt")
    (problem,) = find_damage(folder)
    assert problem.startswith(expected)


def test_a_file_is_refused_for_its_own_damage_and_that_of_the_manifest(folder):
    """An index of parts is refused for damage of any file. A file of the user beside an export is accepted."""
    (folder / "own.pt").touch()
    flip_a_bit(folder / "a.pt")
    for name in ("b.pt", "own.pt"):
        require_whole(folder / name)
    for path in (folder / "a.pt", folder / "e.json", folder):
        with pytest.raises(CheckpointError, match=r"is damaged: .*a\.pt has changed"):
            require_whole(path)
    flip_a_bit(folder / MANIFEST)
    with pytest.raises(CheckpointError, match=f"is damaged: {MANIFEST} "):
        require_whole(folder / "b.pt")


def test_checksums_are_those_of_gzip(folder):
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files.keys() == SIZES.keys()
    for name, size in SIZES.items():
        content = (folder / name).read_bytes()
        packed = subprocess.run(["gzip", "-c"], input=content, capture_output=True, check=True).stdout
        assert files[name] == {"size": size, "crc32": f"{int.from_bytes(packed[-8:-4], 'little'):08x}"}


def test_manifest_records_versions_time_and_run(folder):
    content = manifest.read(folder)
    assert content.versions["torch"] == torch.__version__
    assert content.versions.keys() == {"megaclip", "torch", "deepspeed"}
    assert content.run == "this run" and content.saved_at.startswith("20") and content.saved_at.endswith("+00:00")


def altered(folder: Path, **changes: object) -> None:
    """Change a manifest and recompute its checksum."""
    content = {**json.loads((folder / MANIFEST).read_text()), **changes}
    del content["crc32"]
    content["crc32"] = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    (folder / MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "is missing"),
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "its checksum differs"),
        ("{}", "its checksum differs"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_damaged_manifest_is_named(folder, text, expected):
    (folder / MANIFEST).unlink()
    if text is not None:
        (folder / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    (problem,) = find_damage(folder)
    assert problem.startswith(MANIFEST) and expected in problem


@pytest.mark.parametrize(
    "changes", [{"format": 2}, {"files": []}, {"files": {"a.pt": {"size": -1, "crc32": "0" * 8}}}, {"saved_at": 3}]
)
def test_manifest_of_another_format_is_refused(folder, changes):
    altered(folder, **changes)
    with pytest.raises(CheckpointError, match="is not a manifest of format 1"):
        manifest.read(folder)


@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "sub/../../secret", "a.pt\0", "pipe", "device"])
def test_prepared_names_are_neither_read_nor_waited_for(folder, name):
    (folder.parent / "secret").write_bytes(b"x")
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    altered(folder, files={name: {"size": 0, "crc32": "00000000"}})
    problems = [problem for problem in find_damage(folder) if "not listed" not in problem]
    assert len(problems) == 1
    assert any(words in problems[0] for words in ("leads out of the folder", "is missing", "cannot be read"))


def test_each_file_is_read_by_one_rank_and_the_bytes_are_divided(folder, monkeypatch):
    read: list[str] = []
    original = manifest.checksum
    monkeypatch.setattr(manifest, "checksum", lambda path: read.append(path.name) or original(path))
    flip_a_bit(folder / "c.pt")
    shares = []
    for part in range(3):
        read.clear()
        problems = find_damage(folder, part=part, parts=3)
        shares.append(list(read))
        assert bool(problems) == ("c.pt" in read)
    assert sorted(name for share in shares for name in share) == sorted(Path(name).name for name in SIZES)
    assert max(sum((folder / name).stat().st_size for name in share if name != "d.swp") for share in shares) == 70_000


def test_checking_and_writing_stream(tmp_path):
    tensor = torch.zeros(64 * 2**20, dtype=torch.uint8)
    tracemalloc.start()
    try:
        record = durable.save_tensors({"tensor": tensor}, tmp_path / "large.pt")
        assert durable.checksum(tmp_path / "large.pt") == record
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
    assert torch.equal(torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)["tensor"], tensor)


def test_files_get_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        durable.save_tensors({}, tmp_path / "a.pt")
        manifest.write(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
