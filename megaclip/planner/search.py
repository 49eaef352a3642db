"""What fits: the largest batch of a workload on a cluster, and what to change when a run does not fit."""

import math
from collections.abc import Iterator
from dataclasses import replace

from megaclip.planner.cluster import Cluster
from megaclip.planner.memory import plan_memory
from megaclip.planner.workload import Workload

_MOST_CHUNKS = 2**24
_SMALL_BUCKET = 50_000_000


def fits(workload: Workload, cluster: Cluster) -> bool:
    """Whether GPU, host memory and disk hold it."""
    return not plan_memory(workload, cluster).refusals


def largest_batch(workload: Workload, cluster: Cluster) -> int:
    """The largest contrastive batch of whole chunks that fits, everything else as it is; 0 if not even one does."""
    quantum = math.lcm(workload.image_micro_batch, workload.text_micro_batch)

    def holds(chunks: int) -> bool:
        return fits(replace(workload, local_batch=quantum * chunks), cluster)

    # One chunk keeps its graph and may need more than two, which run one after the other.
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


def advice(workload: Workload, cluster: Cluster) -> list[str]:
    """Changes to ds_config.json after which the run fits: each one that is enough alone, or else several together; none
    if all of them are not enough."""
    together: list[str] = []
    while True:
        enough: dict[str, str] = {}
        for kind, words, changed in _changes(workload):
            if kind not in enough and fits(changed, cluster):
                enough[kind] = words
        if enough and not together:
            return list(enough.values())
        if enough:
            return [" and ".join([*together, next(iter(enough.values()))])]
        steps = [change for change in _changes(workload) if "micro-batch" not in change[0]] or [*_changes(workload)]
        best = min(steps, key=lambda change: _shortage(change[-1], cluster), default=None)
        if best is None or _shortage(best[-1], cluster) >= _shortage(workload, cluster):
            return []
        together.append(best[1])
        workload = best[-1]


def last_resort(workload: Workload) -> str:
    """What to do where `advice` has none."""
    evaluation = ", evaluate on less or with a smaller --eval-batch-size" if workload.evaluation else ""
    return f"more GPUs, a smaller batch or a smaller model{evaluation}: no setting of ds_config.json is enough"


def _shortage(workload: Workload, cluster: Cluster) -> float:
    """Bytes that are missing, of whatever is short, on one host."""
    plan = plan_memory(workload, cluster)
    gpu = max(0.0, plan.gpu_peak - cluster.usable_gpu_memory) if cluster.gpu_memory else 0.0
    cpu = max(0.0, plan.cpu_peak - cluster.usable_host_memory)
    return (
        gpu * cluster.gpus_per_host
        + cpu
        + sum(max(0.0, needed - usable) for _, needed, usable in plan.disk_needs(cluster))
    )


def _changes(workload: Workload) -> Iterator[tuple[str, str, Workload]]:
    """Settings that trade time for memory, the cheapest first: their kind, words for the user, the workload then."""
    for rows in _halves(workload.image_micro_batch, workload.local_batch):
        text = rows if workload.text_follows else workload.text_micro_batch
        smaller = replace(workload, image_micro_batch=rows, text_micro_batch=text)
        words = f'"train_micro_batch_size_per_gpu": {rows}, "gradient_accumulation_steps": '
        yield "micro-batch", f"{words}{workload.local_batch // rows}", smaller
    for rows in () if workload.text_follows else _halves(workload.text_micro_batch, workload.local_batch):
        words = f'"megaclip": {{"text_micro_batch_size": {rows}}}'
        yield "text micro-batch", words, replace(workload, text_micro_batch=rows)
    if not workload.checkpointing:
        yield "checkpointing", '"activation_checkpointing": {}', replace(workload, checkpointing="gpu")
    zero = workload.zero
    if zero.stage > 0 and zero.reduce_bucket > _SMALL_BUCKET:
        smaller = replace(workload, zero=replace(zero, reduce_bucket=_SMALL_BUCKET))
        yield "bucket", f'"zero_optimization": {{"reduce_bucket_size": {_SMALL_BUCKET}}}', smaller
    for stage in range(max(zero.stage, 1) + 1, 4):
        if workload.world_size > 1:
            changed = replace(workload, zero=replace(zero, stage=stage))
            yield "stage", f'"zero_optimization": {{"stage": {stage}}}', changed
    if zero.stage > 0 and zero.offload_optimizer == "none":
        changed = replace(workload, zero=replace(zero, offload_optimizer="cpu"))
        yield "optimizer", '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}', changed
    if zero.stage == 3 and zero.offload_parameters == "none":
        changed = replace(workload, zero=replace(zero, offload_parameters="cpu"))
        yield "parameters", '"zero_optimization": {"offload_param": {"device": "cpu"}}', changed
    if workload.world_size > 1 and workload.exchange != "ring":
        yield "exchange", '"megaclip": {"exchange": "ring"}', replace(workload, exchange="ring")
    if workload.cached and workload.embeddings_offload is not True:
        changed = replace(workload, embeddings_offload=True)
        yield "embeddings", '"megaclip": {"embeddings_offload": true}', changed
    keeps_images = workload.reads_images_twice or workload.data_offload in ("cpu", "disk")
    for place in ("disk", "reread") if keeps_images else ():
        if workload.data_offload not in (place, "reread"):
            changed = replace(workload, data_offload=place)
            yield place, f'"megaclip": {{"data_offload": "{place}"}}', changed


def _halves(micro_batch: int, local_batch: int) -> Iterator[int]:
    """Half of a micro-batch, and so on, where it divides the local batch; largest first."""
    while micro_batch > 1:
        micro_batch //= 2
        if local_batch % micro_batch == 0:
            yield micro_batch
