"""Load a checkpoint into an engine with another number of ranks, or at another ZeRO stage, than wrote it.

DeepSpeed loads only what as many ranks saved at the same stage. Its universal checkpoints lift that for Adam alone, by
a second copy of everything on the disk; they do not bring frozen parameters back, and at ZeRO-3 they give every
parameter group the hyper-parameters of the first. Here nothing is converted: every rank memory-maps the files of all
the ranks that saved, reads from them what belongs to its own partition, puts that into the state dict that its fresh
optimizer would save, and has DeepSpeed load this one. Values are copied, never computed, so the result is exact.

The model has no buffers. Optimizer state on NVMe lies in files of another kind and is refused.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megaclip.comm.collectives import raise_together
from megaclip.errors import CheckpointError, first_line

_FP32 = "fp32"
_FROZEN = "frozen"


def load_resharded(engine: DeepSpeedEngine, folder: Path, *, ranks: int) -> None:
    """Load parameters, optimizer state and step counters of the checkpoint in `folder`, which `ranks` ranks wrote, on
    every rank.

    The optimizer's settings (weight decay, betas) stay the engine's own.

    Raises:
        CheckpointError: on every rank, when the files cannot be read or do not hold what the engine trains.
    """
    partitioned = hasattr(engine.optimizer, "checkpoint_event_prologue")  # ZeRO-3
    if partitioned:
        engine.optimizer.checkpoint_event_prologue()
    error: CheckpointError | None = None
    try:
        if engine.zero_nvme_offload_optimizer() or (folder / "offloaded_tensors").exists():
            raise CheckpointError(
                "optimizer state on NVMe can be resumed only with the number of ranks and the ZeRO stage it was saved "
                "with; use those, or offload_optimizer.device cpu from the start"
            )
        groups = list(_flat_groups(engine))
        saved = _Saved.open(folder, ranks, [slot.name for group in groups for slot in group.in_order])
        _fill(engine, groups, saved)
        _fill_frozen(engine, saved)
    except CheckpointError as problem:
        error = problem
    except Exception as problem:  # whatever torch.load or DeepSpeed make of a damaged file
        error = CheckpointError(f"cannot load checkpoint {str(folder)!r}: {first_line(problem)}")
    raise_together(error)  # before the collectives below
    if partitioned:
        engine.optimizer.checkpoint_event_epilogue()
    elif hasattr(engine.optimizer, "update_lp_params"):  # ZeRO-1 and 2
        engine.optimizer.update_lp_params()
    for name, value in saved.counters.items():
        setattr(engine, name, value)


@dataclass(frozen=True)
class _Slot:
    """A part of one parameter in a flat tensor of this rank."""

    name: str
    size: int
    """Elements of the whole parameter."""
    start: int
    """First element of the part, in the flattened parameter."""
    place: int
    """Where the part begins in the flat tensor."""
    numel: int


@dataclass(frozen=True)
class _FlatGroup:
    """One tensor that the optimizer updates on this rank, and what lies where in it."""

    flat: torch.Tensor
    in_order: list[_Slot]
    """Every parameter of the group in the optimizer's order, those that other ranks hold with numel 0."""


def _flat_groups(engine: DeepSpeedEngine) -> Iterator[_FlatGroup]:
    """The optimizer's tensors, in the order in which its state dict numbers them."""
    optimizer: Any = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3: parts of equal size, the last ones padded
        rank = dist.get_rank(group=optimizer.dp_process_group)
        for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            slots, place = [], 0
            for parameter in parameters:
                start = rank * parameter.partition_numel()
                numel = max(0, min(parameter.partition_numel(), parameter.ds_numel - start))
                slots.append(_Slot(engine.param_names[parameter], parameter.ds_numel, start, place, numel))
                place += parameter.partition_numel()
            yield _FlatGroup(flat, slots)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2: one cut through a whole group
        for flat, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
            slots = []
            for parameter in parameters:
                name, size, mapping = engine.param_names[parameter], parameter.numel(), parameter._hp_mapping
                if mapping is None:
                    slots.append(_Slot(name, size, 0, 0, 0))
                else:
                    place, start = mapping.get_hp_fragment_address(), mapping.lp_fragment_address.start
                    slots.append(_Slot(name, size, start, place.start, place.numel))
            yield _FlatGroup(flat, slots)
    else:  # ZeRO-0, in float32 only (config/checks.py)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                size = parameter.numel()
                yield _FlatGroup(parameter.data, [_Slot(engine.param_names[parameter], size, 0, 0, size)])


def _fill(engine: DeepSpeedEngine, groups: list[_FlatGroup], saved: "_Saved") -> None:
    """Give the optimizer's tensors and their state the saved values."""
    optimizer: Any = engine.optimizer
    state: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        kinds, numbers = saved.kinds_and_numbers(group.in_order[0].name)
        state[index] = {kind: saved.gather(group, kind) for kind in kinds} | numbers
        group.flat.data.copy_(saved.gather(group, _FP32))
    if not engine.zero_optimization():
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        return
    own = optimizer.state_dict()  # holds the tensors filled above
    own["base_optimizer_state" if "base_optimizer_state" in own else "optimizer_state_dict"]["state"] = state
    only_own: list[Any] = [None] * dist.get_world_size()
    only_own[dist.get_rank()] = own
    optimizer.load_state_dict(only_own, load_from_fp32_weights=True)


def _fill_frozen(engine: DeepSpeedEngine, saved: "_Saved") -> None:
    """Give this rank's part of every frozen parameter the saved values."""
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            part, size = parameter.ds_tensor, parameter.ds_numel
            start = dist.get_rank() * part.numel()
        else:
            part, size, start = parameter.data, parameter.numel(), 0
        slot = _Slot(name, size, start, 0, max(0, min(part.numel(), size - start)))
        part.data.copy_(saved.gather(_FlatGroup(part, [slot]), _FROZEN))


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of a flattened parameter, or of its optimizer state, in a saved flat tensor."""

    flat: torch.Tensor
    start: int
    numel: int


@dataclass
class _Saved:
    """A checkpoint by names of parameters, whatever the ranks and the stage that wrote it."""

    pieces: dict[tuple[str, str], list[_Piece]] = field(default_factory=dict)
    """(name, kind) -> pieces in order; kind: "fp32", "frozen", or a tensor of the optimizer's state ("exp_avg")."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """name -> what its optimizer state holds besides such tensors ("step")."""
    counters: dict[str, int] = field(default_factory=dict)
    """The engine's: global_steps and the like."""

    @classmethod
    def open(cls, folder: Path, ranks: int, names: list[str]) -> "_Saved":
        """Map the files of `ranks` ranks in `folder`; `names`: what the optimizer updates, in its order (ZeRO-0 saves
        no names)."""
        optimizers = [_map(path)["optimizer_state_dict"] for path in _files_by_rank(folder, "optim", ranks)]
        saved = cls()
        whole = folder / "mp_rank_00_model_states.pt"
        if whole.is_file():  # ZeRO-0 to 2: one file with all working copies
            models = [_map(whole)]
            for name, value in models[0]["module"].items():
                saved._add(name, _FROZEN, value.reshape(-1), 0, value.numel())
            for optimizer in optimizers:
                saved._add_stage_1_or_2(optimizer)
            if not optimizers:
                saved._add_stage_0(models[0], names)
        else:
            models = [_map(path) for path in _files_by_rank(folder, "model", ranks)]
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                saved._add_stage_3(model, optimizer, rank, len(optimizers))
        saved.counters = {name: models[0][name] for name in ("global_steps", "global_samples", "skipped_steps")}
        return saved

    def _add(self, name: str, kind: str, flat: torch.Tensor, start: int, numel: int) -> None:
        self.pieces.setdefault((name, kind), []).append(_Piece(flat, start, numel))

    def _add_group(self, name: str, fp32: torch.Tensor, state: dict[str, Any], start: int, numel: int) -> None:
        """A parameter's piece of a flat group. State tensors may be longer than fp32 by padding, never shorter."""
        self._add(name, _FP32, fp32, start, numel)
        tensors = {kind: value for kind, value in state.items() if torch.is_tensor(value) and value.ndim}
        for kind, value in tensors.items():
            self._add(name, kind, value.view(-1), start, numel)
        self.numbers[name] = {kind: value for kind, value in state.items() if kind not in tensors}

    def _add_stage_0(self, model: dict[str, Any], names: list[str]) -> None:
        state = model["optimizer"]["state"]
        # DeepSpeed's FusedAdam counts its steps in the last parameter of a group only.
        counts = {"step": max(part["step"] for part in state.values())} if "step" in state.get(0, {}) else {}
        for index, name in enumerate(names):
            value = model["module"].get(name)
            if value is not None:
                self._add_group(name, value.reshape(-1), state.get(index, {}) | counts, 0, value.numel())

    def _add_stage_1_or_2(self, optimizer: dict[str, Any]) -> None:
        state = optimizer["base_optimizer_state"]["state"]
        for index, flat in enumerate(optimizer["single_partition_of_fp32_groups"]):
            for name, place in optimizer["param_slice_mappings"][index].items():
                self._add_group(name, flat, state.get(index, {}), place.start, place.numel)

    def _add_stage_3(self, model: dict[str, Any], optimizer: dict[str, Any], rank: int, ranks: int) -> None:
        state = optimizer["optimizer_state_dict"]["state"]
        for index, flat in enumerate(optimizer["fp32_flat_groups"]):
            start = 0
            for name, shape in model["param_shapes"][index].items():
                share = -(-shape.numel() // ranks)
                numel = max(0, min(share, shape.numel() - rank * share))
                self._add_group(name, flat, state.get(index, {}), start, numel)
                start += share
        for name, part in (model["frozen_param_fragments"] or {}).items():
            size = model["frozen_param_shapes"][name].numel()
            self._add(name, _FROZEN, part.view(-1), 0, max(0, min(part.numel(), size - rank * part.numel())))

    def kinds_and_numbers(self, name: str) -> tuple[list[str], dict[str, Any]]:
        """The kinds of the optimizer's state tensors of a parameter, and the rest of its state."""
        kinds = [kind for (other, kind) in self.pieces if other == name and kind not in (_FP32, _FROZEN)]
        return kinds, copy.deepcopy(self.numbers.get(name, {}))  # torch counts in place: no two groups may share it

    def gather(self, group: _FlatGroup, kind: str) -> torch.Tensor:
        """A tensor like `group.flat`, on the CPU, with the saved elements of `kind` in their slots and zeros between.

        Raises:
            CheckpointError: a parameter was not saved, or with another number of elements.
        """
        flat = torch.zeros(group.flat.numel())
        for slot in group.in_order:
            pieces = self.pieces.get((slot.name, kind), [])
            if (size := sum(piece.numel for piece in pieces)) != slot.size:
                raise CheckpointError(
                    f"the checkpoint has {size} elements of {slot.name} ({kind}) and this run needs {slot.size}: "
                    "resume with the model, the locked towers and the optimizer it was written with"
                )
            out, done = flat[slot.place : slot.place + slot.numel], 0
            for piece in pieces:
                low, high = max(slot.start, done), min(slot.start + slot.numel, done + piece.numel)
                if low < high:
                    source = piece.flat[piece.start + low - done : piece.start + high - done]
                    out[low - slot.start : high - slot.start].copy_(source)
                done += piece.numel
        return flat.view(group.flat.shape)


def _files_by_rank(folder: Path, kind: str, ranks: int) -> list[Path]:
    """DeepSpeed's files of all `ranks` ranks, in order; none where they are not made. kind: "optim" or "model"."""
    pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_{kind}_states\.pt")
    found = {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if found and sorted(found) != list(range(ranks)):
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is incomplete: {ranks} ranks wrote it, and it has the files of {sorted(found)}"
        )
    return [found[rank] for rank in sorted(found)]


def _map(path: Path) -> dict[str, Any]:
    """A file of DeepSpeed's, its tensors left on the disk until they are read. It is unpickled without restriction, as
    DeepSpeed does: resume only runs you trust."""
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    assert isinstance(loaded, dict)
    return loaded
