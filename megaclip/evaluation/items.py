"""Read the sets of images and captions that are compared within an item, from the files that their authors publish.

An item of Winoground has two images with their captions, one of SugarCrepe an image, its caption and a wrong one, one
of WinoGAViL candidate images and a cue, one of Crossmodal-3600 an image and its first caption in one language.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    """Images and captions that are compared with each other, by their places in an `ItemSet`."""

    images: tuple[int, ...]
    captions: tuple[int, ...]
    right: tuple[int, ...] = ()
    """Images that belong to the cue of WinoGAViL."""
    language: str = ""
    """Language of the caption of Crossmodal-3600, such as "en"."""


@dataclass
class ItemSet:
    """Items, with each of their images and captions once. An `EvaluationLoader` reads the images, with the label 0."""

    name: str
    """Path of the file."""
    files: list[str] = field(default_factory=list)
    """Paths of the images."""
    captions: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, sample_id: int) -> RawSample:
        """Return an undecoded image. Raises BadSample."""
        path = self.files[sample_id]
        return RawSample(read_file(path, "image", path), Captions(("0",)), path)

    def shard_name(self, sample_id: int) -> str:
        """Return the file of the set, for messages."""
        return self.name


def item_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the key and the file of each set in a folder. The list is empty for other folders."""
    return [(key, folder / name) for key, name in FILES.items() if (folder / name).is_file()]


def open_items(key: str, path: Path) -> ItemSet:
    """Read a set of items. key, path: from `item_files`. Raises DataError for a file that is not as its authors'."""
    result, rows = ItemSet(str(path)), 0
    images, captions = dict[str, int](), dict[str, int]()
    read = _READERS[key.partition("/")[0]]

    def place(known: dict[str, int], text: Any) -> int:
        if not isinstance(text, str) or not text:
            raise ValueError(f"expected a text, got {text!r}")
        return known.setdefault(text, len(known))

    try:
        for row in _rows(path):
            rows += 1
            result.items += read(row, lambda name: place(images, name), lambda text: place(captions, text))
        folder = path.parent / ("val2017" if key.startswith("sugar_crepe") else "images")
        result.files, result.captions = [_image_file(folder, name) for name in images], list(captions)
    except OSError as error:
        raise DataError(f"cannot read {path}: {os_reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, csv.Error) as error:
        what = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{path}, item {max(1, rows)}: {what}; expected the file that its authors publish") from error
    if not result.items:
        raise DataError(f"{path} has no items; expected the file that its authors publish")
    return result


_Place = Callable[[Any], int]


def _winoground(row: dict[str, Any], image: _Place, caption: _Place) -> Iterator[Item]:
    images = tuple(image(row[f"image_{number}"]) for number in (0, 1))
    yield Item(images, tuple(caption(row[f"caption_{number}"]) for number in (0, 1)))


def _sugar_crepe(row: dict[str, Any], image: _Place, caption: _Place) -> Iterator[Item]:
    yield Item((image(row["filename"]),), (caption(row["caption"]), caption(row["negative_caption"])))


def _winogavil(row: dict[str, Any], image: _Place, caption: _Place) -> Iterator[Item]:
    candidates, right = json.loads(row["candidates"]), json.loads(row["associations"])
    if not right or not set(right) <= set(candidates):
        raise ValueError(f"the associations {right} are not among the candidates {candidates}")
    cue = row["cue"].lower()
    prompt = caption(f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}")
    yield Item(tuple(map(image, candidates)), (prompt,), right=tuple(map(image, right)))


def _crossmodal(row: dict[str, Any], image: _Place, caption: _Place) -> Iterator[Item]:
    for language, texts in sorted(row.items()):
        if isinstance(texts, dict):
            yield Item((image(row["image/key"]),), (caption(texts["caption"][0]),), language=language)


_READERS = {
    "winoground": _winoground,
    "sugar_crepe": _sugar_crepe,
    "misc": _winogavil,
    "crossmodal3600": _crossmodal,
}


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
