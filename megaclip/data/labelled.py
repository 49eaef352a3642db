"""Open labelled images for zero-shot classification, in CLIP_benchmark's layout or with one image folder per class.

CLIP_benchmark's layout: tar shards with an image and a `.cls` or `.npy` file per sample, in the folder itself or its
`test` folder. `classnames.txt` and `zeroshot_classification_templates.txt` ("a photo of a {c}.") lie in the folder.
With one image folder per class the two text files are optional: the classes are the sorted sub-folders, named as these
are. Folders whose names differ only in their numbers ("0", "class_11") are sorted by these numbers.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megaclip.data.batch import BadSample, Captions, RawSample, WeightedKey
from megaclip.data.captions import CaptionKeys
from megaclip.data.image_folder import reason_to_leave_out, walk_folder
from megaclip.data.remote import RemoteFile, copied, find_files, is_remote
from megaclip.data.source import UNREADABLE, Account, read_file
from megaclip.data.tar_shards import TarShards
from megaclip.errors import DataError, first_line, os_errors_as, public
from megaclip.logging import get_logger

CLASS_NAMES_FILE = "classnames.txt"
SHARD_COUNT_FILE = "nshards.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
DEFAULT_TEMPLATES = ["a photo of a {c}."]
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test"}
"""Names of folders that hold the classes of a split."""
_WORDNET_ID = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"([0-9]+)")

_logger = get_logger(__name__)


class LabelledDataset:
    """Images with a class number. The prompts are made from `class_names` and `templates`."""

    def __init__(
        self,
        images: TarShards | _ImageFolder,
        class_names: list[str],
        templates: list[str],
        facts: int | None = None,
    ) -> None:
        """facts: as for `open_labelled`."""
        self._images = images
        self.has_several_labels = facts == 0
        """True: an image may have several classes. `facts` returns all of them, and `read` returns class 0."""
        self._fact_count = len(class_names) if facts == 0 else facts
        self.account = images.account
        self.class_names = class_names
        self.templates = templates

    def __len__(self) -> int:
        return len(self._images)

    def read(self, sample_id: int) -> RawSample:
        """Return the undecoded image, with the class number as its caption.

        Raises BadSample, or DataError for a number without a class: then no label can be trusted.
        """
        raw = self._images.read(sample_id)
        label = "0" if self.has_several_labels else raw.captions.texts[0].strip()
        if self._fact_count is not None:
            self._numbers(raw.captions, sample_id)
        if not (label.isascii() and label.isdigit() and len(label) < 20):  # int() refuses thousands of digits
            raise BadSample("label is no number", f"{raw.key}: label {label[:20]!r}")
        if int(label) >= len(self.class_names):
            raise DataError(
                f"{raw.key} has the label {label}, and {CLASS_NAMES_FILE} has {len(self.class_names)} classes; number "
                "the classes from 0, and write one name per class"
            )
        return RawSample(raw.image, Captions((label,)), raw.key)

    def facts(self, sample_id: int) -> list[int]:
        """Return the numbers in the `.npy` file of an image: its groups or, with several labels, 0 or 1 per class.

        Raises BadSample.
        """
        assert isinstance(self._images, TarShards), "open_labelled(facts=...) opens a dataset with facts"
        return self._numbers(self._images.captions(sample_id), sample_id)

    def _numbers(self, captions: Captions, sample_id: int) -> list[int]:
        texts = captions.texts
        numbers = texts[-1].split() if len(texts) == (1 if self.has_several_labels else 2) else []
        if len(numbers) != self._fact_count:
            name = f"sample {sample_id} of {self.shard_name(sample_id)}"
            raise BadSample("wrong .npy", f"{name}: {len(numbers)} numbers, expected {self._fact_count}")
        return list(map(int, numbers))

    def shard_name(self, sample_id: int) -> str:
        """Return the path of the shard or folder that holds a sample, for messages."""
        return self._images.shard_name(sample_id)


class _NumberKeys(CaptionKeys):
    """Reads the whole numbers of a `.npy` file as a text of decimal numbers."""

    def decode(self, content: bytes, extension: str, key: str) -> tuple[str, ...]:
        if extension != "npy":
            return super().decode(content, extension, key)
        try:
            numbers = np.asarray(np.load(io.BytesIO(content), allow_pickle=False), dtype=np.float64).ravel().tolist()
            if not all(number.is_integer() and abs(number) < 2**53 for number in numbers):  # larger ones are inexact
                raise ValueError("expected whole numbers of less than 2**53")
        except Exception as error:  # a hostile file may cause any exception of NumPy's parser
            raise BadSample("wrong .npy", f"{key}: {first_line(error)}") from error
        return (" ".join(f"{number:.0f}" for number in numbers),)


class _ImageFolder:
    def __init__(self, folder: Path) -> None:
        entries = sorted(entry for entry in folder.iterdir() if entry.name[0] != ".")
        names = [entry.name for entry in entries if entry.is_dir()]
        by_number = sorted(names, key=_parts)
        self.is_by_number = len({_NUMBER.sub("0", name) for name in names}) == 1
        """True if the names of the classes differ only in their numbers, which sort them."""
        self.is_order_clear = self.is_by_number or by_number == names
        """False if another program might sort the classes in another order."""
        self.classes = by_number if self.is_by_number else names
        self.beside = [
            entry.name for entry in entries if entry.is_file() and reason_to_leave_out(str(entry)) in ("", UNREADABLE)
        ]
        """Names of the images outside of the class folders."""
        self.tops: dict[str, str] = {}
        """Folders that hold images and are not inside another one, by their path inside of the folder of their class.
        There is one path, such as "." or "images", unless classes are nested."""
        self.account = Account()
        self._files: list[tuple[str, int]] = []
        for label, name in enumerate(self.classes):
            for place, files in walk_folder(str(folder / name)):
                before = len(self._files)
                for path in self.account.see(os.path.join(place, file) for file in sorted(files)):
                    if reason := reason_to_leave_out(path):
                        self.account.leave_out(reason, path, lost=reason == UNREADABLE)
                    else:
                        self._files.append((path, label))
                if len(self._files) > before and not any(place.startswith(top + os.sep) for top in self.tops.values()):
                    self.tops[os.path.relpath(place, folder / name)] = place
        self.account.in_samples = len(self._files)
        of_images = {label for _, label in self._files}
        self.empty = [name for label, name in enumerate(self.classes) if label not in of_images]
        """Names of the classes without images."""

    def __len__(self) -> int:
        return len(self._files)

    def read(self, row: int) -> RawSample:
        path, label = self._files[row]
        return RawSample(read_file(path, "image", path), Captions((str(label),)), path)

    def shard_name(self, row: int) -> str:
        return os.path.dirname(self._files[row][0])


def open_labelled(
    path: str | Path, *, max_bad_fraction: float | None = None, split: str | None = None, facts: int | None = None
) -> LabelledDataset:
    """Open a labelled dataset, and log how many files or members are in samples, and which are left out.

    max_bad_fraction: as in `open_pairs`. split: "test" or "train", to read that folder of a set with both. facts: count
    of the numbers in the `.npy` file of each sample of tar shards, which `LabelledDataset.facts` returns; 0: one number
    per class, for images with several labels. Default: these files are only labels, of samples without a `.cls` file.
    Raises DataError if the layout of the folder is neither of the two, if it is unreadable, or if too many images are
    left out.
    """
    folder = Path(path).expanduser()
    if not is_remote(path) and not folder.is_dir():
        raise DataError(
            f"zero-shot data {str(path)!r} is not a folder; expected a folder in CLIP_benchmark's layout, or one with "
            "an image folder per class"
        )
    with os_errors_as(DataError, f"cannot read zero-shot data {public(str(path))!r}"):
        folder, shards = _copied_texts(str(path)) if is_remote(path) else (folder, split_shards(folder, split))
        dataset = _open_folder(folder, shards, split, facts)
        refuse_damaged_shards(folder, [dataset.account])
    _warn_of_equal_names(folder, dataset.class_names)
    dataset.account.report(f"zero-shot data {public(str(path))!r}", len(dataset), max_bad_fraction)
    return dataset


def refuse_damaged_shards(folder: Path, accounts: Iterable[Account]) -> None:
    """Raise DataError if tar shards are damaged: the scores would be those of the samples before the damage."""
    if damaged := sum(account.problems.get("damaged shard", 0) for account in accounts):
        raise DataError(f"{folder}: {damaged} damaged tar shards, so samples may be missing; download them again")


def _parts(name: str) -> list[str | int]:
    """Return the texts and the numbers of a name, in turn: "class_3" gives ["class_", 3, ""]."""
    return [int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(name))]


def _warn_of_equal_names(folder: Path, names: list[str]) -> None:
    """Warn of classes that share a name. Their prompts are equal, and ties count against the model."""
    counts = {name: count for name, count in Counter(names).items() if count > 1}
    if counts:
        text = (
            "zero-shot data %s: %d of %d classes share their names (%s); ties count against the model, so their images "
            "are never correct at top-1: write a different name for each class to %s"
        )
        _logger.warning(text, folder, sum(counts.values()), len(names), _listed(list(counts)), CLASS_NAMES_FILE)


def _copied_texts(url: str) -> tuple[Path, list[RemoteFile]]:
    """Return a local folder with copies of the text files in a remote one, and its shards. Raises DataError."""
    url = url.rstrip("/")
    texts = copied(find_files(f"{url}/*.txt"))
    try:
        shards = find_files(f"{url}/*.tar")
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        shards = find_files(f"{url}/test/*.tar")
    return texts[0].parent, sorted(shards, key=lambda shard: (_parts(shard.name), shard.name))


def split_names(folder: Path) -> set[str]:
    """Return the names of the folders in a labelled dataset if all of them are splits, such as train, else none."""
    names = {entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."}
    return names if _are_splits(names) else set()


def _are_splits(names: Iterable[str]) -> bool:
    return {name.lower() for name in names} <= _SPLITS


def split_shards(folder: Path, split: str | None = None) -> list[Path]:
    """Return the tar shards in a folder in CLIP_benchmark's layout, or in its folder test or train.

    Raises DataError if nshards.txt specifies another number of shards.
    """
    places = [folder / split] if split == "train" else [folder, folder / "test"]
    for place in places:
        counts = text_lines(place / SHARD_COUNT_FILE)
        if shards := sorted(place.glob("[!.]*.tar"), key=lambda path: (_parts(path.name), path.name)):
            if counts and counts[0] != str(len(shards)):
                raise DataError(
                    f"{place / SHARD_COUNT_FILE} specifies {counts[0][:20]!r} shards, found {len(shards)}; download "
                    "the missing ones"
                )
            return shards
    return []


def _open_folder(
    folder: Path, shards: Sequence[Path] | Sequence[RemoteFile], split: str | None, facts: int | None
) -> LabelledDataset:
    templates = list(filter(None, text_lines(folder / TEMPLATES_FILE))) or DEFAULT_TEMPLATES
    if wrong := [template for template in templates if "{c}" not in template]:
        raise DataError(
            f"{folder / TEMPLATES_FILE}: the template {wrong[0]!r} has no {{c}}; write {{c}} where the class name goes"
        )
    names = text_lines(folder / CLASS_NAMES_FILE)
    if shards:
        if len(names) < 2:
            raise DataError(
                f"zero-shot data {folder}: tar shards require the file {CLASS_NAMES_FILE} with 2 classes or more, got "
                f"{len(names)}; write one name per line"
            )
        if "" in names:
            raise DataError(
                f"{folder / CLASS_NAMES_FILE}: line {names.index('') + 1} is empty, and label n is the name in line "
                "n + 1; write a name to every line"
            )
        labels, numbers = (_NumberKeys(ends, flag="", key=WeightedKey(ends[0])) for ends in (("cls", "npy"), ("npy",)))
        keys = {None: [labels], 0: [numbers]}.get(facts, [labels, numbers])
        return LabelledDataset(TarShards(shards, caption_keys=keys), names, templates, facts)
    if facts is not None:
        raise DataError(f"zero-shot data {folder}: this task requires tar shards with .npy files")
    of_split = {"test": ["test", "val", "validation"], "train": ["train"], None: []}[split]
    place = next((folder / name for name in of_split if name in split_names(folder)), folder)
    names, images = list(filter(None, names)), _ImageFolder(place)
    if problem := _reason_to_refuse(place, images, names):
        raise DataError(f"zero-shot data {place}: {problem}")
    if names:
        first = [f"{name!r} for {place!r}" for name, place in zip(names[:3], images.classes, strict=False)]
        order = f"sorted by {'number' if images.is_by_number else 'name'}: {', '.join(first)}, ..."
        text = "zero-shot data %s: the %d lines of %s are the classes of the folders, %s"
        _logger.info(text, folder, len(names), CLASS_NAMES_FILE, order)
    elif images.empty:
        text = (
            "zero-shot data %s: %d of %d folders have no images (%s) and count as classes; delete those that are none"
        )
        _logger.warning(text, folder, len(images.empty), len(images.classes), _listed(images.empty))
    if not names and all(map(str.isdecimal, images.classes)):
        text = "zero-shot data %s: the prompts name the classes by numbers (%s); write their names to %s, one per line"
        _logger.warning(text, folder, _listed(images.classes), CLASS_NAMES_FILE)
    return LabelledDataset(images, names or [name.replace("_", " ") for name in images.classes], templates)


def _reason_to_refuse(folder: Path, images: _ImageFolder, names: list[str]) -> str:
    """Return the reason why folders of images cannot be classes with these names, or an empty string."""
    classes = images.classes
    if not names and classes and _are_splits(classes):
        return (
            f"the folders {_listed(classes)} are splits; expected one folder of images per class: give one split, such "
            f"as {folder / classes[-1]}"
        )
    if len(images) == 0:
        return "no data found; expected *.tar, test/*.tar or one folder of images per class"
    if len(classes) == 1:
        return f"only one class, {classes[0]!r}; expected one folder of images per class"
    if images.beside:
        return (
            f"images beside the folders of the classes: {len(images.beside)} ({_listed(images.beside)}); move each "
            "into the folder of its class, or out of this folder"
        )
    if len(images.tops) > 1:
        first, second = list(images.tops.values())[:2]
        return (
            f"images lie in {first} and in {second}, so folders of classes are nested in other folders; expected the "
            f"images of a class in a folder of {folder}: move or link the folders of all classes there"
        )
    if names and len(names) != len(classes):
        return (
            f"{len(names)} class names for {len(classes)} folders of images; write one name per folder to "
            f"{CLASS_NAMES_FILE}"
        )
    if names and not images.is_order_clear:
        return (
            f"the order of the folders, and so their lines in {CLASS_NAMES_FILE}, depends on whether numbers in names "
            "are compared as text (10 before 9) or as numbers; rename the folders so that all numbers have as many "
            "digits, or so that names differ only in their numbers"
        )
    plain = {name: name.casefold().replace("_", " ") for name in (*names, *classes)}
    of_folders = {plain[place] for place in classes}
    for name, place in [] if images.is_by_number else zip(names, classes, strict=False):
        if plain[name] != plain[place] and plain[name] in of_folders:
            return (
                f"{CLASS_NAMES_FILE} has the name {name!r} for the folder {place!r}, and another folder has this name; "
                "write one name per line, in the order of the sorted folders"
            )
    if not names and any(_WORDNET_ID.fullmatch(name) for name in classes):
        return (
            "the folders are named by WordNet ids (as ImageNet's); write the class names to "
            f"{CLASS_NAMES_FILE} in it, one per line, in the order of the sorted folders"
        )
    return ""


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def text_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it to UTF-8") from error
    return [line.strip() for line in text.split("\n")] if text else []  # splitlines() would split at U+2028 too
