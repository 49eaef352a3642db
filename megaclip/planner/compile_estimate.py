"""Decide whether a run compiles its towers: compare the seconds that torch.compile saves with those that it takes."""

import math
from dataclasses import dataclass

from megaclip.errors import ConfigError
from megaclip.models import OpenClipConfig
from megaclip.models.text import is_cut_exact
from megaclip.planner.cluster import Cluster
from megaclip.planner.constants import COMPILE_BLOCKS_SECONDS, COMPILE_LAYER_SECONDS
from megaclip.planner.text_chunks import planned_pieces
from megaclip.planner.towers import tower_work
from megaclip.planner.workload import Workload
from megaclip.step.layout import cuts_captions


@dataclass(frozen=True)
class CompileEstimate:
    """Seconds of one rank over a whole run."""

    saved: float
    """Seconds that compiled towers save. Infinite if the number of steps is unknown."""
    startup: float
    """Seconds that the compilation takes at the start."""
    pays: bool
    """True if the run compiles its towers."""


def compile_estimate(workload: Workload, cluster: Cluster) -> CompileEstimate:
    """Return the seconds that torch.compile saves and takes, and whether the run uses it.

    The saved time counts one forward and one backward pass of each trained tower, not the second forward passes of the
    gradient cache. For open_clip's modules it is a guess, so "auto" does not compile them. A run with "measure" does if
    `engine.compile_trial` shows that they are faster.
    """
    section = workload.megaclip
    plain, compiled = (tower_work(workload.with_megaclip(compile=setting)) for setting in (False, True))
    step = 0.0
    for slow_tower, fast_tower in zip(plain, compiled, strict=True):
        if slow_tower.trained:
            slow, fast = (each.seconds(cluster) for each in (slow_tower, fast_tower))
            step += workload.local_batch * (slow.forward - fast.forward + slow.backward - fast.backward)
    saved = math.inf if workload.steps is None else workload.steps * step
    image, text = COMPILE_BLOCKS_SECONDS, _text_shapes(workload) * COMPILE_BLOCKS_SECONDS
    if workload.compiles_image_tower:
        layers = [tower.costs.forward.layers for tower in plain]
        image = layers[0] * COMPILE_LAYER_SECONDS
        if not is_cut_exact(workload.model.text_cfg):  # then the text tower is compiled as a whole too
            text = layers[1] * COMPILE_LAYER_SECONDS
    startup = text + image
    if isinstance(section.compile, bool):
        return CompileEstimate(saved, startup, section.compile)
    is_guess = section.compile == "auto" and isinstance(workload.model, OpenClipConfig)
    may_compile = cluster.gpu_memory > 0 and not section.untraced and not is_guess
    return CompileEstimate(saved, startup, may_compile and saved > startup)


def check_recomputation(setting: bool | str, *, compiles: bool) -> None:
    """Raise ConfigError if megaclip.selective_recompute is true and torch.compile does not run the towers."""
    if setting is True and not compiles:
        raise ConfigError(
            "megaclip.selective_recompute true requires torch.compile, which this run does not use; set "
            'megaclip.compile to true, or selective_recompute to "auto"'
        )


def _text_shapes(workload: Workload) -> int:
    """Return the number of shapes of text chunks that text blocks are compiled for."""
    text = workload.model.text_cfg
    if not cuts_captions(workload.megaclip.cut_captions, text):
        return 1
    batch = workload.batch
    return len(planned_pieces(batch.text_micro_batch, batch.text_chunks, text, workload.tensor_ranks))
