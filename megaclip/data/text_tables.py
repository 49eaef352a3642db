"""Convert CSV, TSV and JSON files to one Arrow file, which is an index (index.py) of their image paths and captions.

Cells stay the text that is in the file: "007", "NA" and "2021-03-01" are captions. Every row of a file becomes a row of
the table. A file in which rows cannot be told apart, for example because a quotation mark is not closed, is read with
quotation marks as text if every line then has as many cells as the first one. Otherwise it is refused.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from megaclip.data.captions import is_text, values_of, weighted_keys
from megaclip.data.images import IMAGE_EXTENSIONS
from megaclip.data.index import open_index, reading
from megaclip.data.source import MAX_BYTES, Account, ReadingOptions
from megaclip.errors import DataError, first_line, shortened
from megaclip.logging import get_logger

IMAGE_COLUMNS = (
    *("image", "jpg", "png", "webp", "img", "filepath", "file_path", "image_path", "file_name", "path"),
    *("filename", "image_name", "image_file", "img_path"),
)
CAPTION_COLUMNS = ("caption", "text", "txt", "title", "captions", "sentence", "alt_text", "sentences", "comment")
BLANK = "a blank line"
_FORMAT = 6
_IMAGE_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
_BATCH = 10_000
_RECORDS_CHECKED = 100
"""Number of first JSON records whose fields are the columns of a file."""
_RETURN_IN_CELL = re.compile(r"\r(?!\n|$)")
_QUOTES = (
    "put cells with line breaks, separators or quotation marks in quotation marks, and write each quotation mark in "
    "them twice"
)

_logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class TextTable:
    """The index of some files: an Arrow stream with the columns `index_columns`, of which captions are lists."""

    path: Path
    columns: dict[str, str]
    """Names of the columns of images and captions in the first file."""
    rows: list[int]
    """Number of rows of each file."""
    account: Account
    checksum: str
    """Checksum of all rows, in order."""


def open_text_tables(paths: Sequence[str], options: ReadingOptions) -> TextTable:
    """Return the index of the rows of CSV, TSV and JSON files. Raises DataError if a file cannot be read as a table.

    `options.dataset_type` is that of files whose names end in neither .csv, .tsv, .json nor .jsonl.
    """

    keys = [options.dataset_type, options.image_key, options.caption_key, options.id_column]
    settings = [_FORMAT, *keys, *options.field_keys.values(), IMAGE_COLUMNS, CAPTION_COLUMNS]
    files = [Path(path).absolute() for path in paths]
    index, description = open_index(files, settings, ".arrow", lambda index, *_: _convert(index, paths, options))
    return TextTable(path=index, **description | {"account": Account(**description["account"])})


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the columns of a table."""

    image: str
    captions: list[str]
    """One per key of --caption-key."""
    id: str | None
    fields: list[str]
    """Extra fields, which an index holds as JSON, in the order of `ReadingOptions.field_keys`."""


def find_columns(names: Sequence[str], options: ReadingOptions, path: str) -> Columns:
    """Return the columns to read, among all `names` of the table `path`. Raises DataError if one is missing."""

    def find(wanted: str | None, what: str, usual: Sequence[str] = ()) -> str:
        for column in [wanted] if wanted else usual:
            if (count := list(names).count(column)) > 1:
                raise DataError(f"data {path!r} has {count} columns named {column}; give each column its own name")
            if count:
                return column
        flag = "the field's key in the objective" if what == "field" else f"--{what}-key"
        raise DataError(
            f"data {path!r} has no {what} column {wanted or ' or '.join(usual)}; it has {shortened(', '.join(names))}; "
            f"set {flag} to one of them"
        )

    return Columns(
        find(options.image_key, "image", IMAGE_COLUMNS),
        [find(key.name, "caption", CAPTION_COLUMNS) for key in weighted_keys(options.caption_key)],
        options.id_column and find(options.id_column, "id"),
        [find(key, "field") for key in options.field_keys.values()],
    )


def index_columns(options: ReadingOptions) -> Columns:
    """Return the columns of an index."""
    captions = ["caption", *(f"caption {number}" for number in range(1, len(weighted_keys(options.caption_key))))]
    return Columns("image", captions, "id", [f"field {number}" for number in range(len(options.field_keys))])


def _convert(index: Path, paths: Sequence[str], options: ReadingOptions) -> dict[str, Any]:
    import pyarrow as pa

    own, text = index_columns(options), pa.string()
    captions = [(name, pa.list_(text)) for name in own.captions]
    schema = pa.schema([(own.image, text), *captions, (own.id, text), *((name, text) for name in own.fields)])
    account, columns, counts, digest = Account("rows"), dict[str, str](), list[int](), hashlib.sha256()
    with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for path in paths:
            counts.append(0)
            try:
                rows = _rows(path, options, account, columns)
                while batch := list(itertools.islice(rows, _BATCH)):
                    counts[-1] += len(batch)
                    pairs = [[row.get(column) for column in (own.image, *own.captions)] for row in batch]
                    digest.update(json.dumps(pairs).encode())
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"cannot read {path}: byte 0x{error.object[error.start]:02x} is not {error.encoding}; convert the "
                    f"file to UTF-8, for example with  iconv -f CP1252 -t UTF-8 {path} > NEW_FILE"
                ) from error
            except csv.Error as error:
                raise DataError(f"cannot read {path}: {error}; {_QUOTES}") from error
    if any(counts) and not columns:
        raise DataError(f"data {paths[0]!r} has only rows without fields; give tables with images and captions")
    account.in_samples = sum(counts)
    checksum = digest.hexdigest()[:16]
    return {"columns": columns, "rows": counts, "account": dataclasses.asdict(account), "checksum": checksum}


def _rows(path: str, options: ReadingOptions, account: Account, shown: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file, by the columns of an index. An empty file has none.

    shown: receives the names of the columns of images and captions if it is empty.
    """
    suffix = os.path.splitext(path)[1].lower()
    is_json = suffix in (".json", ".jsonl") or (options.dataset_type == "json" and suffix not in (".csv", ".tsv"))
    records: Iterator[dict[str, Any]]
    if is_json:
        records = _records(path, account)
        first = list(itertools.islice(records, _RECORDS_CHECKED))
        names, records = list(dict.fromkeys(itertools.chain(*first))), itertools.chain(first, records)
    else:
        separator, names = _header(path)
        records = _csv_rows(path, separator, names, account)
    if not names:
        yield from ({} for _ in records)  # JSON objects without fields
        return
    columns, own = find_columns(names, options, path), index_columns(options)
    shown.setdefault("image", columns.image)
    shown.setdefault("caption", ", ".join(columns.captions))
    for record in records:
        found = record.get(columns.image)
        if isinstance(found, dict):  # as `datasets` writes an image
            found = found.get("path")
        row: dict[str, Any] = {"image": _text(found) or None, "id": _text(record.get(columns.id or ""))}
        row |= zip(own.captions, (_texts(record.get(name)) for name in columns.captions), strict=True)
        for name, found in zip(own.fields, map(record.get, columns.fields), strict=True):
            row[name] = found if found is None or isinstance(found, str) else json.dumps(found)  # text of a CSV is JSON
        yield row


def _texts(value: Any) -> list[str] | None:
    """Return the texts in a value, which may be a list, or None if there are none."""
    return [text for text in map(_text, values_of(value)) if text is not None] or None


def _text(value: Any) -> str | None:
    """Return a value as text, or None if it is none (`captions.is_text`)."""
    if isinstance(value, bool):
        return json.dumps(value)
    return value if is_text(value) else None


def _open_text(path: str) -> TextIO:
    """Open a text file in UTF-8 or, if it starts with a byte order mark, in UTF-16. Raises DataError for null bytes.

    A carriage return ends a line only if it ends the first one. pandas writes it in cells without quotation marks.
    """
    with reading(Path(path)), open(path, "rb") as file:
        head = file.read(4096)
    is_utf_16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not is_utf_16 and b"\0" in head:
        raise DataError(
            f"cannot read {path}: it contains null bytes and is no text in UTF-8; decompress it, or convert it with  "
            f"iconv -f UTF-16LE -t UTF-8 {path} > NEW_FILE"
        )
    newline = "" if re.match(rb"[^\r\n]*\r(?!\n)", head) else "\n"
    return open(path, encoding="utf-16" if is_utf_16 else "utf-8-sig", newline=newline)


def _records(path: str, account: Account) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, or of a JSON file with one list of objects. Numbers stay as written."""

    def parsed(text: str, line: int) -> Any:
        try:
            return json.loads(text, parse_int=str, parse_float=str, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"cannot read {path}: line {line}: {first_line(error)}; write one JSON object per line, or one list"
            ) from error

    with _open_text(path) as file:
        head = [""]  # the first lines, as far as the first one that is not blank
        while not head[-1].strip() and (line := file.readline()):
            head.append(line)
        is_list = head[-1].lstrip().startswith("[")
        lines = parsed("".join(head) + file.read(), 1) if is_list else itertools.chain(head[1:], file)
        for number, item in enumerate(account.see(lines), start=1):
            if not is_list and not item.strip():
                account.leave_out(BLANK, f"{path}, line {number}")
                continue
            record = item if is_list else parsed(item, number)
            if not isinstance(record, dict):
                raise DataError(f"cannot read {path}: row {number} is not a JSON object; write one object per row")
            yield record


def separator_of(header: str) -> str:
    """Return the separator of a CSV file by its first line: a tab if it has one, else the most frequent of | ; and ,"""
    return "\t" if "\t" in header else max(",;|", key=header.count)


def _header(path: str) -> tuple[str, list[str]]:
    """Return the separator and the names of the columns of a CSV file."""
    csv.field_size_limit(16 * MAX_BYTES["caption"])
    with _open_text(path) as file:
        header = next((line for line in file if line.strip()), "")
    separator = separator_of(header)
    names = next(csv.reader([header], delimiter=separator, skipinitialspace=True), [])
    return separator, [name.strip() for name in names]


def _csv_rows(path: str, separator: str, names: list[str], account: Account) -> Iterator[dict[str, str]]:
    """Yield the rows after the first one. Raises DataError for a row with more cells than the first line has names."""
    numbered = None
    """1 if the rows have an additional first cell with their number, as R writes them."""
    quoted = _has_quoted_cells(path, separator, len(names))
    rows = itertools.dropwhile(lambda row: not row[2], _split_rows(path, separator, quoted))
    for line, _, cells in itertools.islice(rows, 1, None):
        account.seen += 1
        if not cells:
            account.leave_out(BLANK, f"{path}, line {line}")
            continue
        if numbered is None:
            numbered = int(len(cells) == len(names) + 1 and cells[0].isdigit())
        if len(cells) > len(names) + numbered:
            raise DataError(
                f"cannot read {path}: line {line} has more cells than the first line has names ({len(cells)} and "
                f"{len(names)}, separated by {separator!r}: {shortened(separator.join(cells))}); {_QUOTES}"
            )
        yield dict(zip(names, cells[numbered:], strict=False))


def _split_rows(path: str, separator: str, quoted: bool) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield the number of the last line, the lines and the cells of every row. Blank lines have no cells."""
    lines: list[str] = []

    def noted() -> Iterator[str]:
        for line in file:
            line = _RETURN_IN_CELL.sub(" ", line) if "\r" in line else line
            lines.append(line)
            yield line

    with _open_text(path) as file:
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
        reader = csv.reader(noted(), delimiter=separator, strict=True, skipinitialspace=True, quoting=quoting)
        try:
            for cells in reader:
                cells = [cell.strip() for cell in cells]
                yield reader.line_num, lines, [] if not any(cells) and len(cells) < 2 else cells
                lines.clear()
        except csv.Error as error:
            raise csv.Error(f"line {reader.line_num}: {error}") from error


def _has_quoted_cells(path: str, separator: str, width: int) -> bool:
    """Return whether quotation marks enclose cells. False: the file has none, or they are text.

    They are text if they do not end where cells end, or if a cell in them contains other rows. Raises DataError if the
    file cannot be read in this way either.
    """
    with _open_text(path) as file:
        if not any('"' in line for line in file):
            return False
    first = 1
    """First line of the row in which quotation marks do not enclose a cell."""
    try:
        for last, lines, _ in _split_rows(path, separator, True):
            if len(lines) > 1 and sum(_looks_like_a_row(line, separator, width, path) for line in lines) > 1:
                break
            first = last + 1
        else:
            return True
    except csv.Error:
        pass
    for _, _, cells in _split_rows(path, separator, False):
        if cells and (len(cells) != width or any(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)):
            raise DataError(
                f"cannot read {path}: the row in line {first} has a quotation mark that is not closed at the end of "
                f"its cell, or not before the next row; {_QUOTES}"
            )
    _logger.warning("%s: quotation marks are read as text, because in line %d they do not enclose cells", path, first)
    return False


def _looks_like_a_row(line: str, separator: str, width: int, path: str) -> bool:
    """Return whether a line has as many cells as a row, and one of them is the name of an image."""
    cells = [cell.strip().strip('"') for cell in line.split(separator)]
    folder = os.path.dirname(path)
    return len(cells) == width and any(
        cell.lower().endswith(_IMAGE_SUFFIXES) or os.path.isfile(os.path.join(folder, cell)) for cell in cells if cell
    )
