"""Read the sets of images and captions that are compared within an item, from the files that their authors publish.

An item of Winoground has two images with their captions, one of SugarCrepe an image, its caption and a wrong one, one
of WinoGAViL candidate images and a cue, one of Crossmodal-3600 an image and its first caption in one language.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclip.data.batch import Captions, RawSample
from megaclip.data.images import IMAGE_EXTENSIONS
from megaclip.data.source import read_file
from megaclip.errors import DataError, first_line, os_reason

_SUGAR_CREPE = ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj")
FILES = {
    "winoground": "examples.jsonl",
    "misc/winogavil": "winogavil_dataset.csv",
    "crossmodal3600": "captions.jsonl",
    **{f"sugar_crepe/{part}": f"{part}.json" for part in _SUGAR_CREPE},
}
"""File of each set, by the key of its task. Its images are in the folder `images`, those of SugarCrepe in `val2017`."""


@dataclass(frozen=True)
class Item:
    """Images, by their names in the file of the set, and captions that are compared with each other."""

    images: tuple[str, ...]
    captions: tuple[str, ...]
    right: tuple[str, ...] = ()
    """Images that belong to the cue of WinoGAViL."""
    language: str = ""
    """Language of the caption of Crossmodal-3600, such as "en"."""

    def __post_init__(self) -> None:
        for text in (*self.images, *self.captions):
            if not isinstance(text, str) or not text:
                raise ValueError(f"expected a text, got {text!r}")


class ItemSet:
    """Items, with each of their images once. An `EvaluationLoader` reads the images, with the label 0."""

    def __init__(self, path: Path, items: list[Item], folder: Path) -> None:
        """path: file of the set. folder: that of the images."""
        self.name, self.items = str(path), items
        self.images = list(dict.fromkeys(image for item in items for image in item.images))
        self._files = [_image_file(folder, image) for image in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, sample_id: int) -> RawSample:
        """Return an undecoded image. Raises BadSample."""
        path = self._files[sample_id]
        return RawSample(read_file(path, "image", path), Captions(("0",)), path)

    def shard_name(self, sample_id: int) -> str:
        """Return the file of the set, for messages."""
        return self.name


def item_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the key and the file of each set in a folder. The list is empty for other folders."""
    return [(key, folder / name) for key, name in FILES.items() if (folder / name).is_file()]


def open_items(key: str, path: Path) -> ItemSet:
    """Read a set of items. key, path: from `item_files`. Raises DataError for a file that is not as its authors'."""
    items, number = list[Item](), 0
    folder = path.parent / ("val2017" if key.startswith("sugar_crepe") else "images")
    try:
        for row in _rows(path):
            number += 1
            items += _READERS[key.partition("/")[0]](row)
        found = ItemSet(path, items, folder)
    except OSError as error:
        raise DataError(f"cannot read {path}: {os_reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, csv.Error) as error:
        what = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{path}, item {max(1, number)}: {what}; expected the file that its authors publish") from error
    if not items:
        raise DataError(f"{path} has no items; expected the file that its authors publish")
    return found


def _winoground(row: dict[str, Any]) -> Iterator[Item]:
    yield Item((row["image_0"], row["image_1"]), (row["caption_0"], row["caption_1"]))


def _sugar_crepe(row: dict[str, Any]) -> Iterator[Item]:
    yield Item((row["filename"],), (row["caption"], row["negative_caption"]))


def _winogavil(row: dict[str, Any]) -> Iterator[Item]:
    candidates, right = json.loads(row["candidates"]), json.loads(row["associations"])
    if not right or not set(right) <= set(candidates):
        raise ValueError(f"the associations {right} are not among the candidates {candidates}")
    cue = row["cue"].lower()
    yield Item(tuple(candidates), (f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}",), right=tuple(right))


def _crossmodal(row: dict[str, Any]) -> Iterator[Item]:
    for language, texts in sorted(row.items()):
        if isinstance(texts, dict):
            yield Item((row["image/key"],), (texts["caption"][0],), language=language)


_READERS = {
    "winoground": _winoground,
    "sugar_crepe": _sugar_crepe,
    "misc": _winogavil,
    "crossmodal3600": _crossmodal,
}
"""Function that returns the items of a row of the file, by the first part of the key of the task."""


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        elif path.suffix == ".jsonl":
            yield from (json.loads(line) for line in file if line.strip())
        else:
            yield from json.load(file).values()


def _image_file(folder: Path, name: str) -> str:
    """Return the path of an image. The files of all sets but SugarCrepe name it without its extension."""
    paths = [folder / name, *(folder / f"{name}.{extension}" for extension in IMAGE_EXTENSIONS)]
    return str(next((path for path in paths if path.is_file()), paths[0]))
