"""State of every sample of the dataset, stored by the rank that owns the sample: n/W rows on each of W ranks.

The global losses (`megaclip.losses.fastclip`) store a few numbers per sample. `SampleState` stores them by
int64 sample id, 0 to n-1, and moves them in batches:

* `fetch` requests the rows of this step's ids. It may be called before the towers run.
* `Ticket.rows` waits for them.
* `commit` sends one row per sample back to its owner.

`fetch` first gathers the ids of all ranks (8 bytes per sample), and every rank computes from them which rows it sends
to which rank. One all-to-all in `fetch` and one in `commit` send the rows of state.

The owner merges the rows that it receives, so numbers that only the owner needs, such as the moments of an optimizer,
are never sent. An id may occur twice in a batch: both occurrences fetch the same row, and the owner's merge receives
both. To add an estimator, define its columns and its merge function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from torch import Tensor

from megaclip.comm.collectives import gather_on_host
from megaclip.comm.groups import RankGroup, resolve
from megaclip.devices import upload
from megaclip.errors import CheckpointError, DataError
from megaclip.logging import format_count

Merge = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(stored rows (k, C), received rows (r, sent columns), index of the stored row of each (r,)) -> new rows (k, C)."""


def check_ids(ids: object, rows: int | None = None) -> None:
    """Raise DataError unless `ids` is a tensor (b,) of int64. rows: the expected b. None: any."""
    expected = f"one int64 sample id per row, ({'b' if rows is None else rows},)"
    if not isinstance(ids, Tensor):
        raise DataError(f"ids are a {type(ids).__name__}; expected a tensor, {expected}: use torch.as_tensor(ids)")
    if ids.dim() != 1 or ids.dtype != torch.int64 or rows not in (None, len(ids)):
        raise DataError(f"ids are {tuple(ids.shape)} {ids.dtype}; expected {expected}")


class Ticket:
    """Requested rows. `rows()` waits for them. `SampleState.commit` sends new values back to the same owners."""

    def __init__(
        self, ids: Tensor, slots: Tensor, order: Tensor, given: list[int], taken: list[int], received: Tensor, work: Any
    ) -> None:
        self.ids = ids  # (b,) of this rank, on the host
        # slots: the rows of this rank's state that each rank requested, in rank order. Duplicates are found now, while
        # a GPU may still compute the towers: `held` are the distinct rows, `inverse` is the row of each request.
        self.held, self.inverse = torch.unique(slots, return_inverse=True)
        self.order = order  # (b,) position in the batch of each row received
        self.given, self.taken = given, taken  # number of rows sent to and received from each peer
        self._received = received
        self._work = work
        self._rows: Tensor | None = None

    def rows(self) -> Tensor:
        """Return the rows (b, fetched columns) in the order of the ids, on the device of the group's messages."""
        if self._rows is None:
            if self._work is not None:
                self._work.wait()
            self._rows = torch.empty_like(self._received)
            self._rows[upload(self.order, self._received.device)] = self._received
        return self._rows


class SampleState:
    """A few numbers per sample, sharded by owner over the ranks of `group`: id i is row `i // W` of rank `i % W`.

    columns: name and initial value of each number. A fetch sends the first `fetched` of them; the owner keeps the
    others.
    samples: number n of samples of the dataset; ids are 0 to n-1.
    dtype, device: dtype and device of the state on this rank. float32 needs 4 * columns * n / W bytes.
    """

    def __init__(
        self,
        columns: dict[str, float],
        *,
        fetched: int,
        samples: int,
        group: Any,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.columns = columns
        self.fetched = fetched
        self.samples = samples
        self.group = group
        self.ranks: RankGroup = resolve(group)
        initial = torch.tensor(list(columns.values()), dtype=dtype, device=device)
        self.values = initial.repeat(len(range(self.ranks.rank, samples, self.ranks.size)), 1)  # (rows, C)

    def fetch(self, ids: Tensor) -> Ticket:
        """Request the rows of this rank's ids, (b,) int64 on any device. Every rank calls it with the same b.

        Raises DataError: on all ranks for ids outside the dataset, on this rank alone for another shape or dtype.
        Raises RuntimeError if distributed training was initialised after this object was constructed.
        """
        check_ids(ids)
        ids = ids.detach().cpu()
        ranks = resolve(self.group)
        if ranks != self.ranks:
            raise RuntimeError(
                f"the state per sample was constructed for rank {self.ranks.rank} of {self.ranks.size}, and this is "
                f"rank {ranks.rank} of {ranks.size}; construct the loss after distributed training is initialised"
            )
        everyone = gather_on_host(ids, group=ranks).flatten()
        outside = everyone[(everyone < 0) | (everyone >= self.samples)]
        if len(outside):
            raise DataError(
                f"sample id {int(outside[0])} is outside the dataset of {self.samples} samples; expected ids "
                f"0 to {self.samples - 1}: construct the loss with the size of the dataset"
            )
        owners = everyone % ranks.size
        mine = owners == ranks.rank
        slots = everyone[mine] // ranks.size
        given = mine.view(ranks.size, -1).sum(dim=1).tolist()
        own = owners.view(ranks.size, -1)[ranks.rank]
        taken = torch.bincount(own, minlength=ranks.size).tolist()
        rows = self.values[upload(slots, self.values.device), : self.fetched]
        if ranks.size > 1:
            rows = upload(rows, ranks.message_device)
        received, work = self._exchange(rows, given, taken, wait=False)
        # NumPy sorts 16-bit numbers stably in linear time.
        order = torch.from_numpy(np.argsort(own.numpy().astype(np.min_scalar_type(ranks.size)), kind="stable"))
        return Ticket(ids, slots, order, given, taken, received, work)

    def commit(self, ticket: Ticket, rows: Tensor, merge: Merge) -> None:
        """Send `rows` (b, any columns), in the order of the ids, to the samples' owners; `merge` updates their state.

        Every rank calls it, once per ticket.
        """
        ticket.rows()
        rows = rows.detach().to(ticket.rows().device, self.values.dtype)
        sent = rows[upload(ticket.order, rows.device)]
        received, _ = self._exchange(sent, ticket.taken, ticket.given, wait=True)
        held, inverse = (upload(index, self.values.device) for index in (ticket.held, ticket.inverse))
        self.values[held] = merge(self.values[held], received.to(self.values.device), inverse)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: its rows, in the order of their ids."""
        return {
            "columns": list(self.columns),
            "samples": self.samples,
            "rank": self.ranks.rank,
            "world_size": self.ranks.size,
            "values": self.values.to("cpu", copy=True),
        }

    def load_state_dicts(self, parts: Iterable[dict[str, Any]]) -> None:
        """Read this rank's samples from the parts of all ranks that saved. The number of ranks may differ.

        Raises CheckpointError if a part is missing, or belongs to another dataset size, loss or checkpoint.
        """
        seen: set[int] = set()
        size = 0
        for part in parts:
            for name, here in (("columns", list(self.columns)), ("samples", self.samples)):
                if part[name] != here:
                    raise CheckpointError(
                        f"the per-sample state was saved with {name} {part[name]!r}, this run has {here!r}; "
                        "use the loss and the training data with which it was saved"
                    )
            if seen and part["world_size"] != size:
                raise CheckpointError(
                    f"some parts of the per-sample state were saved by {format_count(size, 'rank')}, others by "
                    f"{part['world_size']}; give only the parts of one checkpoint"
                )
            seen.add(part["rank"])
            size = part["world_size"]
            ids = torch.arange(len(part["values"])) * size + part["rank"]
            mine = ids % self.ranks.size == self.ranks.rank
            slots = ids[mine] // self.ranks.size
            self.values[slots.to(self.values.device)] = part["values"][mine].to(self.values)
        if not seen:
            raise CheckpointError(
                "the checkpoint holds no per-sample state, because another loss wrote it; set the loss that wrote it"
            )
        if seen != set(range(size)):
            raise CheckpointError(
                f"the per-sample state was saved by {format_count(size, 'rank')}, but only the parts of ranks "
                f"{sorted(seen)} were found; restore the parts of the other ranks"
            )

    def _exchange(self, rows: Tensor, given: list[int], taken: list[int], *, wait: bool) -> tuple[Tensor, Any]:
        """Send `given[r]` rows to rank r and receive `taken[r]` rows from it, in rank order."""
        if self.ranks.size == 1:
            return rows, None
        rows = rows.contiguous()
        received = rows.new_empty(sum(taken), rows.shape[1])
        work = dist.all_to_all_single(received, rows, taken, given, group=self.ranks.handle, async_op=not wait)
        return received, None if wait else work


def mean_per_row(received: Tensor, inverse: Tensor, rows: int) -> Tensor:
    """Return one row per sample (rows, columns), the mean over its occurrences in the batch.

    The first two columns hold log u. Their result is the logarithm of the mean of u. The other columns hold gradients.
    """
    if len(received) == rows:
        new = torch.empty_like(received)
        new[inverse] = received
        return new
    index = inverse[:, None].expand_as(received)
    count = torch.bincount(inverse, minlength=rows)[:, None].to(received.dtype)
    log_u = received[:, :2]
    top = torch.full((rows, 2), -math.inf, dtype=received.dtype, device=received.device)
    top = top.scatter_reduce(0, index[:, :2], log_u, "amax")
    top = top.masked_fill(top.isinf(), 0.0)  # u = 0: exp(-inf - 0) is 0 again
    total = torch.zeros_like(top).scatter_add_(0, index[:, :2], (log_u - top[inverse]).exp())
    rest = received.new_zeros(rows, received.shape[1] - 2).scatter_add_(0, index[:, 2:], received[:, 2:])
    return torch.cat([top + total.log() - count.log(), rest / count], dim=1)
