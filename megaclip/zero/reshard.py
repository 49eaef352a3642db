"""Load a checkpoint into an engine, whose number of ranks and ZeRO stage may differ from those of the saving engine.

DeepSpeed loads only checkpoints of the same number of ranks and the same stage. Its universal checkpoints remove that
limit for Adam only, and need a second copy of everything on the disk. They do not restore frozen parameters. At ZeRO-3
they give every parameter group the hyper-parameters of the first group.

This module converts no files. Every rank memory-maps the files of all ranks that saved, and reads the parts of its own
partition. It builds the state dict that its new optimizer would save from them, and DeepSpeed loads this state dict.
Values are copied, never computed, so the result is exact.

Buffers (running statistics of batch norms) are whole and equal on every rank.
"""

import copy
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine

from megaclip.checkpoint.deepspeed_files import loading
from megaclip.checkpoint.saved_states import FP32, WORKING, SavedStates
from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.zero.masters import FlatGroup, Slot, flat_groups, publish_masters
from megaclip.zero.parameters import is_partitioned


def load_checkpoint(engine: DeepSpeedEngine, folder: Path) -> None:
    """Load parameters, optimizer state and step counters into `engine`, on every rank.

    The optimizer's settings (weight decay, betas) stay the engine's own. folder: RUN/checkpoints/step_N.

    Raises:
        CheckpointError: on every rank, if the files cannot be read or do not contain the engine's parameters.
    """
    is_zero_3 = engine.zero_optimization_stage() == 3
    if is_zero_3:
        engine.optimizer.checkpoint_event_prologue()
    with raise_on_all_ranks(), loading(folder):
        counters = _fill_partition(engine, folder)
    if is_zero_3:
        engine.optimizer.checkpoint_event_epilogue()
    else:
        publish_masters(engine)
    for name, value in counters.items():
        setattr(engine, name, value)


def _fill_partition(engine: DeepSpeedEngine, folder: Path) -> dict[str, int]:
    """Load the saved values of this rank's partition, without communication. Return the engine's saved counters."""
    groups = list(flat_groups(engine))
    saved = SavedStates.open(folder)
    _fill(engine, groups, saved)
    _fill_frozen(engine, saved)
    buffers = dict(engine.module.named_buffers())
    for name, value in saved.buffers.items():
        buffers[name].copy_(value)
    return saved.counters


def _fill(engine: DeepSpeedEngine, groups: list[FlatGroup], saved: SavedStates) -> None:
    """Copy the saved values into the optimizer's tensors and their state."""
    optimizer: Any = engine.optimizer
    state: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        first = group.slots[0].name
        # Numbers are copied for each group, because optimizers count steps in place. They come first, as in the states
        # that Adam makes, so that a resumed run writes the same files.
        state[index] = copy.deepcopy(saved.numbers.get(first, {}))
        state[index] |= {kind: _gather(engine, saved, group, kind) for kind in saved.state_kinds(first)}
        group.flat.data.copy_(_gather(engine, saved, group, FP32))
    if not engine.zero_optimization():
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        for settings in optimizer.param_groups if saved.group_step is not None else ():
            settings["step"] = copy.deepcopy(saved.group_step)
        return
    own = optimizer.state_dict()  # contains the tensors of `groups`, filled above
    own["base_optimizer_state" if "base_optimizer_state" in own else "optimizer_state_dict"]["state"] = state
    only_own: list[Any] = [None] * dist.get_world_size(group=engine.data_parallel_group)
    only_own[dist.get_rank(group=engine.data_parallel_group)] = own
    optimizer.load_state_dict(only_own, load_from_fp32_weights=True)


def _fill_frozen(engine: DeepSpeedEngine, saved: SavedStates) -> None:
    """Copy the saved values into this rank's part of every frozen parameter."""
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad or engine.module.base_sha256 is not None:  # --pretrained has those below adapters
            continue
        if is_partitioned(parameter):
            part, shape = parameter.ds_tensor, parameter.ds_shape
            start = dist.get_rank(group=engine.data_parallel_group) * part.numel()
        else:
            part, shape, start = parameter.data, parameter.shape, 0
        slot = Slot(name, shape, start, 0, max(0, min(part.numel(), shape.numel() - start)))
        kind = FP32 if saved.has(name, FP32) else WORKING
        part.data.copy_(_gather(engine, saved, FlatGroup(part, [slot]), kind))


def _gather(engine: DeepSpeedEngine, saved: SavedStates, group: FlatGroup, kind: str) -> torch.Tensor:
    """Return a CPU tensor shaped like `group.flat`, with the saved elements of `kind` in its slots, else zeros."""
    flat = torch.zeros(group.flat.numel())
    for slot in group.slots:
        out = flat[slot.place : slot.place + slot.numel]
        saved.read(slot.name, kind, slot.shape, engine.module.tensor, slot.start, out)
    return flat.view(group.flat.shape)
