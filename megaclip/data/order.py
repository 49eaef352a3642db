"""Compute the order of the samples by arithmetic, so that the whole state of a loader is one integer.

A *position* counts the samples that all ranks together have consumed since the beginning of training. `SampleOrder`
turns positions into sample ids:

    epoch = position // N. Within an epoch the shards are permuted by (seed, epoch) and concatenated. The result is cut
    into windows, and each window is permuted by (seed, epoch, window).

Every id of 0..N-1 therefore occurs exactly once per epoch, for any number of ranks and workers. A resumed run does not
have to skip samples. A batch may begin in one epoch and end in the next, so no sample is dropped. `MixtureOrder`
interleaves several orders with fixed quotas per block of positions.

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
"""Number of positions per block of a mixture. Every block meets the weights to a thousandth."""

ROWS_PER_SHARD = 1024
"""Number of rows that are permuted together in a source without shards."""

_SHARDS, _WINDOWS, _BLOCKS = range(3)


def permutation(size: int, *seeds: int) -> np.ndarray:
    """Return a permutation of 0..size-1 that depends only on `size` and `seeds` (integers >= 0)."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds))).permutation(size)


_window_permutation = functools.lru_cache(maxsize=16)(permutation)
"""`permutation` of a window, which many batches share. The blocks of a mixture are not kept: they would replace it."""


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
    shard_order: "shuffled", or "sequential" to keep the order of the shards (for a curriculum).
    window_size: number of samples that are shuffled together. Default: 65,536; in sequential order at most the largest
    shard, so that shards of equal size are never mixed.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int] | np.ndarray,
        *,
        seed: int,
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

    def visit(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and epochs, both (n,) int64, at `positions` (n,) int64."""
        epochs, places = np.divmod(positions, self.samples_per_epoch)
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = self._ids_of_epoch(int(epoch), places[chosen])
        return ids, epochs

    def _ids_of_epoch(self, epoch: int, places: np.ndarray) -> np.ndarray:
        windows, offsets = np.divmod(places, self.window_size)
        shuffled = np.empty_like(places)
        for window in np.unique(windows):
            chosen = windows == window
            start = int(window) * self.window_size
            size = min(self.window_size, self.samples_per_epoch - start)
            within = _window_permutation(size, self._seed, _WINDOWS, epoch, int(window))
            shuffled[chosen] = start + within[offsets[chosen]]
        shards, ends = self._laid_out(epoch if self._shuffled else 0)
        slots = np.searchsorted(ends, shuffled, side="right")
        rows = shuffled - (ends[slots] - self._sizes[shards[slots]])
        return self._bases[shards[slots]] + rows

    def shards_from(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the shards in the order of their use from `position`, as (first position of the window, shard).

        The sequence has no end, and a shard may come several times.
        """
        first_epoch, place = divmod(position, self.samples_per_epoch)
        begin = place - place % self.window_size
        for epoch in itertools.count(first_epoch):
            shards, ends = self._laid_out(epoch if self._shuffled else 0)
            for start in range(begin, self.samples_per_epoch, self.window_size):
                end = min(start + self.window_size, self.samples_per_epoch)
                slots = range(np.searchsorted(ends, start, "right"), np.searchsorted(ends, end, "left") + 1)
                for shard in shards[slots]:
                    if self._sizes[shard]:
                        yield epoch * self.samples_per_epoch + start, int(shard)
            begin = 0

    @functools.lru_cache(maxsize=2)  # noqa: B019 (an order lives as long as its loader)
    def _laid_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards in the order of `epoch`, and the position after the last sample of each."""
        count = len(self._sizes)
        shards = permutation(count, self._seed, _SHARDS, epoch) if self._shuffled else np.arange(count)
        return shards, np.cumsum(self._sizes[shards])


class MixtureOrder:
    """Several orders (parts), interleaved: every block of 1,000 positions has a fixed number of each, shuffled.

    Each part has its own epochs, so a small part with a large weight repeats sooner.
    """

    def __init__(self, parts: Sequence[SampleOrder], weights: Sequence[float], *, seed: int) -> None:
        self._parts = list(parts)
        self._seed = seed
        self.quotas = block_quotas(weights)
        sizes = [part.samples_per_epoch for part in parts]
        self._bases = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        self.samples_per_epoch = sum(sizes)

    def largest_batch(self) -> tuple[int, int]:
        """Return the largest number of positions in which no part has to repeat a sample, and the part that limits it.

        Each part has the same share of them as of a block.
        """
        sizes = np.array([part.samples_per_epoch for part in self._parts])
        batches = sizes * MIXTURE_BLOCK // self.quotas
        limiting = int(np.argmin(batches))
        return int(batches[limiting]), limiting

    def visit(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and epochs, both (n,) int64, at `positions` (n,) int64.

        The ids of the second part follow those of the first. Epochs are counted per part.
        """
        ids, epochs = np.empty_like(positions), np.empty_like(positions)
        owners, places = self._owners(positions)
        for number, part in enumerate(self._parts):
            chosen = owners == number
            if chosen.any():
                ids[chosen], epochs[chosen] = part.visit(places[chosen])
                ids[chosen] += self._bases[number]
        return ids, epochs

    def shards_from(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the shards of all parts, as for `SampleOrder.shards_from`, numbered across the parts."""
        base, parts = 0, []
        for part, quota in zip(self._parts, self.quotas.tolist(), strict=True):
            uses = part.shards_from(position // MIXTURE_BLOCK * quota)
            parts.append(map(functools.partial(_in_mixture, quota, base), uses))
            base += part.shard_count
        return heapq.merge(*parts)

    def _owners(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part that each position belongs to, and its position within that part."""
        blocks, offsets = np.divmod(positions, MIXTURE_BLOCK)
        distinct, which = np.unique(blocks, return_inverse=True)
        # Without shuffling, a block is one run of slots per part, as long as the part's quota.
        shuffled = np.array([permutation(MIXTURE_BLOCK, self._seed, _BLOCKS, int(block)) for block in distinct])
        slots = shuffled[which, offsets]
        ends = np.cumsum(self.quotas)
        owners = np.searchsorted(ends, slots, side="right")
        # The slots of a part are numbered from 0, so each number occurs once per block.
        places = blocks * self.quotas[owners] + slots - (ends[owners] - self.quotas[owners])
        return owners, places


def _in_mixture(quota: int, base: int, use: tuple[int, int]) -> tuple[int, int]:
    """Return a use of a part's shard as one of a mixture: its block begins at the position that is returned."""
    return use[0] // quota * MIXTURE_BLOCK, base + use[1]


def block_quotas(weights: Sequence[float]) -> np.ndarray:
    """Return the positions per block of each part, (K,) int64 with sum 1,000, at least 1 each.

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
