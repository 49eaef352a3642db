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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaclip.data.batch import BadSample, Captions, RawSample
from megaclip.data.captions import captions_of, cleaned, decoded, values_of, weighted_keys
from megaclip.data.image_folder import walk_folder
from megaclip.data.images import is_image_name
from megaclip.data.order import runs_of_rows
from megaclip.data.source import MAX_BYTES, Account, ReadingOptions, check_size, read_file
from megaclip.data.text_tables import TextTable, find_columns, index_columns, open_text_tables
from megaclip.errors import DataError, first_line, shortened
from megaclip.logging import format_count

if TYPE_CHECKING:
    from datasets import Dataset

TABLE_TYPES = ("parquet", "csv", "json", "imagefolder", "saved", "hub")
METADATA_FILES = frozenset(("metadata.csv", "metadata.jsonl", "metadata.parquet"))
"""Tables of the pictures in a folder, as `datasets` names them."""
UNNAMED = "a picture that no row names"


class Table:
    """Rows of one Hugging Face dataset."""

    def __init__(
        self,
        dataset: Dataset,
        name: str,
        kind: str,
        options: ReadingOptions,
        *,
        files: Sequence[str] = (),
        rows: Sequence[int] = (),
        text: TextTable | None = None,
    ) -> None:
        """files, rows: files of the table, and the number of rows in each. text: index of the files."""
        from datasets import ClassLabel, Image

        self.kind, self._name, self._files = kind, name, list(files)
        if len(dataset) == 0:
            raise DataError(_no_rows(_with_others(self._files) if files else name))
        columns = index_columns(options) if text else find_columns(dataset.column_names, options, name)
        self._image, self._captions, self._id = columns.image, columns.captions, options.id_column and columns.id
        self._fields = dict(zip(options.field_keys, columns.fields, strict=True))
        self._keys = weighted_keys(options.caption_key)
        self._columns = text.columns if text else {"image": self._image, "caption": ", ".join(self._captions)}
        self._image_root = options.image_root
        self._names, self._starts = self._files or [name], np.cumsum([0, *(rows or [len(dataset)])])
        # A saved dataset may have the format of NumPy or another library, in which a list is not a Python list.
        dataset = dataset.with_format(None)
        if isinstance(dataset.features[self._image], Image):
            dataset = dataset.cast_column(self._image, Image(decode=False))
        self._classes = dict[str, Sequence[str]]()
        """Names of the classes by column, if the captions are stored as numbers of classes."""
        for column in self._captions:
            feature = dataset.features[column]
            feature = getattr(feature, "feature", feature)  # of the captions in a list
            if isinstance(feature, ClassLabel):
                self._classes[column] = feature.names
            dtype = str(getattr(feature, "dtype", ""))
            if dtype.startswith(("timestamp", "date", "time", "duration", "bool")):
                raise DataError(
                    f"data {name!r}: the captions in column {column} are of type {dtype}, and their text is not "
                    "known; store them as text"
                )
        self._rows = dataset.select_columns(
            list({self._image, *self._captions, self._id or self._image, *self._fields.values()})
        )
        self._only_captions = dataset.select_columns(self._captions)
        self.shard_sizes = runs_of_rows(len(dataset))
        self.account = text.account if text else Account("rows", sum(rows) or len(dataset), len(dataset))
        self._checksum = text.checksum if text else ""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def uses_image_root(self) -> bool:
        """True if --image-root is the folder of the paths in the table."""
        return self._image_root is not None and getattr(self._rows.features[self._image], "dtype", "") != "binary"

    @functools.cached_property
    def columns(self) -> dict[str, str]:
        """Names of the columns of images and captions, with the number of images if rows name the same ones."""
        paths = self.image_paths()
        images = len(self) if paths is None else len(set(paths))
        repeated = "" if images == len(self) else f" ({images:,} different images in {len(self):,} rows)"
        return self._columns | {"image": self._columns["image"] + repeated}

    @functools.cached_property
    def checksum(self) -> str:
        """Checksum of the captions in order, and of the image paths if the table holds paths."""
        if self._checksum:
            return self._checksum
        digest = hashlib.sha256()
        rows = self._only_captions
        if self.image_paths() is not None:
            rows = self._rows.select_columns([self._image, *self._captions])
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
        named = set(map(os.path.realpath, self.image_files))
        for place, names in walk_folder(folder):
            for name in names:
                path = os.path.join(place, name)
                if is_image_name(name) and os.path.realpath(path) not in named:
                    self.account.seen += 1
                    self.account.leave_out(UNNAMED, path)

    @property
    def manifest(self) -> list[list[Any]]:
        """[name, bytes, rows] per file. The first file has the rows of the whole table, the others have 0."""
        if not self._files:
            return [[self._name if self.kind == "hub" else Path(self._name).name, 0, len(self)]]
        sizes = [[Path(file).name, os.path.getsize(file), 0] for file in self._files]
        sizes[0][2] = len(self)
        return sizes

    @property
    def image_files(self) -> Sequence[str]:
        """Images that the rows name, or else the files of the table."""
        paths = self.image_paths()
        if paths is None:
            return self._files or [str(entry["filename"]) for entry in self._rows.cache_files]
        return [self._path(os.fsdecode(cell), self._folder(row)) for row, cell in enumerate(paths)]

    def _file_of(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def shard_name(self, row: int) -> str:
        """Return the file of a row, or the name of a table without files."""
        return self._names[self._file_of(row)]

    def _key(self, row: int) -> str:
        """Return a name of a row for messages. Rows are counted from 1 in each file, without the header of a table."""
        return f"{Path(self.shard_name(row)).name} row {row - self._starts[self._file_of(row)] + 1}"

    def _folder(self, row: int) -> str | None:
        """Return the folder to which the image path of a row is relative, or None for the working directory."""
        return self._image_root or (os.path.dirname(self.shard_name(row)) if self._files else None)

    def read(self, row: int) -> RawSample:
        key = self._key(row)
        record = _record(self._rows, row, key)
        captions = self._captions_in(record, key)
        cell = record[self._image]
        image = self._content(cell, key, self._folder(row))
        path = cell.get("path") if isinstance(cell, dict) else cell
        if isinstance(path, str):
            key += f" ({shortened(path)})"
        fields = {name: record[column] for name, column in self._fields.items()}
        found = self._id and record[self._id]
        if self._id and (found is None or found in ("", b"") or found != found):  # NaN
            raise BadSample("missing id", f"{key}: the cell of --id-key is empty")
        return RawSample(image, captions, key, fields, self._id and str(found))

    def captions(self, row: int) -> Captions:
        key = self._key(row)
        return self._captions_in(_record(self._only_captions, row, key), key)

    def _captions_in(self, record: dict[str, Any], key: str) -> Captions:
        return captions_of(self._keys, lambda number: self._texts(record, self._captions[number], key))

    def _texts(self, record: dict[str, Any], column: str, key: str) -> tuple[str, ...]:
        """Return the caption or captions in a cell, with every run of white space replaced by one space."""
        value = record[column]
        values = values_of(value)
        if names := self._classes.get(column):
            values = [names[number] for number in values if number is not None and number >= 0]  # -1: unknown
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
            got = f": expected the bytes or the path of a file, got {type(value).__name__}" if value else ""
            raise BadSample("missing image", key + got)
        where = f" in {folder or '.'} or in the working directory; --image-root names another folder"
        if self._image_root:
            where = "; --image-root is its folder"
        if os.path.isabs(value):
            where = ""
        if "\\" in value and os.path.isfile(self._path(value.replace("\\", "/"), folder)):
            where = ", but would be one with / instead of \\"
        return read_file(self._path(value, folder), "image", key, where)

    def _path(self, name: str, folder: str | None) -> str:
        """Return the path of an image that a row names: in `folder`, or else in the working directory."""
        path = os.path.join(folder or "", name)
        return path if self._image_root or os.path.exists(path) else name


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


def open_table(paths: Sequence[str], kind: str, options: ReadingOptions) -> Table:
    """Open files as a table of type `kind`: one folder for "saved", one name for "hub". Raises DataError."""
    import datasets

    name, options = paths[0], dataclasses.replace(options, dataset_type=kind)
    if kind == "saved":
        return Table(_load_saved(name), name, kind, options)
    if kind == "hub":
        repository, split, config = parse_hub_name(name)
        dataset = _load(repository, datasets.load_dataset, repository, config, split=split)
        return Table(dataset, f"hf:{name}", kind, options)
    if kind in ("csv", "json"):
        text = open_text_tables(paths, options)
        dataset = datasets.Dataset.from_file(str(text.path))
        return Table(dataset, name, kind, options, files=paths, rows=text.rows, text=text)
    rows = list(map(_parquet_rows, paths))
    # `datasets` treats file names as patterns, and fails for most files without rows.
    filled = [glob.escape(os.path.abspath(path)) for path, count in zip(paths, rows, strict=True) if count]
    if not filled:
        raise DataError(_no_rows(_with_others(paths)))
    dataset = _load(_with_others(paths), datasets.load_dataset, kind, data_files=filled, split="train")
    return Table(dataset, name, kind, options, files=paths, rows=rows)


def parse_hub_name(text: str) -> tuple[str, str, str | None]:
    """Return the repository, the split and the configuration of `NAME[:SPLIT[:CONFIG]]`. Raises DataError."""
    name, split, config, *more = (*text.split(":"), "", "", "")
    if not name or any(more):
        raise DataError(f"data 'hf:{text}' is not a hub dataset; write hf:NAME[:SPLIT[:CONFIG]]")
    return name, split or "train", config or None


def _parquet_rows(path: str) -> int:
    """Return the number of rows of a parquet file, 0 for an empty file, or 1 if `datasets` will report an error."""
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows) if os.path.getsize(path) else 0
    except (OSError, ValueError):  # pyarrow's errors are ValueErrors
        return 1


def _with_others(paths: Sequence[str]) -> str:
    """Return the first path and the number of the other paths, for errors."""
    return paths[0] + (f" and {format_count(len(paths) - 1, 'more file')}" if len(paths) > 1 else "")


def _no_rows(what: str) -> str:
    return f"data {what!r}: no rows; give tables with one row per sample"


def _load(what: str, load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return load(*arguments, **options), a function of `datasets`. Raises DataError. what: the data, for the error."""
    try:
        return load(*arguments, **options)
    except Exception as error:  # `datasets` raises many types; all mean that the data cannot be read
        # The first table of a saved dataset without rows is an IndexError.
        if isinstance(error, IndexError) or "corresponds to no data" in str(error):
            raise DataError(_no_rows(what)) from error
        cause = error.__cause__ or error  # "An error occurred while generating the dataset" has the reason as its cause
        reason = shortened(" ".join(str(cause).split()))
        if "column names don't match" in str(cause):
            reason = "the files have different columns; name those with equal columns as a data set each"
        raise DataError(f"cannot read {what}: {type(cause).__name__}: {reason}") from error


def _load_saved(folder: str) -> Dataset:
    import datasets

    loaded = _load(folder, datasets.load_from_disk, folder)
    if isinstance(loaded, datasets.DatasetDict):
        if len(loaded) != 1:
            raise DataError(
                f"data {folder!r} has the splits {', '.join(sorted(loaded))}; give the folder of one of them, for "
                f"example {os.path.join(folder, next(iter(loaded), 'train'))}"
            )
        return next(iter(loaded.values()))
    return loaded
