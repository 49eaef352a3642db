"""Open image-text pairs in any supported format as one dataset with dense, stable ids.

`open_pairs(specs)` opens one *source* per spec (tar shards in tar_shards.py, tables in tables.py) and concatenates
them: the id of a sample is the number of samples before its source plus its row. To add a kind of source, write a class
with the members of `source.Source` and open it in `_open_source`. Opening requires no process group, and reports data
that cannot be read before a run begins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaclip.data.batch import BadSample, Captions, RawSample
from megaclip.data.captions import JSON, TEXT_EXTENSIONS, CaptionKeys, weighted_keys
from megaclip.data.fields import Field, draw
from megaclip.data.image_folder import ImageFolder, walk_folder
from megaclip.data.images import IMAGE_EXTENSIONS, is_image_name
from megaclip.data.order import MixtureOrder, SampleOrder, block_quotas, mixture_batches
from megaclip.data.patterns import expand_pattern, refuse_special_files
from megaclip.data.remote import RemoteFile, copied, files_in, find_files, is_remote, look_up_all
from megaclip.data.source import BESIDE, Account, ReadingOptions, Source
from megaclip.data.tables import METADATA_FILES, TABLE_TYPES, Table, open_table
from megaclip.data.tar_shards import TarShards
from megaclip.errors import DataError, os_errors_as, public

DATASET_TYPES = ("auto", "webdataset", *TABLE_TYPES)
_TYPE_OF_SUFFIX = {
    ".tar": "webdataset",
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
"""Suffix -> type. In a folder, "auto" chooses the first of these types."""
FIRST_FIELDS = 8
"""Number of samples whose extra fields are read at start, until one has all of them."""
_IMG2DATASET_REPORT = re.compile(r"(\d+)(_stats)?")
"""Stems of the tables that img2dataset writes beside a folder of pictures. They contain no images."""
_COMPRESSED_TAR = re.compile(r"\.(tgz|tbz2|txz|tar\.(gz|bz2|xz|zst|lz4))$", re.IGNORECASE)


@dataclasses.dataclass(eq=False)
class PairDataset:
    """Concatenated sources. Forked processes read them too, by id, in any order."""

    sources: Sequence[Source]
    weights: Sequence[float] | None = None
    """One per source, for a mixture."""
    rows: Sequence[np.ndarray] | None = None
    """Rows of each source that the dataset has, (n,) int64, ascending. Default: all."""
    part: str = ""
    """Name of these rows."""
    caption_keys: list[list[Any]] = dataclasses.field(default_factory=list)
    """[key, weight] of each key of --caption-key, if there are several."""
    id_key: str = "caption"
    """Pairs are equal if this is equal: "caption", "image" (its file), or the name of a column of ids."""
    fields: dict[str, Field] = dataclasses.field(default_factory=dict)
    """Extra fields of every sample, by name."""

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.sources):
            raise DataError(
                f"--train-data-weights has {len(self.weights)} weights for {len(self.sources)} datasets; give one per "
                "dataset"
            )
        if self.weights:
            block_quotas(self.weights)
        self._shard_sizes = [source.shard_sizes for source in self.sources]
        if self.rows is not None:
            pairs = zip(self.rows, map(np.cumsum, self._shard_sizes), strict=True)
            self._shard_sizes = [np.diff(np.searchsorted(*pair), prepend=0) for pair in pairs]
        self.shard_sizes = np.concatenate(self._shard_sizes)
        self._sizes = [int(sizes.sum()) for sizes in self._shard_sizes]
        self._ends = np.cumsum(self._sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, sample_id: int) -> RawSample:
        """Return the undecoded sample with this id, 0..len-1. Raises BadSample."""
        source, row = self._place(sample_id)
        return source.read(row)

    def caption(self, sample_id: int) -> str:
        """Return only the caption of a sample, or its captions, one per line. Raises BadSample."""
        return "\n".join(self.captions(sample_id).texts)

    def captions(self, sample_id: int) -> Captions:
        """Return only the captions of a sample. Raises BadSample."""
        source, row = self._place(sample_id)
        return source.captions(row)

    def shard_name(self, sample_id: int) -> str:
        """Return the name of the file that holds a sample, for messages."""
        source, row = self._place(sample_id)
        return source.shard_name(row)

    def siblings(self, sample_id: int) -> tuple[int, int]:
        """Return the first id and the number of the samples of this sample's source. Substitutes are among these."""
        number = int(np.searchsorted(self._ends, sample_id, side="right"))
        return int(self._ends[number]) - self._sizes[number], self._sizes[number]

    def split(self, fraction: float) -> tuple[PairDataset, PairDataset]:
        """Return the dataset without a fraction of its samples, and these, which every run selects alike.

        Rows of a table that name one image stay together. Raises DataError if one of the parts has no samples.
        """
        held_out = [_held_out_rows(source, fraction) for source in self.sources]
        if any(rows.all() or not rows.any() for rows in held_out):
            raise DataError(
                f"--val-fraction is {fraction:g}, and an entry of the data has too few images for it; use a larger "
                "fraction, or other data for validation"
            )
        kept = [np.flatnonzero(~rows) for rows in held_out]
        training = dataclasses.replace(self, rows=kept, part=f" {fraction:g}")
        return training, PairDataset(self.sources, rows=list(map(np.flatnonzero, held_out)), part=training.part)

    def order(self, batch: int, *, seed: int, shard_order: str = "shuffled") -> SampleOrder | MixtureOrder:
        """Return the order of training for contrastive batches of `batch` samples: a mixture if there are weights."""
        if not self.weights:
            return SampleOrder(self.shard_sizes, seed=seed, batch_sizes=[batch], shard_order=shard_order)
        columns = mixture_batches(self.weights, batch).T
        parts = [
            SampleOrder(sizes, seed=seed + number, batch_sizes=batch_sizes, shard_order=shard_order)
            for number, (sizes, batch_sizes) in enumerate(zip(self._shard_sizes, columns, strict=True))
        ]
        return MixtureOrder(parts, seed=seed)

    def remote_shards(self, cache: Path | None) -> dict[int, RemoteFile]:
        """Return the remote tar shards by their number, and read those in the folder `cache` from there from now on."""
        found, first = dict[int, RemoteFile](), 0
        for source, sizes in zip(self.sources, self._shard_sizes, strict=True):
            if isinstance(source, TarShards) and source.remote is not None:
                source.remote.cache, files = cache, source.remote.files
                found |= {first + number: files[number] for number in np.flatnonzero(sizes).tolist()}
            first += len(sizes)
        return found

    def image_times(self) -> str:
        """Return a checksum of the sizes of the local files with the images and of the times of their last change."""
        sums = hashlib.sha256()
        for path in itertools.chain.from_iterable(source.image_files for source in self.sources):
            facts = os.stat(path) if os.path.exists(path) else None  # a missing file is a bad sample
            sums.update(f"{facts and (facts.st_size, facts.st_mtime_ns)}\n".encode())
        return sums.hexdigest()[:16]

    @property
    def accounts(self) -> list[Account]:
        """Number of files, members or rows of each source, and what became of them."""
        return [source.account for source in self.sources]

    def manifest(self) -> dict[str, Any]:
        """Return what must be equal in a resumed run, without absolute paths. JSON does not change it."""
        sources: list[dict[str, Any]] = [
            {"type": source.kind, "files": source.manifest, "checksum": source.checksum + self.part}
            for source in self.sources
        ]
        for source, described in zip(self.sources, sources, strict=True):
            if isinstance(source, TarShards) and source.remote is not None:
                described["versions"] = {str(file): file.version for file in source.remote.files}
        return {
            "samples": len(self),
            "weights": list(self.weights) if self.weights else None,
            "caption_keys": self.caption_keys,
            "sources": sources,
        }

    def _place(self, sample_id: int) -> tuple[Source, int]:
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample id is {sample_id}; use 0 to {len(self) - 1}")
        number = int(np.searchsorted(self._ends, sample_id, side="right"))
        row = sample_id - int(self._ends[number]) + self._sizes[number]
        return self.sources[number], row if self.rows is None else int(self.rows[number][row])


def _held_out_rows(source: Source, fraction: float) -> np.ndarray:
    """Return which rows are held out, (len,) bool: by a hash of the image path, or else of the row number."""
    paths = source.image_paths() if isinstance(source, Table) else None
    keys = (str(row).encode() for row in range(len(source))) if paths is None else paths
    return np.fromiter(map(zlib.crc32, keys), np.int64, len(source)) < fraction * 2**32


def open_pairs(
    specs: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    dataset_type: str = "auto",
    image_key: str | None = None,
    caption_key: str | None = None,
    image_root: str | None = None,
    id_key: str = "caption",
    max_bad_fraction: float | None = None,
    fields: Mapping[str, Field] | None = None,
) -> PairDataset:
    """Open training or validation pairs, and log how much of each source is in samples, and what is left out.

    specs: each a brace or glob pattern of tar, parquet, CSV, TSV or JSON-lines files, a folder (of such files, of
    images with a metadata file or each with a caption file, or saved by HF `datasets`), the URL of such files or of
    their folder, or `hf:NAME[:SPLIT[:CONFIG]]` for a hub dataset.
    weights: one per spec, for a mixture. Default: every sample comes once per epoch.
    dataset_type, image_key, caption_key, image_root: `ReadingOptions` describes them.
    id_key: "caption", "image" or the column of a table: pairs with the same one have the same id.
    max_bad_fraction: largest fraction of possible samples that are left out. Default: DEFAULT_MAX_BAD_FRACTION.
    fields: extra fields of every sample, by name.
    Raises DataError if files are missing or cannot be read, or if too many possible samples are left out.
    """
    if not specs:
        raise DataError("no data was given; give at least one pattern, folder or hf:NAME")
    if dataset_type not in DATASET_TYPES:
        raise DataError(f"--dataset-type is {dataset_type!r}; use one of {', '.join(DATASET_TYPES)}")
    if image_root is not None and not os.path.isdir(image_root):
        raise DataError(f"--image-root {image_root!r} is not a folder; give the folder of the images")
    id_column = None if id_key in ("caption", "image") else id_key
    fields = dict(fields or {})
    keys_of_fields = {name: field.key for name, field in fields.items()}
    options = ReadingOptions(dataset_type, image_key, caption_key, image_root, id_column, keys_of_fields)
    sources = list[Source]()
    for spec in specs:
        with os_errors_as(DataError, f"cannot read data {public(spec)!r}"):
            sources.append(_open_source(spec, options))
        if id_column is not None and not isinstance(sources[-1], Table):
            raise DataError(
                f"data {spec!r} has no columns, and --id-key is {id_key!r}; use 'caption' or 'image', or convert the "
                "data to a table"
            )
    for spec, source in zip(specs, sources, strict=True):
        source.account.report(f"data {public(spec)!r}", len(source), max_bad_fraction)
    keys = [[key.name, key.weight] for key in weighted_keys(caption_key)]
    dataset = PairDataset(sources, weights, caption_keys=keys if len(keys) > 1 else [], id_key=id_key, fields=fields)
    if fields:
        _check_fields(dataset)
    return dataset


def check_image_root(root: str | None, *datasets: PairDataset | None) -> None:
    """Raise DataError if --image-root is `root` and no dataset has a table with paths that it applies to."""
    sources = (source for dataset in datasets if dataset is not None for source in dataset.sources)
    if root is not None and not any(isinstance(source, Table) and source.uses_image_root for source in sources):
        raise DataError(
            f"--image-root {root!r} has no effect: it is the folder of image paths in tables, and the data has no such "
            "table; leave it out"
        )


def _check_fields(dataset: PairDataset) -> None:
    """Raise DataError if every one of some samples has an extra field that is missing or of another form."""
    bad, rows = list[BadSample](), np.linspace(0, len(dataset) - 1, min(len(dataset), FIRST_FIELDS), dtype=np.int64)
    for row in rows.tolist():
        try:
            draw(dataset.fields, dataset.read(row), (0, 0, row))
            return
        except BadSample as found:
            bad.append(found)
    if all("field" in each.kind for each in bad):
        raise DataError(
            f"the extra fields of all of {len(bad)} samples are not as the objective declares them, such as "
            f"{bad[0].kind} ({bad[0].detail}); correct its Field (of a teacher: dims, views and captions), or the data"
        )


def data_files(spec: str) -> Sequence[str | RemoteFile]:
    """Return the files that a path or URL names, or a local folder itself. Raises DataError if one is missing."""
    return _remote_files(spec, "auto")[0] if is_remote(spec) else expand_pattern(spec)


def _remote_files(spec: str, kind: str) -> tuple[list[RemoteFile], list[str]]:
    """Return the files that a URL names, or those of one type in its folder, and the other files of the folder.

    kind: the type, or "auto" for the first known one.
    """
    listed = files_in(spec)
    if listed is None:
        return find_files(spec), []
    by_type = ([url for url in listed if _type_of(url) == type_] for type_ in _TYPE_OF_SUFFIX.values())
    chosen = next((urls for urls in by_type if urls and kind in ("auto", _type_of(urls[0]))), [])
    if not chosen:
        wanted = "a known type" if kind == "auto" else f"type {kind}"
        raise DataError(f"data {public(spec)!r}: the folder has no files of {wanted}, or cannot be listed")
    return look_up_all(chosen), sorted(map(public, {*listed} - {*chosen}))


def check_manifest(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise DataError, with the first difference, if the data of a checkpoint and the current data differ."""
    if saved == current:
        return
    for (what, was), (_, now) in zip(_facts(saved), _facts(current), strict=False):
        if was != now:
            raise DataError(
                f"the checkpoint was trained on data with {was} as {what}, now it is {now}; resume with the data of "
                "the checkpoint, or start a new run"
            )
    for number, (old, new) in enumerate(zip(saved["sources"], current["sources"], strict=True)):
        now = new.get("versions", {})
        for url, version in old.get("versions", {}).items():  # equal data may be at another place meanwhile
            if now.get(url, version) != version:
                raise DataError(
                    f"dataset {number}: {url} was changed after the checkpoint: it had version {version!r}, now "
                    f"{now[url]!r}; restore it, or start a new run"
                )


def _facts(manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of what a manifest records. Equal values so far mean equal names."""
    sources = manifest["sources"]
    yield "number of datasets", len(sources)
    yield "mixture weights", manifest["weights"] or "none"
    yield "several keys of --caption-key", manifest["caption_keys"] or "none"
    for number, source in enumerate(sources):
        yield f"type of dataset {number}", source["type"]
        yield f"number of files of dataset {number}", len(source["files"])
        for name, size, samples in source["files"]:
            yield f"a file of dataset {number}", f"{name}, {size} bytes, {samples} samples"
        yield f"checksum of the order and the captions of dataset {number}", source["checksum"]
    yield "number of samples", manifest["samples"]


def _open_source(spec: str, options: ReadingOptions) -> Source:
    """Return the source of a spec. Raises DataError, or OSError if the system refuses to read the data."""
    kind = options.dataset_type
    if (spec.startswith("hf:") and not is_remote(spec)) or kind == "hub":
        return open_table([spec.removeprefix("hf:")], "hub", options)
    files, beside = _remote_files(spec, kind) if is_remote(spec) else ([], [])
    paths = list(map(str, files)) or expand_pattern(spec)
    if len(paths) == 1 and os.path.isdir(paths[0]):
        kind, paths, beside = _look_into(paths[0], kind)
    else:
        _refuse_folders_and_compressed_tars(spec, paths)
        kind = _type_of_files(spec, paths) if kind == "auto" else kind
    if files and kind not in _TYPE_OF_SUFFIX.values():
        raise DataError(f"data {spec!r}: --dataset-type {kind} is read from local folders only; copy the data")
    if files and kind != "webdataset":
        paths = [str(path) for file in files for path in copied([file])]
    source: Source | None = None
    if kind == "imagefolder":
        source = _open_metadata(paths[0], options)
    elif kind != "webdataset":
        source = open_table(paths, kind, options)
    if source is None:
        keys = list(map(CaptionKeys.parse, weighted_keys(options.caption_key)))
        images = [part.strip().lstrip(".").lower() for part in (options.image_key or "").split(";")]
        extensions = tuple(filter(None, images))
        if both := {*extensions} & {extension for key in keys for extension in key.extensions}:
            raise DataError(f"--image-key and --caption-key both name {', '.join(sorted(both))}; set different ones")
        if kind == "webdataset":
            members = {name: Field(key).extension for name, key in options.field_keys.items()}
            source = TarShards(files or paths, image_extensions=extensions, caption_keys=keys, field_extensions=members)
        elif options.field_keys:
            raise DataError(
                f"data {spec!r} is an image folder without a table, which has no extra fields such as "
                f"{next(iter(options.field_keys.values()))}, and the objective requires them; use tar shards or a table"
            )
        else:
            source = ImageFolder(paths[0], image_extensions=extensions, caption_keys=keys)
    captioned = {stem for stem, end in map(os.path.splitext, beside) if end[1:].lower() in (*TEXT_EXTENSIONS, JSON)}
    for path in source.account.see(beside):
        lost = is_image_name(path) and os.path.splitext(path)[0] in captioned
        source.account.leave_out(BESIDE, path, lost=lost)
    return source


def _open_metadata(folder: str, options: ReadingOptions) -> Table | None:
    """Return the table of the pictures in a folder and its sub-folders, or None if there is none."""
    places = ((place, sorted(METADATA_FILES.intersection(names))) for place, names in walk_folder(folder))
    tables = [os.path.join(place, name) for place, names in places for name in names]
    if not tables:
        return None
    kinds = {_TYPE_OF_SUFFIX[Path(path).suffix] for path in tables}
    if "parquet" in kinds and len(kinds) > 1:
        raise DataError(f"data {folder!r} has metadata files in parquet and as text; use one of these formats")
    # `datasets` calls the column of the pictures "image" when it has read the file names.
    image_key = None if options.image_key == "image" else options.image_key
    table = open_table(tables, kinds.pop(), dataclasses.replace(options, image_key=image_key, image_root=None))
    table.leave_out_unnamed(folder)
    return table


def _refuse_folders_and_compressed_tars(spec: str, paths: Sequence[str]) -> None:
    for path in paths:
        if os.path.isdir(path):
            raise DataError(
                f"data {spec!r} matches {len(paths)} files or folders, and {path} is a folder; give each folder as a "
                "separate entry, or a pattern of files"
            )
        if _COMPRESSED_TAR.search(path):
            raise DataError(
                f"data {spec!r}: {path} is compressed, and samples are read from their place in a tar file; decompress "
                "the shards, for example with  gunzip shards/*.tar.gz  (images are compressed already)"
            )


def _describes_pictures(path: str) -> bool:
    """Return True if a table or JSON file only describes a picture or a folder of pictures beside it.

    img2dataset writes such files: 000000.json beside 000000.jpg, 00000.parquet and 00000_stats.json beside 00000.
    """
    stem = os.path.splitext(path)[0]
    report = _IMG2DATASET_REPORT.fullmatch(os.path.basename(stem))
    if report is not None and os.path.isdir(os.path.join(os.path.dirname(path), report[1])):
        return True
    return path.endswith(".json") and any(os.path.exists(f"{stem}.{extension}") for extension in IMAGE_EXTENSIONS)


def _type_of(path: str) -> str | None:
    return _TYPE_OF_SUFFIX.get(Path(path).suffix.lower())


def _type_of_files(spec: str, paths: list[str]) -> str:
    """Return the type of files, which is that of all of them. Raises DataError."""
    kind, *others = set(map(_type_of, paths))
    if kind is None or others:
        known = ", ".join(_TYPE_OF_SUFFIX)
        raise DataError(f"data {spec!r}: the files are not of one known type ({known}); set --dataset-type")
    return kind


def _look_into(folder: str, kind: str) -> tuple[str, list[str], list[str]]:
    """Return the type of the data in a folder, its files of this type, and its files of other types.

    kind: the type, or "auto". For image folders and saved datasets, the folder itself takes the place of the files.
    """
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if kind == "auto" and not {"state.json", "dataset_dict.json"}.isdisjoint(names):
        return "saved", [folder], []
    if kind == "auto" and not METADATA_FILES.isdisjoint(names):
        return "imagefolder", [folder], []
    paths = [os.path.join(folder, name) for name in names]
    if kind in ("auto", "webdataset"):
        _refuse_folders_and_compressed_tars(folder, [path for path in paths if _COMPRESSED_TAR.search(path)])
        if kind == "auto":
            first = {_type_of(path): path for path in reversed(paths)}
            known = (type_ for type_ in dict.fromkeys(_TYPE_OF_SUFFIX.values()) if type_ in first)
            kind = next((t for t in known if t == "webdataset" or not _describes_pictures(first[t])), "imagefolder")
        types = {"webdataset": ["webdataset"], "imagefolder": ["webdataset", "parquet"]}.get(kind, [])
        _refuse_deeper_files(folder, types)
    if kind not in _TYPE_OF_SUFFIX.values():
        return kind, [folder], []
    files = [path for path in paths if _type_of(path) == kind]
    refuse_special_files(folder, files)
    if not files:
        suffixes = ", ".join(suffix for suffix, type_ in _TYPE_OF_SUFFIX.items() if type_ == kind)
        raise DataError(f"data {folder!r}: the folder has no files of type {kind}; expected {suffixes}")
    # The images of a table may lie beside it.
    others = [path for path in paths if os.path.isfile(path) and (kind == "webdataset" or not is_image_name(path))]
    return kind, files, sorted({*others} - {*files})


def _refuse_deeper_files(folder: str, types: Sequence[str]) -> None:
    """Raise DataError if a sub-folder holds files of these types. They would be left out."""
    for place, names in walk_folder(folder) if types else ():
        for name in sorted(names) if place != folder else ():
            path = os.path.join(place, name)
            if not name.startswith(".") and _type_of(name) in types and not _describes_pictures(path):
                every, here = (os.path.join(folder, *stars) + Path(name).suffix for stars in (("**", "*"), ("*",)))
                raise DataError(
                    f"data {folder!r}: {path} is in a sub-folder; give '{every}' for the files of all folders, or "
                    f"'{here}' for those of this one"
                )
