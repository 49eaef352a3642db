"""Order of the samples: every id once per epoch for any number of ranks, resume from one integer, mixture quotas."""

from collections import Counter

import numpy as np
import pytest

from megaclip.data import check_batch
from megaclip.data.order import MIXTURE_BLOCK, MixtureOrder, SampleOrder, block_quotas, rank_positions
from megaclip.errors import DataError

SIZES = [7, 1, 0, 30, 12, 50]


def visit(order, start, count):
    return order.visit(np.arange(start, start + count))


@pytest.mark.parametrize("shard_order", ["shuffled", "sequential"])
@pytest.mark.parametrize("window", [None, 1, 16, 33, 1000])
def test_each_epoch_visits_every_id_exactly_once(shard_order, window):
    order = SampleOrder(SIZES, seed=3, shard_order=shard_order, window_size=window)
    for epoch in range(3):
        ids, epochs = visit(order, epoch * 100, 100)
        assert sorted(ids) == list(range(100))
        assert set(epochs) == {epoch}


def test_orders_differ_between_epochs_and_seeds_and_are_reproducible():
    order = SampleOrder(SIZES, seed=3)
    first, second = visit(order, 0, 100)[0], visit(order, 100, 100)[0]
    assert (first != second).any()
    assert (first != visit(SampleOrder(SIZES, seed=4), 0, 100)[0]).any()
    np.testing.assert_array_equal(first, visit(SampleOrder(SIZES, seed=3), 0, 100)[0])


def test_the_order_of_a_seed_never_changes():
    """Checkpoints must resume under every version of NumPy and of this code, so this order must never change."""
    assert visit(SampleOrder([4, 4, 4], seed=0), 0, 12)[0].tolist() == [1, 11, 6, 5, 7, 8, 0, 4, 9, 3, 2, 10]


def test_the_order_does_not_depend_on_how_positions_are_grouped():
    order = SampleOrder(SIZES, seed=1, window_size=16)
    whole = visit(order, 0, 250)[0]
    pieces = [visit(order, start, 25)[0] for start in range(0, 250, 25)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_sequential_order_keeps_shards_in_order_and_shuffles_within():
    ids = visit(SampleOrder([20] * 5, seed=0, shard_order="sequential"), 0, 100)[0]
    np.testing.assert_array_equal(ids // 20, np.repeat(np.arange(5), 20))
    assert (ids != np.arange(100)).any()
    again = visit(SampleOrder([20] * 5, seed=0, shard_order="sequential"), 100, 100)[0]
    assert (ids[:20] != again[:20]).any()


def test_shuffled_windows_mix_shards():
    ids = visit(SampleOrder([20] * 5, seed=0), 0, 100)[0]
    assert len(set(ids[:20] // 20)) > 2


def test_each_rank_takes_every_wth_position_of_a_step():
    """The reference deals the positions of a step to the ranks in turn."""
    for world_size, micro_batches, size in [(1, 1, 24), (2, 3, 4), (3, 2, 4), (4, 1, 6)]:
        dealt = [
            [rank_positions(48, m, size, rank, world_size) for m in range(micro_batches)] for rank in range(world_size)
        ]
        for rank in range(world_size):
            expected = [48 + place for place in range(24) if place % world_size == rank]
            assert np.concatenate(dealt[rank]).tolist() == expected


def test_a_position_in_a_large_dataset_is_computed_without_replay():
    """Position 3e8 of 4e8 samples must be computed without replay, and without memory in proportion to the samples."""
    order = SampleOrder(np.full(40_000, 10_000), seed=0)
    ids, epochs = visit(order, 300_000_000, 64)
    assert len(set(ids.tolist())) == 64 and ids.min() >= 0 and ids.max() < 400_000_000
    assert set(epochs) == {0}


def test_every_block_of_a_mixture_meets_the_quotas():
    parts = [SampleOrder([300], seed=0), SampleOrder([50, 50], seed=1)]
    order = MixtureOrder(parts, [3.0, 1.0], seed=0)
    for block in range(4):
        ids, _ = visit(order, block * MIXTURE_BLOCK, MIXTURE_BLOCK)
        assert (ids < 300).sum() == 750 and (ids >= 300).sum() == 250


def test_a_batch_over_many_blocks_of_a_mixture_shuffles_each_window_once(monkeypatch):
    """Each window must be shuffled once and kept. 256 samples of one of 64 ranks lie in 17 blocks."""
    parts = [SampleOrder([10**6], seed=seed) for seed in (0, 1)]
    mixture, shuffled = MixtureOrder(parts, [1.0, 1.0], seed=987), Counter()
    seed_sequence = np.random.SeedSequence

    def counted(seeds):
        shuffled[seeds] += 1
        return seed_sequence(seeds)

    monkeypatch.setattr(np.random, "SeedSequence", counted)
    for micro_batch in range(3):
        mixture.visit(rank_positions(0, micro_batch, 256, 3, 64))
    assert {seeds: count for seeds, count in shuffled.items() if len(seeds) == 4 and count > 1} == {}


def test_each_part_of_a_mixture_has_its_own_epochs():
    parts = [SampleOrder([300], seed=0), SampleOrder([50, 50], seed=1)]
    ids, epochs = visit(MixtureOrder(parts, [3.0, 1.0], seed=0), 0, 4 * MIXTURE_BLOCK)
    for first, size in ((0, 300), (300, 100)):
        mine = (ids >= first) & (ids < first + size)
        for epoch in range(mine.sum() // size):
            assert sorted(ids[mine & (epochs == epoch)]) == list(range(first, first + size))


def test_a_batch_of_a_mixture_repeats_no_sample_of_a_part_that_is_too_small_for_its_weight():
    mixture = MixtureOrder([SampleOrder([100_000], seed=0), SampleOrder([100], seed=1)], [1.0, 1.0], seed=0)
    check_batch(200, mixture)
    with pytest.raises(DataError, match=r"repeat samples of entry 2 of --train-data.* set train_batch_size to 200 or"):
        check_batch(201, mixture)
    ids, _ = visit(mixture, 0, 1000)
    assert len(set(ids)) == 600  # the property that the check protects


def test_quotas_sum_to_a_block_and_unusable_weights_are_errors():
    assert block_quotas([1, 1, 1]).sum() == MIXTURE_BLOCK
    assert block_quotas([0.5, 0.25, 0.25]).tolist() == [500, 250, 250]
    for weights in ([1, 0], [1, -1], [1, float("nan")], [1, 1e-6]):
        with pytest.raises(DataError, match="weights"):
            block_quotas(weights)


def test_empty_datasets_and_unknown_orders_are_errors():
    with pytest.raises(DataError, match="no samples"):
        SampleOrder([0, 0], seed=0)
    with pytest.raises(DataError, match="shard_order"):
        SampleOrder([1], seed=0, shard_order="random")
