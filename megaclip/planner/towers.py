"""Both towers of a workload: their chunks per step, and the memory and time of their samples.

The costs of one sample are formulas for MegaCLIP's towers (`planner.own_towers`), and traces for open_clip's
(`planner.traced_towers`).
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from megaclip.models import ModelConfig, OpenClipConfig
from megaclip.planner import own_towers
from megaclip.planner.cluster import Rates
from megaclip.planner.constants import COMPILED_TIME, PRODUCT_SHARE, RECOMPUTE_TIME, TEXT_FACTOR
from megaclip.planner.own_towers import TowerSizes
from megaclip.planner.tower_costs import PassCosts, TowerMemory
from megaclip.planner.traced_towers import traced_memory, traced_pass_costs
from megaclip.planner.workload import Parameters, Workload


class PassSeconds(NamedTuple):
    """Seconds of one sample in each pass through a tower."""

    forward: float
    backward: float


@dataclass(frozen=True)
class TowerWork:
    """A tower on one rank in one step."""

    workload: Workload
    is_text: bool
    parameters: Parameters
    unlocked_groups: int | None
    """Number of trained groups of a partly locked tower, or None."""
    micro_batch: int
    chunks: int
    kept: int
    """Number of chunks whose graphs are kept."""
    encoded_again: int
    """Number of chunks that are encoded twice."""

    @property
    def name(self) -> str:
        return "text" if self.is_text else "image"

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.parameters.trained

    @property
    def is_partly_locked(self) -> bool:
        return self.unlocked_groups is not None

    @functools.cached_property
    def memory(self) -> TowerMemory:
        """Bytes of one of the rank's samples. Captions have the full length, as in a chunk with a long caption."""
        model, width, checkpointing = self.workload.model, self.workload.compute_bytes, self.workload.checkpointing
        if isinstance(model, OpenClipConfig):
            return traced_memory(model, self.name, self.unlocked_groups, width, checkpointing)
        return own_towers.tower_memory(*self._sizes(model), width, checkpointing)

    @functools.cached_property
    def passes(self) -> tuple[PassCosts, PassCosts]:
        """Work of one of the rank's samples in the whole tower, and in its part with a graph. Captions have their mean
        length after cutting."""
        model, width = self.workload.model, self.workload.compute_bytes
        if isinstance(model, OpenClipConfig):
            share = self.workload.text_positions / model.text_cfg.context_length if self.is_text else 1.0
            traced = (traced_pass_costs(model, self.name, groups, width) for groups in (None, self.unlocked_groups))
            whole, part = (costs.times(share) for costs in traced)
            return whole, part
        sizes = self._sizes(model)
        if self.is_text:
            whole_sizes, part_sizes = (replace(each, tokens=self.workload.text_positions) for each in sizes)
            sizes = whole_sizes, part_sizes
        whole, part = (own_towers.pass_costs(each, width) for each in sizes)
        return whole, part

    def seconds(self, rates: Rates) -> tuple[PassSeconds, PassSeconds]:
        """Return the rank's seconds for one of its samples in the whole tower, and in its part with a graph. The
        backward pass runs over the part only."""
        factor = _compiled_time(self.workload)[self.is_text] * (TEXT_FACTOR if self.is_text else 1.0)
        whole, part = (_seconds(costs, rates, factor) for costs in self.passes)
        return whole, part

    def _sizes(self, model: ModelConfig) -> tuple[TowerSizes, TowerSizes]:
        """Return the sizes of one of MegaCLIP's towers, and of its part with a graph."""
        sizes_of = own_towers.text_sizes if self.is_text else own_towers.image_sizes
        whole, section = sizes_of(model, self.workload.tensor_ranks), self.workload.megaclip
        if section.compile is True:  # the compiler computes QuickGELU's sigmoid again instead of keeping it
            whole = replace(whole, quick_gelu=False, recomputes=section.selective_recompute is True)
        return whole, whole.part(self.unlocked_groups) if self.unlocked_groups else whole


def tower_work(workload: Workload) -> tuple[TowerWork, TowerWork]:
    """Return the work of the image tower and of the text tower."""
    batch, kept, again = workload.batch, workload.kept, workload.encoded_again
    image, text = workload.parameters
    return (
        TowerWork(
            workload,
            is_text=False,
            parameters=image,
            unlocked_groups=workload.image_unlocked if image.is_partly_locked else None,
            micro_batch=batch.micro_batch,
            chunks=batch.accumulation,
            kept=kept.image,
            encoded_again=again[0],
        ),
        TowerWork(
            workload,
            is_text=True,
            parameters=text,
            unlocked_groups=workload.text_unlocked if text.is_partly_locked else None,
            micro_batch=batch.text_micro_batch,
            chunks=batch.text_chunks,
            kept=kept.text,
            encoded_again=again[1],
        ),
    )


def _seconds(costs: PassCosts, rates: Rates, factor: float) -> PassSeconds:
    computing = costs.products / (rates.product_flops * PRODUCT_SHARE) + costs.attention / rates.attention_flops
    return PassSeconds(
        forward=factor * (computing + costs.forward_bytes / rates.memory),
        backward=factor * (2 * computing + costs.backward_bytes / rates.memory),
    )


def _compiled_time(workload: Workload) -> tuple[float, float]:
    """Return the time of the image tower and of the text tower over that of plain PyTorch."""
    if workload.megaclip.compile is not True:
        return 1.0, 1.0
    own = "towers" if workload.compiles_image_tower else "blocks"
    image, text = COMPILED_TIME["open_clip" if isinstance(workload.model, OpenClipConfig) else own]
    longer = RECOMPUTE_TIME if workload.megaclip.selective_recompute is True else 1.0
    return longer * image, longer * text
