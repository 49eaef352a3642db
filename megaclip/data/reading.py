"""Samples to tensors: read, decode, tokenise, and what happens when one of them is bad.

A bad sample never shifts ids or batches. In training its row keeps its id and shows a substitute, another sample of the
same source, chosen by (seed, id) alone; in evaluation its row becomes padding, because a sample twice would change the
scores. Every one is counted by kind, and above a limit the run stops.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from megaclip.data.batch import PADDING_ID, BadSample, Batch, LabelledBatch, RawSample
from megaclip.data.images import ImageTransform
from megaclip.data.sources import PairDataset
from megaclip.data.tokenizers import Tokenizer
from megaclip.errors import DataError
from megaclip.logging import get_logger

SUBSTITUTE_TRIES = 16
TOLERATED_AS_IF_SEEN = 1000
"""A rate needs samples to be one: early on, as many bad samples are tolerated as among this many."""

_logger = get_logger(__name__)


class ReadableSet(Protocol):
    """What reading needs of a dataset: pairs and labelled images both have it."""

    def __len__(self) -> int: ...

    def read(self, sample_id: int) -> RawSample: ...

    def shard_name(self, sample_id: int) -> str: ...


@dataclasses.dataclass
class Complaint:
    """One bad sample."""

    kind: str
    detail: str
    shard: str


@dataclasses.dataclass
class Loaded:
    """What a worker hands back; `fatal` says why there is no batch."""

    batch: Batch | LabelledBatch | None
    complaints: list[Complaint]
    fatal: str = ""

    def pin_memory(self) -> Loaded:
        """torch's DataLoader calls this."""
        return dataclasses.replace(self, batch=self.batch.pin_memory() if self.batch else None)

    def share_memory_(self) -> Loaded:
        """`map_in_workers` calls this in the worker."""
        if self.batch:
            self.batch.share_memory_()
        return self


class TrainReader:
    """Batches of image-text pairs with substitutes for bad samples."""

    def __init__(self, dataset: PairDataset, transform: ImageTransform, tokenizer: Tokenizer, seed: int) -> None:
        self._dataset = dataset
        self._transform = transform
        self._tokenizer = tokenizer
        self._seed = seed

    def read(self, ids: np.ndarray, epochs: np.ndarray) -> Loaded:
        """The batch of `ids` (b,), each augmented by (seed, its epoch, its id)."""
        images, captions, complaints = [], [], list[Complaint]()
        for sample_id, epoch in zip(ids.tolist(), epochs.tolist(), strict=True):
            pair = self._read_or_substitute(sample_id, epoch, complaints)
            if pair is None:
                why = f"sample {sample_id} of {complaints[-1].shard} and {SUBSTITUTE_TRIES} substitutes are all bad"
                return Loaded(None, complaints, f"{why}, the last: {complaints[-1].kind} ({complaints[-1].detail})")
            images.append(pair[0])
            captions.append(pair[1])
        return Loaded(Batch(torch.stack(images), self._tokenizer(captions), torch.from_numpy(ids)), complaints)

    def _read_or_substitute(
        self, sample_id: int, epoch: int, complaints: list[Complaint]
    ) -> tuple[torch.Tensor, str] | None:
        first, count = self._dataset.siblings(sample_id)
        for candidate in itertools.chain([sample_id], _substitutes(self._seed, sample_id, first, count)):
            try:
                raw = self._dataset.read(candidate)
                check_caption(raw)
                image = pixels_of(self._transform, raw, (self._seed, epoch, sample_id))
                return image, _one_caption(raw, epoch + sample_id)
            except BadSample as bad:
                # A bad substitute counts too: it is as likely as any sample to be drawn, so the rate stays honest.
                complaints.append(Complaint(bad.kind, bad.detail, self._dataset.shard_name(candidate)))
        return None


def _substitutes(seed: int, sample_id: int, first: int, count: int) -> Iterator[int]:
    """Ids to try instead of a bad one, the same in every run."""
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, sample_id])))
    for _ in range(SUBSTITUTE_TRIES):
        yield first + int(generator.randint(count))


def _one_caption(raw: RawSample, turn: int) -> str:
    """The caption, or where there are several, another one every epoch."""
    return raw.alternatives[turn % len(raw.alternatives)] if raw.alternatives else raw.caption


def pixels_of(transform: ImageTransform, raw: RawSample, seeds: tuple[int, int, int]) -> torch.Tensor:
    """The transformed image; the transform knows only bytes, so the sample's place is added to what it finds wrong."""
    try:
        return transform(raw.image, seeds=seeds)
    except BadSample as bad:
        raise BadSample(bad.kind, f"{raw.key}: {bad.detail}") from bad


def check_caption(raw: RawSample) -> None:
    """Raise BadSample when there is nothing to learn from in the caption."""
    if not raw.caption.strip("\0 \t\r\n"):
        raise BadSample("empty caption", raw.key)


class EvaluationReader:
    """Batches of pairs (with a tokenizer) or labelled images (without), bad samples and missing ids as padding rows."""

    def __init__(self, dataset: ReadableSet, transform: ImageTransform, tokenizer: Tokenizer | None) -> None:
        self._dataset = dataset
        self._transform = transform
        self._tokenizer = tokenizer

    def read(self, ids: np.ndarray) -> Loaded:
        """The batch of `ids` (b,), where PADDING_ID stands for no sample."""
        size = self._transform.size
        images = torch.zeros(len(ids), 3, size, size, dtype=torch.uint8)
        captions, kept = [""] * len(ids), np.full_like(ids, PADDING_ID)
        complaints = list[Complaint]()
        for row, sample_id in enumerate(ids.tolist()):
            if sample_id == PADDING_ID:
                continue
            try:
                raw = self._dataset.read(sample_id)
                check_caption(raw)
                images[row] = pixels_of(self._transform, raw, (0, 0, 0))
                captions[row], kept[row] = raw.caption, sample_id
            except BadSample as bad:
                complaints.append(Complaint(bad.kind, bad.detail, self._dataset.shard_name(sample_id)))
        kept_ids = torch.from_numpy(kept)
        if self._tokenizer is not None:
            return Loaded(Batch(images, self._tokenizer(captions), kept_ids), complaints)
        labels = torch.tensor([int(caption) if caption else PADDING_ID for caption in captions])
        return Loaded(LabelledBatch(images, labels, kept_ids), complaints)


class BadSampleLog:
    """Counts bad samples by kind, says each kind once, and stops the run when they are more than `limit` of all."""

    def __init__(self, limit: float, consequence: str) -> None:
        self.counts: Counter[str] = Counter()
        self._limit = limit
        self._consequence = consequence
        self._seen = 0
        self._shards: Counter[str] = Counter()

    def add(self, complaints: list[Complaint], rows: int) -> None:
        """Take in what was said about `rows` samples; raises DataError that names the worst shards."""
        self._seen += rows
        for complaint in complaints:
            self.counts[complaint.kind] += 1
            self._shards[complaint.shard] += 1
            if self.counts[complaint.kind] == 1:
                where = f"{complaint.detail}, {complaint.shard}"
                _logger.warning("%s: %s; %s, more are only counted", complaint.kind, where, self._consequence)
        bad = self.counts.total()
        if bad > self._limit * max(self._seen, TOLERATED_AS_IF_SEEN):
            worst = ", ".join(f"{name} ({count})" for name, count in self._shards.most_common(3))
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
            raise DataError(
                f"{bad} of {self._seen} samples are bad ({kinds}), over the limit of {self._limit:.2%}; most in {worst}"
            )
