"""Neighbour exchange: blocks go round the ranks of a group while each rank works on the block it holds.

Every rank sends to the next rank and receives from the previous one. `circulate` shows a rank all W blocks in W-1
exchanges; the next one is under way while the caller works on the present block. What is computed *for* a block (its
column statistics, its gradient) follows one exchange behind in a `Carried`, which merges each rank's part and after W
exchanges is back with the rank that owns the block:

    hop      0          1          2                     rank r holds, at hop k, the block of rank r-k
    blocks   r          r-1        r-2
    carried  r   ->     r-1   ->   r-2   ->  home: r

On several nodes of several ranks (a `NodeGroup`) the ring has two levels: a block goes round the ranks of a node while
a copy of it is on its way to the next node, so the slow links have one transfer per round and as long as the round
takes for it. What is carried for a block comes round each node, joins what came from the nodes before, and goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import deepspeed.comm as dist
import torch
from torch import Tensor

from megaclip.comm.groups import NodeGroup, RankGroup, resolve

Tensors = tuple[Tensor, ...]
Merge = Callable[[Tensors, Tensors], Tensors]

# Gloo pairs messages by tag: blocks and what is carried for them are under way at the same time (NCCL goes by order).
_BLOCK_TAG = 0
_CARRIED_TAG = 100


def circulate(
    block: Sequence[Tensor], *, group: Any = None, payload: torch.dtype | None = None
) -> Iterator[tuple[int, Tensors]]:
    """Yield (rank that owns the block, its tensors) W times, this rank's own block first.

    block: tensors whose shapes and dtypes are the same on all ranks. The caller must not change what it is given: it is
    being sent on. payload: the dtype that matrices travel in (vectors travel as they are); what arrives has its own
    dtype again. None leaves all as they are.
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
    """One level of `circulate`."""
    held: Tensors = tuple(tensor.contiguous() for tensor in block)
    for hop in range(ranks.size):
        exchange = _Exchange(held, ranks, _BLOCK_TAG, payload) if hop < ranks.size - 1 else None
        yield (ranks.rank - hop) % ranks.size, held
        if exchange is not None:
            held = exchange.wait()


class Carried:
    """Tensors that travel one exchange behind the blocks of `circulate` and collect a part from every rank.

    merge(arrived, part) joins what came along with this rank's part; it may work in place on either. payload: as for
    `circulate`; parts are merged in their own dtype.
    """

    def __init__(self, merge: Merge, *, group: Any = None, payload: torch.dtype | None = None) -> None:
        ranks = resolve(group)
        self._route: _Route | _TwoLevelRoute
        if _has_two_levels(ranks):
            self._route = _TwoLevelRoute(merge, ranks, payload)
        else:
            self._route = _Route(merge, ranks, payload)

    def add(self, part: Tensors) -> None:
        """This rank's part for the block it holds; call it once per hop. The part must not be used afterwards."""
        self._route.add(part)

    def home(self) -> Tensors:
        """After the last hop: the merged parts of all ranks for this rank's own block."""
        return self._route.home()


class _Route:
    """One level of `Carried`."""

    def __init__(self, merge: Merge, ranks: RankGroup, payload: torch.dtype | None) -> None:
        self._merge, self._ranks, self._payload = merge, ranks, payload
        self._under_way: _Exchange | None = None

    def add(self, part: Tensors) -> None:
        if self._under_way is not None:
            part = self._merge(self._under_way.wait(), part)
        self._under_way = _Exchange(part, self._ranks, _CARRIED_TAG, self._payload)

    def home(self) -> Tensors:
        assert self._under_way is not None, "home() before the first add()"
        return self._under_way.wait()


class _TwoLevelRoute:
    """`Carried` on several nodes: round after round inside the node, each added to what goes from node to node."""

    def __init__(self, merge: Merge, ranks: NodeGroup, payload: torch.dtype | None) -> None:
        self._merge, self._ranks, self._payload = merge, ranks, payload
        self._between = _Route(merge, ranks.outer, payload)
        self._round = _Route(merge, ranks.inner, payload)
        self._hops = 0

    def add(self, part: Tensors) -> None:
        if self._hops == self._ranks.inner.size:  # only now: its last exchange had a tile's time to end
            self._end_round()
        self._round.add(part)
        self._hops += 1

    def home(self) -> Tensors:
        self._end_round()
        return self._between.home()

    def _end_round(self) -> None:
        self._between.add(self._round.home())
        self._round, self._hops = _Route(self._merge, self._ranks.inner, self._payload), 0


class _Exchange:
    """Tensors on their way to the next rank, while the previous rank's arrive. A group of one hands its own back."""

    def __init__(self, tensors: Tensors, ranks: RankGroup, tag: int, payload: torch.dtype | None) -> None:
        self._dtypes = tuple(tensor.dtype for tensor in tensors)
        if payload is not None and ranks.size > 1:
            tensors = tuple(tensor.to(payload) if tensor.dim() > 1 else tensor for tensor in tensors)
        self._sent = tensors  # kept alive until they have left
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
