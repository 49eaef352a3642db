"""Find the caption of a sample in a text file, or in a field of a JSON file, and decode it.

Members of tar shards and files in a folder are found by their extensions. `--caption-key` names one or more, separated
by semicolons: "alt" is a text file `.alt` or, in samples without one, the field "alt" of a `.json` file; "json.alt" is
only the field. Text is UTF-8. A caption with other bytes is a bad sample, because replacing the bytes would change the
caption.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable
from typing import Any

from megaclip.data.batch import BadSample
from megaclip.errors import DataError, shortened

TEXT_EXTENSIONS = ("txt", "caption", "text")
"""Extensions of text files that hold captions, when --caption-key is not given."""
JSON = "json"
SHOWS_NOTHING = "only spaces, control characters or HTML spaces such as &nbsp;"
"""Content of an empty caption, for messages."""


@dataclasses.dataclass(frozen=True)
class CaptionKeys:
    """Extensions of the files that hold captions, and fields of JSON files. The first one that a sample has is used."""

    extensions: tuple[str, ...] = TEXT_EXTENSIONS
    """Extensions, lower-case and without a dot. "json" comes last, and only if `fields` is not empty."""
    fields: tuple[str, ...] = ()
    """Names of fields of JSON files."""
    flag: str = "--caption-key"
    """Flag that selects other extensions, for messages. Empty: there is no such flag."""

    @classmethod
    def parse(cls, key: str | None) -> CaptionKeys:
        """Parse the value of --caption-key. Raises DataError for whole JSON files."""
        if not key:
            return cls()
        parts = [part.strip().removeprefix(".") for part in key.split(";") if part.strip(" .")]
        texts = [part.lower() for part in parts if not part.startswith("json.")]
        if any(text.rpartition(".")[2] == JSON for text in texts):
            raise DataError(f"--caption-key {key!r} names whole JSON files; add the field, such as json.caption")
        fields = tuple(part.removeprefix("json.") for part in parts)
        return cls((*texts, JSON), fields)

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
        values = value if isinstance(value, list) else [value]
        texts = [item for item in values if isinstance(item, str)]
        if not texts:
            raise BadSample("missing caption", f"{key}: no text in the field {' or '.join(self.fields)} of its JSON")
        return cleaned(texts, key)


TEXT_FILES = CaptionKeys()
"""Captions in text files: the default."""


def decoded(content: bytes, key: str) -> str:
    """Return the text in `content`. key: origin of the sample. Raises BadSample if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise BadSample(
            "caption is not UTF-8", f"{key}: byte 0x{byte:02x} at position {error.start}; convert it to UTF-8"
        ) from error


def cleaned(texts: Iterable[str], key: str) -> tuple[str, ...]:
    """Return the captions that are not empty, with every run of white space replaced by one space.

    key: origin of the sample. Raises BadSample if all of them are empty.
    """
    captions = tuple(" ".join(text.split()).strip("\0") for text in texts if not is_blank(text))
    if not captions:
        raise BadSample("empty caption", f"{key}: {SHOWS_NOTHING}")
    return captions


def is_blank(text: str) -> bool:
    """Return whether a caption shows nothing when it is cleaned: only spaces, control characters or &nbsp;."""
    return not any(character.isprintable() and character != " " for character in html.unescape(html.unescape(text)))


def json_record(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in `text`, or None if it holds something else."""
    try:
        record = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except (ValueError, RecursionError):  # RecursionError for thousands of nested brackets
        return None
    return record if isinstance(record, dict) else None


def text_fields(record: dict[str, Any]) -> str:
    """Return the names of the fields of `record` that hold text, for a message."""
    names = [name for name, value in record.items() if isinstance(value, str | list)]
    return f"the fields {shortened(', '.join(names))}" if names else "no fields with text"


def check_fields(records: list[dict[str, Any]], keys: CaptionKeys, first: str) -> None:
    """Raise DataError if none of the records has one of the wanted fields. first: name of the first JSON file."""
    if not any(field in record for record in records for field in keys.fields):
        raise DataError(
            f"--caption-key: {first} and the next JSON files have no field {' or '.join(keys.fields)}; the first one "
            f"has {text_fields(records[0])}"
        )
