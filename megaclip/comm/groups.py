"""Process groups. Only this module and `parallelism.py` look up groups.

Every function that communicates takes a keyword `group`: a process group of deepspeed.comm or torch.distributed, or
None for all ranks of the job. `resolve` turns it into a `RankGroup` with this process's rank, the size of the group and
the global ranks of its members. A Python process without a launcher is a group of one rank, and runs the same code.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from megaclip.logging import get_logger
from megaclip.zero.op_builds import leave_out_shared_memory

_ALL_RANKS = "all ranks"
_NO_MEMBER = "not a member"

_logger = get_logger(__name__)


@dataclass(frozen=True)
class RankGroup:
    """A process group and this process's rank in it."""

    handle: Any
    """Process group, as deepspeed.comm takes it. None: all ranks of the job, or a process without a job."""
    rank: int
    """Rank of this process within the group."""
    size: int
    """Number of ranks in the group."""

    def global_rank(self, rank: int) -> int:
        """Return the global rank of member `rank` modulo the size; point-to-point calls require global ranks."""
        member = rank % self.size
        return member if self.handle is None else dist.get_global_rank(self.handle, member)

    @property
    def message_device(self) -> torch.device:
        """Device of the tensors that this group's backend can send."""
        if torch.distributed.get_backend(self.handle) == "gloo":
            return torch.device("cpu")
        return torch.device(get_accelerator().current_device_name())


@dataclass(frozen=True)
class NodeGroup(RankGroup):
    """A group over several hosts (nodes) with equally many ranks each: rank = node * inner.size + local rank.

    A ring over this group passes blocks inside each host, over fast links, while one transfer runs between hosts.
    """

    inner: RankGroup
    """The ranks of this host."""
    outer: RankGroup
    """The ranks of all hosts that have the same local rank as this process."""


def init_distributed(backend: str | None = None) -> None:
    """Call deepspeed.init_distributed, without the shared-memory all-reduce that it starts on CPUs.

    backend: name of the communication backend. None: the accelerator's default.
    """
    leave_out_shared_memory()
    dist.init_distributed(backend or get_accelerator().communication_backend_name(), verbose=False)


def resolve(group: Any = None) -> RankGroup:
    """Return the `RankGroup` of a process group or, for None, of all ranks of the job.

    A `RankGroup` is returned unchanged.

    Raises:
        ValueError: this process is not a member, or a group is passed before distributed training is initialised.
    """
    if isinstance(group, RankGroup):
        return group
    if not _initialised():
        if group is not None:
            raise ValueError(
                "a process group was passed, but neither deepspeed.comm nor torch.distributed is initialised; "
                "call deepspeed.init_distributed() first"
            )
        return RankGroup(handle=None, rank=0, size=1)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the group that was passed; "
            "pass each rank a group that contains it"
        )
    return RankGroup(handle=group, rank=rank, size=dist.get_world_size(group))


def name_of(group: Any = None) -> str:
    """Return a name from which `named` finds this group in this process. Compiled graphs hold names, not groups."""
    handle = group.handle if isinstance(group, RankGroup) else group
    return _ALL_RANKS if handle is None else getattr(handle, "group_name", _NO_MEMBER)


def named(name: str) -> RankGroup:
    """Return the `RankGroup` of a name from `name_of`. Raises ValueError as `resolve` does."""
    if name == _ALL_RANKS:
        return resolve(None)
    if name == _NO_MEMBER:
        return resolve(torch.distributed.GroupMember.NON_GROUP_MEMBER)
    # The look-up of PyTorch's own compiled collectives.
    return resolve(torch.distributed.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]


def by_node(ranks: RankGroup) -> RankGroup:
    """Return `ranks` as a `NodeGroup` if they are all ranks of a job on several hosts with equally many ranks each.

    Otherwise return `ranks` unchanged. The first call creates process groups, so every rank of the job must make it.
    """
    if ranks.size < 2 or ranks.size != dist.get_world_size():
        return ranks
    groups = _node_groups(torch.distributed.group.WORLD)
    if groups is None:
        return ranks
    inner, outer = groups
    return NodeGroup(ranks.handle, ranks.rank, ranks.size, inner=resolve(inner), outer=resolve(outer))


@functools.cache
def _node_groups(world: Any) -> tuple[Any, Any] | None:
    """Return the process groups (this host's ranks, its peers on other hosts); None unless by_node's condition holds.

    world: the default process group. It is part of the cache key, so that a new job creates new groups.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    local_size = ranks_of_this_node() or size
    local_sizes: list[Any] = [None] * size
    torch.distributed.all_gather_object(local_sizes, local_size)  # all ranks must decide alike, even if hosts differ
    if set(local_sizes) != {local_size} or local_size == size or size % local_size:
        return None
    nodes = [list(range(first, first + local_size)) for first in range(0, size, local_size)]
    handles = [(members, dist.new_group(members)) for members in (*nodes, *map(list, zip(*nodes, strict=True)))]
    inner, outer = (handle for members, handle in handles if rank in members)
    return inner, outer


def ranks_of_this_node() -> int | None:
    """Return the number of ranks that the launcher started on this host, or None if it does not set it.

    torchrun sets LOCAL_WORLD_SIZE; DeepSpeed's launcher sets LOCAL_SIZE.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(size) if size else None


def group_rank(group: Any = None) -> int:
    """Return this process's rank within the group."""
    return resolve(group).rank


def group_size(group: Any = None) -> int:
    """Return the number of ranks in the group: 1 in a process without a launcher."""
    return resolve(group).size


def _initialised() -> bool:
    """Return whether distributed training is initialised.

    If the program has initialised torch.distributed only, initialise deepspeed.comm on top of it.
    """
    if dist.is_initialized():
        return True
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    _logger.info("torch.distributed is initialised already; DeepSpeed uses its process group")
    init_distributed(str(torch.distributed.get_backend()))
    return True
