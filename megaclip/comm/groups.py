"""Who a rank works with: the only place that looks a process group up.

Everything that communicates takes a keyword `group`: a process group of deepspeed.comm (or torch.distributed), or None
for every rank of the job.

`resolve` turns the handle into a `RankGroup` that knows this process's rank, the size and its peers' global ranks.
A plain Python process without any launcher is a group of one, and a group of one takes the same path as any other.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator

from megaclip.errors import ConfigError
from megaclip.logging import get_logger

_logger = get_logger(__name__)


@dataclass(frozen=True)
class RankGroup:
    """A process group seen from one of its members."""

    handle: Any  # what deepspeed.comm takes as `group`; None is every rank of the job, or no job at all
    rank: int  # of this process within the group
    size: int

    def global_rank(self, rank: int) -> int:
        """Global rank of member `rank` (taken modulo the size), as point-to-point calls want it."""
        member = rank % self.size
        return member if self.handle is None else dist.get_global_rank(self.handle, member)

    @property
    def message_device(self) -> torch.device:
        """Where a small tensor must lie so that this group can send it."""
        if torch.distributed.get_backend(self.handle) == "gloo":
            return torch.device("cpu")
        return torch.device(get_accelerator().current_device_name())


@dataclass(frozen=True)
class NodeGroup(RankGroup):
    """A group on nodes of equally many ranks each, node by node in rank order: rank = node * inner.size + place.

    Its rings go round inside each node, over fast links, while one transfer goes from node to node.
    """

    inner: RankGroup  # the ranks of this node
    outer: RankGroup  # the ranks with this one's place on every node


def init_distributed(backend: str | None = None) -> None:
    """deepspeed.init_distributed without the shared-memory all-reduce that it brings up on CPUs.

    That op serves inference only. It takes 25 s to compile and leaves 67 MB per rank in /dev/shm after every run: more
    than a Docker container has.
    backend: None takes the accelerator's own. Raises ConfigError where another program has the launcher's port.
    """
    if get_accelerator().device_name() == "cpu":  # elsewhere reading the table would probe every op there is
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        dist.init_distributed(backend or get_accelerator().communication_backend_name(), verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {os.environ.get('MASTER_PORT')} is in use, by another run perhaps: give the launcher a free one, "
            "deepspeed --master_port 29501 ..."
        ) from None


def resolve(group: Any = None) -> RankGroup:
    """The group behind a handle, a `RankGroup` (returned as it is) or None (every rank of the job).

    Raises ValueError when this process is not a member, or when a group is given although nothing is initialised.
    """
    if isinstance(group, RankGroup):
        return group
    if not _initialised():
        if group is not None:
            raise ValueError(
                "a process group was given but neither deepspeed.comm nor torch.distributed is initialised: "
                "call deepspeed.init_distributed() first"
            )
        return RankGroup(handle=None, rank=0, size=1)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the group it was given: "
            "pass each rank the group that contains it"
        )
    return RankGroup(handle=group, rank=rank, size=dist.get_world_size(group))


def by_node(ranks: RankGroup) -> RankGroup:
    """`ranks` as a `NodeGroup` if they are every rank of a job on several nodes of equally many ranks, else unchanged.

    The first call makes process groups: every rank of the job must make it.
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
    """This rank's node, and its peers on other nodes; None if there is one node only, or nodes of different sizes.

    world: the job, so that a new one makes new groups.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    local_size = ranks_of_this_node() or size
    local_sizes: list[Any] = [None] * size
    torch.distributed.all_gather_object(local_sizes, local_size)  # nodes may differ; ranks must agree on what follows
    if set(local_sizes) != {local_size} or local_size == size or size % local_size:
        return None
    nodes = [list(range(first, first + local_size)) for first in range(0, size, local_size)]
    handles = [(members, dist.new_group(members)) for members in (*nodes, *map(list, zip(*nodes, strict=True)))]
    inner, outer = (handle for members, handle in handles if rank in members)
    return inner, outer


def ranks_of_this_node() -> int | None:
    """How many ranks the launcher started on this node (torchrun: LOCAL_WORLD_SIZE; DeepSpeed: LOCAL_SIZE), if it says
    so."""
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(size) if size else None


def group_rank(group: Any = None) -> int:
    """This process's rank within the group."""
    return resolve(group).rank


def group_size(group: Any = None) -> int:
    """Number of ranks in the group; 1 in a plain Python process."""
    return resolve(group).size


def _initialised() -> bool:
    """True when there are peers to talk to. Joins the groups of a program that initialised torch.distributed only."""
    if dist.is_initialized():
        return True
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    _logger.info("joining the ranks that torch.distributed has initialised")
    init_distributed(str(torch.distributed.get_backend()))
    return True
