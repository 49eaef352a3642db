"""Loaders that yield this rank's batches.

`TrainLoader` never ends: it yields this rank's micro-batches, epoch after epoch. Its only state is `samples_consumed`,
which grows by the global batch with every step. Step s takes the positions s*B..(s+1)*B-1 of the dataset's order
(order.py), and rank r takes every W-th of them. For one seed and one global batch the samples of a step therefore do
not depend on the number of ranks, workers and micro-batches. The worker processes (workers.py) share the rows of every
micro-batch, so that it arrives W times as soon as from one worker, and parts arrive evenly. A work item is a
micro-batch and a range of its rows. The worker turns it into ids, reads the samples (reading.py), and writes their
pixels into these rows of the micro-batch's slot. The slots are in memory that all workers and this process share, so
this process never copies pixels, except those that a caller asks it to keep.

`EvaluationLoader` yields every sample of a dataset once per iteration, in the same number of batches on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaclip.data.batch import PADDING_ID, EvaluationBatch, LabelledBatch, TrainBatch
from megaclip.data.feature_cache import CachedFeatures
from megaclip.data.gpu_decoder import GpuDecoder
from megaclip.data.images import CPU_DECODER, GPU_DECODER, LARGEST_ON_GPU, ImageTransform, JpegCrop
from megaclip.data.order import MixtureOrder, SampleOrder, rank_positions
from megaclip.data.reading import BadSampleLog, EvaluationReader, Loaded, ReadableSet, TrainReader, described
from megaclip.data.shard_cache import ShardCache
from megaclip.data.source import DEFAULT_MAX_BAD_FRACTION
from megaclip.data.sources import PairDataset
from megaclip.data.tokenizers import Tokenizer
from megaclip.data.workers import PREFETCHED, WorkerResults, shared_pixels
from megaclip.errors import DataError, first_line
from megaclip.logging import get_logger, log_once

_logger = get_logger(__name__)

SMALLEST_PART = 32
"""Smallest number of rows that a worker reads for a micro-batch. Each part has a fixed cost of passing it on."""


def parts_of(rows: int, workers: int) -> list[slice]:
    """Return the parts in which so many workers read a micro-batch of so many rows; one part without workers."""
    count = max(1, min(workers, -(-rows // SMALLEST_PART)))
    edges = [rows * part // count for part in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def slots_ahead(rows: int, workers: int) -> int:
    """Return the number of micro-batches of so many rows that workers may begin behind the one that is being taken."""
    parts = len(parts_of(rows, workers))
    return (parts - 1 + PREFETCHED * workers) // parts


class TrainLoader:
    """Endless iterator over this rank's micro-batches.

    One step is micro_batch_size x micro_batches_per_step x world_size samples. `samples_consumed` counts the samples of
    all ranks. It increases when the last micro-batch of a step is taken. A loader constructed with that number resumes
    there.

    reread_from: number of the first micro-batch that is yielded a second time, after all micro-batches of the step, for
    a caller that does not keep them. Default: none is repeated.
    shard_order: see order.SampleOrder.
    max_bad_fraction: largest fraction of bad samples among those of this rank; above it, `next` raises DataError.
    shard_cache, shard_cache_bytes: folder where the ranks of a host keep remote shards, and its limit, as for
    `shard_cache.ShardCache`. Default: every sample is read by its range of bytes.
    gpu_decoder: replaces the JPEG files that workers leave to a GPU by their pixels. Default: workers decode all files.
    features: image features from a cache, whose bytes (b, width) uint8 replace the pixels. Default: images are decoded.
    slots: (S, m, 3, H, W) uint8, memory of `workers.shared_pixels` for the pixels of S micro-batches of m rows. S
    is greater than `slots_ahead(m, num_workers)`. Default: the smallest S.
    `next` yields copies of the pixels; `megaclip.engine` calls `read` instead.
    """

    def __init__(
        self,
        dataset: PairDataset,
        transform: ImageTransform,
        tokenizer: Tokenizer,
        *,
        micro_batch_size: int,
        micro_batches_per_step: int = 1,
        reread_from: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        samples_consumed: int = 0,
        shard_order: str = "shuffled",
        max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION,
        slots: Tensor | None = None,
        shard_cache: Path | None = None,
        shard_cache_bytes: int | None = None,
        gpu_decoder: GpuDecoder | None = None,
        features: CachedFeatures | None = None,
    ) -> None:
        self.samples_per_step = micro_batch_size * micro_batches_per_step * world_size
        self.samples_consumed = samples_consumed
        self.micro_batches_per_step = micro_batches_per_step
        reread_from = micro_batches_per_step if reread_from is None else reread_from
        self._readings = [*range(micro_batches_per_step), *range(reread_from, micro_batches_per_step)]
        self.readings_per_step = len(self._readings)
        """Number of micro-batches that a step yields, including those that are read again."""
        self._micro_batch_size = micro_batch_size
        self._parts = parts_of(micro_batch_size, num_workers)
        ahead = slots_ahead(micro_batch_size, num_workers)
        if slots is None:
            image_shape = (3, transform.size, transform.size) if features is None else (features.width,)
            slots = shared_pixels((ahead + 1, micro_batch_size, *image_shape))
        self.slots = slots
        """Pixels of the last `held` micro-batches and of those that are being read. Micro-batch number n, counted from
        the start of the loader, is in slot n modulo S."""
        self.held = len(slots) - ahead
        """Number of micro-batches whose pixels are kept. `read` number n may overwrite those of number n - held."""
        self._first, self._number = samples_consumed, 0
        """First position of this loader, and number of the micro-batch that is taken next, counted from there."""
        self._gpu_decoder, self._for_gpu = gpu_decoder, gpu_decoder is not None
        self._rank, self._world_size = rank, world_size
        self.fields = dataset.fields
        self._has_told = dataset.id_key == "image"  # equal images are then known to the loss
        self._log = BadSampleLog(max_bad_fraction, "a substitute is used", "--max-bad-fraction")
        self._order = order = dataset.order(self.samples_per_step, seed=seed, shard_order=shard_order)
        check_batch(self.samples_per_step, order)
        if features is None:
            decoder = (CPU_DECODER if gpu_decoder is None else GPU_DECODER) if transform.training else "Pillow"
            log_once(_logger.info, f"training images are decoded and resized by {decoder}")
        self._reader = TrainReader(dataset, transform, tokenizer, seed, features)
        self._cache: ShardCache | None = None
        if shards := dataset.remote_shards(shard_cache):
            if shard_cache is None:
                _logger.info("remote shards are read sample by sample; --shard-cache keeps whole ones on a local disk")
            else:
                start = self._needed_from()
                self._cache = ShardCache(shard_cache, shard_cache_bytes, shards, order.shards_from, start)
        elif shard_cache is not None:
            raise DataError("--shard-cache has no effect without URLs of tar shards in --train-data; leave it out")
        describe_row = functools.partial(described, dataset)
        self._batches = WorkerResults(self._load, self._schedule(), num_workers=num_workers, describe_row=describe_row)

    @property
    def bad_counts(self) -> dict[str, int]:
        """Number of bad samples that this loader has replaced, by kind."""
        return dict(self._log.counts)

    def __iter__(self) -> Iterator[TrainBatch]:
        return self

    def __next__(self) -> TrainBatch:
        batch = self.read()
        return dataclasses.replace(batch, images=batch.images.clone())

    def read(self) -> TrainBatch:
        """Return the next micro-batch, with its pixels in a slot until call number `held` after this one."""
        images, files, for_gpu = self.slots[self._number % len(self.slots)], list[tuple[int, JpegCrop]](), False
        read, parts = set[tuple[int, int]](), list[TrainBatch]()
        for rows in self._parts:
            part = next(self._batches)
            parts.append(self._admitted(part))
            read |= part.images
            files += [(rows.start + row, crop) for row, crop in part.encoded or ()]
            for_gpu |= part.encoded is not None
        tokens, pair_ids = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "pair_ids"))
        fields = {name: torch.cat([part.fields[name] for part in parts]) for name in self.fields}
        batch = TrainBatch(images, tokens, pair_ids, fields)
        if for_gpu:
            self._decode(batch, files)
        self._warn_of_equal_images(read)
        self._number += 1
        if self._number % self.readings_per_step == 0:
            self.samples_consumed += self.samples_per_step
            if self._cache is not None:
                self._cache.advance(self._needed_from())
        return batch

    def _admitted(self, part: Loaded) -> TrainBatch:
        """Count the bad samples of a part of a micro-batch, and return the part. Raises DataError."""
        # The second reading of a micro-batch finds the same bad samples.
        if self._number % self.readings_per_step < self.micro_batches_per_step:
            self._log.add(part.bad_samples, part.reads)
        if part.fatal:
            raise DataError(part.fatal)
        assert isinstance(part.batch, TrainBatch)
        return part.batch

    def _decode(self, batch: TrainBatch, files: list[tuple[int, JpegCrop]]) -> None:
        """Replace the `files` (row, crop) among the images of `batch` by their pixels. Read refused ones again."""
        decoder, size = self._gpu_decoder, batch.images[0].numel()
        assert decoder is not None
        if len(files) < len(batch.images):
            others = f"all but baseline JPEG files of at most {size:,} bytes and {LARGEST_ON_GPU:,} pixels"
            log_once(_logger.info, f"the CPU decodes {others}")
        try:
            refused = decoder(batch.images, files)
        except torch.OutOfMemoryError as error:
            advice = "use --image-decoder cpu, or a smaller train_micro_batch_size_per_gpu"
            raise DataError(f"--image-decoder gpu: {first_line(error)}; {advice}") from None
        for row in refused:
            again = self._admitted(self._load((self._number, slice(row, row + 1), False)))
            batch.tokens[row], batch.pair_ids[row] = again.tokens[0], again.pair_ids[0]
            for name, values in again.fields.items():
                batch.fields[name][row] = values[0]

    def _load(self, item: tuple[int, slice, bool]) -> Loaded:
        """Read an item of `_schedule`, in a worker or in this process."""
        number, rows, for_gpu = item
        step, turn = divmod(number, self.readings_per_step)
        start, micro_batch = self._first + step * self.samples_per_step, self._readings[turn]
        positions = rank_positions(start, micro_batch, self._micro_batch_size, self._rank, self._world_size)[rows]
        images = self.slots[number % len(self.slots), rows]
        return self._reader.read(*self._order.visit(positions), images, for_gpu=for_gpu)

    def _schedule(self) -> Iterator[tuple[int, slice, bool]]:
        """Yield work items without end: (number of the micro-batch, rows, whether a GPU decodes)."""
        for step in itertools.count():
            for_gpu = self._for_gpu  # for a whole step: its micro-batches may be read twice
            for number in range(step * self.readings_per_step, (step + 1) * self.readings_per_step):
                yield from ((number, rows, for_gpu) for rows in self._parts)

    def _warn_of_equal_images(self, read: set[tuple[int, int]]) -> None:
        # A row that is in the batch twice, as a substitute or at the end of an epoch, is no equal image.
        repeated = len(read) - len({digest for digest, _ in read})
        if repeated and not self._has_told:
            self._has_told = True
            _logger.warning(
                "a micro-batch of %d has equal images (copies: %d): each is a negative of the others' "
                'captions. Train with --id-key image and megaclip.same_ids "mask" or "positive" (`megaclip show '
                "losses`), or give each image a list of captions",
                self._micro_batch_size,
                repeated,
            )

    def _needed_from(self) -> int:
        """Return the first position that a rank of this host may still read. No rank is two steps behind another."""
        return max(0, self.samples_consumed - 2 * self.samples_per_step)

    def ids_of_step(self, samples_consumed: int) -> torch.Tensor:
        """Return this rank's ids (b,) int64 of the step that begins at `samples_consumed`, in the order of its rows.

        This is arithmetic and reads no data, so the ids are known before the batches. A bad sample keeps its id.
        """
        rows = self._micro_batch_size * self.micro_batches_per_step
        ids, _ = self._order.visit(rank_positions(samples_consumed, 0, rows, self._rank, self._world_size))
        return torch.from_numpy(ids)

    def decode_on(self, gpu_decoder: GpuDecoder | None) -> None:
        """Let a GPU decode the steps that no worker has begun, or None. Callable while another thread reads."""
        self._gpu_decoder = gpu_decoder or self._gpu_decoder  # which parts that have been begun still need
        self._for_gpu = gpu_decoder is not None

    def close(self) -> None:
        """End the worker processes. Iterating afterwards stops at once."""
        self._batches.close()
        if self._cache is not None:
            self._cache.close()


def check_batch(contrastive_batch: int, order: SampleOrder | MixtureOrder) -> None:
    """Raise DataError if the data cannot fill one contrastive batch with different samples."""
    samples = order.samples_per_epoch
    if contrastive_batch > samples:
        raise DataError(
            f"train_batch_size: a contrastive batch of {contrastive_batch} requires as many different samples, but the "
            f"training data has {samples}; set a smaller train_batch_size in ds_config.json"
        )
    largest, limiting = order.largest_batch() if isinstance(order, MixtureOrder) else (samples, 0)
    if contrastive_batch > largest:
        raise DataError(
            f"train_batch_size: a contrastive batch of {contrastive_batch} would repeat samples of entry "
            f"{limiting + 1} of --train-data, which is too small for its weight; set train_batch_size "
            f"to {largest} or less, or lower its weight in --train-data-weights"
        )


@dataclasses.dataclass(eq=False)
class EvaluationLoader:
    """Iterable over every sample of a dataset, spread over the ranks. It may be iterated several times.

    Yields `EvaluationBatch` with a tokenizer and `LabelledBatch` without one. Every rank gets `len(self)` batches of
    `batch_size` rows. Rows without a sample, and bad samples, have the id PADDING_ID and an image of zeros.
    """

    dataset: ReadableSet
    transform: ImageTransform
    tokenizer: Tokenizer | None
    _: dataclasses.KW_ONLY
    batch_size: int
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION
    by_line: bool = False
    """Every line of a text is a caption."""
    bad_counts: dict[str, int] = dataclasses.field(default_factory=dict, init=False)
    """Number of bad samples that this rank found in its last iteration, by kind."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[EvaluationBatch | LabelledBatch]:
        log = BadSampleLog(self.max_bad_fraction, "it is left out", has_pairs=self.tokenizer is not None)
        reader = EvaluationReader(self.dataset, self.transform, self.tokenizer, self.by_line)
        ahead = min(PREFETCHED * self.num_workers, len(self))
        slots = shared_pixels((ahead + 1, self.batch_size, 3, self.transform.size, self.transform.size))

        def load(batch: int) -> Loaded:
            ids = rank_positions(0, batch, self.batch_size, self.rank, self.world_size)
            return reader.read(np.where(ids < len(self.dataset), ids, PADDING_ID), slots[batch % len(slots)])

        describe_row = functools.partial(described, self.dataset)
        results = WorkerResults(load, range(len(self)), num_workers=self.num_workers, describe_row=describe_row)
        for batch, loaded in enumerate(results):
            log.add(loaded.bad_samples, loaded.reads)
            self.bad_counts = dict(log.counts)
            if loaded.fatal:
                raise DataError(loaded.fatal)
            yield dataclasses.replace(loaded.batch, images=slots[batch % len(slots)].clone())
