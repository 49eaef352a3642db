"""Find the captions of a sample in text files, or in fields of JSON files, and decode them.

`--caption-key` gives one key, or several with weights ("short:0.7,long:0.3") or in turn ("short,long"). A table has a
column for each key. Members of tar shards and files in a folder are found by their extensions. A key names one or more,
separated by semicolons: "alt" is a text file `.alt` or, in samples without one, the field "alt" of a `.json` file;
"json.alt" is only the field. Text is UTF-8. A caption with other bytes is a bad sample, because replacing the bytes
would change the caption.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import dataclasses
import html
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megaclip.data.batch import BadSample, Captions, WeightedKey
from megaclip.errors import DataError, shortened
from megaclip.logging import format_count

TEXT_EXTENSIONS = ("txt", "caption", "text")
"""Extensions of text files that hold captions, when --caption-key is not given."""
JSON = "json"
_JSON_CHECKED = 64
"""Number of JSON files that are searched for the fields of each key. They are evenly spread, the first one first."""
_T = TypeVar("_T")
_ABSENT = ("missing caption", "empty caption")
"""Kinds of bad samples that mean, with several keys, that the sample does not have a key."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_ITEM = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None)\s*,?\s*""")
"""An item of a list as pandas writes it, and the separator. A list that pandas read from Parquet has no commas."""
_SHOWS_NOTHING = " \u115f\u1160\u2800\u3164\uffa0"
"""Printable characters that show nothing: a space, Hangul fillers and the Braille pattern without dots."""
_WEIGHTED = re.compile(r"(.+?):\s*([+-]?(?:[0-9.][0-9.eE+-]*|nan|inf(?:inity)?))\s*(?:,|$)", re.IGNORECASE)
"""A key and its weight. A key ends only before a weight, so it may contain colons and commas."""


def weighted_keys(value: str | None) -> list[WeightedKey]:
    """Parse the value of --caption-key: KEY, or KEY,KEY, or KEY:WEIGHT,KEY:WEIGHT.

    A key that contains commas, or that ends in a colon and a number, must have a weight ("a,b:1"). Raises DataError.
    """
    if not value:
        return [WeightedKey()]
    found = list(_WEIGHTED.finditer(value))
    if found and (found[-1].end() < len(value) or re.search(r":\s*[0-9.]+\s*;", value)):
        raise DataError(f"--caption-key {value!r} gives some keys no weight; write KEY:WEIGHT,KEY:WEIGHT or KEY,KEY")
    keys = [WeightedKey(match[1].strip(), _weight(match[2], value)) for match in found]
    keys = keys or [WeightedKey(name.strip()) for name in value.split(",")]
    if not all(key.name for key in keys) or len({key.name for key in keys}) < len(keys):
        raise DataError(f"--caption-key {value!r} has an empty or a repeated key; name every key once")
    return keys


def _weight(text: str, value: str) -> float:
    """Return a weight. value: that of --caption-key. Raises DataError unless it is positive and finite."""
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise DataError(f"--caption-key {value!r} has the weight {text}; use a positive, finite number")
    return weight


def captions_of(keys: Sequence[WeightedKey], read: Callable[[int], tuple[str, ...]]) -> Captions:
    """Return the captions of a sample under all keys that it has.

    read: returns the captions under the key with this number, or raises BadSample. Raises BadSample if the sample has
    none of the keys, or if the captions under one of them cannot be read.
    """
    if len(keys) == 1:
        return Captions(read(0))
    texts, shares, absent = list[str](), list[tuple[WeightedKey, int]](), list[BadSample]()
    for number, key in enumerate(keys):
        try:
            given = read(number)
            found = [text for text in given if not is_blank(text)]
            if not found:
                raise empty_caption(f"--caption-key {key.name}", *given)
        except BadSample as bad:
            if bad.kind not in _ABSENT:
                raise
            absent.append(bad)
            continue
        texts += found
        shares.append((key, len(found)))
    if not texts:
        raise absent[-1]
    return Captions(tuple(texts), tuple(shares))


@dataclasses.dataclass(frozen=True)
class CaptionKeys:
    """Extensions of files with captions under one key, and fields of JSON files. The first in a sample is used."""

    extensions: tuple[str, ...] = TEXT_EXTENSIONS
    """Extensions, lower-case and without a dot. "json" comes last, and only if `fields` is not empty."""
    fields: tuple[str, ...] = ()
    """Names of fields of JSON files."""
    flag: str = "--caption-key"
    """Flag that selects other extensions, for messages. Empty: there is no such flag."""
    key: WeightedKey = dataclasses.field(default_factory=WeightedKey)

    @classmethod
    def parse(cls, weighted: WeightedKey) -> CaptionKeys:
        """Return the extensions and fields of one key of --caption-key. Raises DataError for whole JSON files."""
        if not (key := weighted.name):
            return cls()
        parts = [part.strip().removeprefix(".") for part in key.split(";") if part.strip(" .")]
        texts = [part.lower() for part in parts if not part.startswith("json.")]
        if any(text.rpartition(".")[2] == JSON for text in texts):
            raise DataError(f"--caption-key {key!r} names whole JSON files; add the field, such as json.caption")
        fields = tuple(part.removeprefix("json.") for part in parts)
        return cls((*texts, JSON), fields, key=weighted)

    def name(self, extension: str) -> str:
        """Return the extension as users write it, with its fields if it is JSON: ".txt" or "json.caption"."""
        return f"json.{' or '.join(self.fields)}" if extension == JSON else f".{extension}"

    def decode(self, content: bytes, extension: str, key: str) -> tuple[str, ...]:
        """Return the caption or captions in a file with this extension. key: origin of the sample. Raises BadSample."""
        text = decoded(content, key)
        if extension != JSON or not self.fields:
            return (text,)
        record = json_record(text)
        if record is None:
            raise BadSample("undecodable JSON", f"{key}: expected one JSON object")
        value = next((record[field] for field in self.fields if record.get(field) is not None), None)
        texts = list(filter(is_text, values_of(value)))
        if not texts:
            raise BadSample("missing caption", f"{key}: no text in the field {' or '.join(self.fields)} of its JSON")
        return cleaned(texts, key)


def decoded(content: bytes, key: str) -> str:
    """Return the text in `content`. key: origin of the sample. Raises BadSample if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        source = " from UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
        raise BadSample(
            "caption is not UTF-8", f"{key}: byte 0x{byte:02x} at position {error.start}; convert it{source} to UTF-8"
        ) from error


def cleaned(texts: Sequence[str], key: str) -> tuple[str, ...]:
    """Return the captions that are not empty, with every run of white space replaced by one space.

    key: origin of the sample. Raises BadSample if all of them are empty.
    """
    captions = tuple(" ".join(text.split()).strip("\0") for text in texts if not is_blank(text))
    if not captions:
        raise empty_caption(key, *texts)
    return captions


def empty_caption(key: str, *texts: str) -> BadSample:
    """Return the error of a sample with blank captions only. key: its origin."""
    shows_nothing = "only spaces, control characters or HTML spaces such as &nbsp;"
    return BadSample("empty caption", f"{key}: {shows_nothing if any(texts) else 'no text'}")


def is_blank(text: str) -> bool:
    """Return whether a caption shows nothing when it is cleaned: only spaces, control characters or &nbsp;."""
    text = html.unescape(html.unescape(text))
    return not any(character.isprintable() and character not in _SHOWS_NOTHING for character in text)


def is_text(value: Any) -> bool:
    """Return whether a value is text that has a UTF-8 encoding. Half of a surrogate pair, as JSON allows, has none."""
    return isinstance(value, str) and (value.isascii() or _SURROGATE.search(value) is None)


def values_of(value: Any) -> Sequence[Any]:
    """Return the values of a list, or [value]. A text may be a list of texts, in JSON or as pandas writes it."""
    if isinstance(value, list | tuple):
        return value
    is_list = isinstance(value, str) and value.startswith("[") and value.endswith("]")
    for parse in (json.loads, lambda text: ast.literal_eval(_ITEM.sub(r"\1,", text))) if is_list else ():
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            texts = parse(value)
            if all(isinstance(text, str | None) for text in texts):
                return texts
    return [value]


def json_record(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in `text`, or None if it holds something else."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError for thousands of nested brackets
        return None
    return record if isinstance(record, dict) else None


def text_fields(record: dict[str, Any]) -> str:
    """Return the names of the fields of `record` that hold text, for a message."""
    names, nested = ([name for name, value in record.items() if isinstance(value, kind)] for kind in (str | list, dict))
    inside = f" (fields inside {shortened(', '.join(nested))} are not read; write them outside)" if nested else ""
    return (f"the fields {shortened(', '.join(names))}" if names else "no fields with text") + inside


def check_fields(
    keys: CaptionKeys, places: Sequence[_T], record: Callable[[_T], dict[str, Any]], name: Callable[[_T], str]
) -> None:
    """Raise DataError if none of the JSON files has a field of `keys`. At most `_JSON_CHECKED` of them are read.

    record, name: functions of the place of a file that return its JSON object, and its name for the error.
    """
    count = min(_JSON_CHECKED, len(places))
    records = [record(places[number * len(places) // count]) for number in range(count)]
    if records and not any(field in found for found in records for field in keys.fields):
        raise DataError(
            f"--caption-key: {name(places[0])} and {format_count(count - 1, 'more JSON file')} have no field "
            f"{' or '.join(keys.fields)}; the first one has {text_fields(records[0])}"
        )
