"""Read tables of image-text pairs: parquet, CSV, TSV, JSON lines, saved and hub datasets.

Tables are Arrow files, which are memory-mapped and read by row. text_tables.py writes those of CSV, TSV and JSON files,
and Hugging Face `datasets` the others. Images stay undecoded: a column holds the bytes or the path of a file, relative
to --image-root, or else to the table's folder or to the working directory.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaclip.data.batch import BadSample, RawSample
from megaclip.data.captions import cleaned, decoded
from megaclip.data.image_folder import walk_folder
from megaclip.data.images import is_image_name
from megaclip.data.order import runs_of_rows
from megaclip.data.source import MAX_BYTES, Account, check_size, read_file
from megaclip.data.text_tables import CAPTION_COLUMNS, IMAGE_COLUMNS, TextTable, find_column, open_text_tables
from megaclip.errors import DataError, first_line, shortened

if TYPE_CHECKING:
    from datasets import Dataset

TABLE_TYPES = ("parquet", "csv", "json", "imagefolder", "saved", "hub")
METADATA_FILES = frozenset(("metadata.csv", "metadata.jsonl", "metadata.parquet"))
"""Tables of the pictures in a folder, as `datasets` names them."""
UNNAMED = "a picture that no row names"
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
        image_key: str | None,
        caption_key: str | None,
        *,
        files: Sequence[str] = (),
        image_root: str | None = None,
        id_column: str | None = None,
        text: TextTable | None = None,
    ) -> None:
        """files: files of the table. id_column: column of `RawSample.id_cell`. text: index of the files."""
        from datasets import ClassLabel, Image

        self.kind = kind
        self._name = name
        self._files = list(files)
        if len(dataset) == 0:
            raise DataError(_no_rows(_with_others(self._files) if files else name))
        names = dataset.column_names
        self._image = "image" if text else find_column(names, image_key, IMAGE_COLUMNS, "image", name)
        self._caption = "caption" if text else find_column(names, caption_key, CAPTION_COLUMNS, "caption", name)
        self._columns = text.columns if text else {"image": self._image, "caption": self._caption}
        folders = [os.path.dirname(path) or "." for path in files]
        self._folders: list[str] | None = folders or None
        """Folder of each file, to which paths are relative. Only a text table knows the file of a row."""
        if image_root is not None:
            self._folders = [image_root] * len(folders)
        elif text is None and len(set(folders)) > 1:
            self._folders = None
        self._requires_folder = image_root is not None
        # A saved dataset may have the format of NumPy or another library, in which a list is not a Python list.
        dataset = dataset.with_format(None)
        self._ids: Dataset | None = None
        if id_column is not None:
            self._ids = dataset.select_columns(["id" if text else find_column(names, id_column, (), "id", name)])
        dataset = dataset.select_columns([self._image, self._caption, *(["file"] if text else [])])
        if isinstance(dataset.features[self._image], Image):
            dataset = dataset.cast_column(self._image, Image(decode=False))
        feature = dataset.features[self._caption]
        self._classes: Sequence[str] = feature.names if isinstance(feature, ClassLabel) else ()
        """Names of the classes, if the captions are stored as numbers of classes."""
        dtype = str(getattr(feature, "dtype", ""))
        if dtype.startswith(("timestamp", "date", "time", "duration", "bool")):
            raise DataError(
                f"data {name!r}: the captions in column {self._caption} are of type {dtype}, and their text is not "
                "known; store them as text"
            )
        self._rows = dataset
        self._only_captions = dataset.select_columns([self._caption])
        self.shard_sizes = runs_of_rows(len(dataset))
        self.account = text.account if text else Account("rows", len(dataset), len(dataset))
        self._checksum = text.checksum if text else ""

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def columns(self) -> dict[str, str]:
        """Names of the columns of images and captions, with the number of images if rows name the same ones."""
        images = len(set(self.image_paths() or range(len(self))))
        repeated = "" if images == len(self) else f" ({images:,} different images in {len(self):,} rows)"
        return self._columns | {"image": self._columns["image"] + repeated}

    @functools.cached_property
    def checksum(self) -> str:
        """Checksum of the captions in order, and of the image paths if the table holds paths."""
        if self._checksum:
            return self._checksum
        digest, rows = hashlib.sha256(), self._only_captions if self.image_paths() is None else self._rows
        for part in rows.with_format("arrow").iter(batch_size=10_000):
            for batch in part.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return digest.hexdigest()[:16]

    def image_paths(self) -> list[bytes] | None:
        """Return the image path of every row, or None if the table holds the images themselves."""
        if getattr(self._rows.features[self._image], "dtype", "") not in ("string", "large_string"):
            return None
        parts = self._rows.select_columns([self._image]).with_format("arrow").iter(batch_size=10_000)
        return [cell or b"" for part in parts for cell in part.column(0).cast("binary").to_pylist()]

    def leave_out_unnamed(self, folder: str) -> None:
        """Account for the pictures in `folder` that no row names."""
        named = set[str]()
        for row, cell in enumerate(self.image_paths() or ()):
            named.add(os.path.realpath(os.path.join(self._folder(row) or ".", os.fsdecode(cell))))
        for place, names in walk_folder(folder):
            for name in names:
                path = os.path.join(place, name)
                if is_image_name(name) and os.path.realpath(path) not in named:
                    self.account.seen += 1
                    self.account.leave_out(UNNAMED, path)

    def manifest(self) -> list[list[Any]]:
        """Return [name, bytes, rows] per file. The first file has the rows of the whole table, the others have 0."""
        if not self._files:
            return [[self._name if self.kind == "hub" else Path(self._name).name, 0, len(self)]]
        sizes = [[Path(file).name, os.path.getsize(file), 0] for file in self._files]
        sizes[0][2] = len(self)
        return sizes

    def shard_name(self, row: int) -> str:
        """Return the file of a row, or the name of the table if it is not known."""
        return self._files[self._rows[row]["file"]] if "file" in self._rows.column_names else self._name

    def _folder(self, row: int, record: dict[str, Any] | None = None) -> str | None:
        """Return the folder to which the image path of a row is relative, or None for the working directory."""
        if self._folders is None:
            return None
        if "file" not in self._rows.column_names:
            return self._folders[0]
        return self._folders[(record or self._rows[row])["file"]]

    def read(self, row: int) -> RawSample:
        """Return the undecoded sample. Raises BadSample."""
        key = f"{Path(self._name).name}[{row}]"
        record = _record(self._rows, row, key)
        captions = self._captions(record[self._caption], key)
        cell = record[self._image]
        image = self._content(cell, key, self._folder(row, record))
        path = cell.get("path") if isinstance(cell, dict) else cell
        if isinstance(path, str):
            key += f" ({path[:MAX_SHOWN]})"
        return dataclasses.replace(RawSample.of(image, captions, key), id_cell=self._id_cell(row, key))

    def _id_cell(self, row: int, key: str) -> str | None:
        """Return the id of a row as text, or None without a column of ids. Raises BadSample if its cell is empty."""
        if self._ids is None:
            return None
        ((column, cell),) = _record(self._ids, row, key).items()
        if cell is None or cell in ("", b"") or cell != cell:  # NaN
            raise BadSample("missing id", f"{key}: its {column} of --id-key is empty")
        return str(cell)

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

    def _content(self, value: Any, key: str, folder: str | None) -> bytes:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes) and value:
            check_size("image", len(value), key)
            return value
        if not isinstance(value, str) or not value:
            raise BadSample("missing image", key)
        path, where = value, f" in {folder} or in the working directory" if folder else ""
        if folder is not None and (self._requires_folder or os.path.exists(os.path.join(folder, value))):
            path = os.path.join(folder, value)
        return read_file(path, "image", key, "; --image-root is its folder" if self._requires_folder else where)


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


def open_table(
    paths: list[str],
    kind: str,
    image_key: str | None,
    caption_key: str | None,
    image_root: str | None = None,
    id_column: str | None = None,
) -> Table:
    """Open files, or one folder for "saved", as a table. Raises DataError."""
    import datasets

    if kind == "saved":
        return Table(_load_saved(paths[0]), paths[0], kind, image_key, caption_key, id_column=id_column)
    options: dict[str, Any] = {"files": paths, "image_root": image_root, "id_column": id_column}
    if kind in ("csv", "json"):
        text = open_text_tables(paths, kind, image_key, caption_key, id_column)
        options |= {"text": text}
        return Table(datasets.Dataset.from_file(str(text.path)), paths[0], kind, image_key, caption_key, **options)
    filled = [path for path in paths if not _is_empty(path)]  # `datasets` fails for most other empty files
    if not filled:
        raise DataError(_no_rows(_with_others(paths)))
    names = [glob.escape(os.path.abspath(path)) for path in filled]  # `datasets` treats file names as patterns
    dataset = _load(_with_others(filled), kind, data_files=names, split="train")
    table = Table(dataset, paths[0], kind, image_key, caption_key, **options)
    if table.names_files_in(os.path.dirname(paths[0]) or ".") and len({os.path.dirname(path) for path in paths}) > 1:
        raise DataError(
            f"data {paths[0]!r}: the tables are in several folders, and their image paths are relative to them; give "
            "the tables of each folder as a separate entry"
        )
    return table


def _is_empty(path: str) -> bool:
    """Return whether a parquet file has no bytes or no rows. Files that cannot be read are not empty."""
    import pyarrow.parquet as pq

    try:
        return os.path.getsize(path) == 0 or pq.read_metadata(path).num_rows == 0
    except (OSError, ValueError):  # pyarrow's errors are ValueErrors
        return False


def _with_others(paths: list[str]) -> str:
    """Return the first path and the number of the other paths, for errors."""
    return paths[0] + (f" and {len(paths) - 1} more files" if len(paths) > 1 else "")


def _no_rows(what: str) -> str:
    return f"data {what!r}: no rows; give tables with one row per sample"


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
