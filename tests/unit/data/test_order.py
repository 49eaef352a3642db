"""Order of the samples: every id once per epoch for any number of ranks, resume from one integer, mixture quotas."""

from collections import Counter

import numpy as np
import pytest

from megaclip.data import check_batch
from megaclip.data.order import MIXTURE_BLOCK, MixtureOrder, SampleOrder, block_quotas, mixture_batches, rank_positions
from megaclip.errors import DataError

SIZES = [7, 1, 0, 30, 12, 50]


def visit(order, start, count):
    return order.visit(np.arange(start, start + count))


@pytest.mark.parametrize("shard_order", ["shuffled", "sequential"])
@pytest.mark.parametrize("window", [None, 1, 33])
def test_each_epoch_visits_every_id_exactly_once(shard_order, window):
    order = SampleOrder(SIZES, seed=3, shard_order=shard_order, window_size=window)
    for epoch in range(3):
        ids, epochs = visit(order, epoch * 100, 100)
        assert sorted(ids) == list(range(100))
        assert set(epochs) == {epoch}


def test_the_order_of_a_seed_never_changes_and_seeds_and_epochs_differ():
    """Checkpoints must resume under every version of NumPy and of this code, so this order must never change."""
    assert visit(SampleOrder([4, 4, 4], seed=0), 0, 12)[0].tolist() == [1, 11, 6, 5, 7, 8, 0, 4, 9, 3, 2, 10]
    order = SampleOrder(SIZES, seed=3)
    first, second = visit(order, 0, 100)[0], visit(order, 100, 100)[0]
    assert (first != second).any() and (first != visit(SampleOrder(SIZES, seed=4), 0, 100)[0]).any()


def test_sequential_order_keeps_shards_in_order_and_shuffles_within():
    order = SampleOrder([20] * 5, seed=0, shard_order="sequential")
    ids, again = visit(order, 0, 100)[0], visit(order, 100, 100)[0]
    np.testing.assert_array_equal(ids // 20, np.repeat(np.arange(5), 20))
    assert (ids != np.arange(100)).any() and (ids[:20] != again[:20]).any()
    assert len(set(visit(SampleOrder([20] * 5, seed=0), 0, 20)[0] // 20)) > 2  # a shuffled window mixes shards


def test_each_rank_takes_every_wth_position_of_a_step():
    """The reference deals the positions of a step to the ranks in turn."""
    for world_size, micro_batches, size in [(1, 1, 24), (2, 3, 4), (3, 2, 4), (4, 1, 6)]:
        dealt = [
            [rank_positions(48, m, size, rank, world_size) for m in range(micro_batches)] for rank in range(world_size)
        ]
        for rank in range(world_size):
            expected = [48 + place for place in range(24) if place % world_size == rank]
            assert np.concatenate(dealt[rank]).tolist() == expected


def mixture(sizes, weights, batch, seed=0, shard_order="shuffled"):
    columns = mixture_batches(weights, batch).T
    parts = [
        SampleOrder([size], seed=number, batch_sizes=column, shard_order=shard_order)
        for number, (size, column) in enumerate(zip(sizes, columns, strict=True))
    ]
    return MixtureOrder(parts, seed=seed)


@pytest.mark.parametrize("batch", [1, 3, 64, 1000, 1024])
def test_every_batch_of_a_mixture_has_the_rounded_share_of_each_part_and_a_thousand_have_it_exactly(batch):
    weights = [0.31, 5, 1, 1.7]
    shares = batch * block_quotas(weights) / MIXTURE_BLOCK
    counts = mixture_batches(weights, batch)
    assert (counts.sum(axis=1) == batch).all()
    assert ((counts == np.floor(shares)) | (counts == np.ceil(shares))).all()
    assert counts.sum(axis=0).tolist() == (batch * block_quotas(weights)).tolist()
    ahead = np.cumsum(counts, axis=0) - np.arange(1, 1 + MIXTURE_BLOCK)[:, None] * shares
    assert np.abs(ahead).max() < 8  # samples, at any time
    order = mixture([300, 4000, 70, 90], weights, batch)
    ids, _ = visit(order, 5 * batch, batch)
    found, _ = np.histogram(ids, [0, 300, 4300, 4370, 4460])
    assert found.tolist() == counts[5].tolist()


def test_a_batch_of_a_mixture_shuffles_each_window_and_each_batch_once(monkeypatch):
    """Each must be shuffled once and kept. One of 64 ranks takes a step in three micro-batches of 256 samples."""
    order, shuffled = mixture([10**6, 10**6], [1.0, 1.0], 256 * 3 * 64, seed=987), Counter()
    seed_sequence = np.random.SeedSequence

    def counted(seeds):
        shuffled[seeds] += 1
        return seed_sequence(seeds)

    monkeypatch.setattr(np.random, "SeedSequence", counted)
    for micro_batch in range(3):
        order.visit(rank_positions(0, micro_batch, 256, 3, 64))
    assert len(shuffled) > 2
    assert {seeds: count for seeds, count in shuffled.items() if len(seeds) != 3 and count > 1} == {}
    assert max(count for seeds, count in shuffled.items() if len(seeds) == 3) <= 2  # a batch, or the shards of a part


def copies_and_fewest(order, sizes, batch, steps):
    """Return the copies in each of the first batches, and the smallest number with these parts: counted by id."""
    ids = visit(order, 0, steps * batch)[0].reshape(steps, batch)
    first = np.cumsum([0, *sizes])
    copies = np.array([batch - len(set(row)) for row in ids.tolist()])
    fewest = [np.maximum(0, np.histogram(row, first)[0] - sizes).sum() for row in ids]
    return copies, np.array(fewest)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shard_order", ["shuffled", "sequential"])
def test_batches_of_mixtures_hold_the_fewest_possible_copies(seed, shard_order):
    """Batches that `check_batch` accepts hold none, the largest one too, and larger ones only those that they must."""
    random = np.random.default_rng(seed)
    parts = random.integers(1, 6)
    sizes, weights = random.integers(20, 900, parts), random.uniform(0.2, 3, parts)
    largest, _ = mixture(sizes, weights, 1).largest_batch()
    for batch in {1 + largest // 4, 2 * largest // 3, largest, largest + 9, 3 * largest}:
        order = mixture(sizes, weights, batch, seed, shard_order)
        copies, fewest = copies_and_fewest(order, sizes, batch, 30)
        assert copies.tolist() == fewest.tolist()
        if batch <= min(largest, sizes.sum()):
            check_batch(batch, order)
            assert not copies.any()
        else:
            with pytest.raises(DataError):
                check_batch(batch, order)


@pytest.mark.parametrize("shard_order", ["shuffled", "sequential"])
@pytest.mark.parametrize("batch", [1, 30, 50, 51, 99, 100, 130])
def test_batches_of_one_dataset_hold_no_sample_twice_and_its_epochs_each_sample_once(batch, shard_order):
    order = SampleOrder(SIZES, seed=5, batch_sizes=[batch], shard_order=shard_order)
    copies, fewest = copies_and_fewest(order, [100], batch, 300)
    assert copies.tolist() == fewest.tolist()
    ids, _ = visit(order, 0, 5000)
    assert (np.sort(ids.reshape(50, 100)) == np.arange(100)).all()
    assert len({tuple(row) for row in ids.reshape(50, 100).tolist()}) >= (50 if batch <= 50 or batch == 100 else 1)
    far = 10**12
    whole, pieces = visit(order, far, 700)[0], [visit(order, far + start, 35)[0] for start in range(0, 700, 35)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)  # random access, in any order
    np.testing.assert_array_equal(visit(order, far, 700)[0][::3], order.visit(np.arange(far, far + 700, 3))[0])


def test_the_parts_of_a_mixture_have_their_own_epochs_which_follow_one_another():
    """The positions of a part, in order of appearance, must hold each of its samples once per epoch."""
    sizes = [300, 100]
    ids, epochs = visit(mixture(sizes, [3.0, 1.0], 64), 0, 6400)
    for first, size in ((0, 300), (300, 100)):
        mine = (ids >= first) & (ids < first + size)
        rounds = mine.sum() // size
        found = ids[mine][: rounds * size].reshape(rounds, size)
        assert (np.sort(found) == np.arange(first, first + size)).all()
        assert (epochs[mine] == np.arange(mine.sum()) // size).all()


def test_quotas_sum_to_a_block_and_unusable_settings_are_errors():
    assert block_quotas([1, 1, 1]).sum() == MIXTURE_BLOCK
    assert block_quotas([0.5, 0.25, 0.25]).tolist() == [500, 250, 250]
    for weights in ([1, 0], [1, -1], [1, float("nan")], [1, 1e-6]):
        with pytest.raises(DataError, match="weights"):
            block_quotas(weights)
    with pytest.raises(DataError, match="no samples"):
        SampleOrder([0, 0], seed=0)
    with pytest.raises(DataError, match="shard_order"):
        SampleOrder([1], seed=0, shard_order="random")


def test_every_part_of_a_mixture_keeps_the_order_of_its_shards():
    """It is computed once per epoch, not once per batch. 80 positions of each part are in epoch 0."""
    parts = [SampleOrder([50] * 20, seed=number, batch_sizes=[8]) for number in range(4)]
    mixture = MixtureOrder(parts, seed=0)
    for batch in range(10):
        mixture.visit(np.arange(32 * batch, 32 * (batch + 1)))
    assert [part._laid_out.cache_info().misses for part in parts] == [1] * 4
