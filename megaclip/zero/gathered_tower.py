"""Keep the parameters of a tower gathered for all its chunks at ZeRO-3.

DeepSpeed gathers a block's parameters before each pass over the block. Afterwards it releases them, unless it expects
to use them again soon. For this it records the order of the blocks in a forward pass and its backward pass. A step of
the gradient cache has many passes, over one tower and then the other. Most of them have another order than the recorded
one. DeepSpeed then gathers and releases all parameters in every pass, also those below
`stage3_param_persistence_threshold`. `GatheredTower` does not use the recorded order.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from megaclip.config.ds_config import elements_kept_gathered

_Parameters = list[Any]
"""Parameters with the attributes that DeepSpeed's ZeRO-3 adds to them."""
_USER = "megaclip.zero.gathered_tower"
"""Entry in the set of the modules that use a parameter. DeepSpeed releases no parameter whose set has an entry."""


class GatheredTower:
    """Keeps parameters gathered from one pass over a tower to the next. Below ZeRO-3 it does nothing.

    Those below the persistence threshold stay gathered in both towers. The others are gathered by the first pass that
    uses them, and released when the other tower's passes begin, or at the end. `elements_kept_gathered` limits
    their number.
    """

    def __init__(self, engine: DeepSpeedEngine, towers: Iterable[nn.Module]) -> None:
        self._persistent: _Parameters = []
        self._of_towers: dict[nn.Module, _Parameters] = {tower: [] for tower in towers}
        self._tower: nn.Module | None = None
        if engine.zero_optimization_stage() < 3:
            return
        parameters: _Parameters = list(engine.module.parameters())
        self._persistent = [parameter for parameter in parameters if parameter.ds_persist]
        offload = engine.zero_offload_param()
        limit = elements_kept_gathered(
            engine.zero_max_reuse_distance(),
            engine.zero_max_live_parameters(),
            engine.zero_prefetch_bucket_size(),
            offloads=offload is not None and offload.device != OffloadDeviceEnum.none,
        )
        for tower in self._of_towers:
            self._of_towers[tower] = _last_parameters(tower, limit)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep parameters gathered in the body. After it, only DeepSpeed decides."""
        _keep(self._persistent)
        try:
            yield
        finally:
            self._release_tower()
            _leave(self._persistent)

    def use(self, tower: nn.Module) -> None:
        """Keep the parameters of this tower from now on, and release those of the other tower."""
        if tower is not self._tower:
            self._release_tower()
            self._tower = tower
            _keep(self._of_towers[tower])

    def _release_tower(self) -> None:
        if self._tower is None:
            return
        parameters = self._of_towers[self._tower]
        self._tower = None
        _leave(parameters)
        for parameter in parameters:
            if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_active_sub_modules:
                parameter.partition()


def _last_parameters(module: nn.Module, limit: int) -> _Parameters:
    """Return the last parameters above the persistence threshold, with at most `limit` elements in all."""
    kept: _Parameters = []
    parameters: _Parameters = list(module.parameters())
    for parameter in reversed([each for each in parameters if not each.ds_persist]):
        limit -= parameter.ds_numel
        if limit < 0:
            break
        kept.append(parameter)
    return kept


def _keep(parameters: _Parameters) -> None:
    for parameter in parameters:
        parameter.ds_active_sub_modules.add(_USER)


def _leave(parameters: _Parameters) -> None:
    for parameter in parameters:
        parameter.ds_active_sub_modules.discard(_USER)
