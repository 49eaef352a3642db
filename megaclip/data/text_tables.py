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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megaclip.data.images import IMAGE_EXTENSIONS
from megaclip.data.index import open_index, reading
from megaclip.data.source import MAX_BYTES, Account
from megaclip.errors import DataError, first_line, shortened
from megaclip.logging import get_logger

IMAGE_COLUMNS = (
    *("image", "jpg", "png", "webp", "img", "filepath", "file_path", "image_path", "file_name", "path"),
    *("filename", "image_name", "image_file", "img_path"),
)
CAPTION_COLUMNS = ("caption", "text", "txt", "title", "captions", "sentence", "alt_text", "sentences", "comment")
BLANK = "a blank line"
_FORMAT = 2
_IMAGE_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
_BATCH = 10_000
_RECORDS_CHECKED = 100
"""Number of first JSON records whose fields are the columns of a file."""
_QUOTES = (
    "put cells with line breaks, separators or quotation marks in quotation marks, and write each quotation mark in "
    "them twice"
)

_logger = get_logger(__name__)
_Row = tuple[str | None, list[str] | None, str | None]
"""Image path, captions, and the cell of the column of ids, if one was requested."""


@dataclasses.dataclass(frozen=True)
class TextTable:
    """The index of some files: an Arrow stream with the columns "file" (number), "image", "caption" (list) and "id"."""

    path: Path
    columns: dict[str, str]
    """Names of the columns of images and captions in the first file."""
    account: Account
    checksum: str
    """Checksum of all rows, in order."""


def open_text_tables(
    paths: Sequence[str], kind: str, image_key: str | None, caption_key: str | None, id_column: str | None
) -> TextTable:
    """Return the index of the rows of CSV, TSV and JSON files. Raises DataError if a file cannot be read as a table.

    kind: "csv" or "json", for files whose names end in neither .csv, .tsv, .json nor .jsonl.
    """

    def make(index: Path, names: list[str], sizes: list[int]) -> dict[str, Any]:
        return _convert(index, paths, kind, image_key, caption_key, id_column)

    settings = [_FORMAT, kind, image_key, caption_key, id_column, IMAGE_COLUMNS, CAPTION_COLUMNS]
    absolute = [Path(path).absolute() for path in paths]
    index = open_index(absolute, settings, ".arrow", is_complete=_is_complete, make=make)
    description = json.loads(index.with_suffix(".json").read_text())
    return TextTable(index, description["columns"], Account(**description["account"]), description["checksum"])


def find_column(names: Sequence[str], wanted: str | None, usual: Sequence[str], what: str, path: str) -> str:
    """Return the column `wanted`, or else the first usual one. what: "image" or "caption". Raises DataError."""
    for column in [wanted] if wanted else usual:
        if column in names:
            return column
    expected, columns = wanted or " or ".join(usual), shortened(", ".join(names))
    raise DataError(f"data {path!r} has no {what} column {expected}; it has {columns}; set --{what}-key to one of them")


def _is_complete(index: Path) -> bool:
    try:
        return json.loads(index.with_suffix(".json").read_text())["bytes"] == index.stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert(
    index: Path,
    paths: Sequence[str],
    kind: str,
    image_key: str | None,
    caption_key: str | None,
    id_column: str | None,
) -> dict[str, Any]:
    import pyarrow as pa

    text = pa.string()
    schema = pa.schema([("file", pa.int32()), ("image", text), ("caption", pa.list_(text)), ("id", text)])
    account, columns, digest = Account("rows"), dict[str, str](), hashlib.sha256()
    with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for number, path in enumerate(paths):
            try:
                suffix = os.path.splitext(path)[1].lower()
                is_json = suffix in (".json", ".jsonl") or (kind == "json" and suffix not in (".csv", ".tsv"))
                rows = _rows(path, is_json, image_key, caption_key, id_column, account, columns)
                while batch := list(itertools.islice(rows, _BATCH)):
                    account.in_samples += len(batch)
                    images, captions, ids = zip(*batch, strict=True)
                    digest.update(json.dumps(list(zip(images, captions, strict=True))).encode())
                    writer.write_batch(pa.record_batch([[number] * len(batch), images, captions, ids], schema=schema))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"cannot read {path}: byte 0x{error.object[error.start]:02x} is not {error.encoding}; convert the "
                    f"file to UTF-8, for example with  iconv -f CP1252 -t UTF-8 {path} > NEW_FILE"
                ) from error
    size = index.stat().st_size
    return {
        "bytes": size,
        "columns": columns,
        "account": dataclasses.asdict(account),
        "checksum": digest.hexdigest()[:16],
    }


def _rows(
    path: str,
    is_json: bool,
    image_key: str | None,
    caption_key: str | None,
    id_column: str | None,
    account: Account,
    columns: dict[str, str],
) -> Iterator[_Row]:
    """Yield the rows of one file; set `columns` if it is empty. An empty file has no rows."""
    if is_json:
        records = iter(_records(path, account))
        first = list(itertools.islice(records, _RECORDS_CHECKED))
        names = list(dict.fromkeys(name for record in first for name in record))
        table: Iterator[dict[str, Any]] = itertools.chain(first, records)
    else:
        names, lines = _cells(path, account)
        table = (dict(zip(names, cells, strict=False)) for cells in lines)
    if not names:
        return
    image = find_column(names, image_key, IMAGE_COLUMNS, "image", path)
    caption = find_column(names, caption_key, CAPTION_COLUMNS, "caption", path)
    if id_column is not None:
        find_column(names, id_column, (), "id", path)
    columns.setdefault("image", image)
    columns.setdefault("caption", caption)
    for record in table:
        found, value = record.get(image), record.get(caption)
        if isinstance(found, dict):  # as `datasets` writes an image
            found = found.get("path")
        values = value if isinstance(value, list) else [value]
        texts = [text for text in map(_text, values) if text is not None]
        yield _text(found) or None, texts or None, _text(record.get(id_column)) if id_column is not None else None


def _text(value: Any) -> str | None:
    """Return a value as text, or None if it is none, or text that has no UTF-8 encoding (half of a surrogate pair)."""
    if isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _open_text(path: str) -> TextIO:
    """Open a text file in UTF-8 or, if it starts with a byte order mark, in UTF-16. Raises DataError for null bytes."""
    with reading(Path(path)), open(path, "rb") as file:
        head = file.read(4096)
    is_utf_16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not is_utf_16 and b"\0" in head:
        raise DataError(
            f"cannot read {path}: it contains null bytes and is no text in UTF-8; convert it, for example with  "
            f"iconv -f UTF-16LE -t UTF-8 {path} > NEW_FILE"
        )
    return open(path, encoding="utf-16" if is_utf_16 else "utf-8-sig", newline="")


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
        line = next((line for line in file if line.strip()), "")
        is_list = line.lstrip().startswith("[")
        lines = parsed(line + file.read(), 1) if is_list else itertools.chain([line] if line else [], file)
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


def _cells(path: str, account: Account) -> tuple[list[str], Iterator[list[str]]]:
    """Return the names of the columns of a CSV file, and its rows."""
    csv.field_size_limit(16 * MAX_BYTES["caption"])
    with _open_text(path) as file:
        header = next((line for line in file if line.strip()), "")
    separator = separator_of(header)
    try:
        names = [name.strip() for name in next(csv.reader([header], delimiter=separator, skipinitialspace=True), [])]
    except csv.Error as error:
        raise DataError(f"cannot read {path}: its first line: {error}") from error
    quoted = _has_quoted_cells(path, separator, len(names)) if names else False
    return names, _checked_rows(path, separator, len(names), quoted, account)


def _checked_rows(path: str, separator: str, width: int, quoted: bool, account: Account) -> Iterator[list[str]]:
    """Yield the rows after the first one. Raises DataError for a row with more cells than the first line has names."""
    numbered = 0
    """1 if the rows have an additional first cell with their number, as R writes them."""
    rows = itertools.dropwhile(lambda row: not row[1], _split_rows(path, separator, quoted))
    for place, (line, cells) in enumerate(itertools.islice(rows, 1, None)):
        account.seen += 1
        if not cells:
            account.leave_out(BLANK, f"{path}, line {line}")
            continue
        if place == 0:
            numbered = int(len(cells) == width + 1 and cells[0].isdigit())
        if len(cells) > width + numbered:
            raise DataError(
                f"cannot read {path}: line {line} has more cells than the first line has names "
                f"({len(cells)} and {width}, separated by {separator!r}); {_QUOTES}"
            )
        yield cells[numbered:]


def _split_rows(path: str, separator: str, quoted: bool, lines: list[str] | None = None) -> Iterator[tuple[int, list]]:
    """Yield line number and cells of every row; blank lines have no cells. `lines` receives the lines of the row."""
    with _open_text(path) as file:
        if not quoted:
            for number, line in enumerate(file, start=1):
                yield number, [cell.strip() for cell in line.split(separator)] if line.strip(" \r\n") else []
            return

        def noted() -> Iterator[str]:
            for line in file:
                if lines is not None:
                    lines.append(line)
                yield line

        reader = csv.reader(noted(), delimiter=separator, strict=True, skipinitialspace=True)
        for cells in reader:
            yield reader.line_num, [] if not any(cells) and len(cells) < 2 else cells


def _has_quoted_cells(path: str, separator: str, width: int) -> bool:
    """Return whether quotation marks enclose cells; False: they are text. Raises DataError if this is not clear."""
    with _open_text(path) as file:
        if not any('"' in line for line in file):
            return False
    lines: list[str] = []
    problem, number = "", 0
    try:
        for number, _ in _split_rows(path, separator, True, lines):  # noqa: B007
            if len(lines) > 1 and sum(_looks_like_a_row(line, separator, width, path) for line in lines) > 1:
                problem = "a cell contains other rows"
                break
            lines.clear()
    except csv.Error as error:
        problem, number = str(error), number + 1
    if not problem:
        return True
    for place, cells in _split_rows(path, separator, False):
        enclosed = any(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
        if cells and (len(cells) != width or enclosed):
            raise DataError(
                f"cannot read {path}: quotation marks from line {number} on do not enclose cells ({problem}), and line "
                f"{place} {'has enclosed cells' if enclosed else f'has {len(cells)} cells, not {width}'}; {_QUOTES}"
            )
    _logger.warning("%s: quotation marks are read as text, because they do not enclose cells (%s)", path, problem)
    return False


def _looks_like_a_row(line: str, separator: str, width: int, path: str) -> bool:
    """Return whether a line has as many cells as a row, and one of them is the name of an image."""
    cells = [cell.strip().strip('"') for cell in line.split(separator)]
    folder = os.path.dirname(path)
    return len(cells) == width and any(
        cell.lower().endswith(_IMAGE_SUFFIXES) or os.path.isfile(os.path.join(folder, cell)) for cell in cells if cell
    )
