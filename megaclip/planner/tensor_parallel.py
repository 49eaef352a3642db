"""Compare a run with tensor parallelism with the same run without it.

Tensor parallelism is useful if a model's states do not fit otherwise, or if links between hosts are slow. In other
cases ZeRO needs less time, because the towers wait for every sum over a tensor-parallel group.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megaclip.config.optimizers import needs_permission
from megaclip.planner.cluster import Cluster
from megaclip.planner.search import fits
from megaclip.planner.step_time import plan_time
from megaclip.planner.workload import Workload

_ABOUT = 1.02
"""Times that differ by less than this factor count as equal."""


class Alternative(NamedTuple):
    """A run without tensor parallelism, and its settings as text."""

    settings: str
    workload: Workload
    seconds: float


def tensor_parallel_verdict(workload: Workload, cluster: Cluster) -> str | None:
    """Return a sentence with the fastest run without tensor parallelism, if that fits and is faster.

    None: the run has no tensor parallelism, requires it, or is faster with it.
    """
    if workload.tensor_ranks == 1:
        return None
    best, seconds = fastest_without(workload, cluster), plan_time(workload, cluster).total
    setting = f"megaclip.tensor_parallel_size {workload.tensor_ranks}"
    if best is None:
        return None
    if not fits(workload, cluster):
        return (
            f"{setting} does not fit; {best.settings} without it fits and is planned at {best.seconds:.3g} s per step"
        )
    if best.seconds >= seconds:
        return None
    return (
        f"{setting}: {best.settings} without it fits too and is planned at {best.seconds:.3g} s per step instead of "
        f"{seconds:.3g} s"
    )


def fastest_without(workload: Workload, cluster: Cluster) -> Alternative | None:
    """Return the fastest run without tensor parallelism that fits; None if none fits. Of runs that take almost as long,
    it is the one with the lowest ZeRO stage and the fewest other settings.

    It has the same contrastive batch on the same GPUs, and as many passes over the towers. It may use ZeRO-1, 2 or 3,
    and chunks of other sizes, because larger chunks hide more of ZeRO-3's communication. At ZeRO-2 and 3 it may reduce
    the gradients of every chunk instead of once per step.
    """
    # Smaller chunks would save more of the captions' padding, but the run with tensor parallelism could use them too.
    saved = 1 - workload.text_positions / workload.model.text_cfg.context_length
    planned = [
        Alternative(settings, one, plan_time(replace(one, text_positions_saved=saved), cluster).total)
        for settings, one in _without(workload)
        if fits(one, cluster)
    ]
    least = min((one.seconds for one in planned), default=0.0)
    return next((one for one in planned if one.seconds <= _ABOUT * least), None)


def _without(workload: Workload) -> Iterator[tuple[str, Workload]]:
    batch, ranks = workload.batch, workload.tensor_ranks
    captions = workload.megaclip.text_micro_batch_size is not None
    whole = workload.with_megaclip(tensor_parallel_size=1)
    doublings = [2**power for power in range(batch.accumulation.bit_length())]
    for stage, factor in itertools.product((1, 2, 3), [ranks, *(one for one in doublings if one != ranks)]):
        rows, text_rows = factor * batch.micro_batch, factor * batch.text_micro_batch
        if batch.local_batch % rows or (captions and batch.local_batch % text_rows):
            continue
        chunked = whole.with_batch(micro_batch=rows, text_micro_batch=text_rows if captions else None)
        if (chunked.backward_passes == 1) != (workload.backward_passes == 1):
            continue
        changed = [] if factor == ranks else [f"train_micro_batch_size_per_gpu {rows}"]
        if changed and captions:
            changed.append(f"megaclip.text_micro_batch_size {text_rows}")
        if workload.zero.stage == 0 and needs_permission(workload.optimizer, stage):
            changed.append("zero_allow_untested_optimizer true")
        if not workload.runs_at_stage(stage):
            continue
        yield _settings(stage, changed), chunked.at_stage(stage)
        if workload.coalesces and stage > 1:
            reducing = [*changed, "megaclip.coalesce_gradient_reduction false"]
            if workload.bf16 and not workload.accumulates_in_bf16:
                reducing.append('data_types.grad_accum_dtype "fp32"')
            yield _settings(stage, reducing), _reducing_all(chunked).at_stage(stage)


def _settings(stage: int, changed: list[str]) -> str:
    return f"ZeRO-{stage}" + (f" ({', '.join(changed)})" if changed else "")


def _reducing_all(workload: Workload) -> Workload:
    """Return the workload with gradients reduced after every chunk, added up in the dtype they have been added in."""
    whole = workload.with_megaclip(coalesce_gradient_reduction=False)
    return whole if workload.accumulates_in_bf16 else replace(whole, gradient_bytes=4)
