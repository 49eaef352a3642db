"""Hostile tar headers: the walk ends at once, reports the damage and allocates no memory for it."""

import tarfile
import time

import pytest

from megaclip.data.tar_walk import walk_shard
from tests.unit.data.data_samples import pair_members, write_tar

pytestmark = pytest.mark.timeout(60)  # a fault that these tests detect may hang


def walk(path):
    return walk_shard(path, ("png",), ("txt",))


def with_size_field(field: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a tar header for 000.png with these 12 bytes as its size field and a correct checksum."""
    member = tarfile.TarInfo("000.png")
    member.type = kind
    header = bytearray(member.tobuf(tarfile.USTAR_FORMAT)[:512])
    header[124:136] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


SIZE_FIELDS = {
    "octal, negative": b"-0000001000\0",  # a walk that accepts it returns to this header for ever
    "octal, one block back": b"-1000       ",
    "base 256, negative": b"\xff" + (2**88 - 512).to_bytes(11, "big"),
    "base 256, huge": b"\x80" + b"\xff" * 11,
    "underscores": b"0000_1000_0\0",
    "prefix": b"0o000001000\0",
    "letters": b"none at all\0",
}


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.DIRTYPE])
@pytest.mark.parametrize("name", SIZE_FIELDS)
def test_an_invalid_size_is_damage(tmp_path, name, kind):
    path = write_tar(tmp_path / "shard.tar", pair_members([0, 1]))
    content = path.read_bytes().rstrip(b"\0")
    content += bytes(-len(content) % 512)
    path.write_bytes(content + with_size_field(SIZE_FIELDS[name], kind) + bytes(1024))
    contents = walk(path)
    assert len(contents.entries) == 2 and contents.damage


def pax(records: bytes) -> bytes:
    """Return a tar file with these records in a pax header before an empty member."""
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, len(records)
    after = tarfile.TarInfo("000.png").tobuf(tarfile.USTAR_FORMAT)
    return member.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512) + after + bytes(1024)


@pytest.mark.parametrize(
    "records",
    [
        b"12 size=-512\n",
        b"9" * 5000 + b" size=1\n",  # int() raises an error for 5,000 digits
        b"0 size=1\n",
        b"3 x=1\n",
        b"13 path=\xff\xfe\0\n",
        b"28 size=9999999999999999999\n",
    ],
)
def test_a_hostile_pax_header_is_damage_or_has_no_effect(tmp_path, records):
    path = tmp_path / "shard.tar"
    path.write_bytes(pax(records))
    contents = walk(path)
    assert len(contents.entries) <= 1
    assert contents.damage or (contents.entries["image_size"] >= 0).all()


def test_a_pax_header_of_a_megabyte_is_read_in_linear_time(tmp_path):
    """Reading 200,000 records must take linear time.

    A reader that copies the rest of the header at each record takes 4 s, and a shard may contain many such headers.
    """
    path = tmp_path / "shard.tar"
    path.write_bytes(pax(b"5 a=\n" * 200_000))
    began = time.process_time()
    assert len(walk(path).entries) == 1
    assert time.process_time() - began < 2
