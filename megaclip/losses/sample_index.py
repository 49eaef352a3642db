"""Where a sample's row lies: which rank owns an int64 id, and in which row of its state. On the host.

`DenseIndex` is arithmetic and holds nothing. `HashedIndex` is an open-addressing table with linear probing, worked on
for whole batches at once; it gives out rows 0, 1, 2... in the order of first appearance.
"""

import torch
from torch import Tensor

from megaclip.errors import DataError

_EMPTY = torch.iinfo(torch.int64).min
_LOW_BITS = 2**62 - 1


class DenseIndex:
    """Ids 0 to n-1: row `id // W` of rank `id % W`."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self._samples = samples
        self._world_size = world_size
        self.rows = len(range(rank, samples, world_size))

    def check(self, ids: Tensor) -> None:
        """Raise DataError for the first id outside the dataset."""
        outside = (ids < 0) | (ids >= self._samples)
        if outside.any():
            raise DataError(
                f"sample id {int(ids[outside][0])} is outside the dataset of {self._samples} samples that the loss's "
                f"state was made for (ids 0 to {self._samples - 1}): make the loss with the dataset's size"
            )

    def owner(self, ids: Tensor, world_size: int) -> Tensor:
        return ids % world_size

    def slots(self, ids: Tensor) -> Tensor:
        return ids // self._world_size


class HashedIndex:
    """Any ids but the smallest int64."""

    def __init__(self) -> None:
        self.rows = 0
        self._keys = torch.full((1024,), _EMPTY)
        self._slots = torch.zeros(1024, dtype=torch.int64)

    def check(self, ids: Tensor) -> None:
        """Raise DataError for the one id that cannot be stored."""
        if (ids == _EMPTY).any():
            raise DataError(f"sample id {_EMPTY} cannot be used: it marks empty places")

    def owner(self, ids: Tensor, world_size: int) -> Tensor:
        return (_mix(ids) >> 31) % world_size

    def slots(self, ids: Tensor) -> Tensor:
        """The row of each id (r,), new rows for ids that were not seen before."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        if 2 * (self.rows + len(unique)) > len(self._keys):
            self._enlarge(self.rows + len(unique))
        places, is_new = self._insert(unique)
        fresh = places[is_new]
        self._slots[fresh] = torch.arange(self.rows, self.rows + len(fresh))
        self.rows += len(fresh)
        return self._slots[places][inverse]

    def ids(self) -> Tensor:
        """(rows,) the id of each row."""
        used = self._keys != _EMPTY
        ids = torch.empty(self.rows, dtype=torch.int64)
        ids[self._slots[used]] = self._keys[used]
        return ids

    def _insert(self, unique: Tensor) -> tuple[Tensor, Tensor]:
        """Places of distinct ids in the table, and which of them were empty until now."""
        mask = len(self._keys) - 1
        places = _mix(unique) & mask
        is_new = torch.zeros(len(unique), dtype=torch.bool)
        waiting = torch.arange(len(unique))
        while len(waiting):
            at, wanted = places[waiting], unique[waiting]
            empty = self._keys[at] == _EMPTY
            self._keys[at[empty]] = wanted[empty]  # of several that meet in one place one is written; the rest move on
            settled = self._keys[at] == wanted
            is_new[waiting[empty & settled]] = True
            waiting = waiting[~settled]
            places[waiting] = (places[waiting] + 1) & mask
        return places, is_new

    def _enlarge(self, rows: int) -> None:
        ids = self.ids()
        size = len(self._keys)
        while size < 4 * rows:
            size *= 2
        self._keys = torch.full((size,), _EMPTY)
        self._slots = torch.zeros(size, dtype=torch.int64)
        places, _ = self._insert(ids)
        self._slots[places] = torch.arange(len(ids))


def _mix(ids: Tensor) -> Tensor:
    """Scrambled ids, non-negative: the finaliser of splitmix64 in wrapping int64 arithmetic."""
    mixed = ids ^ ((ids >> 30) & (2**34 - 1))
    mixed = mixed * -4658895280553007687
    mixed = mixed ^ ((mixed >> 27) & (2**37 - 1))
    mixed = mixed * -7723592293110705685
    return (mixed ^ ((mixed >> 31) & (2**33 - 1))) & _LOW_BITS
