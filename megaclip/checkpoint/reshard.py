"""Load a checkpoint into an engine with a different number of ranks, or at a different ZeRO stage, than wrote it.

DeepSpeed loads only checkpoints of the same number of ranks and the same stage. Its universal checkpoints remove that
limit for Adam only, and need a second copy of everything on the disk. They do not restore frozen parameters, and at
ZeRO-3 they give every parameter group the hyper-parameters of the first one.

Here nothing is converted. Every rank memory-maps the files of all ranks that saved, and reads the parts of its own
partition. It puts them into the state dict that its fresh optimizer would save, and DeepSpeed loads this state dict.
Values are copied, never computed, so the result is exact.

The model has no buffers. Optimizer state on NVMe is stored in files of another format and is refused.
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

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.errors import CheckpointError, first_line

_FP32 = "fp32"
_FROZEN = "frozen"


def load_resharded(engine: DeepSpeedEngine, folder: Path, *, ranks: int) -> None:
    """Load parameters, optimizer state and step counters into `engine`, on every rank.

    The optimizer's settings (weight decay, betas) stay the engine's own.

    Args:
        engine: a fresh engine, with any number of ranks and any ZeRO stage.
        folder: folder of one checkpoint, RUN/checkpoints/step_N.
        ranks: number of ranks that wrote the checkpoint.

    Raises:
        CheckpointError: on every rank, if the files cannot be read or do not hold the parameters that the engine has.
    """
    is_zero_3 = hasattr(engine.optimizer, "checkpoint_event_prologue")
    if is_zero_3:
        engine.optimizer.checkpoint_event_prologue()
    with raise_on_all_ranks():
        try:
            counters = _fill_partition(engine, folder, ranks)
        except CheckpointError:
            raise
        except Exception as problem:  # a damaged file can cause any exception inside torch.load or DeepSpeed
            raise CheckpointError(f"cannot load checkpoint {str(folder)!r}: {first_line(problem)}") from problem
    if is_zero_3:
        engine.optimizer.checkpoint_event_epilogue()
    elif hasattr(engine.optimizer, "update_lp_params"):  # ZeRO-1 and 2
        engine.optimizer.update_lp_params()
    for name, value in counters.items():
        setattr(engine, name, value)


def _fill_partition(engine: DeepSpeedEngine, folder: Path, ranks: int) -> dict[str, int]:
    """Give this rank's partition the saved values, without communication. Return the engine's saved counters."""
    if engine.zero_nvme_offload_optimizer() or (folder / "offloaded_tensors").exists():
        raise CheckpointError(
            "optimizer state on NVMe can be resumed only with the number of ranks and the ZeRO stage that saved it; "
            "use those, or set offload_optimizer.device to 'cpu' from the start of the run"
        )
    groups = list(_flat_groups(engine))
    saved = _Saved.open(folder, ranks, [slot.name for group in groups for slot in group.slots])
    _fill(engine, groups, saved)
    _fill_frozen(engine, saved)
    return saved.counters


@dataclass(frozen=True)
class _Slot:
    """Part of one parameter in a flat tensor of this rank."""

    name: str
    size: int
    """Number of elements of the whole parameter."""
    start: int
    """Index of the part's first element in the flattened parameter."""
    place: int
    """Index of the part's first element in the flat tensor."""
    numel: int
    """Number of elements of the part; 0 if other ranks hold the parameter."""


@dataclass(frozen=True)
class _FlatGroup:
    """Tensor that the optimizer updates on this rank, with the positions of the parameters in it."""

    flat: torch.Tensor
    slots: list[_Slot]
    """One slot for every parameter of the group, in the optimizer's order."""


def _flat_groups(engine: DeepSpeedEngine) -> Iterator[_FlatGroup]:
    """Yield the optimizer's tensors in the order in which its state dict numbers them."""
    optimizer: Any = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3: each parameter is cut into equal parts
        rank = dist.get_rank(group=optimizer.dp_process_group)
        for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            slots, place = [], 0
            for parameter in parameters:
                start = rank * parameter.partition_numel()
                numel = max(0, min(parameter.partition_numel(), parameter.ds_numel - start))
                slots.append(_Slot(engine.param_names[parameter], parameter.ds_numel, start, place, numel))
                place += parameter.partition_numel()
            yield _FlatGroup(flat, slots)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2: each group is cut as a whole
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
    else:  # ZeRO-0; config/checks.py allows it in float32 only
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                size = parameter.numel()
                yield _FlatGroup(parameter.data, [_Slot(engine.param_names[parameter], size, 0, 0, size)])


def _fill(engine: DeepSpeedEngine, groups: list[_FlatGroup], saved: "_Saved") -> None:
    """Copy the saved values into the optimizer's tensors and their state."""
    optimizer: Any = engine.optimizer
    state: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        kinds, numbers = saved.kinds_and_numbers(group.slots[0].name)
        state[index] = {kind: saved.gather(group, kind) for kind in kinds} | numbers
        group.flat.data.copy_(saved.gather(group, _FP32))
    if not engine.zero_optimization():
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        return
    own = optimizer.state_dict()  # contains the tensors of `groups`, filled above
    own["base_optimizer_state" if "base_optimizer_state" in own else "optimizer_state_dict"]["state"] = state
    only_own: list[Any] = [None] * dist.get_world_size()
    only_own[dist.get_rank()] = own
    optimizer.load_state_dict(only_own, load_from_fp32_weights=True)


def _fill_frozen(engine: DeepSpeedEngine, saved: "_Saved") -> None:
    """Copy the saved values into this rank's part of every frozen parameter."""
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
    """Index of the first element in the flat tensor."""
    numel: int
    """Number of elements."""


@dataclass
class _Saved:
    """Checkpoint indexed by parameter name, independent of the number of ranks and the ZeRO stage that wrote it."""

    pieces: dict[tuple[str, str], list[_Piece]] = field(default_factory=dict)
    """(name, kind) -> pieces in order. kind: "fp32", "frozen", or a tensor of the optimizer's state ("exp_avg")."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """name -> entries of the parameter's optimizer state that are not in `pieces` ("step")."""
    counters: dict[str, int] = field(default_factory=dict)
    """Counters of the engine, such as global_steps."""

    @classmethod
    def open(cls, folder: Path, ranks: int, names: list[str]) -> "_Saved":
        """Memory-map the files in `folder`, which `ranks` ranks wrote.

        names: the parameters that the optimizer updates, in its order. ZeRO-0 saves no names.
        """
        optimizers = [_map(path)["optimizer_state_dict"] for path in _files_by_rank(folder, "optim", ranks)]
        saved = cls()
        whole = folder / "mp_rank_00_model_states.pt"
        if whole.is_file():  # ZeRO-0 to 2: one file holds the working copies of all parameters
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
        """Add a parameter's piece of a flat group. Padding may make state tensors longer than `fp32`, never shorter."""
        self._add(name, _FP32, fp32, start, numel)
        tensors = {kind: value for kind, value in state.items() if torch.is_tensor(value) and value.ndim}
        for kind, value in tensors.items():
            self._add(name, kind, value.view(-1), start, numel)
        self.numbers[name] = {kind: value for kind, value in state.items() if kind not in tensors}

    def _add_stage_0(self, model: dict[str, Any], names: list[str]) -> None:
        state = model["optimizer"]["state"]
        # DeepSpeed's FusedAdam counts its steps only in the last parameter of a group.
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
        """Return the kinds of a parameter's optimizer state tensors, and the other entries of its optimizer state."""
        kinds = [kind for (other, kind) in self.pieces if other == name and kind not in (_FP32, _FROZEN)]
        # A copy, because torch counts steps in place and two groups must not share one counter.
        return kinds, copy.deepcopy(self.numbers.get(name, {}))

    def gather(self, group: _FlatGroup, kind: str) -> torch.Tensor:
        """Return a CPU tensor shaped like `group.flat`, with the saved elements of `kind` in its slots, else zeros.

        Raises:
            CheckpointError: a parameter was not saved, or was saved with a different number of elements.
        """
        flat = torch.zeros(group.flat.numel())
        for slot in group.slots:
            pieces = self.pieces.get((slot.name, kind), [])
            if (size := sum(piece.numel for piece in pieces)) != slot.size:
                raise CheckpointError(
                    f"the checkpoint has {size} elements of {slot.name} ({kind}), but this run requires {slot.size}; "
                    "resume with the model, the locked towers and the optimizer that wrote it"
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
    """Return DeepSpeed's files of all `ranks` ranks in rank order; an empty list if the stage writes no such files.

    kind: "optim" or "model".
    """
    pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_{kind}_states\.pt")
    found = {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if found and sorted(found) != list(range(ranks)):
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is incomplete: {ranks} ranks wrote it, but it has the files of ranks "
            f"{sorted(found)}; choose another one"
        )
    return [found[rank] for rank in sorted(found)]


def _map(path: Path) -> dict[str, Any]:
    """Open one of DeepSpeed's files; its tensors stay on the disk until they are read.

    The file is unpickled without restriction, as DeepSpeed does it. Resume only runs that you trust.
    """
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    assert isinstance(loaded, dict)
    return loaded
