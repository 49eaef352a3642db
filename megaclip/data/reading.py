"""Read, decode and tokenise samples, and replace bad ones.

A bad sample never shifts ids or batches. In training its row keeps its id and contains a substitute: another sample of
the same source, chosen by (seed, id) only. In evaluation its row becomes padding, because a sample that counts twice
would change the scores. Bad samples are counted by kind; above a limit the run stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from megaclip.data.batch import (
    PADDING_ID,
    BadSample,
    Batch,
    EvaluationBatch,
    LabelledBatch,
    RawSample,
    TrainBatch,
    digest,
)
from megaclip.data.captions import empty_caption, is_blank
from megaclip.data.feature_cache import CachedFeatures
from megaclip.data.fields import CROP, draw
from megaclip.data.images import ImageTransform, JpegCrop
from megaclip.data.sources import PairDataset
from megaclip.data.tokenizers import Tokenizer
from megaclip.data.workers import note_row
from megaclip.errors import DataError, first_line
from megaclip.logging import get_logger

SUBSTITUTE_TRIES = 16
MIN_SAMPLES_FOR_LIMIT = 1000
"""Number of samples to which the limit applies until a run has read as many."""

_logger = get_logger(__name__)


class ReadableSet(Protocol):
    """Members of a dataset that reading requires. Pairs and labelled images both have them."""

    def __len__(self) -> int: ...

    def read(self, sample_id: int) -> RawSample: ...

    def shard_name(self, sample_id: int) -> str: ...


@dataclasses.dataclass
class Loaded:
    """Result of a worker process."""

    batch: Batch | LabelledBatch | None
    """Batch without pixels, which are in memory that processes share, or None if `fatal` is set."""
    bad_samples: list[BadSample]
    """Bad samples that were found while the batch was read."""
    reads: int = 0
    """Number of samples that were read for the batch, bad ones and substitutes included."""
    fatal: str = ""
    """Reason why there is no batch."""
    images: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Digest and row in the dataset of each image of a training batch."""
    encoded: list[tuple[int, JpegCrop]] | None = None
    """Row and crop of each image of a training batch that a GPU decodes. The row of pixels contains its file. None:
    no image is left to a GPU."""


_Pair = tuple[JpegCrop | None, str, tuple[int, int], int, dict[str, np.ndarray]]
"""Crop of an image whose file is for the GPU, caption, digest and row in the dataset of the image, id, and fields."""


@dataclasses.dataclass(frozen=True)
class TrainReader:
    """Read parts of batches of image-text pairs with substitutes for bad samples."""

    dataset: PairDataset
    transform: ImageTransform
    tokenizer: Tokenizer
    seed: int
    features: CachedFeatures | None = None
    """These replace the images."""

    def read(self, ids: np.ndarray, epochs: np.ndarray, images: torch.Tensor, *, for_gpu: bool = False) -> Loaded:
        """Return the pairs of `ids` (b,), with their pixels written into `images` (b, 3, H, W) uint8, or the bytes of
        their features into `images` (b, width).

        Each sample is augmented by (seed, its epoch, its id). for_gpu: write files that a GPU decodes as they are.
        """
        pairs, bad_samples = list[_Pair](), list[BadSample]()
        try:
            for target, sample_id, epoch in zip(images, ids.tolist(), epochs.tolist(), strict=True):
                pairs.append(self._read_or_substitute(sample_id, epoch, target, for_gpu, bad_samples))
        except DataError as error:  # the run saves and ends with it
            return Loaded(None, bad_samples, len(pairs) + len(bad_samples), str(error))
        crops, captions, image_ids, pair_ids, fields = zip(*pairs, strict=True)
        encoded = [(row, crop) for row, crop in enumerate(crops) if crop is not None]
        more = {
            name: torch.from_numpy(np.stack([found[name] for found in fields])).to(field.dtype)
            for name, field in self.dataset.fields.items()
        }
        return Loaded(
            TrainBatch(torch.empty(0), self.tokenizer(captions), torch.tensor(pair_ids), more),
            bad_samples,
            len(pairs) + len(bad_samples),
            images=set(image_ids),
            encoded=encoded if for_gpu else None,
        )

    def _read_or_substitute(
        self, sample_id: int, epoch: int, target: torch.Tensor, for_gpu: bool, bad_samples: list[BadSample]
    ) -> _Pair:
        """Write an image into `target`, and return its pair. Raises DataError, also if all substitutes are bad."""
        seeds = (self.seed, epoch, sample_id)
        for candidate in itertools.chain([sample_id], self._substitutes(sample_id)):
            with _noted(self.dataset, candidate, bad_samples):
                raw = self._read(candidate)
                number, texts = raw.captions.number(*seeds), raw.captions.texts
                drawn = draw(self.dataset.fields, raw, seeds)
                crop = self._write(raw, seeds, drawn.get(CROP), target, for_gpu)
                # A part of the bytes identifies a file, and a digest of all of them would take longer than the crop.
                image_id = digest(raw.image[:: 1 + len(raw.image) // 4096])
                return crop, texts[number], (image_id, candidate), _pair_id(raw, number, self.dataset.id_key), drawn
        last = bad_samples[-1]
        raise DataError(
            f"sample {sample_id} of {last.shard} and {SUBSTITUTE_TRIES} substitutes for it are bad, last {last.kind} "
            f"({last.detail}); a larger --max-bad-fraction does not help: check the data with `megaclip inspect`"
        )

    def _substitutes(self, sample_id: int) -> Iterator[int]:
        """Yield the ids to try instead of a bad one. They are equal in every run with the same seed.

        They are drawn uniformly, so counting the bad ones does not bias the rate.
        """
        first, count = self.dataset.siblings(sample_id)
        generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, sample_id])))
        for _ in range(SUBSTITUTE_TRIES):
            yield first + int(generator.randint(count))

    def _read(self, sample_id: int) -> RawSample:
        """Return a pair, with the bytes of its features as its image if they replace the images. Raises BadSample."""
        if self.features is None:
            raw = self.dataset.read(sample_id)
        else:
            content = self.features.read(sample_id).tobytes()
            raw = RawSample(content, self.dataset.captions(sample_id), f"sample {sample_id}")
        check_caption(raw)
        return raw

    def _write(
        self, raw: RawSample, seeds: tuple[int, int, int], box: np.ndarray | None, target: torch.Tensor, for_gpu: bool
    ) -> JpegCrop | None:
        """Write the pixels, the bytes of the features, or the file for a GPU into `target`. Raises BadSample.

        Return the crop of a file for a GPU. box: replaces the random crop.
        """
        crop: JpegCrop | None = None
        if self.features is None:
            with _named(raw):
                image = self.transform.prepare(raw.image, seeds, gpu_bytes=target.numel() if for_gpu else 0, crop=box)
            if isinstance(image, torch.Tensor):
                target.copy_(image)
                return None
            crop = image
        target.view(-1)[: len(raw.image)] = torch.frombuffer(bytearray(raw.image), dtype=torch.uint8)
        return crop


@contextlib.contextmanager
def _noted(dataset: ReadableSet, sample_id: int, bad_samples: list[BadSample]) -> Iterator[None]:
    """Note the sample that the `with` statement reads, and append it if it is bad. Raises DataError."""
    has_pairs = isinstance(dataset, PairDataset)
    note_row(sample_id)
    try:
        yield
    except BadSample as bad:
        bad_samples.append(BadSample(bad.kind, bad.detail, dataset.shard_name(sample_id)))
    except DataError as error:
        raise DataError(f"sample {sample_id}: {error}" if has_pairs else str(error)) from error
    except Exception as error:  # a source may raise any exception
        place = described(dataset, sample_id)
        _logger.error("cannot read %s", place, exc_info=error)
        advice = " with `megaclip inspect`" if has_pairs else ""
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"cannot read {place}: {reason}; check the data{advice}") from error


def described(dataset: ReadableSet, sample_id: int) -> str:
    """Return a name of a sample for messages."""
    return f"sample {sample_id} of {dataset.shard_name(sample_id)}"


def _pair_id(raw: RawSample, number: int, id_key: str) -> int:
    """Return a digest of what --id-key selects: caption `number` without extra white space, image file, or cell."""
    if id_key == "image":
        return digest(raw.image)
    return digest((" ".join(raw.captions.texts[number].split()) if raw.id_cell is None else raw.id_cell).encode())


def decode_image(transform: ImageTransform, raw: RawSample) -> torch.Tensor:
    """Return the transformed image. Raises BadSample, whose detail names the sample."""
    with _named(raw):
        return transform(raw.image)


@contextlib.contextmanager
def _named(raw: RawSample) -> Iterator[None]:
    """Add the name of the sample to the detail of a BadSample."""
    try:
        yield
    except BadSample as bad:
        raise BadSample(bad.kind, f"{raw.key}: {bad.detail}") from bad


def check_caption(raw: RawSample) -> None:
    """Raise BadSample if the caption is empty or blank."""
    if is_blank(raw.caption):
        raise empty_caption(raw.key, raw.caption)


@dataclasses.dataclass(frozen=True)
class EvaluationReader:
    """Read batches of pairs (with a tokenizer) or labelled images (without one). Bad samples become padding rows."""

    dataset: ReadableSet
    transform: ImageTransform
    tokenizer: Tokenizer | None
    by_line: bool = False
    """Every line of a text is a caption."""

    def read(self, ids: np.ndarray, images: torch.Tensor) -> Loaded:
        """Return the batch of `ids` (b,), PADDING_ID for padding. Its pixels go into `images` (b, 3, H, W) uint8."""
        images.zero_()
        captions, kept = [[""]] * len(ids), np.full_like(ids, PADDING_ID)
        digests, lines = torch.zeros(2, len(ids), dtype=torch.int64)
        bad_samples = list[BadSample]()
        try:
            for row in np.flatnonzero(ids != PADDING_ID).tolist():
                with _noted(self.dataset, sample_id := int(ids[row]), bad_samples):
                    raw = self.dataset.read(sample_id)
                    check_caption(raw)
                    images[row] = decode_image(self.transform, raw)
                    kept[row], digests[row] = sample_id, digest(raw.image)
                    texts = list(raw.captions.texts)
                    captions[row] = raw.lines if self.by_line and len(texts) == 1 else texts
                    lines[row] = len(raw.lines) if captions[row] == [raw.caption] else 1
        except DataError as error:
            return Loaded(None, bad_samples, fatal=str(error))
        kept_ids, reads = torch.from_numpy(kept), int((ids != PADDING_ID).sum())
        if self.tokenizer is not None:
            tokens = self.tokenizer([caption for texts in captions for caption in texts])
            rows = torch.arange(len(ids)).repeat_interleave(torch.tensor([len(texts) for texts in captions]))
            return Loaded(EvaluationBatch(torch.empty(0), tokens, kept_ids, digests, rows, lines), bad_samples, reads)
        labels = torch.tensor([int(label) if label else PADDING_ID for (label,) in captions])
        return Loaded(LabelledBatch(torch.empty(0), labels, kept_ids), bad_samples, reads)


@dataclasses.dataclass
class BadSampleLog:
    """Count bad samples by kind, log the first of each kind, and stop the run if there are too many."""

    limit: float
    """Largest fraction of bad samples."""
    consequence: str
    """Words for the log, such as "a substitute is used"."""
    setting: str = ""
    """Flag that sets the limit, for the error; "" if it is fixed."""
    has_pairs: bool = True
    """False for labelled images, which `megaclip inspect` does not read."""
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    _read: int = 0
    _shards: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, bad_samples: list[BadSample], reads: int) -> None:
        """Count the bad samples among `reads` samples. Raises DataError, with the worst shards, above the limit."""
        self._read += reads
        for bad in bad_samples:
            self.counts[bad.kind] += 1
            self._shards[bad.shard] += 1
            if self.counts[bad.kind] == 1:
                _logger.warning(
                    "%s: %s, %s; %s; later ones are only counted", bad.kind, bad.detail, bad.shard, self.consequence
                )
        total = self.counts.total()
        if total > self.limit * max(self._read, MIN_SAMPLES_FOR_LIMIT):
            worst = ", ".join(f"{name} ({count})" for name, count in self._shards.most_common(3))
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
            advice = " (`megaclip inspect` lists the problems)" if self.has_pairs else ""
            raise DataError(
                f"{total} of the {self._read} samples read so far are bad ({kinds}), over "
                f"{self.setting or 'the limit'} {self.limit:g}; most are in {worst}; repair the data{advice}"
                + (f" or set a larger {self.setting}" if self.setting else "")
            )
