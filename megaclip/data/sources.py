"""Open image-text pairs, whatever they are stored in, as one dataset with dense, stable ids.

`open_pairs(specs)` makes one *source* per spec (tar shards here, tables in tables.py) and lays them end to end: a
sample's id is its source's base plus its row. Add a kind of source by giving it the members of `Source` and a line in
`_open_source`. Opening needs no process group, and refuses what it cannot read before a run begins.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megaclip.data.batch import RawSample
from megaclip.data.order import MixtureOrder, SampleOrder, block_quotas
from megaclip.data.patterns import expand_pattern
from megaclip.data.tables import TABLE_TYPES, HubTable, Table, open_table
from megaclip.data.tar_shards import CAPTION_EXTENSIONS, IMAGE_EXTENSIONS, TarShards
from megaclip.errors import DataError

DATASET_TYPES = ("auto", "webdataset", *TABLE_TYPES)
_TYPE_OF_SUFFIX = {
    ".tar": "webdataset",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
}


class Source(Protocol):
    """What every kind of storage offers."""

    kind: str
    shard_sizes: np.ndarray
    """(S,) int64 samples per shard; the order permutes shards, then windows of samples."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> RawSample:
        """The undecoded sample; raises BadSample."""

    def caption(self, row: int) -> str:
        """Only its caption; raises BadSample."""

    def shard_name(self, row: int) -> str:
        """The file that holds `row`, for messages."""

    def manifest(self) -> list[list[Any]]:
        """What must be the same when a run resumes: [name, bytes, samples] per file."""

    @property
    def problems(self) -> dict[str, int]:
        """What is known to be wrong before any sample is read, by kind."""


class PairDataset:
    """Sources laid end to end. Safe to fork and to pickle; reading is by id, in any order."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] | None = None) -> None:
        if weights and len(weights) != len(sources):
            raise DataError(f"a mixture needs one weight per dataset: {len(sources)} datasets, {len(weights)} weights")
        self._sources = list(sources)
        self.weights = list(weights) if weights else None
        if self.weights:
            block_quotas(self.weights)
        self._ends = np.cumsum([len(source) for source in sources])
        self.shard_sizes = np.concatenate([source.shard_sizes for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, sample_id: int) -> RawSample:
        """The undecoded sample with this id, 0..len-1; raises BadSample."""
        source, row = self._place(sample_id)
        return source.read(row)

    def caption(self, sample_id: int) -> str:
        """Only the caption of a sample; raises BadSample."""
        source, row = self._place(sample_id)
        return source.caption(row)

    def shard_name(self, sample_id: int) -> str:
        """The file that holds a sample, for messages."""
        source, row = self._place(sample_id)
        return source.shard_name(row)

    def siblings(self, sample_id: int) -> tuple[int, int]:
        """First id and number of the samples of the same source: a substitute is taken from these."""
        number = int(np.searchsorted(self._ends, sample_id, side="right"))
        size = len(self._sources[number])
        return int(self._ends[number]) - size, size

    def order(self, *, seed: int, shard_order: str = "shuffled") -> SampleOrder | MixtureOrder:
        """The order of training: one for all sources by size, or a mixture with the given weights."""
        if not self.weights:
            return SampleOrder(self.shard_sizes, seed=seed, shard_order=shard_order)
        parts = [
            SampleOrder(source.shard_sizes, seed=seed + number, shard_order=shard_order)
            for number, source in enumerate(self._sources)
        ]
        return MixtureOrder(parts, self.weights, seed=seed)

    @property
    def problems(self) -> dict[str, int]:
        """What is known to be wrong before any sample is read, by kind."""
        totals: dict[str, int] = {}
        for source in self._sources:
            for kind, count in source.problems.items():
                totals[kind] = totals.get(kind, 0) + count
        return totals

    def manifest(self) -> dict[str, Any]:
        """What must be the same when a run resumes, as JSON would give it back; it does not name absolute paths."""
        sources = [{"type": source.kind, "files": source.manifest()} for source in self._sources]
        return {"samples": len(self), "weights": self.weights, "sources": sources}

    def _place(self, sample_id: int) -> tuple[Source, int]:
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample id {sample_id} is outside 0..{len(self) - 1}")
        number = int(np.searchsorted(self._ends, sample_id, side="right"))
        source = self._sources[number]
        return source, sample_id - (int(self._ends[number]) - len(source))


def open_pairs(
    specs: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    dataset_type: str = "auto",
    image_key: str | None = None,
    caption_key: str | None = None,
) -> PairDataset:
    """Open training or validation pairs.

    specs: each a brace or glob pattern of tar, parquet, CSV, TSV or JSON-lines files, a folder (of such files, of
    images with a metadata file, or saved by HF `datasets`), or `hf:NAME[:SPLIT[:CONFIG]]` for a hub dataset.
    weights: one per spec for a mixture; without, every sample comes once per epoch.
    image_key, caption_key: column names, or member extensions of tar shards ("jpg;png"); found by name when None.
    Raises DataError when anything is missing or not understood.
    """
    if not specs:
        raise DataError("no data: expected at least one pattern, folder or hf:NAME")
    if dataset_type not in DATASET_TYPES:
        raise DataError(f"dataset type {dataset_type!r} is not one of {', '.join(DATASET_TYPES)}")
    return PairDataset([_open_source(spec, dataset_type, image_key, caption_key) for spec in specs], weights)


def check_manifest(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise DataError that names the first difference between a checkpoint's data and today's."""
    if saved == current:
        return
    advice = "resume with the data of the checkpoint, or begin a new run"
    before, now = saved.get("sources", []), current["sources"]
    if len(before) != len(now):
        raise DataError(f"the checkpoint was trained on {len(before)} datasets, this run has {len(now)}; {advice}")
    if saved.get("weights") != current["weights"]:
        raise DataError(f"the mixture weights were {saved.get('weights')}, now {current['weights']}; {advice}")
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        if old["type"] != new["type"]:
            raise DataError(f"dataset {number} was of type {old['type']}, now {new['type']}; {advice}")
        if len(old["files"]) != len(new["files"]):
            was, is_ = len(old["files"]), len(new["files"])
            raise DataError(f"dataset {number} had {was} files, now {is_}; {advice}")
        for old_file, new_file in zip(old["files"], new["files"], strict=True):
            if old_file != new_file:
                fields = ("name", "bytes", "samples")
                then = ", ".join(f"{field} {value}" for field, value in zip(fields, old_file, strict=True))
                today = ", ".join(f"{field} {value}" for field, value in zip(fields, new_file, strict=True))
                raise DataError(f"dataset {number}: a file was {then}; now {today}; {advice}")
    raise DataError(f"the data differs from the checkpoint's; {advice}")


def _open_source(spec: str, dataset_type: str, image_key: str | None, caption_key: str | None) -> Source:
    if spec.startswith("hf:") or dataset_type == "hub":
        return Table(HubTable.parse(spec.removeprefix("hf:")).load(), spec, "hub", None, image_key, caption_key)
    paths = expand_pattern(spec)
    if dataset_type == "auto":
        dataset_type, paths = _recognise(spec, paths)
    elif len(paths) == 1 and os.path.isdir(paths[0]) and dataset_type in _TYPE_OF_SUFFIX.values():
        paths = _files_of_type(paths[0], dataset_type)
    if dataset_type == "webdataset":
        return TarShards(
            paths,
            image_extensions=_extensions(image_key) or IMAGE_EXTENSIONS,
            caption_extensions=_extensions(caption_key) or CAPTION_EXTENSIONS,
        )
    return open_table(paths, dataset_type, image_key, caption_key)


def _extensions(key: str | None) -> tuple[str, ...]:
    return tuple(part.strip().lstrip(".").lower() for part in key.split(";")) if key else ()


def _recognise(spec: str, paths: list[str]) -> tuple[str, list[str]]:
    """The type of a spec's files, and the files: a folder stands for the files of one known type in it."""
    if len(paths) == 1 and os.path.isdir(paths[0]):
        folder = paths[0]
        if any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json")):
            return "saved", paths
        if not glob.glob(os.path.join(glob.escape(folder), "metadata.*")):
            for dataset_type in ("webdataset", "parquet", "json", "csv"):
                files = _files_of_type(folder, dataset_type, may_be_empty=True)
                if files:
                    return dataset_type, files
        return "imagefolder", paths
    types = {_TYPE_OF_SUFFIX.get(Path(path).suffix.lower()) for path in paths}
    found = types.pop() if len(types) == 1 else None
    if found is None:
        known = ", ".join(_TYPE_OF_SUFFIX)
        raise DataError(f"data {spec!r}: files of one known type expected ({known}), or say --dataset-type")
    return found, paths


def _files_of_type(folder: str, dataset_type: str, *, may_be_empty: bool = False) -> list[str]:
    files = sorted(
        os.path.join(folder, name)
        for name in os.listdir(folder)
        if _TYPE_OF_SUFFIX.get(Path(name).suffix.lower()) == dataset_type
    )
    if not files and not may_be_empty:
        raise DataError(f"the folder {folder} has no files of type {dataset_type}")
    return files
