"""Where a sample's row lies: the hashed table against a dictionary, far beyond its first size; the dense arithmetic."""

import pytest
import torch

from megaclip.errors import DataError
from megaclip.losses.sample_index import DenseIndex, HashedIndex


def test_a_hashed_id_keeps_its_row_while_the_table_grows() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(-(2**62), 2**62, (6000,), generator=generator)
    pool[:3000] = torch.arange(3000)  # neighbours, as datasets have them, beside ids from anywhere
    index = HashedIndex()
    rows: dict[int, int] = {}
    for _ in range(40):
        ids = pool[torch.randint(len(pool), (400,), generator=generator)]  # known, new, and twice in a batch
        for sample, row in zip(ids.tolist(), index.slots(ids).tolist(), strict=True):
            assert rows.setdefault(sample, row) == row
        assert sorted(rows.values()) == list(range(index.rows))
    assert len(rows) > 5000
    assert dict(zip(index.ids().tolist(), range(index.rows), strict=True)) == rows


def test_hashed_ids_are_spread_evenly_over_their_owners() -> None:
    owners = HashedIndex().owner(torch.arange(0, 30_000, 10), 3)
    assert torch.bincount(owners, minlength=3).tolist() == pytest.approx([1000] * 3, rel=0.1)


def test_the_one_id_that_marks_empty_places_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be used"):
        HashedIndex().check(torch.tensor([1, -(2**63)]))


@pytest.mark.parametrize("world_size", [1, 3])
def test_dense_ids_fill_the_rows_of_all_ranks(world_size: int) -> None:
    ids = torch.arange(10)
    index = DenseIndex(10, 0, world_size)
    places = list(zip(index.owner(ids, world_size).tolist(), index.slots(ids).tolist(), strict=True))
    sizes = [DenseIndex(10, rank, world_size).rows for rank in range(world_size)]
    assert sorted(places) == [(rank, row) for rank, size in enumerate(sizes) for row in range(size)]
