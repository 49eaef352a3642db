"""Read tables of image-text pairs: parquet, CSV, TSV, JSON lines, image folders, saved and hub datasets.

Hugging Face `datasets` converts each table to Arrow files, which are memory-mapped and read by row. Images stay
undecoded: a column holds the bytes or the path of a file, relative to the table's folder or to the working directory.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaclip.data.batch import BadSample, RawSample
from megaclip.data.captions import cleaned, decoded
from megaclip.data.order import runs_of_rows
from megaclip.data.source import MAX_BYTES, Account, check_size, read_file
from megaclip.errors import DataError, first_line, shortened

if TYPE_CHECKING:
    from datasets import Dataset

TABLE_TYPES = ("parquet", "csv", "json", "imagefolder", "saved", "hub")
IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "img", "filepath", "file_path", "image_path", "file_name", "path")
CAPTION_COLUMNS = ("caption", "text", "txt", "title", "captions", "sentence", "alt_text")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Tables of the pictures in a folder, as `datasets` names them."""
MAX_SHOWN = 200
"""Largest number of characters of a path in a message."""


@dataclasses.dataclass(frozen=True)
class HubTable:
    """Name of a dataset on the Hugging Face hub: `NAME[:SPLIT[:CONFIG]]`."""

    name: str
    split: str = "train"
    config: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubTable:
        """Parse the part after `hf:`. Raises DataError."""
        parts = text.split(":")
        if not parts[0] or len(parts) > 3:
            raise DataError(f"data 'hf:{text}' is not a hub dataset; write hf:NAME[:SPLIT[:CONFIG]]")
        name, split, config = (*parts, "", "")[:3]
        return cls(name, split or "train", config or None)

    def load(self) -> Dataset:
        """Open the dataset from the cache, or download it."""
        return _load(self.name, self.name, self.config, split=self.split)


class Table:
    """Rows of one Hugging Face dataset."""

    def __init__(
        self,
        dataset: Dataset,
        name: str,
        kind: str,
        folder: str | None,
        image_key: str | None,
        caption_key: str | None,
        files: Sequence[str] = (),
    ) -> None:
        from datasets import ClassLabel, Image

        self.kind = kind
        self._name = name
        self._folder = folder
        self._files = list(files)
        self._image = _column(dataset, image_key, IMAGE_COLUMNS, "image", name)
        self._caption = _column(dataset, caption_key, CAPTION_COLUMNS, "caption", name)
        # A saved dataset may have the format of NumPy or another library, in which a list is not a Python list.
        dataset = dataset.with_format(None).select_columns([self._image, self._caption])
        if isinstance(dataset.features[self._image], Image):
            dataset = dataset.cast_column(self._image, Image(decode=False))
        feature = dataset.features[self._caption]
        self._classes: Sequence[str] = feature.names if isinstance(feature, ClassLabel) else ()
        """Names of the classes, if the captions are stored as numbers of classes."""
        self._rows = dataset
        self._only_captions = dataset.select_columns([self._caption])
        if len(dataset) == 0:
            raise DataError(f"data {name!r} has no rows; check the file")
        self.shard_sizes = runs_of_rows(len(dataset))
        self.account = Account("rows", len(dataset), len(dataset))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def columns(self) -> dict[str, str]:
        """Names of the columns of images and captions."""
        return {"image": self._image, "caption": self._caption}

    @property
    def has_numbers_as_captions(self) -> bool:
        """True if the cells of the caption column are numbers, and not the numbers of named classes."""
        dtype = str(getattr(self._rows.features[self._caption], "dtype", ""))
        return not self._classes and dtype.startswith(("int", "uint", "float"))

    def manifest(self) -> list[list[Any]]:
        """Return [name, bytes, rows] per file. The first file has the rows of the whole table, the others have 0."""
        if not self._files:
            return [[self._name if self.kind == "hub" else Path(self._name).name, 0, len(self)]]
        sizes = [[Path(file).name, os.path.getsize(file), 0] for file in self._files]
        sizes[0][2] = len(self)
        return sizes

    def shard_name(self, row: int) -> str:
        """Return the name of the table. The file of a row is not known."""
        return self._name

    def read(self, row: int) -> RawSample:
        """Return the undecoded sample. Raises BadSample."""
        key = f"{Path(self._name).name}[{row}]"
        record = _record(self._rows, row, key)
        captions = self._captions(record[self._caption], key)
        cell = record[self._image]
        image = self._content(cell, key)
        path = cell.get("path") if isinstance(cell, dict) else cell
        if isinstance(path, str):
            key += f" ({path[:MAX_SHOWN]})"
        return RawSample.of(image, captions, key)

    def names_files_in(self, folder: str) -> bool:
        """Return whether the image of the first row is the path of a file, relative to `folder`."""
        try:
            path = _record(self._rows, 0, "0")[self._image]
        except BadSample:
            return False
        return isinstance(path, str) and not os.path.isabs(path) and os.path.exists(os.path.join(folder, path))

    def captions(self, row: int) -> tuple[str, ...]:
        """Return only the caption of a sample, or its captions. Raises BadSample."""
        return self._captions(_record(self._only_captions, row, str(row))[self._caption], str(row))

    def _captions(self, value: Any, key: str) -> tuple[str, ...]:
        """Return the caption or captions in a cell, with every run of white space replaced by one space."""
        if self._classes and value is not None:
            value = self._classes[value] if value >= 0 else None  # -1 is an unknown class
        values = value if isinstance(value, list | tuple) else [value]
        texts = [_text(text, key) for text in values if text is not None and text == text]  # NaN differs from itself
        if not texts:
            raise BadSample("missing caption", key)
        captions = cleaned(texts, key)
        if (size := sum(map(len, captions))) > MAX_BYTES["caption"]:
            raise BadSample("caption too large", f"{key}: {size} characters")
        return captions

    def _content(self, value: Any, key: str) -> bytes:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes) and value:
            check_size("image", len(value), key)
            return value
        if not isinstance(value, str) or not value:
            raise BadSample("missing image", key)
        return self._file(value, key)

    def _file(self, path: str, key: str) -> bytes:
        if self._folder is not None and os.path.exists(os.path.join(self._folder, path)):
            path = os.path.join(self._folder, path)
        return read_file(path, "image", key, f" in {self._folder} or in the working directory" if self._folder else "")


def _text(value: Any, key: str) -> str:
    """Return one caption of a cell. Raises BadSample if it is not text."""
    if isinstance(value, dict | list | tuple):
        raise BadSample("missing caption", f"{key}: expected text, got {type(value).__name__}")
    return decoded(value, key) if isinstance(value, bytes) else str(value)


def _record(rows: Dataset, row: int, key: str) -> dict[str, Any]:
    """Return one row. Raises BadSample if its text is not UTF-8, which is found only here, or if it cannot be read."""
    try:
        return rows[row]
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise BadSample(
            "caption is not UTF-8", f"{key}: byte 0x{byte:02x} at position {error.start}; convert the table to UTF-8"
        ) from error
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise BadSample("unreadable row", f"{key}: {first_line(error)}") from error


def open_table(paths: list[str], kind: str, image_key: str | None, caption_key: str | None) -> Table:
    """Open files, or one folder for "imagefolder" and "saved", as a table. Raises DataError."""
    if kind == "saved":
        return Table(_load_saved(paths[0]), paths[0], kind, None, image_key, caption_key)
    options: dict[str, Any] = {}
    if kind == "imagefolder":
        # `datasets` treats folders and files with names such as "test" as splits. If the folder itself contains the
        # metadata file, that file lists the pictures of all these folders.
        if any(os.path.exists(os.path.join(paths[0], name)) for name in METADATA_FILES):
            options = {"data_files": ["**"]}
        escaped = glob.escape(paths[0])
        dataset = _load(paths[0], "imagefolder", data_dir=escaped, split="train", drop_labels=True, **options)
        table = Table(dataset, paths[0], kind, None, image_key, caption_key)
        if table.has_numbers_as_captions:  # in CSV files they may be texts such as 007, which have lost their zeros
            raise DataError(
                f"data {paths[0]!r}: all captions in the metadata files of its folders are numbers; give each folder "
                "with a metadata file as a separate entry, whose captions are read as text"
            )
        return table
    filled = [path for path in paths if not _is_empty(path, kind)]  # `datasets` fails for most other empty files
    if not filled:
        raise DataError(_no_rows(_with_others(paths)))
    if kind == "csv":
        # By default pandas reads the captions "NA", "null" and "None" as missing.
        separator = _separator(filled[0])
        # Cells stay text: numbers would lose zeros, and a column may have numbers only in its first rows.
        as_text = dict.fromkeys(_names(filled[0], separator), str)
        options = {"sep": separator, "keep_default_na": False, "converters": as_text}
    names = [glob.escape(os.path.abspath(path)) for path in filled]  # `datasets` treats file names as patterns
    dataset = _load(_with_others(filled), kind, data_files=names, split="train", **options)
    unnamed = dataset.features.get("__index_level_0__") if kind == "csv" else None
    if unnamed is not None and not unnamed.dtype.startswith("int"):  # pandas has shifted every cell to the left
        raise DataError(
            f"data {paths[0]!r}: rows have more cells than the first line has names; put captions that contain the "
            f"separator {options['sep']!r} in double quotes, and give a column of row names a name"
        )
    folders = sorted({os.path.dirname(path) or "." for path in paths})
    # `datasets` does not report the file of a row. So paths are relative to a folder only if all files are in one
    # folder.
    folder = folders[0] if len(folders) == 1 else None
    table = Table(dataset, paths[0], kind, folder, image_key, caption_key, files=paths)
    if folder is None and table.names_files_in(os.path.dirname(paths[0]) or "."):
        raise DataError(
            f"data {paths[0]!r}: the tables are in {len(folders)} folders, and their image paths are relative to them; "
            "give the tables of each folder as a separate entry"
        )
    return table


def _is_empty(path: str, kind: str) -> bool:
    """Return whether a file has no bytes, or a parquet file no rows. Files that cannot be read are not empty."""
    import pyarrow.parquet as pq

    try:
        return os.path.getsize(path) == 0 or (kind == "parquet" and pq.read_metadata(path).num_rows == 0)
    except (OSError, ValueError):  # pyarrow's errors are ValueErrors
        return False


def _with_others(paths: list[str]) -> str:
    """Return the first path and the number of the other paths, for errors."""
    return paths[0] + (f" and {len(paths) - 1} more files" if len(paths) > 1 else "")


def _no_rows(what: str) -> str:
    return f"data {what!r}: no rows; give tables with one row per sample"


def _header(path: str) -> str:
    """Return the first line of a CSV file."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.readline(1 << 16)


def _names(path: str, separator: str) -> list[str]:
    """Return the names of the columns of a CSV file, or none if its first line cannot be read."""
    try:
        return next(csv.reader([_header(path)], delimiter=separator), [])
    except csv.Error:  # pandas reports the reason
        return []


def _separator(path: str) -> str:
    """Return the separator of a CSV file by its first line: tab, semicolon or comma."""
    header = _header(path)
    if "\t" in header:
        return "\t"
    return ";" if header.count(";") > header.count(",") else ","


def _load(what: str, kind: str, *arguments: Any, **options: Any) -> Dataset:
    """Return the loaded dataset. what: the data, for the error. kind: its type, or the name of a hub dataset."""
    import datasets

    try:
        return datasets.load_dataset(kind, *arguments, **options)
    except Exception as error:  # `datasets` raises many types; all mean that the data cannot be read
        if "corresponds to no data" in str(error):
            raise DataError(_no_rows(what)) from error
        raise DataError(f"cannot read {what} as {kind}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the type and message of the original error.

    `datasets` has it in a later paragraph of its own message, or only in the cause of its error.
    """
    from datasets.exceptions import DatasetGenerationError

    kind, detail = type(error).__name__, str(error)
    if isinstance(error, DatasetGenerationError):
        summary, _, detail = detail.partition("\n\n")
        if not detail and error.__cause__ is not None:
            kind, detail = type(error.__cause__).__name__, str(error.__cause__)
        detail = detail or summary
    return f"{kind}: {shortened(' '.join(detail.split()))}"


def _load_saved(folder: str) -> Dataset:
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except IndexError as error:  # the first table of a dataset that was saved without rows
        raise DataError(_no_rows(folder)) from error
    except Exception as error:  # `datasets` raises many types; all mean that the folder cannot be read
        raise DataError(f"cannot read the saved dataset {folder}: {_reason(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if len(loaded) != 1:
            raise DataError(
                f"data {folder!r} has the splits {', '.join(sorted(loaded))}; give the folder of one of them, for "
                f"example {os.path.join(folder, next(iter(loaded), 'train'))}"
            )
        return next(iter(loaded.values()))
    return loaded


def _column(dataset: Dataset, wanted: str | None, usual: Sequence[str], what: str, name: str) -> str:
    for column in [wanted] if wanted else usual:
        if column in dataset.column_names:
            return column
    expected = wanted or " or ".join(usual)
    columns = ", ".join(dataset.column_names)
    raise DataError(f"data {name!r} has no {what} column {expected}; it has {columns}; set --{what}-key to one of them")
