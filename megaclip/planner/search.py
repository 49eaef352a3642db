"""Search the largest batch of a workload that fits on a cluster, changes after which a run fits, and a faster run at
another ZeRO stage or without tensor parallelism."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megaclip.config.optimizers import NEED_WHOLE_TENSORS, can_be_offloaded
from megaclip.planner.cluster import Cluster
from megaclip.planner.memory import MemoryPlan, plan_memory
from megaclip.planner.step_time import time_of
from megaclip.planner.workload import Workload
from megaclip.zero.settings import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

_MOST_CHUNKS = 2**24
_SMALL_BUCKET = 50_000_000
_CLEARLY_FASTER, _ABOUT = 0.95, 1.02
"""Share of a step's planned time below which other settings are recommended; factor below which times count as
equal."""


def fits(workload: Workload, cluster: Cluster) -> bool:
    """Return whether GPU, host memory and disk are large enough for the workload."""
    return not plan_memory(workload, cluster).refusals


def largest_batch(workload: Workload, cluster: Cluster) -> int:
    """Return the largest contrastive batch of whole chunks that fits with all other settings as they are; 0 if none
    fits.

    Text chunks keep their size too. By default it would change with the number of image chunks.
    """
    text_micro_batch = workload.batch.text_micro_batch
    quantum = math.lcm(workload.batch.micro_batch, text_micro_batch)

    def holds(chunks: int) -> bool:
        return fits(workload.with_batch(quantum * chunks, text_micro_batch=text_micro_batch), cluster)

    # One chunk keeps its graph, so it may need more memory than two, which run one after the other.
    if not holds(2):
        return quantum * workload.world_size if holds(1) else 0
    most = 2
    while most < _MOST_CHUNKS and holds(2 * most):
        most *= 2
    least, beyond = most, 2 * most
    while beyond - least > max(1, least // 256):
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if holds(middle) else (least, middle)
    return quantum * least * workload.world_size


class MicroBatch(NamedTuple):
    """Plan of a run with one of several micro-batch sizes."""

    plan: MemoryPlan
    seconds: float
    """Planned seconds of a step."""


def micro_batches(workload: Workload, cluster: Cluster) -> list[MicroBatch]:
    """Return the run with its own micro-batch, with the smallest that does not fit and with the five largest that fit:
    of the local batch, its half, its quarter, ... From large to small."""
    rows, own = workload.batch.local_batch, workload.batch.micro_batch
    planned = []
    for size in sorted({rows, own, *_halves(rows, rows)}, reverse=True):
        plan = plan_memory(workload.with_batch(micro_batch=size), cluster)
        planned.append(MicroBatch(plan, time_of(plan, cluster).total))
    too_large = [one for one in planned if one.plan.refusals]
    shown = [*too_large[-1:], *[one for one in planned if not one.plan.refusals][:5]]
    return [one for one in planned if one in shown or one.plan.workload.batch.micro_batch == own]


def advice(workload: Workload, cluster: Cluster) -> list[str]:
    """Return changes to ds_config.json after which the run fits: each that is enough alone, or else one combination. If
    all of them together are not enough, return changes beyond the file."""
    together: list[str] = []
    while True:
        enough: dict[str, str] = {}
        for kind, setting, changed in _changes(workload):
            if kind not in enough and fits(changed, cluster):
                enough[kind] = setting
        if enough and not together:
            return list(enough.values())
        if enough:
            return [" and ".join([*together, next(iter(enough.values()))])]
        steps = [change for change in _changes(workload) if "micro-batch" not in change[0]] or [*_changes(workload)]
        best = min(steps, key=lambda change: _shortage(change[-1], cluster), default=None)
        if best is None or _shortage(best[-1], cluster) >= _shortage(workload, cluster):
            also = ", a smaller --eval-batch-size or fewer samples to evaluate on" if workload.evaluation else ""
            return [f"more GPUs, a smaller batch or a smaller model{also}: no setting of ds_config.json is enough"]
        together.append(best[1])
        workload = best[-1]


def faster_run(workload: Workload, cluster: Cluster) -> str | None:
    """Return a sentence with a faster run at another ZeRO stage, or without tensor parallelism, if such a run fits.

    At ZeRO-3 DeepSpeed gathers and releases the parameters of every block in every pass, and the towers wait for every
    sum over a tensor-parallel group. The other run has the same batch, in one chunk or in several. Of runs that take
    almost as long, it is the one with the lowest stage.
    """
    found = list(_alternatives(workload, cluster))
    if not found:
        return None
    plan = plan_memory(workload, cluster)
    least, own = min(seconds for _, seconds in found), time_of(plan, cluster).total
    name, seconds = next(each for each in found if each[1] <= _ABOUT * least)
    setting = f"ZeRO-{workload.zero.stage}"
    if workload.tensor_ranks > 1:
        setting, name = f"megaclip.tensor_parallel_size {workload.tensor_ranks}", f"{name} without it"
    if plan.refusals:
        return f"{setting} does not fit; {name} fits and is planned at {seconds:.3g} s per step"
    if seconds >= _CLEARLY_FASTER * own:
        return None
    return f"{setting}: {name} fits too and is planned at {seconds:.3g} s per step instead of {own:.3g} s"


def _alternatives(workload: Workload, cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Yield the settings and the seconds per step of runs that fit, among which `faster_run` searches."""
    ranks, batch = workload.tensor_ranks, workload.batch
    if ranks == 1:
        for stage in (1, 2) if workload.zero.stage == 3 and cluster.gpu_memory else ():
            if workload.runs_at_stage(stage) and not (lower := plan_memory(workload.at_stage(stage), cluster)).refusals:
                yield f"ZeRO-{stage}", time_of(lower, cluster).total
        return
    whole = workload.with_megaclip(tensor_parallel_size=1)
    whole = whole.with_batch(micro_batch=math.gcd(ranks * batch.micro_batch, batch.local_batch))
    if batch.local_batch % whole.batch.text_micro_batch:
        return
    for stage in filter(workload.runs_at_stage, (1, 2, 3)):
        settings = ""
        if stage > 1 and workload.coalesces:  # whole gradients would be kept to the end of the step
            whole = whole.with_megaclip(coalesce_gradient_reduction=False)
            whole = replace(whole, gradient_bytes=2 if workload.accumulates_in_bf16 else 4)
            settings = ", megaclip.coalesce_gradient_reduction false"
            if workload.bf16 and not workload.accumulates_in_bf16:
                settings += ', data_types.grad_accum_dtype "fp32"'
        sizes = micro_batches(whole.at_stage(stage), cluster)
        for one in sorted(sizes, key=lambda one: one.plan.workload.batch.micro_batch != ranks * batch.micro_batch):
            size = one.plan.workload.batch.micro_batch
            other_chunks = "" if size == ranks * batch.micro_batch else f", train_micro_batch_size_per_gpu {size}"
            passes = {each.one_chunk_each for each in (workload, one.plan.workload)}  # which keeps all graphs
            if not one.plan.refusals and len(passes) == 1:
                changed = (settings + other_chunks).removeprefix(", ")
                yield f"ZeRO-{stage}" + (f" ({changed})" if changed else ""), one.seconds


def _shortage(workload: Workload, cluster: Cluster) -> float:
    """Return the bytes that one host lacks: of GPU memory, host memory and disk together."""
    return sum(
        max(0.0, needed - usable) * (cluster.gpus_per_host if owner == "a GPU" else 1)
        for owner, needed, _, usable in plan_memory(workload, cluster).needs(cluster)
    )


def _changes(workload: Workload) -> Iterator[tuple[str, str, Workload]]:
    """Yield settings that trade time for memory, cheapest first: kind, text for ds_config.json, changed workload."""
    batch, section, tensor_ranks = workload.batch, workload.megaclip, workload.tensor_ranks
    if section.keep_graphs != "auto" and section.keep_graphs > 0 and not workload.one_chunk_each:
        yield "graphs", '"megaclip": {"keep_graphs": "auto"}', workload.with_megaclip(keep_graphs="auto")
    for rows in _halves(batch.micro_batch, batch.local_batch):
        setting = f'"train_micro_batch_size_per_gpu": {tensor_ranks * rows}, "gradient_accumulation_steps": '
        yield "micro-batch", f"{setting}{batch.local_batch // rows}", workload.with_batch(micro_batch=rows)
    captions_apart = section.text_micro_batch_size or batch.text_micro_batch > batch.micro_batch
    for rows in _halves(batch.text_micro_batch, batch.local_batch) if captions_apart else ():
        setting = f'"megaclip": {{"text_micro_batch_size": {tensor_ranks * rows}}}'
        yield "text micro-batch", setting, workload.with_batch(text_micro_batch=rows)
    if not workload.checkpointing:
        yield "checkpointing", '"activation_checkpointing": {}', replace(workload, checkpointing="gpu")
    zero = workload.zero
    if zero.stage > 0 and zero.reduce_bucket_size > _SMALL_BUCKET:
        setting = f'"zero_optimization": {{"reduce_bucket_size": {_SMALL_BUCKET}}}'
        yield "bucket", setting, workload.with_zero(reduce_bucket_size=_SMALL_BUCKET)
    splits = workload.replicas > 1 and workload.optimizer not in NEED_WHOLE_TENSORS
    for stage in range(max(zero.stage, 1) + 1, 4) if splits else ():
        yield "stage", f'"zero_optimization": {{"stage": {stage}}}', workload.at_stage(stage)
    if zero.stage > 0 and not workload.offloads_optimizer and can_be_offloaded(workload.optimizer):
        changed = workload.with_zero(offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device="cpu"))
        yield "optimizer", '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}', changed
    if zero.stage == 3 and not workload.offloads_parameters:
        changed = workload.with_zero(offload_param=DeepSpeedZeroOffloadParamConfig(device="cpu"))
        yield "parameters", '"zero_optimization": {"offload_param": {"device": "cpu"}}', changed
    if workload.world_size > 1 and section.exchange != "ring":
        yield "exchange", '"megaclip": {"exchange": "ring"}', workload.with_megaclip(exchange="ring")
    if sum(workload.encoded_again) and section.embeddings_offload is not True:
        changed = workload.with_megaclip(embeddings_offload=True)
        yield "embeddings", '"megaclip": {"embeddings_offload": true}', changed
    keeps_images = workload.encoded_again[0] > 0 or section.data_offload in ("cpu", "disk")
    for place in ("disk", "reread") if keeps_images else ():
        if section.data_offload not in (place, "reread"):
            changed = workload.with_megaclip(data_offload=place)
            yield place, f'"megaclip": {{"data_offload": "{place}"}}', changed


def _halves(micro_batch: int, local_batch: int) -> Iterator[int]:
    """Yield a half, a quarter, ... of a micro-batch, if it divides the local batch."""
    while micro_batch > 1:
        micro_batch //= 2
        if local_batch % micro_batch == 0:
            yield micro_batch
