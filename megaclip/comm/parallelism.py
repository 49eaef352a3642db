"""The data-parallel and the tensor-parallel group of each rank of a run.

A run has N = W * T ranks: W replicas of the model, each split over T ranks. The groups are Megatron-core's
(`parallel_state`); nothing of Megatron is imported at T = 1. The data loader, the losses, the evaluation and FastCLIP's
state do not use these groups: each of the N ranks has its own rows. Only the model (`megaclip.models`), the engine and
the checkpoints use them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megaclip.comm.groups import RankGroup, resolve
from megaclip.errors import ConfigError

ONE_RANK = RankGroup(handle=None, rank=0, size=1)
"""The tensor-parallel group of a model that is not split."""


@dataclass(frozen=True)
class Parallelism:
    """The groups of this rank."""

    data: RankGroup
    """The ranks with the same part of the towers, one of each replica. DeepSpeed averages gradients over them."""
    tensor: RankGroup
    """The ranks of this replica, each with another part of the towers."""
    mpu: Any = None
    """Model parallel unit for DeepSpeed. None without tensor parallelism."""


def parallel_groups(tensor_parallel_size: int) -> Parallelism:
    """Return the groups of this rank. Every rank of the job must call it with the same size.

    Ranks that follow each other form a replica, so that a replica lies inside one host.

    Raises:
        ConfigError: megatron-core is not installed, the size does not divide the number of ranks, or this process has
            groups of another size already.
    """
    if tensor_parallel_size == 1:
        return Parallelism(data=resolve(None), tensor=ONE_RANK)
    return _megatron_groups(tensor_parallel_size, torch.distributed.group.WORLD)


def require_megatron() -> None:
    """Raise ConfigError if megatron-core cannot be imported."""
    try:
        import megatron.core.tensor_parallel  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"megaclip.tensor_parallel_size above 1 requires megatron-core, which cannot be imported ({error}): "
            "install it with  pip install 'megaclip[megatron]'"
        ) from None


@functools.cache
def _megatron_groups(size: int, world: Any) -> Parallelism:
    """Make Megatron's groups once. world: the job's group, so that another job in this process makes new groups."""
    require_megatron()
    from megatron.core import parallel_state

    ranks = resolve(None).size
    if ranks % size:
        raise ConfigError(
            f"megaclip.tensor_parallel_size {size} does not divide the number of ranks, {ranks}; change one of them"
        )
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() != size:
            raise ConfigError(
                f"megaclip.tensor_parallel_size {size}: this process has tensor-parallel groups of size "
                f"{parallel_state.get_tensor_model_parallel_world_size()} already; use that size, or a new process"
            )
    else:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size, create_gloo_process_groups=False)
    data = parallel_state.get_data_parallel_group()
    # The names that DeepSpeed calls. It also looks for sequence and expert groups, which a run does not have.
    mpu = SimpleNamespace(
        get_data_parallel_rank=parallel_state.get_data_parallel_rank,
        get_data_parallel_world_size=parallel_state.get_data_parallel_world_size,
        get_data_parallel_group=parallel_state.get_data_parallel_group,
        get_data_parallel_group_ranks=lambda: torch.distributed.get_process_group_ranks(data),
        get_model_parallel_rank=parallel_state.get_tensor_model_parallel_rank,
        get_model_parallel_world_size=parallel_state.get_tensor_model_parallel_world_size,
        get_model_parallel_group=parallel_state.get_tensor_model_parallel_group,
        get_tensor_model_parallel_rank=parallel_state.get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size=parallel_state.get_tensor_model_parallel_world_size,
        get_tensor_model_parallel_group=parallel_state.get_tensor_model_parallel_group,
    )
    return Parallelism(data=resolve(data), tensor=resolve(parallel_state.get_tensor_model_parallel_group()), mpu=mpu)
