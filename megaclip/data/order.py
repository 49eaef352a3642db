"""Compute the order of the samples by arithmetic, so that the whole state of a loader is one integer.

A *position* counts the samples that all ranks together have consumed since the beginning of training. `SampleOrder`
turns positions into sample ids:

    epoch = position // N. Within an epoch the shards are permuted by (seed, epoch) and concatenated. The result is cut
    into windows, and each window is permuted by (seed, epoch, window).

Every id of 0..N-1 therefore occurs exactly once per epoch, for any number of ranks and workers. A resumed run does not
have to skip samples. `MixtureOrder` interleaves several orders (parts): each batch has the share of each part.

A batch may begin in one epoch and end in the next, so no sample is dropped. Equal samples of a batch would be negatives
of each other, so the next epoch is arranged such that a batch of n positions of a dataset or part with N samples holds
exactly max(0, n - N) copies. This is the smallest possible number, and 0 for every batch that `check_batch` accepts.

Permutations come from NumPy's legacy generator because its stream never changes: a seed gives the same order with every
NumPy version.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from megaclip.errors import DataError

DEFAULT_WINDOW = 65_536
"""Number of samples that are shuffled together. A permutation of this size takes about a millisecond."""
MIXTURE_BLOCK = 1000
"""Number of batches in which a mixture meets its weights exactly, rounded to thousandths."""
ORDER_VERSION = 2
"""Version of the order, which checkpoints record. Change it with every change of the order of a seed."""

ROWS_PER_SHARD = 1024
"""Number of rows that are permuted together in a source without shards."""

_SHARDS, _WINDOWS, _BATCHES, _CELLS = range(4)


def permutation(size: int, *seeds: int) -> np.ndarray:
    """Return a permutation of 0..size-1 that depends only on `size` and `seeds` (integers >= 0)."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds))).permutation(size)


_window_permutation = functools.lru_cache(maxsize=16)(permutation)
"""`permutation` of a window, which many batches share."""


def runs_of_rows(rows: int) -> np.ndarray:
    """Return the sizes of runs of rows, (S,) int64, which replace shards in a source without shards."""
    full, rest = divmod(rows, ROWS_PER_SHARD)
    return np.array([ROWS_PER_SHARD] * full + [rest] * bool(rest), dtype=np.int64)


def rank_positions(step_start: int, micro_batch: int, micro_batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """Return the positions of one rank's micro-batch, (micro_batch_size,) int64, ascending.

    Rank r takes every W-th position of the step that begins at position `step_start`.
    """
    rows = np.arange(micro_batch * micro_batch_size, (micro_batch + 1) * micro_batch_size, dtype=np.int64)
    return step_start + rank + world_size * rows


class SampleOrder:
    """The order of one dataset.

    shard_sizes: number of samples per shard.
    batch_sizes: number of positions of this dataset in each batch, (P,), repeated without end.
    shard_order: "shuffled", or "sequential" to keep the order of the shards (for a curriculum).
    window_size: number of samples that are shuffled together. Default: 65,536; in sequential order at most the largest
    shard, so that shards of equal size are never mixed.

    If a batch of n positions begins in one epoch and ends in the next, the samples of its first part are put last among
    the first n positions of the next epoch. The end of an epoch of N >= 2 n samples stays unchanged, so that an epoch
    does not depend on all epochs before it. Smaller datasets keep the order of epoch 0, and each epoch permutes cells
    of N - n + 1 samples: n positions in a row then hold n different samples.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int] | np.ndarray,
        *,
        seed: int,
        batch_sizes: Sequence[int] | np.ndarray = (1,),
        shard_order: str = "shuffled",
        window_size: int | None = None,
    ) -> None:
        if shard_order not in ("shuffled", "sequential"):
            raise DataError(f"shard_order is {shard_order!r}; use 'shuffled' or 'sequential'")
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self._bases = np.concatenate([[0], np.cumsum(self._sizes)])[:-1]
        self.shard_count = len(self._sizes)
        self._seed = seed
        self._shuffled = shard_order == "shuffled"
        self.samples_per_epoch = int(self._sizes.sum())
        if self.samples_per_epoch == 0:
            raise DataError("the dataset has no samples; check the files that were given")
        default = DEFAULT_WINDOW if self._shuffled else min(DEFAULT_WINDOW, int(self._sizes.max()))
        self.window_size = window_size or default
        self.batch_sizes = np.asarray(batch_sizes, dtype=np.int64)
        self._ends = np.cumsum(self.batch_sizes)
        self._largest = int(self.batch_sizes.max())
        is_one_epoch = (self.batch_sizes == self.samples_per_epoch).all()
        self._is_small = self.samples_per_epoch < 2 * self._largest and not is_one_epoch
        # The parts of a mixture have a cache each.
        self._cells = functools.lru_cache(8)(self._find_cells)
        self._first_ids = functools.lru_cache(8)(self._find_first_ids)
        self._laid_out = functools.lru_cache(2)(self._lay_out)

    def batch_start(self, batch: int) -> int:
        """Return the position of this dataset at which batch number `batch` begins."""
        periods, rest = divmod(batch, len(self._ends))
        return periods * int(self._ends[-1]) + int(self._ends[rest] - self.batch_sizes[rest])

    def batch_of(self, position: int) -> int:
        """Return the number of the batch that holds a position of this dataset."""
        periods, rest = divmod(position, int(self._ends[-1]))
        return periods * len(self._ends) + int(np.searchsorted(self._ends, rest, side="right"))

    def visit(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and epochs, both (n,) int64, at `positions` (n,) int64."""
        epochs, places = np.divmod(positions, self.samples_per_epoch)
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = self._ids_of_epoch(int(epoch), places[chosen])
        return ids, epochs

    def _ids_of_epoch(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self._is_small:
            places = self._cells(epoch)[places]
            return self._shuffled_ids(0, places) if self._shuffled else self._laid_out_ids(0, places)
        ids = self._shuffled_ids(epoch, places)
        if epoch and (places < self._largest).any():
            first = self._first_ids(epoch)
            changed = places < len(first)
            ids[changed] = first[places[changed]]
        return ids

    def _find_cells(self, epoch: int) -> np.ndarray:
        """Return a permutation of the places of an epoch in which every place stays in its cell, (N,) int64."""
        size = max(1, self.samples_per_epoch - self._largest + 1)
        window = self.samples_per_epoch if self._shuffled else self.window_size
        places = permutation(self.samples_per_epoch, self._seed, _CELLS, epoch)
        return places[np.lexsort((places % window // size, places // window))]

    def _find_first_ids(self, epoch: int) -> np.ndarray:
        """Return the first ids of an epoch, as many as the batch that begins in the epoch before has positions."""
        boundary, batch = epoch * self.samples_per_epoch, self.batch_of(epoch * self.samples_per_epoch)
        start, end = self.batch_start(batch), self.batch_start(batch + 1)
        last = self._shuffled_ids(epoch - 1, np.arange(start - boundary, 0) + self.samples_per_epoch)
        first = self._shuffled_ids(epoch, np.arange(end - start))
        return first[np.argsort(np.isin(first, last), kind="stable")]

    def _shuffled_ids(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the ids at `places` of an epoch that is arranged without regard to the epoch before."""
        windows, offsets = np.divmod(places, self.window_size)
        shuffled = np.empty_like(places)
        for window in np.unique(windows):
            chosen = windows == window
            start = int(window) * self.window_size
            size = min(self.window_size, self.samples_per_epoch - start)
            within = _window_permutation(size, self._seed, _WINDOWS, epoch, int(window))
            shuffled[chosen] = start + within[offsets[chosen]]
        return self._laid_out_ids(epoch, shuffled)

    def _laid_out_ids(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the ids at `places` of the concatenated shards."""
        shards, ends = self._laid_out(epoch if self._shuffled else 0)
        slots = np.searchsorted(ends, places, side="right")
        rows = places - (ends[slots] - self._sizes[shards[slots]])
        return self._bases[shards[slots]] + rows

    def shards_from(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the shards in the order of their use from `position`, as (first position of the window, shard).

        The sequence has no end, and a shard may come several times.
        """
        first_epoch, place = divmod(position, self.samples_per_epoch)
        # the first positions of an epoch hold samples of any window among them, those of a small dataset of all windows
        mixed = self.samples_per_epoch if self._is_small else self._largest
        begin = place - place % self.window_size if place >= mixed else 0
        for epoch in itertools.count(first_epoch):
            shards, ends = self._laid_out(epoch if self._shuffled else 0)
            for start in range(begin, self.samples_per_epoch, self.window_size):
                end = min(start + self.window_size, self.samples_per_epoch)
                slots = range(np.searchsorted(ends, start, "right"), np.searchsorted(ends, end, "left") + 1)
                used_from = epoch * self.samples_per_epoch + (start if start >= mixed else 0)
                yield from ((used_from, int(shard)) for shard in shards[slots] if self._sizes[shard])
            begin = 0

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards in the order of `epoch`, and the position after the last sample of each."""
        count = len(self._sizes)
        shards = permutation(count, self._seed, _SHARDS, epoch) if self._shuffled else np.arange(count)
        return shards, np.cumsum(self._sizes[shards])


class MixtureOrder:
    """Several orders (parts), interleaved: every batch has the positions of each part that `batch_sizes` states.

    The positions of a batch are dealt to the parts at random. Those of a part are numbered in order of appearance, so
    its epochs follow one another. A small part with a large weight repeats sooner.

    parts: orders whose `batch_sizes` are the columns of `mixture_batches`.
    """

    def __init__(self, parts: Sequence[SampleOrder], *, seed: int) -> None:
        self._parts = list(parts)
        self._seed = seed
        self._batch_sizes = np.stack([part.batch_sizes for part in parts], axis=1)
        self._batch = int(self._batch_sizes[0].sum())
        sizes = [part.samples_per_epoch for part in parts]
        self._bases = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        self.samples_per_epoch = sum(sizes)

    def largest_batch(self) -> tuple[int, int]:
        """Return the largest batch in which no part has to repeat a sample, and the part that limits it."""
        sizes = np.array([part.samples_per_epoch for part in self._parts])
        quotas = self._batch_sizes.sum(axis=0) // self._batch
        batches = (sizes * MIXTURE_BLOCK // quotas).tolist()
        return min(batches), batches.index(min(batches))

    def visit(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and epochs, both (n,) int64, at `positions` (n,) int64.

        The ids of the second part follow those of the first. Epochs are counted per part.
        """
        batches, offsets = np.divmod(positions, self._batch)
        owners, places, ids, epochs = (np.empty_like(positions) for _ in range(4))
        for batch in np.unique(batches):
            chosen = batches == batch
            owners[chosen], places[chosen] = (dealt[offsets[chosen]] for dealt in self._dealt(int(batch)))
        for number, part in enumerate(self._parts):
            chosen = owners == number
            if chosen.any():
                ids[chosen], epochs[chosen] = part.visit(places[chosen])
                ids[chosen] += self._bases[number]
        return ids, epochs

    def shards_from(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the shards of all parts, as for `SampleOrder.shards_from`, numbered across the parts."""

        def uses(part: SampleOrder, base: int) -> Iterator[tuple[int, int]]:
            for first, shard in part.shards_from(part.batch_start(position // self._batch)):
                yield part.batch_of(first) * self._batch, base + shard

        bases = itertools.accumulate((part.shard_count for part in self._parts), initial=0)
        return heapq.merge(*map(uses, self._parts, bases))

    @functools.lru_cache(maxsize=2)  # noqa: B019 (an order lives as long as its loader)
    def _dealt(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each position of a batch, and its position within that part, both (B,)."""
        sizes = self._batch_sizes[batch % len(self._batch_sizes)]
        owners = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
        owners = owners[permutation(self._batch, self._seed, _BATCHES, batch)]
        places = np.empty(self._batch, dtype=np.int64)
        starts = [part.batch_start(batch) + np.arange(size) for part, size in zip(self._parts, sizes, strict=True)]
        places[np.argsort(owners, kind="stable")] = np.concatenate(starts)
        return owners, places


def mixture_batches(weights: Sequence[float], batch: int) -> np.ndarray:
    """Return the positions of each part in each of 1,000 batches of `batch` positions, (1000, K) int64.

    A part has its share of a batch, rounded down or up. Rounding up is spread by systematic sampling (Madow 1949), and
    over the 1,000 batches the shares are exact. Raises DataError for unusable weights.
    """
    lower, rests = np.divmod(batch * block_quotas(weights), MIXTURE_BLOCK)
    # 617 and 1,000 have no common factor: every offset occurs once, and batches in a row have distant ones
    offsets = np.arange(MIXTURE_BLOCK) * 617 % MIXTURE_BLOCK
    ends = np.concatenate([[0], np.cumsum(rests)])
    return lower + np.diff((ends + offsets[:, None]) // MIXTURE_BLOCK, axis=1)


def block_quotas(weights: Sequence[float]) -> np.ndarray:
    """Return the share of each part in thousandths, (K,) int64 with sum 1,000, at least 1 each.

    They are proportional to the weights, rounded by largest remainder. Raises DataError for unusable weights.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise DataError(f"--train-data-weights are {list(weights)}; use positive numbers")
    exact = shares / shares.sum() * MIXTURE_BLOCK
    quotas = np.floor(exact).astype(np.int64)
    largest = np.argsort(quotas - exact, kind="stable")[: MIXTURE_BLOCK - int(quotas.sum())]
    quotas[largest] += 1
    if (quotas == 0).any():
        raise DataError(
            f"--train-data-weights are {list(weights)}; use weights of at least 1/{MIXTURE_BLOCK} of their sum"
        )
    return quotas
