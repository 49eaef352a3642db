"""State of every sample of the dataset, kept by the rank that owns the sample: n/W rows on each of W ranks.

Losses over the whole dataset (`megaclip.losses.fastclip`) remember a few numbers per sample. `SampleState` stores them
by int64 sample id and moves them in batches: `fetch` asks for the rows of this step's ids and may be called before the
towers run, `Ticket.rows` waits for them, and `commit` sends one row per sample back to its owner. Each way is one
all-to-all; who owns what follows from the ids of all ranks, which `fetch` gathers (8 bytes per sample).

The owner merges what it receives, so numbers that only it needs (an optimizer's moments) never move, and an id that
occurs twice in a batch is well defined: both occurrences are fetched alike, and the owner's merge sees both.

Two ways of finding a row: dense, for ids 0 to n-1 (row `id // W` on rank `id % W`; the ids of datasets laid end to end,
as `megaclip.data` makes them, cannot collide), and hashed, for any ids (a table that grows with the samples seen).
Another estimator plugs in by choosing its columns and its merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from torch import Tensor

from megaclip.comm.collectives import gather_on_host
from megaclip.comm.groups import RankGroup, resolve
from megaclip.errors import CheckpointError, DataError
from megaclip.losses.sample_index import DenseIndex, HashedIndex

Merge = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows held (k, C), rows received (r, sent columns), index of the held row of each received (r,)) -> new rows."""


class Ticket:
    """Rows that were asked for. `rows()` waits; `SampleState.commit` sends new values back along the same routes."""

    def __init__(
        self, ids: Tensor, slots: Tensor, order: Tensor, given: list[int], taken: list[int], received: Tensor, work: Any
    ) -> None:
        self.ids = ids  # (b,) of this rank, on the host
        # slots: rows of this rank's state that others (and it) asked for, requester by requester. Sorted out now, while
        # a GPU may be busy with the towers: which rows there are, and which of them each request means.
        self.held, self.inverse = torch.unique(slots, return_inverse=True)
        self.order = order  # (b,) where the rows received belong in the batch
        self.given, self.taken = given, taken  # rows per peer: sent to it, received from it
        self._received = received
        self._work = work
        self._rows: Tensor | None = None

    def rows(self) -> Tensor:
        """(b, fetched columns) in the order of the ids, on the device that messages use."""
        if self._rows is None:
            if self._work is not None:
                self._work.wait()
            self._rows = torch.empty_like(self._received)
            self._rows[_upload(self.order, self._received.device)] = self._received
        return self._rows

    def rows_on(self, device: torch.device) -> Tensor:
        """`rows()` on another device."""
        return _upload(self.rows(), device)


class SampleState:
    """`columns` numbers per sample, sharded by owner over the ranks of `group`.

    columns: name and starting value of each; the first `fetched` of them travel in a fetch, the others stay home.
    samples: the dataset's size for dense ids; None for hashed ids.
    dtype, device: of the state held here. float32 on the host costs 4 * columns * n / W bytes of host memory.
    """

    def __init__(
        self,
        columns: dict[str, float],
        *,
        fetched: int,
        samples: int | None,
        group: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.columns = columns
        self.fetched = fetched
        self.samples = samples
        self.group = group
        self.ranks: RankGroup = resolve(group)
        self._start = torch.tensor(list(columns.values()), dtype=dtype)
        self.index: DenseIndex | HashedIndex
        self.index = HashedIndex() if samples is None else DenseIndex(samples, self.ranks.rank, self.ranks.size)
        self.values = self._start.to(device).repeat(self.index.rows, 1)  # (rows, C)

    def fetch(self, ids: Tensor) -> Ticket:
        """Ask for the rows of this rank's ids, (b,) int64 on any device; every rank calls it with equally many.

        Raises DataError: on all ranks for ids outside the dataset; on this one alone for what is no (b,) of int64.
        """
        ids = ids.detach().cpu()
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise DataError(f"expected sample ids (b,) of int64, got {tuple(ids.shape)} {ids.dtype}")
        ranks = self.ranks
        everyone = gather_on_host(ids, group=ranks).flatten()
        self.index.check(everyone)
        owners = self.index.owner(everyone, ranks.size)
        mine = owners == ranks.rank
        slots = self.index.slots(everyone[mine])
        self._grow()
        given = mine.view(ranks.size, -1).sum(dim=1).tolist()
        own = owners.view(ranks.size, -1)[ranks.rank]
        taken = torch.bincount(own, minlength=ranks.size).tolist()
        rows = self.values[_upload(slots, self.values.device), : self.fetched]
        if ranks.size > 1:
            rows = _upload(rows, ranks.message_device)
        received, work = self._exchange(rows, given, taken, wait=False)
        # 16-bit numbers have a stable sort in linear time.
        order = torch.from_numpy(np.argsort(own.numpy().astype(np.min_scalar_type(ranks.size)), kind="stable"))
        return Ticket(ids, slots, order, given, taken, received, work)

    def commit(self, ticket: Ticket, rows: Tensor, merge: Merge) -> None:
        """Give each sample's owner a row (b, any columns) in the order of the ids; `merge` makes the new state of it.

        Every rank calls it, once per ticket.
        """
        ticket.rows()
        rows = rows.detach().to(ticket.rows().device, self.values.dtype)
        sent = rows[_upload(ticket.order, rows.device)]
        received, _ = self._exchange(sent, ticket.taken, ticket.given, wait=True)
        held, inverse = (_upload(index, self.values.device) for index in (ticket.held, ticket.inverse))
        self.values[held] = merge(self.values[held], received.to(self.values.device), inverse)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: its rows with their ids implied (dense) or listed (hashed)."""
        return {
            "columns": list(self.columns),
            "samples": self.samples,
            "rank": self.ranks.rank,
            "world_size": self.ranks.size,
            "values": self.values[: self.index.rows].to("cpu", copy=True),
            "ids": self.index.ids() if isinstance(self.index, HashedIndex) else None,
        }

    def load_state_dicts(self, parts: Iterable[dict[str, Any]]) -> None:
        """Take this rank's samples from the parts of all ranks that saved, however many those were.

        Raises CheckpointError when a part is missing or belongs to another dataset size or another loss.
        """
        seen: set[int] = set()
        size = 0
        for part in parts:
            for name, here in (("columns", list(self.columns)), ("samples", self.samples)):
                if part[name] != here:
                    raise CheckpointError(
                        f"the per-sample state was saved with {name} {part[name]!r}, this run has {here!r}: "
                        "use the loss and the training data it was saved with"
                    )
            seen.add(part["rank"])
            size = part["world_size"]
            ids = part["ids"] if part["ids"] is not None else _dense_ids(part)
            mine = self.index.owner(ids, self.ranks.size) == self.ranks.rank
            slots = self.index.slots(ids[mine])
            self._grow()
            self.values[slots.to(self.values.device)] = part["values"][mine].to(self.values)
        if not seen:
            raise CheckpointError("the checkpoint holds no per-sample state: another loss wrote it")
        if seen != set(range(size)):
            raise CheckpointError(f"the per-sample state was saved by {size} ranks, only {sorted(seen)} are here")

    def _grow(self) -> None:
        missing = self.index.rows - len(self.values)
        if missing > 0:
            more = self._start.to(self.values.device).repeat(max(missing, len(self.values) // 2), 1)
            self.values = torch.cat([self.values, more])

    def _exchange(self, rows: Tensor, given: list[int], taken: list[int], *, wait: bool) -> tuple[Tensor, Any]:
        """`given[r]` rows to rank r, `taken[r]` from it, in rank order."""
        if self.ranks.size == 1:
            return rows, None
        rows = rows.contiguous()
        received = rows.new_empty(sum(taken), rows.shape[1])
        work = dist.all_to_all_single(received, rows, taken, given, group=self.ranks.handle, async_op=not wait)
        return received, None if wait else work


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; from the host to a GPU without waiting for the work that is queued there."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _dense_ids(part: dict[str, Any]) -> Tensor:
    return torch.arange(len(part["values"])) * part["world_size"] + part["rank"]
