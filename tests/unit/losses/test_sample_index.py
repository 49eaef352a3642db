"""Rows and owners of sample ids: the ids of a dataset fill the rows of all ranks, and other ids are refused."""

import pytest
import torch

from megaclip.errors import DataError
from megaclip.losses.estimators import SampleIndex


@pytest.mark.parametrize("world_size", [1, 3])
def test_ids_fill_the_rows_of_all_ranks(world_size: int) -> None:
    ids = torch.arange(10)
    index = SampleIndex(10, 0, world_size)
    places = list(zip(index.owner(ids).tolist(), index.slots(ids).tolist(), strict=True))
    sizes = [SampleIndex(10, rank, world_size).rows for rank in range(world_size)]
    assert sorted(places) == [(rank, row) for rank, size in enumerate(sizes) for row in range(size)]


@pytest.mark.parametrize("sample", [-1, 10, 2**62])
def test_an_id_outside_the_dataset_is_refused(sample: int) -> None:
    with pytest.raises(DataError, match=f"sample id {sample} is outside the dataset of 10 samples"):
        SampleIndex(10, 0, 3).check(torch.tensor([4, sample]))
