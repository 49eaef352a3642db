"""Read pictures in a folder and its sub-folders, each with its caption in a file beside it.

`cat.jpg` has its caption in `cat.txt`, or in a field of `cat.json` (captions.py). img2dataset writes this layout with
`--output_format files`. Folders with a metadata file are tables (tables.py). Opening the folder collects only names and
sizes. A file is read when its sample is read.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaclip.data.batch import BadSample, Captions, RawSample
from megaclip.data.captions import JSON, CaptionKeys, captions_of, check_fields, json_record, text_fields
from megaclip.data.images import HEAD_BYTES, IMAGE_EXTENSIONS, image_kind, is_image_name
from megaclip.data.index import reading
from megaclip.data.order import runs_of_rows
from megaclip.data.source import ALONE, HIDDEN, OTHER, SPARE, UNREADABLE, Account, counted, read_file
from megaclip.errors import DataError

_Files = tuple[str, tuple[str | None, ...]]
"""Paths of a picture and of its caption files, one per key of --caption-key."""


class ImageFolder:
    """Pictures of a folder, in the order of their sorted paths. `read(row)` accepts any row of 0..len-1."""

    kind = "imagefolder"

    def __init__(
        self, folder: str, *, image_extensions: Sequence[str] = (), caption_keys: Sequence[CaptionKeys]
    ) -> None:
        """image_extensions: extensions of the pictures. Default: IMAGE_EXTENSIONS, and others are read by content."""
        self._image_extensions, self._keys = tuple(image_extensions or IMAGE_EXTENSIONS), caption_keys
        self._by_content = not image_extensions
        self.account = Account()
        self._rows: list[_Files] = []
        self.manifest: list[list[Any]] = []
        """[name, bytes, samples] per folder that holds pictures. Names are relative to the whole folder."""
        for place, names in sorted(walk_folder(folder)):
            rows = self._pairs(place, names)
            if rows:
                files = {path for picture, texts in rows for path in (picture, *texts) if path and os.path.exists(path)}
                size = sum(os.stat(path).st_size for path in files)
                self.manifest.append([os.path.relpath(place, folder), size, len(rows)])
                self._rows += rows
        self.image_files = [picture for picture, _ in self._rows]
        self.shard_sizes = runs_of_rows(len(self._rows))
        if missing := sum(not any(captions) for _, captions in self._rows):
            self.account.problems["missing caption"] = missing
        self._check(folder)
        relative = "\n".join(os.path.relpath(path, folder) for path in self.image_files)
        self.checksum = hashlib.sha256(relative.encode(errors="surrogateescape")).hexdigest()[:16]
        images, captions = Counter(f".{_extension(path)}" for path in self.image_files), Counter[str]()
        for _, paths in self._rows:
            pairs = zip(self._keys, paths, strict=True)
            captions.update(keys.name(_extension(path)) for keys, path in pairs if path)
        self.columns = {"image": counted(images), "caption": counted(captions)}

    def __len__(self) -> int:
        return len(self._rows)

    def shard_name(self, row: int) -> str:
        return os.path.dirname(self._rows[row][0])

    def read(self, row: int) -> RawSample:
        path, _ = self._rows[row]
        captions = self.captions(row)
        return RawSample(read_file(path, "image", path), captions, path)

    def captions(self, row: int) -> Captions:
        picture, paths = self._rows[row]

        def read(number: int) -> tuple[str, ...]:
            if (path := paths[number]) is None:
                raise BadSample("missing caption", picture)
            return self._keys[number].decode(read_file(path, "caption", path), _extension(path), path)

        return captions_of([keys.key for keys in self._keys], read)

    def _pairs(self, place: str, names: list[str]) -> list[_Files]:
        """Return the paths of the pictures in one folder, each with those of its caption files."""
        stems: dict[str, dict[str, str]] = {}
        for name in self.account.see(sorted(names)):
            path, files = os.path.join(place, name), stems.setdefault(os.path.splitext(name)[0], {})
            if name.startswith("."):
                self.account.leave_out(HIDDEN, path)
            elif files.setdefault(_extension(name), path) != path:
                self.account.leave_out(SPARE, path)
        return [pair for files in stems.values() if files and (pair := self._pair(files)) is not None]

    def _pair(self, files: dict[str, str]) -> _Files | None:
        """Return picture and captions among the files with one name, by extension, or None without a picture."""
        captions, unreadable = {name for keys in self._keys for name in keys.extensions}, list[str]()
        texts = tuple(
            next((files[extension] for extension in keys.extensions if extension in files), None) for keys in self._keys
        )
        picture = next((files[extension] for extension in self._image_extensions if extension in files), None)
        if picture is None and self._by_content:
            kinds = {path: file_kind(path) for extension, path in files.items() if extension not in captions}
            picture = next((path for path, kind in kinds.items() if kind == "readable"), None)
            unreadable = [path for path, kind in kinds.items() if kind == "unreadable" and picture is None]
        used = {path for path in (picture, *texts) if path is not None and picture is not None}
        self.account.in_samples += len(used)
        for extension, path in files.items():
            if path in unreadable:
                self.account.leave_out(UNREADABLE, path, lost=path == unreadable[0])
            elif picture is None and path in texts:
                other = any(extension not in (*captions, JSON) for extension in files)
                self.account.leave_out(ALONE, path, lost=other and not unreadable)
            elif path not in used:
                is_spare = extension in self._image_extensions or extension in captions
                self.account.leave_out(SPARE if is_spare else OTHER, path)
        return None if picture is None else (picture, texts)

    def _check(self, folder: str) -> None:
        """Raise DataError if the folder contains no pictures, no captions, or JSON files without the fields."""
        if not self._rows:
            raise DataError(
                f"data {folder!r}: the folder holds no pictures (.{', .'.join(self._image_extensions)}); "
                "--image-key sets another extension"
            )
        for number, keys in enumerate(self._keys):
            captions = [path for _, paths in self._rows if (path := paths[number])]
            if not captions:
                wanted = f".{' or .'.join(keys.extensions)}"
                raise DataError(
                    f"data {folder!r}: the image folder has no captions; put a text file ({wanted}) with the same name "
                    "beside each picture, or add a metadata.csv with the columns file_name and text, or give a CSV "
                    f"with the paths of the images{self._json_advice()}"
                )
            if keys.fields:
                check_fields(keys, [path for path in captions if _extension(path) == JSON], _record, str)

    def _json_advice(self) -> str:
        beside = os.path.splitext(self._rows[0][0])[0] + ".json"
        if not os.path.isfile(beside):
            return ""
        return f"; {beside} has {text_fields(_record(beside))}: set --caption-key to one of them, as in json.caption"


def walk_folder(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the path and the file names of a folder and of all folders below it, links to folders included.

    Hidden folders, such as .ipynb_checkpoints, are left out. A folder that several links name is visited once. Raises
    DataError if a folder cannot be read.
    """
    visited = set[str]()
    for place, folders, names in os.walk(folder, onerror=_raise_data_error, followlinks=True):
        # Sorted, so that every process visits the same link first.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real := os.path.realpath(place)) in visited:
            folders.clear()
            continue
        visited.add(real)
        yield place, names


def _raise_data_error(error: OSError) -> None:
    raise DataError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def file_kind(path: str) -> str:
    """Return `images.image_kind` of a file. Raises DataError if it cannot be read."""
    if not os.path.isfile(path):  # a device or a pipe could block
        return "no image"
    with reading(Path(path)), open(path, "rb") as file:
        return image_kind(file.read(HEAD_BYTES))


def reason_to_leave_out(path: str) -> str:
    """Return the reason why a file is no image, by its name or its content, or "". Raises DataError."""
    name = os.path.basename(path)
    if name.startswith("."):
        return HIDDEN
    return "" if is_image_name(name) else {"readable": "", "unreadable": UNREADABLE}.get(file_kind(path), OTHER)


def _extension(path: str) -> str:
    return os.path.splitext(path)[1].removeprefix(".").lower()


def _record(path: str) -> dict[str, Any]:
    try:
        return json_record(read_file(path, "caption", path)) or {}
    except BadSample:
        return {}
