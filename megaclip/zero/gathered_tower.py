"""Keep the parameters of a tower gathered for all its chunks at ZeRO-3, and prefetch those of the pass that runs.

DeepSpeed gathers a block's parameters before each pass over the block. Afterwards it releases them, unless it expects
to use them again soon. For this it records the order of the blocks in a forward pass and its backward pass, and it
gathers the next blocks of that order in advance. A step of the gradient cache has passes of several kinds: forward and
backward, over one tower or both. With a single record, DeepSpeed gathers a tower that the pass does not use, releases
it, and starts a new record. `trace_kinds_of_passes` keeps one record for each kind.

In such a record every parameter is used once, so DeepSpeed releases it after this use. `GatheredTower` keeps
parameters from one pass to the next.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import ZeRoTraceMode
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from megaclip.config.ds_config import count_kept

_Parameters = list[Any]
"""Parameters with the attributes that DeepSpeed's ZeRO-3 adds to them."""
_USER = "megaclip.zero.gathered_tower"
"""Entry in the set of the modules that use a parameter. DeepSpeed releases no parameter whose set has an entry."""


_RECORD = [f"_PartitionedParameterCoordinator__{name}" for name in ("trace_mode", "submodule_order", "param_order")]
"""Attributes of DeepSpeed's `PartitionedParameterCoordinator` that hold the recorded order of a pass."""


class GatheredTower:
    """Keeps parameters gathered from one pass to the next in a step. Below ZeRO-3 it does nothing.

    Those below the persistence threshold stay gathered in both towers. The others are gathered by the first pass that
    uses them, and released when the other tower's passes begin, or at the end. `count_kept` limits their
    number.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._persistent: _Parameters = []
        self._towers: tuple[nn.Module, ...] = ()
        self._kept: _Parameters = []
        self._engine = engine if engine.zero_optimization_stage() == 3 else None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep parameters gathered in the body. After it, only DeepSpeed decides."""
        if self._engine is not None:
            self._persistent = [parameter for parameter in self._engine.module.parameters() if parameter.ds_persist]
        _keep(self._persistent)
        try:
            yield
        finally:
            self.release()
            _leave(self._persistent)

    def use(self, *towers: nn.Module) -> None:
        """Keep the parameters of these towers from now on, and release those of other towers.

        Both towers at once: the step has one forward pass and one backward pass.
        """
        if self._engine is None or towers == self._towers:
            return
        self.release()
        self._towers = towers
        offload = self._engine.zero_offload_param()
        parameters: _Parameters = [parameter for tower in towers for parameter in tower.parameters()]
        large = [parameter for parameter in parameters if not parameter.ds_persist]
        kept = count_kept(
            [parameter.ds_numel for parameter in large],
            self._engine.zero_max_reuse_distance(),
            self._engine.zero_max_live_parameters(),
            self._engine.zero_prefetch_bucket_size(),
            offloads=offload is not None and offload.device != OffloadDeviceEnum.none and len(towers) == 1,
        )
        self._kept = large[len(large) - kept :]
        _keep(self._kept)

    def release(self) -> None:
        """Release the parameters above the persistence threshold."""
        _leave(self._kept)
        for parameter in self._kept:
            if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_active_sub_modules:
                parameter.partition()
        self._towers, self._kept = (), []


def trace_kinds_of_passes(engine: DeepSpeedEngine) -> None:
    """Let ZeRO-3 record and prefetch the order of modules of each kind of pass. Below ZeRO-3 it does nothing.

    A kind is the direction, the towers that the model's forward pass runs, and whether it makes a graph: only then a
    caption decoder runs.
    """
    if engine.zero_optimization_stage() < 3:
        return
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    records: dict[Any, list[Any]] = {}
    current: Any = None

    def start(kind: Any) -> None:
        nonlocal current
        if coordinator.is_record_trace():
            coordinator.reset_step()  # completes the record
        if kind == current:
            return
        records[current] = [getattr(coordinator, name) for name in _RECORD]
        new: list[Any] = [ZeRoTraceMode.INVALID, [], []]
        for name, value in zip(_RECORD, records.get(kind, new), strict=True):
            setattr(coordinator, name, value)
        current = kind

    def before_forward(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        # DeepSpeed's own hook resets the step.
        start(("forward", torch.is_grad_enabled(), *(each is not None for each in inputs[:2])))

    def after_forward(_: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        kind = ("backward", *(each is not None for each in inputs[:2]))

        def before_backward(_: Tensor) -> None:
            start(kind)
            coordinator.reset_step()

        graph = [output for output in pytree.tree_leaves(outputs) if output is not None and output.requires_grad]
        if graph:
            register_multi_grad_hook(graph, before_backward, mode="any")

    engine.module.register_forward_pre_hook(before_forward, prepend=True)
    engine.module.register_forward_hook(after_forward)


def _keep(parameters: _Parameters) -> None:
    for parameter in parameters:
        parameter.ds_active_sub_modules.add(_USER)


def _leave(parameters: _Parameters) -> None:
    for parameter in parameters:
        parameter.ds_active_sub_modules.discard(_USER)
