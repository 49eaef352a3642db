"""Both towers of a workload: their chunks per step, and the memory and time of their samples.

Three kinds of kernels run one after the other: matrix products, attention, and kernels that only read and write memory
(norms, activation functions, sums). Products grow with the square of the width, the others with the width, so a wide
tower reaches a larger share of the GPU's product rate than a narrow one.
"""

import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import NamedTuple

from megaclip.models import OpenClipConfig
from megaclip.ops.attention import fits_kernels
from megaclip.planner.cluster import HOPPER_GPUS, Cluster
from megaclip.planner.constants import (
    ATTENTION_TILE,
    COMPILED_TIME,
    PRODUCT_SHARE,
    QUACK_TIME,
    RECOMPUTE_TIME,
    SHORT_ATTENTION_TIME,
    TEXT_FACTOR,
)
from megaclip.planner.tower_costs import NO_WORK, Pass, TowerCosts, tower_costs
from megaclip.planner.workload import Parameters, Workload

_HAS_QUACK = importlib.util.find_spec("quack") is not None


class PassSeconds(NamedTuple):
    """Seconds of one sample in the passes through a tower."""

    forward: float
    """A forward pass through the whole tower."""
    backward: float
    """The backward pass through the part with a graph, and activation checkpointing's forward pass through its blocks;
    0 if the tower is not trained."""


@dataclass(frozen=True)
class TowerWork:
    """A tower on one rank in one step."""

    workload: Workload
    is_text: bool
    parameters: Parameters
    """Sizes of the tower's parameters."""
    micro_batch: int
    """Samples of a chunk."""
    chunks: int
    """Number of chunks."""
    kept: int
    """Number of chunks whose graphs are kept."""
    encoded_again: int
    """Number of chunks that are encoded twice."""

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.parameters.trained

    @functools.cached_property
    def costs(self) -> TowerCosts:
        """Costs of one of the rank's samples. Captions have the full length, as in a chunk with a long caption."""
        workload, model = self.workload, self.workload.model
        section = workload.megaclip
        compiled = section.compile is True and not isinstance(model, OpenClipConfig)
        if compiled and model.quick_gelu:  # the compiler computes QuickGELU's sigmoid again instead of keeping it
            model = model.replace(quick_gelu=False)
        unlocked = workload.text_unlocked if self.is_text else workload.image_unlocked
        return tower_costs(
            model,
            "text" if self.is_text else "image",
            workload.compute_bytes,
            unlocked_groups=unlocked if self.parameters.is_partly_locked else None,
            checkpointing=workload.checkpointing,
            compiled=compiled,
            recomputes=section.selective_recompute is True,
            tensor_ranks=workload.tensor_ranks,
            lora=section.lora if self.trained else None,
        )

    @functools.cached_property
    def passes(self) -> tuple[Pass, Pass]:
        """Work of one of the rank's samples in a forward and a backward pass. Captions have their mean length after
        cutting. Cached images take no work."""
        passes = self.costs.forward, self.costs.backward
        if self.workload.cached_images and not self.is_text:
            return NO_WORK, NO_WORK
        if not self.is_text:
            return passes
        cut, whole = self.workload.text_positions, self.workload.model.text_cfg.context_length
        tiles = (math.ceil(cut / ATTENTION_TILE) / math.ceil(whole / ATTENTION_TILE)) ** 2
        forward, backward = (
            Pass(each.layers, *(cut / whole * cost for cost in each[1:]))._replace(attention=tiles * each.attention)
            for each in passes
        )
        return forward, backward

    @property
    def blocks_share(self) -> float:
        """Share of the tower's blocks that have a graph."""
        forward, backward = self.passes
        return backward.layers / max(1, forward.layers)

    def seconds(self, cluster: Cluster) -> PassSeconds:
        """Return the rank's seconds for one of its samples."""
        rates = cluster.rates
        factor = _compiled_time(self.workload, cluster)[self.is_text] * (TEXT_FACTOR if self.is_text else 1.0)
        forward, backward = (
            factor * (work.products / (rates.product_flops * PRODUCT_SHARE) + work.attention / rates.attention_flops)
            + factor * work.moved / rates.memory
            for work in self.passes
        )
        if self.workload.checkpointing:
            backward += self.blocks_share * forward
        return PassSeconds(forward, backward if self.trained else 0.0)


def tower_work(workload: Workload) -> tuple[TowerWork, TowerWork]:
    """Return the work of the image tower and of the text tower."""
    rows = workload.batch.micro_batch, workload.batch.text_micro_batch
    of_both = zip(workload.parameters, rows, workload.chunks, workload.kept, workload.encoded_again, strict=True)
    image, text = (TowerWork(workload, is_text, *own) for is_text, own in zip((False, True), of_both, strict=True))
    return image, text


def _compiled_time(workload: Workload, cluster: Cluster) -> tuple[float, float]:
    """Return the time of the image tower and of the text tower over that of plain PyTorch.

    quack-kernels counts if it is installed where the plan is made.
    """
    if workload.megaclip.compile is not True:
        return 1.0, 1.0
    longer = RECOMPUTE_TIME if workload.megaclip.selective_recompute is True else 1.0
    if isinstance(workload.model, OpenClipConfig):
        image, text = COMPILED_TIME["open_clip"]
        return longer * image, longer * text
    image, text = COMPILED_TIME["towers" if workload.compiles_image_tower else "blocks"]
    if cluster.name in HOPPER_GPUS:
        longer *= QUACK_TIME if _HAS_QUACK else 1.0
        of_image, of_text = workload.model.vision_cfg, workload.model.text_cfg
        image *= SHORT_ATTENTION_TIME if fits_kernels(of_image.tokens, of_image.head_width) else 1.0
        text *= SHORT_ATTENTION_TIME if fits_kernels(of_text.context_length, of_text.width // of_text.heads) else 1.0
    return longer * image, longer * text
