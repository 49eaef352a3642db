"""Labelled images for zero-shot classification: CLIP_benchmark's layout, or an image folder with one folder per class.

CLIP_benchmark's: tar shards with an image and a `.cls` file per sample, in the folder itself or its `test` folder,
with `classnames.txt` and `zeroshot_classification_templates.txt` ("a photo of a {c}.") beside them. In an image folder
the two text files are optional: classes are the sorted sub-folders, and their names the class names.
"""

from __future__ import annotations

import re
from pathlib import Path

from megaclip.data.batch import BadSample, RawSample
from megaclip.data.tar_shards import IMAGE_EXTENSIONS, TarShards
from megaclip.errors import DataError

CLASS_NAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
DEFAULT_TEMPLATES = ["a photo of a {c}."]
_WORDNET_ID = re.compile(r"n\d{8}")


class LabelledDataset:
    """Images with a class number; `class_names` and `templates` make the prompts."""

    def __init__(self, images: TarShards | _ImageFolder, class_names: list[str], templates: list[str]) -> None:
        self._images = images
        self.class_names = class_names
        self.templates = templates

    def __len__(self) -> int:
        return len(self._images)

    def read(self, sample_id: int) -> RawSample:
        """The undecoded image; its caption is the class number. Raises BadSample."""
        raw = self._images.read(sample_id)
        label = raw.caption.strip()
        if not (label.isascii() and label.isdigit() and int(label) < len(self.class_names)):
            raise BadSample(
                "label outside the classes", f"{raw.key}: {label[:20]!r} of {len(self.class_names)} classes"
            )
        return RawSample(raw.image, label, raw.key)

    def shard_name(self, sample_id: int) -> str:
        """The file that holds a sample, for messages."""
        return self._images.shard_name(sample_id)


class _ImageFolder:
    def __init__(self, folder: Path) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        self._files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower().lstrip(".") in IMAGE_EXTENSIONS
        ]

    def __len__(self) -> int:
        return len(self._files)

    def read(self, row: int) -> RawSample:
        path, label = self._files[row]
        try:
            return RawSample(path.read_bytes(), str(label), str(path))
        except OSError as error:
            raise BadSample("missing image", f"{path}: {error}") from error

    def shard_name(self, row: int) -> str:
        return str(self._files[row][0].parent)


def open_labelled(path: str | Path) -> LabelledDataset:
    """Open a labelled set; raises DataError when its layout is not understood."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataError(f"zero-shot data {str(path)!r}: expected a folder (CLIP_benchmark's layout, or one per class)")
    shards = sorted(folder.glob("*.tar"), key=_by_number) or sorted(folder.glob("test/*.tar"), key=_by_number)
    templates = _lines(folder / TEMPLATES_FILE) or DEFAULT_TEMPLATES
    wrong = [template for template in templates if "{c}" not in template]
    if wrong:
        raise DataError(f"{folder / TEMPLATES_FILE}: every template holds {{c}} for the class name, not {wrong[0]!r}")
    names = _lines(folder / CLASS_NAMES_FILE)
    if shards:
        if not names:
            raise DataError(f"zero-shot data {folder}: tar shards need the file {CLASS_NAMES_FILE}, one name per line")
        return LabelledDataset(TarShards(shards, caption_extensions=("cls",)), names, templates)
    images = _ImageFolder(folder)
    if len(images) == 0:
        raise DataError(f"zero-shot data {folder}: neither *.tar, nor test/*.tar, nor one folder of images per class")
    if len(images.classes) == 1:
        raise DataError(
            f"zero-shot data {folder}: only one class, {images.classes[0]!r}; a folder per class is expected"
        )
    if names and len(names) != len(images.classes):
        raise DataError(f"{folder}: {len(names)} class names for {len(images.classes)} folders of images")
    if not names and all(_WORDNET_ID.fullmatch(name) for name in images.classes):
        raise DataError(
            f"zero-shot data {folder}: its folders are WordNet's numbers (ImageNet's); write the names of the classes, "
            f"one per line in the order of the sorted folders, to {CLASS_NAMES_FILE} in it"
        )
    return LabelledDataset(images, names or [name.replace("_", " ") for name in images.classes], templates)


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdigit() else -1, path.name)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
