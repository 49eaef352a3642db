"""Read the sets of images and captions that are compared within an item, from the files that their authors publish.

| set | files in its folder | an item |
| --- | --- | --- |
| Winoground | `examples.jsonl`, `images/` | two images and their captions |
| SugarCrepe | `add_att.json` ... `swap_obj.json`, `val2017/` of COCO | an image, its caption and a wrong one |
| WinoGAViL | `winogavil_dataset.csv`, `images/` | candidate images and a cue |
| Crossmodal-3600 | `captions.jsonl`, `images/` | an image and its first caption in one language |

Other names of the folder of the images are accepted if the set has only one folder.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaclip.data.batch import RawSample
from megaclip.data.images import IMAGE_EXTENSIONS
from megaclip.data.source import read_file
from megaclip.errors import DataError, first_line, os_reason

_SUGAR_CREPE = ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj")


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

    files: list[str] = field(default_factory=list)
    """Paths of the images."""
    captions: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, sample_id: int) -> RawSample:
        """Return an undecoded image. Raises BadSample."""
        path = self.files[sample_id]
        return RawSample(read_file(path, "image", path), "0", path)

    def shard_name(self, sample_id: int) -> str:
        """Return the folder of an image, for messages."""
        return str(Path(self.files[sample_id]).parent)


def item_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the file of each set in a folder, with the name of its task. The list is empty for other folders."""
    names = {
        "winoground": "examples.jsonl",
        "misc/winogavil": "winogavil_dataset.csv",
        "crossmodal3600": "captions.jsonl",
        **{f"sugar_crepe/{part}": f"{part}.json" for part in _SUGAR_CREPE},
    }
    return [(task, folder / name) for task, name in names.items() if (folder / name).is_file()]


def open_items(task: str, path: Path) -> ItemSet:
    """Read a set of items. task, path: from `item_files`. Raises DataError for a file that is not as its authors'."""
    images, result = _image_folder(path.parent), ItemSet()
    known: tuple[dict[str, int], dict[str, int]] = ({}, {})

    def place(kind: int, text: Any) -> int:
        """Return the place of an image (kind 0) or a caption (kind 1), which is added if it is new."""
        if not isinstance(text, str) or not text:
            raise ValueError(f"expected a text, got {text!r}")
        if text not in known[kind]:
            known[kind][text] = len(known[kind])
            (result.captions if kind else result.files).append(text if kind else _image_file(images, text))
        return known[kind][text]

    number = 0
    try:
        for row in _rows(path):
            number += 1
            result.items += _READERS[task.partition("/")[0]](row, place)
    except OSError as error:
        raise DataError(f"cannot read {path}: {os_reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, csv.Error) as error:
        what = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"{path}, item {max(1, number)}: {what}; expected the file that its authors publish") from error
    if not result.items:
        raise DataError(f"{path} has no items; expected the file that its authors publish")
    return result


_Place = Callable[[int, Any], int]


def _winoground(row: dict[str, Any], place: _Place) -> Iterator[Item]:
    images = tuple(place(0, row[f"image_{number}"]) for number in (0, 1))
    yield Item(images, tuple(place(1, row[f"caption_{number}"]) for number in (0, 1)))


def _sugar_crepe(row: dict[str, Any], place: _Place) -> Iterator[Item]:
    yield Item((place(0, row["filename"]),), (place(1, row["caption"]), place(1, row["negative_caption"])))


def _winogavil(row: dict[str, Any], place: _Place) -> Iterator[Item]:
    candidates, right = ([str(name) for name in json.loads(row[key])] for key in ("candidates", "associations"))
    images = tuple(place(0, name) for name in candidates)
    if not right or not set(right) <= set(candidates):
        raise ValueError(f"the associations {right} are not among the candidates {candidates}")
    cue = row["cue"].lower()
    prompt = f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}"
    yield Item(images, (place(1, prompt),), right=tuple(images[candidates.index(name)] for name in right))


def _crossmodal(row: dict[str, Any], place: _Place) -> Iterator[Item]:
    image = place(0, row["image/key"])
    for language, texts in sorted(row.items()):
        if isinstance(texts, dict):
            yield Item((image,), (place(1, texts["caption"][0]),), language=language)


_READERS: dict[str, Callable[[dict[str, Any], _Place], Iterator[Item]]] = {
    "winoground": _winoground,
    "sugar_crepe": _sugar_crepe,
    "misc": _winogavil,
    "crossmodal3600": _crossmodal,
}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        elif path.suffix == ".jsonl":
            yield from (json.loads(line) for line in file if line.strip())
        else:
            yield from json.load(file).values()


def _image_folder(folder: Path) -> Path:
    places = sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    named = [place for place in places if place.name in ("images", "val2017")]
    if len(named or places) != 1:
        raise DataError(f"{folder} has {len(places)} folders; expected one folder, images, with the images")
    return (named or places)[0]


def _image_file(folder: Path, name: str) -> str:
    """Return the path of an image. The files of all sets but SugarCrepe name it without its extension."""
    if Path(name).name != name:
        raise ValueError(f"the image {name!r} is not a name of a file")
    endings = ("", *(f".{extension}" for extension in IMAGE_EXTENSIONS))
    paths = [folder / f"{name}{ending}" for ending in endings]
    return str(next((path for path in paths if path.is_file()), paths[0]))
