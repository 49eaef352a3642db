"""Where each rank keeps the float32 masters, which the optimizer updates: DeepSpeed's layout of them at every stage.

ZeRO-3 cuts each parameter into equal parts, one per rank. ZeRO-1 and 2 join the parameters of a group and cut the
whole. ZeRO-0 has no separate masters: the parameters themselves are float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine

from megaclip.models.layers import own_part


@dataclass(frozen=True)
class Slot:
    """Part of one parameter in a flat tensor of this rank."""

    name: str
    shape: torch.Size
    """Shape of the parameter; with tensor parallelism, of this rank's part of it."""
    start: int
    """Index of the part's first element in the flattened parameter."""
    place: int
    """Index of the part's first element in the flat tensor."""
    numel: int
    """Number of elements of the part; 0 if other ranks hold the parameter."""


@dataclass(frozen=True)
class FlatGroup:
    """Tensor that the optimizer updates on this rank, with the positions of the parameters in it."""

    flat: torch.Tensor
    slots: list[Slot]
    """One slot for every parameter of the group, in the optimizer's order."""


def flat_groups(engine: DeepSpeedEngine) -> Iterator[FlatGroup]:
    """Yield the optimizer's tensors in the order in which its state dict numbers them."""
    optimizer: Any = engine.optimizer
    if (stage := engine.zero_optimization_stage()) == 3:
        rank = dist.get_rank(group=optimizer.dp_process_group)
        for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            slots, place = [], 0
            for parameter in parameters:
                start = rank * parameter.partition_numel()
                numel = max(0, min(parameter.partition_numel(), parameter.ds_numel - start))
                slots.append(Slot(engine.param_names[parameter], parameter.ds_shape, start, place, numel))
                place += parameter.partition_numel()
            yield FlatGroup(flat, slots)
    elif stage > 0:
        for flat, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
            slots = []
            for parameter in parameters:
                name, shape, mapping = engine.param_names[parameter], parameter.shape, parameter._hp_mapping
                if mapping is None:
                    slots.append(Slot(name, shape, 0, 0, 0))
                else:
                    place, start = mapping.get_hp_fragment_address(), mapping.lp_fragment_address.start
                    slots.append(Slot(name, shape, start, place.start, place.numel))
            yield FlatGroup(flat, slots)
    else:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = Slot(engine.param_names[parameter], parameter.shape, 0, 0, parameter.numel())
                yield FlatGroup(parameter, [slot])


@torch.no_grad()
def write_masters(engine: DeepSpeedEngine, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy whole weights into the float32 masters of the parameters that are trained.

    With bf16 DeepSpeed initialises a master from its parameter, which was rounded. The parameters themselves do not
    change.

    weights: by the model's names, some or all of them.
    """
    if not weights:
        return
    for group in flat_groups(engine):
        for slot in group.slots:
            if slot.name in weights and slot.numel:
                own = own_part(slot.name, weights[slot.name], engine.module.tensor).flatten()
                flat = group.flat.data.view(-1)
                flat[slot.place : slot.place + slot.numel].copy_(own[slot.start : slot.start + slot.numel])


def publish_masters(engine: DeepSpeedEngine) -> None:
    """Give the model the values of the float32 masters, as DeepSpeed does after an update. All ranks must call it."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()
    # ZeRO-0 has no separate masters.
