"""Open labelled images for zero-shot classification, in CLIP_benchmark's layout or with one image folder per class.

CLIP_benchmark's layout: tar shards with an image and a `.cls` file per sample, in the folder itself or its `test`
folder. `classnames.txt` and `zeroshot_classification_templates.txt` ("a photo of a {c}.") lie in the folder. With one
image folder per class the two text files are optional: the classes are the sorted sub-folders, named as these are.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from megaclip.data.batch import BadSample, RawSample
from megaclip.data.captions import CaptionKeys
from megaclip.data.image_folder import walk_folder
from megaclip.data.images import IMAGE_EXTENSIONS
from megaclip.data.source import read_file
from megaclip.data.tar_shards import TarShards
from megaclip.errors import DataError, os_reason
from megaclip.logging import get_logger

CLASS_NAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
DEFAULT_TEMPLATES = ["a photo of a {c}."]
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test"}
"""Names of folders that hold the classes of a split."""
_WORDNET_ID = re.compile(r"n\d{8}")

_logger = get_logger(__name__)


class LabelledDataset:
    """Images with a class number. The prompts are made from `class_names` and `templates`."""

    def __init__(self, images: TarShards | _ImageFolder, class_names: list[str], templates: list[str]) -> None:
        self._images = images
        self.class_names = class_names
        self.templates = templates

    def __len__(self) -> int:
        return len(self._images)

    def read(self, sample_id: int) -> RawSample:
        """Return the undecoded image, with the class number as its caption. Raises BadSample."""
        raw = self._images.read(sample_id)
        label = raw.caption.strip()
        is_number = label.isascii() and label.isdigit() and len(label) < 20  # int() refuses thousands of digits
        if not (is_number and int(label) < len(self.class_names)):
            raise BadSample(
                "label outside the classes", f"{raw.key}: label {label[:20]!r}, {len(self.class_names)} classes"
            )
        return RawSample(raw.image, label, raw.key)

    def shard_name(self, sample_id: int) -> str:
        """Return the path of the shard or folder that holds a sample, for messages."""
        return self._images.shard_name(sample_id)


class _ImageFolder:
    def __init__(self, folder: Path) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        self._files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(Path(place, file) for place, files in walk_folder(str(folder / name)) for file in files)
            if path.suffix.lower().lstrip(".") in IMAGE_EXTENSIONS and path.name[0] != "."
        ]

    @property
    def empty_classes(self) -> list[str]:
        """Names of the folders without images."""
        labels = {label for _, label in self._files}
        return [name for label, name in enumerate(self.classes) if label not in labels]

    def __len__(self) -> int:
        return len(self._files)

    def read(self, row: int) -> RawSample:
        path, label = self._files[row]
        return RawSample(read_file(path, "image", str(path)), str(label), str(path))

    def shard_name(self, row: int) -> str:
        return str(self._files[row][0].parent)


def open_labelled(path: str | Path) -> LabelledDataset:
    """Open a labelled dataset. Raises DataError if the layout of the folder is neither of the two, or unreadable."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"zero-shot data {str(path)!r} is not a folder; expected a folder in CLIP_benchmark's layout, or one with "
            "an image folder per class"
        )
    try:
        dataset = _open_folder(folder)
    except OSError as error:
        raise DataError(f"cannot read zero-shot data {str(path)!r}: {os_reason(error)}") from error
    _warn_of_equal_names(folder, dataset.class_names)
    return dataset


def _warn_of_equal_names(folder: Path, names: list[str]) -> None:
    """Warn of classes that share a name. Their prompts are equal, and ties count against the model."""
    counts = {name: count for name, count in Counter(names).items() if count > 1}
    if counts:
        _logger.warning(
            "zero-shot data %s: %d of %d classes share their names (%s); ties count against the model, so their images "
            "are never correct at top-1: write a different name for each class to %s",
            folder,
            sum(counts.values()),
            len(names),
            _listed(list(counts)),
            CLASS_NAMES_FILE,
        )


def _open_folder(folder: Path) -> LabelledDataset:
    shards = sorted(folder.glob("[!.]*.tar"), key=_by_number) or sorted(folder.glob("test/[!.]*.tar"), key=_by_number)
    templates = _lines(folder / TEMPLATES_FILE) or DEFAULT_TEMPLATES
    wrong = [template for template in templates if "{c}" not in template]
    if wrong:
        raise DataError(
            f"{folder / TEMPLATES_FILE}: the template {wrong[0]!r} has no {{c}}; write {{c}} where the class name goes"
        )
    names = _lines(folder / CLASS_NAMES_FILE)
    if shards:
        if not names:
            raise DataError(
                f"zero-shot data {folder}: tar shards require the file {CLASS_NAMES_FILE}; write one name per line"
            )
        return LabelledDataset(TarShards(shards, caption_keys=CaptionKeys(("cls",), flag="")), names, templates)
    images = _ImageFolder(folder)
    if len(images) == 0:
        raise DataError(
            f"zero-shot data {folder}: no data found; expected *.tar, test/*.tar or one folder of images per class"
        )
    if len(images.classes) == 1:
        raise DataError(
            f"zero-shot data {folder}: only one class, {images.classes[0]!r}; expected one folder of images per class"
        )
    if names and len(names) != len(images.classes):
        raise DataError(
            f"zero-shot data {folder}: {len(names)} class names for {len(images.classes)} folders of images; write one "
            f"name per folder to {CLASS_NAMES_FILE}"
        )
    if not names and {name.lower() for name in images.classes} <= _SPLITS:
        raise DataError(
            f"zero-shot data {folder}: the folders {_listed(images.classes)} are splits; expected one folder of images "
            f"per class: give one split, such as {folder / images.classes[-1]}"
        )
    if not names and any(_WORDNET_ID.fullmatch(name) for name in images.classes):
        raise DataError(
            f"zero-shot data {folder}: the folders are named by WordNet ids (as ImageNet's); write the class names to "
            f"{CLASS_NAMES_FILE} in it, one per line, in the order of the sorted folders"
        )
    if not names and (empty := images.empty_classes):
        _logger.warning(
            "zero-shot data %s: %d of %d folders have no images (%s) and count as classes: delete folders that are no "
            "classes",
            folder,
            len(empty),
            len(images.classes),
            _listed(empty),
        )
    return LabelledDataset(images, names or [name.replace("_", " ") for name in images.classes], templates)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdecimal() else -1, path.name)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it to UTF-8") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
