"""Interface of the sources of image-text pairs, and the files that they read, with limits of their size."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from megaclip.data.batch import BadSample, Captions, RawSample
from megaclip.errors import DataError, shortened
from megaclip.logging import get_logger

DEFAULT_MAX_BAD_FRACTION = 0.01
"""Largest fraction of bad samples in evaluations and in loaders outside a run. A run has --max-bad-fraction."""
MAX_BYTES = {"image": 256 << 20, "caption": 1 << 20, "field": 64 << 20}
"""Largest size of an image file, of a text file, a JSON file or a caption in a table, and of an extra field."""

HIDDEN = "hidden files"
DOTTED = "a dot before the extension (webdataset ends the name of a sample at its first dot; rename them)"
LINK = "a link in a tar shard (write the shard with tar --dereference --hard-dereference)"
REPEATED = "the name of an earlier member of the shard"
SPARE = "another image or caption of a sample"
UNREADABLE = "an image format that the installed Pillow cannot read, such as HEIC (convert them to JPEG)"
ALONE = "a caption without an image"
OTHER = "neither an image nor a caption"
BESIDE = "a file of another type in the folder of the data"
"""Reasons to leave out a file, member or row."""

_MAX_NAMES = {True: 1000, False: 10}
"""Largest number of names per reason in an account: of possible samples, and of other parts."""
_T = TypeVar("_T")
_logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class ReadingOptions:
    """How the samples of a dataset are found. The flags of these names set the first four."""

    dataset_type: str = "auto"
    """One of DATASET_TYPES. "auto" recognises the type by file names."""
    image_key: str | None = None
    """Column of the images, or their extensions in tar shards and folders ("jpg;png"). Default: the usual names."""
    caption_key: str | None = None
    """Columns of the captions, or their extensions or JSON fields, as captions.py describes. Default: usual names."""
    image_root: str | None = None
    """Folder to which the image paths in tables are relative. Default: the table's, or else the working directory."""
    id_column: str | None = None
    """Column of a table with the ids of the pairs."""
    field_keys: dict[str, str] = dataclasses.field(default_factory=dict)
    """Extra fields: name -> column of a table, or extension of a member of a tar shard."""


@dataclasses.dataclass
class Account:
    """Number of files, members or rows that a source has seen, and what became of them.

    A source counts a part in `see`, and then either in `in_samples` or with `leave_out`. `report` requires the sum.
    """

    unit: str = "files"
    """What is counted: files, members of tar shards, or rows."""
    seen: int = 0
    in_samples: int = 0
    """Number of parts in samples, including samples that are known to be bad."""
    left_out: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """Reason -> [number of parts, number of possible samples among them, names of these, or else of the first parts]"""
    problems: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of problems that were found when the source was opened, by kind, such as samples without a caption."""

    def see(self, parts: Iterable[_T]) -> Iterator[_T]:
        """Yield the parts and count them."""
        for part in parts:
            self.seen += 1
            yield part

    def leave_out(self, reason: str, name: str, *, lost: bool = False) -> None:
        """Count a part that is in no sample. lost: a sample is lost with it."""
        self._add(reason, 1, int(lost), [name])

    def add(self, other: Account, place: str) -> None:
        """Add the parts and problems of another account. place: precedes the names of its parts."""
        self.seen += other.seen
        self.in_samples += other.in_samples
        for reason, (count, lost, names) in other.left_out.items():
            self._add(reason, count, lost, [f"{place}/{name}" for name in names])
        for kind, count in other.problems.items():
            self.problems[kind] = self.problems.get(kind, 0) + count

    def _add(self, reason: str, count: int, lost: int, names: list[str]) -> None:
        old_count, old_lost, old_names = self.left_out.get(reason, (0, 0, []))
        if bool(lost) == bool(old_lost) or not old_names:
            names = old_names + names[: _MAX_NAMES[lost > 0] - len(old_names)]
        elif old_lost:
            names = old_names
        self.left_out[reason] = [old_count + count, old_lost + lost, names]

    @property
    def lost(self) -> int:
        """Number of possible samples that are left out."""
        return sum(lost for _, lost, _ in self.left_out.values())

    def sum(self) -> str:
        """Return the sum in one line: parts seen = parts in samples + parts left out, by reason with an example."""
        return f"{self.seen:,} {self.unit} seen = {self.in_samples:,} in samples" + "".join(
            f" + {count:,} left out{f' with {lost:,} possible samples' * bool(lost)}: {reason}, "
            f"first {shortened(repr(names[0]))}"
            for reason, (count, lost, names) in sorted(self.left_out.items(), key=lambda item: -item[1][1])
        )

    def reason_to_refuse(self, samples: int, limit: float) -> str:
        """Return the reasons why too many of the possible samples are left out, or "". limit: --max-bad-fraction."""
        if self.lost <= limit * (samples + self.lost):
            return ""
        return f"{self.lost:,} of {samples + self.lost:,} possible samples are left out" + "".join(
            f", {lost:,} for {reason}, first {shortened(repr(names[0]))}"
            for reason, (_, lost, names) in self.left_out.items()
            if lost
        )

    def report(self, what: str, samples: int, limit: float | None) -> None:
        """Log the sum. Raises DataError if the possible samples that are left out exceed `limit`.

        what: the data, for the message. limit: --max-bad-fraction; None: there is no such flag.
        """
        assert self.seen == self.in_samples + sum(count for count, *_ in self.left_out.values()), (what, self)
        bound = DEFAULT_MAX_BAD_FRACTION if limit is None else limit
        if reason := self.reason_to_refuse(samples, bound):
            setting = "the limit" if limit is None else "--max-bad-fraction"
            raise DataError(
                f"{what}: {reason}; that is more than {setting} {bound:g}: repair the data"
                + ("" if limit is None else f", or set a larger {setting}")
            )
        bad = "".join(f", {count:,} {kind}" for kind, count in self.problems.items())
        log = _logger.warning if self.lost or bad else _logger.info
        log("%s: %s samples%s; %s", what, f"{samples:,}", bad, self.sum())


class Source(Protocol):
    """Members of image-text pairs of any kind of storage. Rows are read by number, 0..len-1, in any order."""

    kind: str
    shard_sizes: np.ndarray
    """Number of samples per shard, (S,) int64. The order permutes shards, then windows of samples."""
    account: Account

    def __len__(self) -> int: ...

    def read(self, row: int) -> RawSample:
        """Return the undecoded sample. Raises BadSample."""

    def captions(self, row: int) -> Captions:
        """Return only the captions of a sample. Raises BadSample."""

    def shard_name(self, row: int) -> str:
        """Return the name of the file that holds `row`, for messages."""

    @property
    def manifest(self) -> list[list[Any]]:
        """[name, bytes, samples] per file. A resumed run requires an equal one."""

    @property
    def checksum(self) -> str:
        """Checksum of the samples in their order. A resumed run requires an equal one."""

    @property
    def columns(self) -> dict[str, str]:
        """Columns, extensions or fields that images ("image") and captions ("caption") come from, for a report."""

    @property
    def image_files(self) -> Iterable[str | Path]:
        """Local files that hold the images."""


def counted(names: Counter[str]) -> str:
    """Return names with their counts for a report, the most frequent first."""
    return ", ".join(f"{name} ({count:,})" for name, count in names.most_common())


def check_size(what: str, size: int, key: str) -> None:
    """Raise BadSample for an "image" or "caption" with too many bytes. key: origin of the sample."""
    if size > MAX_BYTES[what]:
        raise BadSample(f"{what} too large", f"{key}: {size} bytes; expected at most {MAX_BYTES[what]:,}")


def read_file(path: str | os.PathLike, what: str, key: str, where: str = "") -> bytes:
    """Return the bytes of an "image" or "caption" file. Raises BadSample if it is missing, too large, or a device.

    key, where: origin of the sample, and places that were searched, for the message.
    """
    try:
        if not os.path.isfile(path):  # a device or a pipe could block or never end
            raise BadSample(f"missing {what}", f"{key}: {shortened(os.fspath(path))!r} is not a file{where}")
        check_size(what, os.path.getsize(path), key)
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise BadSample(f"missing {what}", f"{key}: {error}") from error
