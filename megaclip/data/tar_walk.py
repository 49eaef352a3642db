"""Read the headers of one tar shard and return the offsets of each sample's image and caption.

In webdataset's layout, members whose names agree up to the first dot of the file name are one sample
(`dir/000017.jpg`, `dir/000017.txt`). Names are compared and shown but never used as paths, so a malicious name is
harmless. A damaged or truncated shard yields its complete samples.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from megaclip.data.images import HEAD_BYTES, image_kind
from megaclip.data.remote import ReadAhead, RemoteFile
from megaclip.data.source import DOTTED, HIDDEN, LINK, OTHER, REPEATED, SPARE, UNREADABLE, Account

BLOCK = 512
MISSING = -1
"""Size that marks a member that the sample does not have."""
KEY_BYTES = 96
"""Largest number of bytes of a key. Keys are only for messages; longer ones are truncated."""
_MAX_EXTENSION_HEADER = 1 << 20
_MAX_OTHERS = 16
_CHECKED_AFTER_END = 1 << 16
"""Number of bytes after the end of an archive that must be zero. tar pads the last block of 10 KiB."""
_REGULAR_FILE, _FOLDER = (b"0", b"\0", b"7"), b"5"
_RECOGNISED = "by content: "
"""Prefix of the extension of a member that is an image by its first bytes."""
_OCTAL = re.compile(rb"[0-7]{0,12}")
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed files, with the program that decompresses them."""


def entry_type(keys: int) -> np.dtype:
    """Return the dtype of a sample in the index: offset and size of its image, and of the member of each key.

    `caption_extension` (keys,) are indices into the extensions of a key. keys: number of keys of --caption-key and of
    extra fields, which follow them.
    """
    return np.dtype(
        [
            ("image_offset", "<i8"),
            ("image_size", "<i8"),
            ("caption_offset", "<i8", (keys,)),
            ("caption_size", "<i8", (keys,)),
            ("caption_extension", "<i2", (keys,)),
            ("key", f"S{KEY_BYTES}"),
        ]
    )


@dataclasses.dataclass(frozen=True)
class ShardContents:
    """The samples of one shard."""

    entries: np.ndarray
    """Offsets and sizes of n samples, (n,) of `entry_type`, in the order of the shard."""
    damage: str
    """Reason why samples may be missing; empty for an undamaged shard."""
    account: Account
    """Number of members in samples, and of those that are left out."""
    images: Counter[str]
    """Number of samples whose image has an extension, by extension."""
    captions: list[Counter[str]]
    """Number of samples whose caption has an extension, by extension, for each caption key."""
    others: dict[str, tuple[int, int]]
    """Offset and size of the first member with each other extension, of at most 16 extensions, for messages."""


class _Damaged(Exception):
    """Raised if the rest of the shard cannot be read."""


_Read = Callable[[int, int], bytes]
"""Function of (number of bytes, offset) that returns the bytes, fewer at the end of the file."""


def walk_shard(
    path: Path | str | RemoteFile,
    image_extensions: Sequence[str],
    extensions_by_key: Sequence[Sequence[str]],
    *,
    by_content: bool = False,
    fields: int = 0,
) -> ShardContents:
    """Index one shard.

    Extensions are lower-case and without a dot. The first one that a sample has is used.
    extensions_by_key: those of the captions, for each key of --caption-key, and then those of extra `fields`.
    by_content: recognise images with other extensions by their first bytes, in samples without an image.
    """
    samples: dict[bytes, dict[str, tuple[int, int]]] = {}
    rest: dict[bytes, dict[str, tuple[int, int]]] = {}
    caption_extensions = {extension for extensions in extensions_by_key for extension in extensions}
    wanted = {*image_extensions, *caption_extensions}
    others: dict[str, tuple[int, int]] = {}
    links: list[tuple[bytes, bytes, str]] = []
    account, damage, lost_stems = Account("members"), "", set[bytes]()

    def is_first(stem: bytes) -> bool:
        """Return True once per stem: several images of one possible sample count once."""
        known = stem in lost_stems
        lost_stems.add(stem)
        return not known

    with _opened(path) as (read, end):
        try:
            for name, offset, size in account.see(_members(read, end)):
                key, extension = _split_name(name)
                group = samples if extension in wanted else rest
                if offset == MISSING:
                    links.append((name, key, extension))
                elif extension in group.setdefault(key, {}):
                    account.leave_out(REPEATED, _shown(name), lost=extension in image_extensions)
                else:
                    group[key][extension] = (offset, size)
                    if group is rest and len(others) < _MAX_OTHERS and key.rpartition(b"/")[2]:  # not hidden
                        others.setdefault(extension, (offset, size))
        except _Damaged as error:
            damage = str(error)
        for key, members in rest.items():
            has_image = any(extension in image_extensions for extension in samples.get(key, ()))
            for extension, (offset, size) in members.items():
                name, last = key + b"." + extension.encode(), extension.rpartition(".")[2]
                if key.rpartition(b"/")[2] == b"":
                    account.leave_out(HIDDEN, _shown(name))
                elif last != extension and last in wanted:
                    # 17.seg.png beside 17.png is no sample; 17.1.png is one if 17.1.txt or no 17.png exists.
                    stem = extension.removesuffix(last)
                    is_pair = all(
                        any(stem + end in members for end in ends) for ends in (image_extensions, caption_extensions)
                    )
                    could_be = is_pair or not has_image
                    lost = could_be and last in image_extensions and is_first(name.removesuffix(last.encode()))
                    account.leave_out(DOTTED if could_be else OTHER, _shown(name), lost=lost)
                elif has_image or not by_content:
                    account.leave_out(OTHER, _shown(name))
                elif (kind := image_kind(read(min(size, HEAD_BYTES), offset))) == "readable":
                    samples.setdefault(key, {})[_RECOGNISED + extension] = (offset, size)
                    has_image = True
                else:
                    is_sample = key in samples  # its missing image makes it a bad sample
                    reason = OTHER if kind == "no image" else UNREADABLE
                    lost = reason == UNREADABLE and not is_sample and is_first(key)
                    account.leave_out(reason, _shown(name), lost=lost)
    for name, key, extension in links:  # beside a caption, the missing image makes a bad sample
        lost = extension in image_extensions and key not in samples and is_first(key)
        account.leave_out(LINK, _shown(name), lost=lost)
    rows, images, captions = [], Counter[str](), [Counter[str]() for _ in extensions_by_key]
    absent, without_caption = (0, MISSING), 0
    for key, members in samples.items():
        found = (extension for extension in members if extension.startswith(_RECOGNISED))
        image = next((extension for extension in (*image_extensions, *found) if extension in members), "")
        texts = [next((name for name in names if name in members), "") for names in extensions_by_key]
        images[image.removeprefix(_RECOGNISED)] += bool(image)
        for text, counts in zip(texts, captions, strict=True):
            counts[text] += bool(text)
        numbers = [names.index(text) if text else -1 for names, text in zip(extensions_by_key, texts, strict=True)]
        offsets, sizes = zip(*(members.get(text, absent) for text in texts), strict=True)
        rows.append((*members.get(image, absent), offsets, sizes, numbers, key[-KEY_BYTES:]))
        used = {image, *texts} - {""}
        for spare in members.keys() - used:
            account.leave_out(SPARE, _shown(key + b"." + spare.encode()))
        account.in_samples += len(used)
        without_caption += not any(texts[: len(texts) - fields])
    for what, missing in (("image", len(rows) - images.total()), ("caption", without_caption)):
        if missing:
            account.problems[f"missing {what}"] = missing
    entries = np.array(rows, dtype=entry_type(len(extensions_by_key)))
    return ShardContents(entries, damage, account, +images, [+counts for counts in captions], others)


@contextmanager
def _opened(path: Path | str | RemoteFile) -> Iterator[tuple[_Read, int]]:
    """Yield a function that reads the shard, and its size in bytes."""
    if isinstance(path, RemoteFile):
        yield ReadAhead(path).read, path.size
        return
    with open(path, "rb") as file:
        yield partial(os.pread, file.fileno()), os.fstat(file.fileno()).st_size


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _split_name(name: bytes) -> tuple[bytes, str]:
    """Return key and extension: `dir/17.seg.png` gives dir/17 and seg.png.

    The first dot counts, so that macOS's hidden file `._17.png` has the extension `_17.png` and is not an image.
    """
    directory, slash, base = name.rpartition(b"/")
    stem, _, extension = base.partition(b".")
    return directory + slash + stem, extension.decode("utf-8", "replace").lower()


def _members(read: _Read, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, offset and size of every complete regular file. The offset of links and devices is MISSING.

    The standard library's tarfile takes three times as long and raises an exception at the first bad header. Supported
    are ustar, GNU long names and sizes, and pax headers, which cover every common writer.
    """
    place, extended = 0, dict[bytes, bytes]()
    while place < end:
        header = _exactly(read, BLOCK, place)
        if header.count(0) == BLOCK:
            if read(_CHECKED_AFTER_END, place).strip(b"\0"):
                raise _Damaged(
                    f"data after the end of the archive at byte {place}: samples in it are left out; join archives "
                    "with tar --concatenate"
                )
            return
        if place == 0:
            _refuse_compression(header)
        _check(header, place)
        kind, size = header[156:157], _number(header[124:136])
        place += BLOCK
        if kind in (b"x", b"L"):
            if size > _MAX_EXTENSION_HEADER:
                raise _Damaged(f"an extended header of {size} bytes at byte {place}")
            content = _exactly(read, size, place)
            extended |= _pax(content) if kind == b"x" else {b"path": content.rstrip(b"\0")}
        elif kind not in (b"g", b"K"):
            size = int(extended.get(b"size", size))
            if place + size > end:
                raise _Damaged(f"cut off at byte {end}")
            name = extended.get(b"path", _ustar_name(header))
            if kind != _FOLDER and not name.endswith(b"/"):
                yield name, place if kind in _REGULAR_FILE else MISSING, size
            extended = {}
        place += -(-size // BLOCK) * BLOCK
    raise _Damaged(f"no end of the archive at byte {end}: samples after it may be missing" if end else "an empty file")


def _exactly(read: _Read, size: int, offset: int) -> bytes:
    content = read(size, offset)
    if len(content) < size:
        raise _Damaged(f"cut off at byte {offset + len(content)}")
    return content


def _refuse_compression(first_bytes: bytes) -> None:
    for magic, program in _COMPRESSED.items():
        if first_bytes.startswith(magic):
            raise _Damaged(f"the file is compressed with {program}; decompress it")


def _check(header: bytes, place: int) -> None:
    """Verify the checksum of a header. The checksum field itself counts as eight spaces."""
    try:
        expected = int(header[148:156].strip(b" \0"), 8)
    except ValueError:
        raise _Damaged(f"no tar header at byte {place}") from None
    if sum(header) - sum(header[148:156]) + 8 * 32 != expected:
        raise _Damaged(f"wrong checksum at byte {place}")


def _number(field: bytes) -> int:
    """Parse a size field: octal digits, or GNU's base 256 if the first bit is set. A size is never negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not _OCTAL.fullmatch(digits):  # int() accepts a sign; with a negative size the walk would never end
        raise _Damaged(f"a size that is not a number: {field!r}")
    return int(digits or b"0", 8)


def _ustar_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax(content: bytes) -> dict[bytes, bytes]:
    """Return the records "LENGTH KEY=VALUE\\n" of a pax header that change a member's name or size."""
    records, place = {}, 0
    while place < len(content):
        found = _PAX_LENGTH.match(content, place)
        length = int(found[1]) if found else 0
        if found is None or not found.end() < place + length <= len(content):
            raise _Damaged("a pax header that cannot be read")
        key, _, value = content[found.end() : place + length - 1].partition(b"=")
        if key == b"path" or (key == b"size" and value.isdigit() and len(value) < 20):
            records[key] = value
        place += length
    return records
