"""Read tar shards in webdataset layout in place, through an index of offsets.

Opening a set of shards walks their headers once (tar_walk.py) and writes the index to two files (index.py):

    <fingerprint>.npy     one row per sample: offsets and sizes of its members; memory-mapped by all processes
    <fingerprint>.json    the manifest: shard names, sizes in bytes, counts of samples and members, damage

A damaged file is detected by its size or checksum, and the index is rebuilt.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaclip.data.batch import BadSample, Captions, RawSample
from megaclip.data.captions import JSON, CaptionKeys, captions_of, check_fields, json_record, text_fields
from megaclip.data.images import IMAGE_EXTENSIONS
from megaclip.data.index import open_index, reading
from megaclip.data.remote import THREADS, RemoteFile
from megaclip.data.shard_cache import RemoteShards
from megaclip.data.source import DOTTED, UNREADABLE, Account, check_size, counted
from megaclip.data.tar_walk import MISSING, ShardContents, entry_type, walk_shard
from megaclip.errors import DataError
from megaclip.logging import get_logger

_FORMAT = 5
_OPEN_SHARDS = 64

_logger = get_logger(__name__)


class TarShards:
    """Samples of a list of tar shards. `read(row)` accepts any row of 0..len-1."""

    kind = "webdataset"

    def __init__(
        self,
        paths: Sequence[str | Path] | Sequence[RemoteFile],
        *,
        image_extensions: Sequence[str] = (),
        caption_keys: Sequence[CaptionKeys] = (CaptionKeys(),),
        field_extensions: Mapping[str, str] | None = None,
    ) -> None:
        """paths: all local, or all remote. field_extensions: name -> extension of the members with an extra field.

        image_extensions: extensions of the images. Default: IMAGE_EXTENSIONS, and others are read by content.
        """
        files = [path for path in paths if isinstance(path, RemoteFile)]
        self.remote = RemoteShards(files) if files else None
        """The shards, if they are remote."""
        self._paths: Sequence[RemoteFile] | Sequence[Path] = files or [Path(str(path)).absolute() for path in paths]
        self._image_extensions, self._keys = tuple(image_extensions or IMAGE_EXTENSIONS), caption_keys
        self._fields = dict(field_extensions or {})
        index, description = self._open_index(by_content=not image_extensions)
        self.shards: list[dict[str, Any]] = description["shards"]
        self.shard_sizes = np.array([shard["samples"] for shard in self.shards], dtype=np.int64)
        self._ends = np.cumsum(self.shard_sizes)
        self.manifest = [[shard["name"], shard["bytes"], shard["samples"]] for shard in self.shards]
        self.checksum = hashlib.sha256("".join(shard["checksum"] for shard in self.shards).encode()).hexdigest()[:16]
        self.image_files = [path for path in self._paths if isinstance(path, Path)]
        self.account = Account("members")
        for shard in self.shards:
            self.account.add(Account(**shard["account"]), shard["name"])
        if damaged := sum(bool(shard["damage"]) for shard in self.shards):
            self.account.problems["damaged shard"] = damaged
        self._files: dict[int, io.FileIO] = {}
        self._report_damage()
        self._entries: np.ndarray = np.load(index, mmap_mode="r")
        self._check_members()
        for number, keys in enumerate(caption_keys):
            if keys.fields:
                self._check_fields(number, keys)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def columns(self) -> dict[str, str]:
        """Extensions and JSON fields of images and captions, with the number of samples that have them."""
        images, captions = Counter[str](), Counter[str]()
        for shard in self.shards:
            images.update({f".{extension}": count for extension, count in shard["images"].items()})
            for keys, counts in zip(self._keys, shard["captions"], strict=False):
                captions.update({keys.name(extension): count for extension, count in counts.items()})
        return {"image": counted(images), "caption": counted(captions)}

    def shard_name(self, row: int) -> str:
        return str(self._paths[self._shard_of(row)])

    def read(self, row: int) -> RawSample:
        shard = self._shard_of(row)
        entry = self._entries[row]
        key = f"{self._paths[shard].name}/{entry['key'].decode('utf-8', 'replace')}"
        image = self._member(shard, int(entry["image_offset"]), int(entry["image_size"]), "image", key)
        return RawSample(image, self._captions(shard, entry, key), key, self._field_contents(shard, entry, key))

    def captions(self, row: int) -> Captions:
        return self._captions(self._shard_of(row), self._entries[row], str(row))

    def _captions(self, shard: int, entry: np.void, key: str) -> Captions:
        member = functools.cache(lambda offset, size: self._member(shard, offset, size, "caption", key))

        def read(number: int) -> tuple[str, ...]:
            # Several keys may be fields of one member.
            content = member(int(entry["caption_offset"][number]), int(entry["caption_size"][number]))
            keys = self._keys[number]
            return keys.decode(content, keys.extensions[entry["caption_extension"][number]], key)

        return captions_of([keys.key for keys in self._keys], read)

    def _field_contents(self, shard: int, entry: np.void, key: str) -> dict[str, bytes | None]:
        places = zip(entry["caption_offset"].tolist(), entry["caption_size"].tolist(), strict=True)
        own = list(places)[len(self._keys) :]
        contents = {place: None if place[1] == MISSING else self._member(shard, *place, "field", key) for place in own}
        return {name: contents[place] for name, place in zip(self._fields, own, strict=True)}

    def _shard_of(self, row: int) -> int:
        return int(np.searchsorted(self._ends, row, side="right"))

    def _member(self, shard: int, offset: int, size: int, what: str, key: str) -> bytes:
        if size == MISSING:
            raise BadSample(f"missing {what}", key)
        check_size(what, size, key)
        if self.remote is not None:
            return self.remote.read(shard, offset, size)
        try:
            file = self._file(shard)  # stays open until this thread has read it
            content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise BadSample("unreadable shard", f"{key}: {error}") from error
        if len(content) < size:
            raise BadSample("unreadable shard", f"{key}: the shard became shorter after it was indexed")
        return content

    def _file(self, shard: int) -> io.FileIO:
        """Return a shard, opened. Above a limit, the least recently used one is closed when no thread reads it."""
        file = self._files.pop(shard, None) or io.FileIO(str(self._paths[shard]))
        self._files[shard] = file
        if len(self._files) > _OPEN_SHARDS:
            self._files.pop(next(iter(self._files)), None)
        return file

    def _open_index(self, *, by_content: bool) -> tuple[Path, dict[str, Any]]:
        """Return the path of the array of the index, and the description of the index. Makes it if there is none."""
        extensions = [*(keys.extensions for keys in self._keys), *((name,) for name in self._fields.values())]
        fields = len(self._fields)

        def walk(path: Path | RemoteFile) -> ShardContents:
            with reading(path):
                return walk_shard(path, self._image_extensions, extensions, by_content=by_content, fields=fields)

        def make(index: Path, names: list[str], sizes: list[int]) -> dict[str, Any]:
            began = time.monotonic()
            # Threads hide the latency of remote disks. Parsing is not parallel.
            with concurrent.futures.ThreadPoolExecutor(4 if self.remote is None else THREADS) as pool:
                contents = list(pool.map(walk, self._paths))
            samples, seconds = sum(len(shard.entries) for shard in contents), time.monotonic() - began
            _logger.info("indexed %s samples (tar shards: %d) in %.1f s", f"{samples:,}", len(contents), seconds)
            return _write_index(index, contents, names, sizes, fields)

        settings = [_FORMAT, self._image_extensions, extensions, by_content, *([fields] if fields else [])]
        return open_index(self._paths, settings, ".npy", make)

    def _report_damage(self) -> None:
        damaged = [shard for shard in self.shards if shard["damage"]]
        if len(self) == 0:
            reason = f"; {damaged[0]['name']}: {damaged[0]['damage']}" if damaged else ""
            reason += f"; {self.account.sum()}" if self.account.left_out else ""
            images, captions = self._image_extensions, self._keys[0].extensions
            flags = ": --image-key and --caption-key set these extensions" if self._keys[0].flag else ""
            raise DataError(
                f"no samples in {len(self.shards)} tar shards, first {self._paths[0]}{reason}; expected members such "
                f"as 000000.{images[0]} and 000000.{captions[0]}{flags}"
            )
        if damaged:
            listed = ", ".join(f"{shard['name']} ({shard['damage']})" for shard in damaged[:3])
            text = "%d of %d tar shards are damaged; their complete samples are used: %s"
            _logger.warning(text, len(damaged), len(self.shards), listed)

    def _check_members(self) -> None:
        """Raise DataError, with the extensions that the shards have, if no sample has an image or none a caption."""
        wanted = [("image", "an image", self._image_extensions)]
        wanted += [("caption", "a caption", keys.extensions) for keys in self._keys]
        wanted += [("field", f"the field {name}", (extension,)) for name, extension in self._fields.items()]
        found = zip(*([shard["images"], *shard["captions"]] for shard in self.shards), strict=True)
        for (what, named, extensions), counts in zip(wanted, found, strict=True):
            if not any(counts):
                raise DataError(
                    f"none of the {len(self)} samples in {len(self.shards)} tar shards, first {self._paths[0]}, has "
                    f"{named} (a member .{' or .'.join(extensions)}){self._other_members(what)}"
                )

    def _other_members(self, what: str) -> str:
        """Return advice on members that may hold the image or the caption, or "" if there are none."""
        found = {extension: number for number, shard in enumerate(self.shards) for extension in shard["others"]}
        if what == "image" and (unreadable := self.account.left_out.get(UNREADABLE)):
            return f"; members with {UNREADABLE}: {unreadable[0]}, first {unreadable[2][0]!r}"
        if not found or not self._keys[0].flag:
            return ""
        if what == "caption" and JSON in found:
            number = found[JSON]
            record = self._json(number, *self.shards[number]["others"][JSON])
            fields = text_fields(record)
            return f"; their .json members have {fields}: set --caption-key to one of them, as in json.caption"
        dots = f"; {DOTTED}" if any("." in extension for extension in found) else ""
        setting = "the field's key in the objective" if what == "field" else f"--{what}-key"
        return f"; they have .{', .'.join(sorted(found))} members: set {setting} to one of them{dots}"

    def _check_fields(self, number: int, keys: CaptionKeys) -> None:
        """Raise DataError if the JSON members do not have the fields of key `number`."""

        def record(row: int) -> dict[str, Any]:
            entry = self._entries[row]
            place = int(entry["caption_offset"][number]), int(entry["caption_size"][number])
            return self._json(self._shard_of(row), *place)

        def name(row: int) -> str:
            return f"{self.shard_name(row)}, {self._entries[row]['key'].decode('utf-8', 'replace')}.json"

        is_json = self._entries["caption_extension"][:, number] == keys.extensions.index(JSON)
        check_fields(keys, np.flatnonzero(is_json).tolist(), record, name)

    def _json(self, shard: int, offset: int, size: int) -> dict[str, Any]:
        """Return the JSON object in a member, or an empty one if it holds something else."""
        try:
            return json_record(self._member(shard, offset, size, "caption", "")) or {}
        except BadSample:
            return {}


def _write_index(
    index: Path, contents: list[ShardContents], names: list[str], sizes: list[int], fields: int
) -> dict[str, Any]:
    """Write the array of the index, and return its description. fields: number of extra fields."""
    with index.open("wb") as file:
        np.save(file, np.concatenate([shard.entries for shard in contents]))
    shards = [
        {
            "name": name,
            "bytes": size,
            "samples": len(shard.entries),
            "images": shard.images,
            "captions": shard.captions,
            "damage": shard.damage,
            "account": dataclasses.asdict(shard.account),
            "checksum": hashlib.sha256(_without_fields(shard.entries, fields).tobytes()).hexdigest()[:16],
            "others": shard.others,
        }
        for name, size, shard in zip(names, sizes, contents, strict=True)
    ]
    return {"shards": shards}


def _without_fields(entries: np.ndarray, fields: int) -> np.ndarray:
    """Return the entries without extra fields: a run may resume with another objective on the same data."""
    keys = entries["caption_size"].shape[1] - fields
    kept = np.zeros(len(entries), entry_type(keys))
    for name in kept.dtype.names or ():
        kept[name] = entries[name][:, :keys] if entries[name].ndim > 1 else entries[name]
    return kept
