"""Ring exchange: blocks pass around the ranks of a group while each rank computes on the block that it holds.

Every rank sends to the next rank and receives from the previous one. `circulate` yields all W blocks to a rank in W-1
exchanges; the next block is received while the caller computes on the current one. Results that belong to a block (its
column statistics, its gradient) follow one exchange later in a `Carried`. It adds the part of each rank in turn. After
W exchanges it arrives at the rank that owns the block:

    hop      0          1          2                     at hop k, rank r holds the block of rank r-k
    blocks   r          r-1        r-2
    carried  r   ->     r-1   ->   r-2   ->  home: r

On several hosts with several ranks each (a `NodeGroup`) the ring has two levels. A block passes around the ranks of a
host while a copy of it is sent to the next host. So one transfer over the slow links between hosts may take as long as
a whole round inside a host. A `Carried` collects the parts of one host, adds them to those of the previous hosts, and
is sent to the next host.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import deepspeed.comm as dist
import torch
from torch import Tensor

from megaclip.comm.groups import NodeGroup, RankGroup, resolve

Tensors = tuple[Tensor, ...]
Merge = Callable[[Tensors, Tensors], Tensors]

# Blocks and carried results are sent at the same time. Gloo matches messages by tag; NCCL matches them by order.
_BLOCK_TAG = 0
_CARRIED_TAG = 100


def circulate(
    block: Sequence[Tensor], *, group: Any = None, payload: torch.dtype | None = None
) -> Iterator[tuple[int, Tensors]]:
    """Yield (rank that owns the block, its tensors) W times, this rank's own block first.

    The caller must not modify the tensors, because they are being sent to the next rank.

    Args:
        block: tensors whose shapes and dtypes are the same on all ranks.
        payload: dtype in which matrices are sent; vectors are sent in their own dtype. Received tensors have their
            original dtype again. None: every tensor is sent in its own dtype.
    """
    ranks = resolve(group)
    if not _has_two_levels(ranks):
        yield from _circulate(block, ranks, payload)
        return
    for node, held in _circulate(block, ranks.outer, payload):
        for place, visiting in _circulate(held, ranks.inner, payload):
            yield node * ranks.inner.size + place, visiting


def _has_two_levels(ranks: RankGroup) -> TypeGuard[NodeGroup]:
    return isinstance(ranks, NodeGroup) and ranks.inner.size > 1


def _circulate(block: Sequence[Tensor], ranks: RankGroup, payload: torch.dtype | None) -> Iterator[tuple[int, Tensors]]:
    """Circulate over one level of the ring."""
    held: Tensors = tuple(tensor.contiguous() for tensor in block)
    for hop in range(ranks.size):
        exchange = _Exchange(held, ranks, _BLOCK_TAG, payload) if hop < ranks.size - 1 else None
        yield (ranks.rank - hop) % ranks.size, held
        if exchange is not None:
            held = exchange.wait()


class Carried:
    """Tensors that follow one exchange behind the blocks of `circulate` and collect a part from every rank.

    merge(arrived, part) combines the received tensors with this rank's part; it may modify either in place.
    payload: dtype in which matrices are sent, as for `circulate`. Parts are merged in their own dtype.
    """

    def __init__(self, merge: Merge, *, group: Any = None, payload: torch.dtype | None = None) -> None:
        ranks = resolve(group)
        self._between: Carried | None = None
        if _has_two_levels(ranks):
            self._between = Carried(merge, group=ranks.outer, payload=payload)
            ranks = ranks.inner
        self._merge, self._ranks, self._payload = merge, ranks, payload
        self._pending: _Exchange | None = None
        self._hops = 0

    def add(self, part: Tensors) -> None:
        """Add this rank's part for the block that it holds, once per hop. The caller must not use it afterwards."""
        if self._between is not None and self._hops == self._ranks.size:
            self._end_round(self._between)  # not at the end of `add`: the last exchange runs during the next tile
        if self._pending is not None:
            part = self._merge(self._pending.wait(), part)
        self._pending = _Exchange(part, self._ranks, _CARRIED_TAG, self._payload)
        self._hops += 1

    def home(self) -> Tensors:
        """Return the merged parts of all ranks for this rank's own block. Call it once, after the last hop."""
        if self._between is not None:
            self._end_round(self._between)
            return self._between.home()
        assert self._pending is not None, "home() was called before the first add()"
        return self._pending.wait()

    def _end_round(self, between: "Carried") -> None:
        """Add what the ranks of this host have collected to the tensors that are sent between hosts."""
        assert self._pending is not None
        between.add(self._pending.wait())
        self._pending, self._hops = None, 0


class _Exchange:
    """One exchange: send tensors to the next rank and receive those of the previous one.

    In a group of one, `wait` returns the tensors themselves.
    """

    def __init__(self, tensors: Tensors, ranks: RankGroup, tag: int, payload: torch.dtype | None) -> None:
        self._dtypes = tuple(tensor.dtype for tensor in tensors)
        if payload is not None and ranks.size > 1:
            tensors = tuple(tensor.to(payload) if tensor.dim() > 1 else tensor for tensor in tensors)
        self._sent = tensors  # keeps them alive until they have been sent
        if ranks.size == 1:
            self._received, self._works = tensors, []
            return
        self._received = tuple(torch.empty_like(tensor) for tensor in tensors)
        following, previous = ranks.global_rank(ranks.rank + 1), ranks.global_rank(ranks.rank - 1)
        operations = []
        for index, (sent, received) in enumerate(zip(self._sent, self._received, strict=True)):
            operations.append(dist.P2POp(dist.isend, sent, following, group=ranks.handle, tag=tag + index))
            operations.append(dist.P2POp(dist.irecv, received, previous, group=ranks.handle, tag=tag + index))
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensors:
        for work in self._works:
            work.wait()
        return tuple(tensor.to(dtype) for tensor, dtype in zip(self._received, self._dtypes, strict=True))
