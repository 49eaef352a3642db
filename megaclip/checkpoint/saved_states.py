"""Read DeepSpeed's files of one checkpoint by parameter name, for any number of ranks and ZeRO stage that wrote them.

`SavedStates.open` memory-maps the files of all ranks, and `read` copies from them the elements of any part of any
parameter or optimizer state. Values are copied, never computed, so the result is exact. `megaclip.zero.reshard`
fills an engine from it, and `consolidated_weights` joins whole float32 weights.

With bf16 a checkpoint holds locked parameters only as rounded working copies. Their float32 values never change, so all
checkpoints of a run share one file with them (`search.LOCKED_WEIGHTS`). They are read like masters.

With tensor parallelism, T groups of files hold one part each of the parameters that
`megaclip.models.layers.split_dim` names, and equal copies of the others. The number of tensor-parallel ranks that
read does not have to be the number that wrote.

Nothing in the files is executed (`megaclip.checkpoint.deepspeed_files`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megaclip.checkpoint.adapters import merged_weights
from megaclip.checkpoint.deepspeed_files import loading, read_file
from megaclip.checkpoint.model_card import ModelCard, read_model_card
from megaclip.checkpoint.open_clip_weights import read_weights
from megaclip.checkpoint.search import LOCKED_WEIGHTS, MODEL_CARD
from megaclip.checkpoint.weight_files import read_tensors
from megaclip.comm.groups import RankGroup
from megaclip.comm.parallelism import ONE_RANK
from megaclip.errors import CheckpointError
from megaclip.models.layers import own_part, split_dim
from megaclip.models.lora import has_adapters
from megaclip.models.open_clip_keys import StateDict

FP32 = "fp32"
"""Kind of the float32 master weights."""
WORKING = "working"
"""Kind of the working copies of the weights: all of them at ZeRO-0 to 2, the frozen ones at ZeRO-3."""
OBJECTIVE = "objective."
"""Beginning of the names of an objective's parameters (`megaclip.objectives`)."""
EMA = "ema"
"""Kind of the moving averages of the weights (`megaclip.zero.weight_average`), part of the optimizer state."""
PARAMETER_NAMES = "parameter_names"
"""Key of a parameter group at ZeRO-0 under which the names of its parameters are saved, in order."""

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass
class SavedStates:
    """One checkpoint, indexed by parameter name."""

    tensor_ranks: int
    """Number of tensor-parallel ranks that wrote the checkpoint."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """name -> shape of the part that one tensor-parallel rank wrote."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """name -> entries of the parameter's optimizer state without a number per element: "step", Adafactor's factors."""
    group_step: Any = None
    """Number of steps of each group of parameters at ZeRO-0, if the optimizer counts them there, as LAMB does."""
    counters: dict[str, int] = field(default_factory=dict)
    """Counters of the engine, such as global_steps."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """name -> buffer of the model, such as running statistics of a batch norm; equal on all ranks."""
    _pieces: dict[tuple[str, str, int], list[torch.Tensor]] = field(default_factory=dict)
    """(name, kind, tensor-parallel rank) -> views (elements,) of saved flat tensors; one after the other they are the
    flattened parameter or state. kind: FP32, WORKING, or an optimizer state ("exp_avg")."""

    @classmethod
    def open(cls, folder: Path) -> "SavedStates":
        """Memory-map the files of the checkpoint in `folder`, which is whole (`search.require_whole`)."""
        model_files = {
            (int(match[2]), int(match[1] or 0)): path
            for path in folder.iterdir()
            if (match := _MODEL_FILE.fullmatch(path.name))
        }
        # ZeRO-0 to 2 write one model file for each tensor-parallel rank, ZeRO-3 one for each rank.
        one_model_file = (folder / "mp_rank_00_model_states.pt").is_file()
        first = _map(model_files[min(model_files)])
        saved = cls(tensor_ranks=int(first["mp_world_size"]))
        ranks = int(first["dp_world_size"])
        saved.buffers = {name: first["module"][name] for name in first.get("buffer_names") or ()}
        saved.counters = {name: first[name] for name in ("global_steps", "global_samples", "skipped_steps")}
        for tensor_rank in range(saved.tensor_ranks):
            optimizers = [_map(path)["optimizer_state_dict"] for path in _optimizer_files(folder, tensor_rank)]
            model = _map(model_files[tensor_rank, 0])
            if one_model_file:
                saved._add_model_file(model, optimizers, tensor_rank)
                continue
            for rank, optimizer in enumerate(optimizers):
                if rank and model["frozen_param_fragments"]:  # all else in them is equal on all ranks
                    model = _map(model_files[tensor_rank, rank])
                saved._add_stage_3(model, optimizer, tensor_rank, rank, ranks)
        saved._add_locked(folder.parent / MODEL_CARD / LOCKED_WEIGHTS)
        return saved

    def float32_weights(self, names: Iterable[str]) -> StateDict:
        """Return those parameters, whole, whose working copies are float32."""
        working = {name: self._pieces.get((name, WORKING, 0), []) for name in names}
        exact = [name for name, pieces in working.items() if all(piece.dtype == torch.float32 for piece in pieces)]
        return {name: self.whole(name) for name in exact}

    def state_kinds(self, name: str) -> list[str]:
        """Return the kinds of a parameter's optimizer state tensors, such as "exp_avg"."""
        kinds = [kind for (other, kind, tensor_rank) in self._pieces if (other, tensor_rank) == (name, 0)]
        return [kind for kind in kinds if kind not in (FP32, WORKING)]

    def has(self, name: str, kind: str) -> bool:
        """Return whether the checkpoint holds this kind of this parameter."""
        return (name, kind, 0) in self._pieces

    def whole(self, name: str, *, ema: bool = False) -> torch.Tensor:
        """Return a whole parameter in float32: its average with `ema`, else its master, else its working copy."""
        shape, dim = list(self.shapes[name]), split_dim(name)
        if dim is not None:
            shape[dim] *= self.tensor_ranks
        weights = torch.empty(shape)
        preferred = (EMA, FP32) if ema else (FP32,)
        kind = next((kind for kind in preferred if self.has(name, kind)), WORKING)
        self.read(name, kind, weights.shape, ONE_RANK, 0, weights.view(-1))
        return weights

    def read(self, name: str, kind: str, shape: torch.Size, group: RankGroup, start: int, out: torch.Tensor) -> None:
        """Fill `out` with consecutive elements of one tensor-parallel rank's part of a parameter.

        Args:
            kind: FP32, WORKING, or one of `state_kinds`.
            shape: shape of that part, which is the whole parameter where tensor parallelism does not split it.
            group: tensor-parallel group of the rank that reads.
            start: index of the first element in the flattened part.
            out: (elements,), any dtype.

        Raises:
            CheckpointError: the parameter was not saved, or was saved with a different number of elements.
        """
        dim = split_dim(name)
        parts = [self._pieces.get((name, kind, tensor), []) for tensor in range(self.tensor_ranks)]
        if dim is None:
            parts, needed = parts[:1], shape.numel()
        else:
            needed = shape.numel() * group.size
        found = sum(len(piece) for part in parts for piece in part)
        if found != needed:
            raise CheckpointError(
                f"the checkpoint has {found} elements of {name} ({kind}), but this run requires {needed}; "
                "resume with the model, the locked towers and the optimizer that wrote it"
            )
        if dim == 1:
            _read_columns(parts, shape, group, start, out)
            return
        own_start = group.rank * shape.numel() if dim == 0 else 0  # parts follow each other in the flattened whole
        _read_elements([piece for part in parts for piece in part], own_start + start, out)

    def _add(self, name: str, kind: str, tensor_rank: int, piece: torch.Tensor) -> None:
        self._pieces.setdefault((name, kind, tensor_rank), []).append(piece)

    def _add_locked(self, path: Path) -> None:
        """Add the float32 values of locked parameters, if the run has them."""
        for name, whole in read_tensors(path).items() if path.is_file() else ():
            for rank in range(self.tensor_ranks if self.has(name, WORKING) and not self.has(name, FP32) else 0):
                part = own_part(name, whole, RankGroup(None, rank, self.tensor_ranks))
                self._add(name, FP32, rank, part.reshape(-1))

    def _add_trained(
        self, name: str, fp32: torch.Tensor, state: dict[str, Any], tensor_rank: int, start: int, numel: int
    ) -> None:
        """Add a parameter's piece of a flat group. Padding may make state tensors longer than `fp32`, never shorter."""
        place = slice(start, start + numel)
        self._add(name, FP32, tensor_rank, fp32[place])
        self.numbers[name] = {}
        for kind, value in state.items():
            if torch.is_tensor(value) and value.ndim and value.numel() >= len(fp32):
                self._add(name, kind, tensor_rank, value.view(-1)[place])
            else:
                self.numbers[name][kind] = value

    def _add_model_file(self, model: dict[str, Any], optimizers: list[dict[str, Any]], tensor_rank: int) -> None:
        """Add a tensor-parallel rank's files at ZeRO-0 to 2. The model file holds the working copies of all weights."""
        for name, value in model["module"].items():
            if name in self.buffers:
                continue
            self.shapes[name] = value.shape
            self._add(name, WORKING, tensor_rank, value.reshape(-1))
        for optimizer in optimizers:
            state = optimizer["base_optimizer_state"]["state"]
            for index, flat in enumerate(optimizer["single_partition_of_fp32_groups"]):
                for name, place in optimizer["param_slice_mappings"][index].items():
                    self._add_trained(name, flat, state.get(index, {}), tensor_rank, place.start, place.numel)
        if optimizers:
            return
        state = model["optimizer"]["state"]
        # DeepSpeed's FusedAdam counts its steps only in the last parameter of a group.
        counts = {"step": max(part["step"] for part in state.values())} if "step" in state.get(0, {}) else {}
        groups = model["optimizer"]["param_groups"]
        self.group_step = groups[0].get("step")
        trained = [name for group in groups for name in group[PARAMETER_NAMES]]
        for index, name in enumerate(trained):
            value = model["module"][name]
            self._add_trained(name, value.reshape(-1), state.get(index, {}) | counts, tensor_rank, 0, value.numel())

    def _add_stage_3(
        self, model: dict[str, Any], optimizer: dict[str, Any], tensor_rank: int, rank: int, ranks: int
    ) -> None:
        """Add the files of one rank at ZeRO-3, which cuts each parameter into `ranks` equal parts."""
        state = optimizer["optimizer_state_dict"]["state"]
        for index, flat in enumerate(optimizer["fp32_flat_groups"]):
            start = 0
            for name, shape in model["param_shapes"][index].items():
                self.shapes[name] = shape
                share = -(-shape.numel() // ranks)
                numel = max(0, min(share, shape.numel() - rank * share))
                self._add_trained(name, flat, state.get(index, {}), tensor_rank, start, numel)
                start += share
        for name, part in (model["frozen_param_fragments"] or {}).items():
            self.shapes[name] = model["frozen_param_shapes"][name]
            numel = max(0, min(part.numel(), self.shapes[name].numel() - rank * part.numel()))
            self._add(name, WORKING, tensor_rank, part.view(-1)[:numel])


def consolidated_weights(
    folder: Path, tag: str, *, ema: bool = False, merges: bool = True, of_objective: bool = False
) -> StateDict:
    """Return MegaCLIP's state dict of a checkpoint, parameters in float32, on the CPU.

    With ZeRO the weights are the float32 masters. Without ZeRO they are the weights of the forward pass, which are
    float32 too, because bfloat16 training requires ZeRO. Locked parameters have no masters, so they have the values of
    the start of the run, or their working copies if the run started without weights for them. A parameter that the run
    does not update has no moving average, so its value is used.

    Args:
        folder: RUN/checkpoints, with the whole checkpoint `tag`.
        ema: return the moving averages of the weights. Buffers (running statistics) are those of the last step.
        merges: merge adapters (`megaclip.lora`) with the weights below them; otherwise return the adapters alone.
        of_objective: return the weights of the run's objective instead of those of the model.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no moving averages.
    """
    step = folder / tag
    with loading(step):
        saved = SavedStates.open(step)
        if ema and not any(saved.has(name, EMA) for name in saved.shapes):
            raise CheckpointError(
                f"{step} has no moving averages of the weights (--ema), which a run saves if megaclip.ema_decay is "
                "set; leave out --ema"
            )
        buffers = saved.buffers
        names = [name for name in (*saved.shapes, *buffers) if name.startswith(OBJECTIVE) == of_objective]
        weights = {name: buffers[name].clone() if name in buffers else saved.whole(name, ema=ema) for name in names}
    return merged_weights(step, weights) if merges and has_adapters(weights) else weights


def read_model(folder: Path, tag: str | None, *, ema: bool = False) -> tuple[ModelCard, StateDict]:
    """Return the model card and the weights, by MegaCLIP's names, of what `search.locate_model` found."""
    if tag is not None:
        return read_model_card(folder / MODEL_CARD), consolidated_weights(folder, tag, ema=ema)
    card = read_model_card(folder)
    return card, read_weights(folder, card.config)


def _read_elements(pieces: list[torch.Tensor], start: int, out: torch.Tensor) -> None:
    """Copy the elements from index `start` on of the pieces, in order, into `out`."""
    done = 0
    for piece in pieces:
        low, high = max(start, done), min(start + len(out), done + len(piece))
        if low < high:
            out[low - start : high - start].copy_(piece[low - done : high - done])
        done += len(piece)


def _read_columns(
    parts: list[list[torch.Tensor]], shape: torch.Size, group: RankGroup, start: int, out: torch.Tensor
) -> None:
    """Copy elements of this rank's columns of a matrix into `out`. Each part has some columns of every row."""
    if not len(out):
        return
    columns = shape[1]
    part_columns = columns * group.size // len(parts)
    first, last = start // columns, -(-(start + len(out)) // columns)
    rows = []
    for pieces in parts:
        part = torch.empty((last - first) * part_columns, dtype=pieces[0].dtype)
        _read_elements(pieces, first * part_columns, part)
        rows.append(part.view(last - first, part_columns))
    own = torch.cat(rows, dim=1).chunk(group.size, dim=1)[group.rank]
    out.copy_(own.flatten()[start - first * columns :][: len(out)])


def _optimizer_files(folder: Path, tensor_rank: int) -> list[Path]:
    """Return the optimizer files of a tensor-parallel rank in rank order. ZeRO-0 writes none."""
    pattern = re.compile(rf"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_{tensor_rank:02d}_optim_states\.pt")
    found = {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    return [found[rank] for rank in sorted(found)]


def _map(path: Path) -> dict[str, Any]:
    """Open one of DeepSpeed's files; its tensors stay on the disk until they are read."""
    return read_file(path, map_location="cpu", mmap=True)
