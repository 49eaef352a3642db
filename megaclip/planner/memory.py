"""Where the bytes of a step are: GPU, host memory and disk, by part and by phase, and the peak of each.

A step goes through the phases of the gradient cache: each tower without graph, chunk by chunk; the loss over all
embeddings; each tower again with its graph and its backward pass, chunk by chunk; the reduction of the last gradients;
the optimizer's step. Between steps a run may evaluate: towers without graph, then the similarities of what they
encoded. On the GPU the states are there throughout, everything else belongs to a phase, so

    peak = states + max over phases

and the phases' sizes do not depend on the batch, except the loss, the embeddings and their gradients.
"""

import math
from dataclasses import dataclass, field, replace

from megaclip.planner.cluster import Cluster
from megaclip.planner.constants import (
    CUBLAS_WORKSPACES,
    EMBEDDINGS_SHARE,
    EVALUATED_TEXTS,
    EVALUATION_TILES,
    GIB,
    HOST_MARGIN,
    HOST_PROCESS,
    HOST_PROCESS_CPU,
    HOST_WORKER,
    MIB,
    PREFETCHED_BATCHES,
)
from megaclip.planner.losses import LossSizes, megaclip_loss_bytes
from megaclip.planner.states import (
    States,
    gathered_bytes,
    gradient_bytes,
    reduced_gradient_bytes,
    reduction_under_way,
    states_of,
)
from megaclip.planner.towers import Tower, image_tower, text_tower, tower_work, towers
from megaclip.planner.workload import EvaluationSets, Workload


@dataclass
class MemoryPlan:
    """Bytes per rank on the GPU; per host in host memory and on disk."""

    gpu_states: dict[str, float]
    gpu_phases: dict[str, dict[str, float]]
    """Phase -> what it needs on top of the states."""
    cpu: dict[str, float]
    disk: dict[str, float]
    nvme: dict[str, float]
    """What ZeRO-3 offloads to disk."""
    data_store: str
    """Where a step's images wait: "cpu", "disk", "reread" (they are read twice) or "once" (they pass by once)."""
    refusals: list[str] = field(default_factory=list)
    """Why this cannot run on the cluster; empty when it fits."""

    @property
    def peak_phase(self) -> str:
        return max(self.gpu_phases, key=lambda name: sum(self.gpu_phases[name].values()))

    @property
    def gpu_peak(self) -> float:
        """What `torch.cuda.max_memory_allocated` should say."""
        return sum(self.gpu_states.values()) + sum(self.gpu_phases[self.peak_phase].values())

    @property
    def cpu_peak(self) -> float:
        return sum(self.cpu.values())

    @property
    def disk_peak(self) -> float:
        return sum(self.disk.values()) + sum(self.nvme.values())

    def disk_needs(self, cluster: Cluster) -> list[tuple[str, float, float]]:
        """Each disk's name, what the plan puts there and what is usable."""
        if cluster.nvme is None:
            return [("disk", self.disk_peak, cluster.disk * HOST_MARGIN)]
        return [
            ("disk", sum(self.disk.values()), cluster.disk * HOST_MARGIN),
            ("disk at nvme_path", sum(self.nvme.values()), cluster.nvme * HOST_MARGIN),
        ]


def plan_memory(workload: Workload, cluster: Cluster) -> MemoryPlan:
    """Plan one rank's GPU and one host of `cluster`; `refusals` says what does not fit."""
    workload = settled(workload, cluster)
    states = states_of(workload)
    gpu = dict(states.gpu)
    if workload.sample_columns and workload.sample_state_on_gpu:
        gpu["per-sample state"] = _sample_state_bytes(workload)
    if cluster.gpu_memory:
        gpu["library workspaces"] = CUBLAS_WORKSPACES
    phases = _cached_phases(workload, states) if workload.cached else _plain_phases(workload, states)
    if workload.evaluation is not None:
        phases |= _evaluation_phases(workload, workload.evaluation)
    plan = MemoryPlan(gpu_states=gpu, gpu_phases=phases, cpu={}, disk={}, nvme={}, data_store="once")
    _plan_host(plan, workload, cluster, states)
    usable = cluster.usable_gpu_memory
    if cluster.gpu_memory and plan.gpu_peak > usable:
        plan.refusals.append(
            f"a GPU would need {gigabytes(plan.gpu_peak)} ({plan.peak_phase}) and has {gigabytes(usable)} to use"
        )
    if plan.cpu_peak > cluster.usable_host_memory:
        plan.refusals.append(
            f"a host would need {gigabytes(plan.cpu_peak)} of memory and has {gigabytes(cluster.usable_host_memory)} "
            "to use"
        )
    for name, needed, usable in plan.disk_needs(cluster):
        if needed > usable:
            plan.refusals.append(f"a host would need {gigabytes(needed)} of {name} and has {gigabytes(usable)} to use")
    return plan


def settled(workload: Workload, cluster: Cluster) -> Workload:
    """The workload with what "auto" becomes on this cluster: where embeddings wait, as the run decides it
    (`megaclip.engine.data_offload`), and how features are exchanged: by a ring where exchanges hide behind tiles, or
    where gathering would take more than half of the memory. The run compares measured links, too
    (`megaclip.losses.plan`), and may find another way faster."""
    offload, exchange = workload.embeddings_offload, workload.exchange
    if offload == "auto":
        offload = bool(cluster.gpu_memory) and 2 * _embedding_bytes(workload) > EMBEDDINGS_SHARE * cluster.gpu_memory
    if exchange == "auto":
        sizes = loss_sizes(workload)
        gathered = workload.world_size * (sizes.features + sizes.unit)
        large = gathered > cluster.usable_gpu_memory / 2
        ring = workload.world_size == 1 or cluster.hides_exchanges or large
        exchange = "ring" if ring else "all_gather"
    return replace(workload, embeddings_offload=offload, exchange=exchange)


def gigabytes(size: float) -> str:
    """Bytes as words: GiB, or MiB below one GiB."""
    if abs(size) >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.{0 if abs(size) >= 10 * MIB else 1}f} MiB"


def store_bytes(workload: Workload) -> float:
    """One rank's images of a step as they wait: uint8 pixels."""
    image, _ = towers(workload)
    return float(workload.local_batch * image.input_bytes)


def loader_bytes(workload: Workload) -> float:
    """One rank's chunks that its loader processes hold ready, and the one in hand; with processes, in shared memory.
    Evaluation reads while the training chunks wait."""
    image, text = towers(workload)
    sample = image.input_bytes + 8 * text.tokens + 8  # tokens and the sample's number are int64 here
    chunks = workload.workers * PREFETCHED_BATCHES + 1
    rows = chunks * workload.image_micro_batch
    if workload.evaluation is not None:
        batch = workload.evaluation.batch
        longest = max(workload.evaluation.pairs, workload.evaluation.labelled)
        rows += min(chunks, math.ceil(longest / (batch * workload.world_size))) * batch
    return float(rows * sample)


def loss_sizes(workload: Workload) -> LossSizes:
    """The loss's sizes on one rank."""
    return LossSizes(
        workload.local_batch, workload.model.embed_dim, workload.world_size, feature_bytes=workload.compute_bytes
    )


def _sample_state_bytes(workload: Workload) -> float:
    """One rank's samples of a loss over the whole dataset."""
    return 4.0 * workload.sample_columns * -(-workload.samples // workload.world_size)


def _embedding_bytes(workload: Workload) -> float:
    """Both towers' embeddings of the local batch; their gradients take as much."""
    return 2.0 * loss_sizes(workload).features


def _loss_phase(workload: Workload) -> dict[str, float]:
    extra = megaclip_loss_bytes(
        loss_sizes(workload),
        workload.exchange,
        workload.reduction,
        workload.tile_budget_mib,
        workload.loss,
        payload_bytes=workload.payload_bytes,
    )
    return {"embeddings": _embedding_bytes(workload), "loss": extra}


def _cached_phases(workload: Workload, states: States) -> dict[str, dict[str, float]]:
    image, text = tower_work(workload)
    embeddings = 0.0 if workload.embeddings_offload else _embedding_bytes(workload)
    phases: dict[str, dict[str, float]] = {}
    for work in (image, text):
        phases[f"{work.tower.name} tower forward"] = {
            "activations": work.tower.forward_peak(work.micro_batch, workload.compute_bytes),
            "data chunks": 2 * work.tower.input_bytes * work.micro_batch,
            "embeddings": embeddings / 2 if work is image else embeddings,
            "gathered parameters": gathered_bytes(workload, work.parameters),
        }
    phases["loss"] = _loss_phase(workload)
    for work, other in ((image, text), (text, image)):
        tower, parameters, micro_batch, _ = work
        if not parameters.trained:
            continue
        done = image.parameters.trained + (parameters.trained if work is text else 0)
        before = gradient_bytes(workload, image_done=image.parameters.trained > 0, text_done=work is text)
        activations = tower.backward_peak(micro_batch, workload.compute_bytes, workload.checkpointing)
        phases[f"{tower.name} tower backward"] = {
            "activations": activations,
            "data chunks": 2 * tower.input_bytes * micro_batch,
            "embedding gradients": embeddings,
            "gradients": before,
            "gradient sums": workload.gradient_sum_bytes * done,
            "reduce bucket": 0.0 if workload.coalesce else states.bucket,
            "reduction": reduction_under_way(workload, states, parameters, activations),
            "gathered parameters": gathered_bytes(workload, parameters, other=other.parameters),
        }
    _add_step_phases(phases, workload, states)
    return _without_zeros(phases)


def _plain_phases(workload: Workload, states: States) -> dict[str, dict[str, float]]:
    """Nothing is cached: what is trained, in one chunk, keeps its graph through the loss; a frozen tower has none."""
    image_work, text_work = tower_work(workload)
    image, text = image_work.tower, text_work.tower
    samples, width = workload.local_batch, workload.compute_bytes
    trains_image, trains_text = (work.parameters.trained > 0 for work in (image_work, text_work))
    image_waits = _kept_graph(workload, image) + samples * image.input_numbers * width if trains_image else 0.0
    text_waits = _kept_graph(workload, text) if trains_text else 0.0
    embeddings = _embedding_bytes(workload)
    bucket = 0.0 if workload.coalesce else states.bucket
    phases: dict[str, dict[str, float]] = {}
    for tower, parameters, micro_batch, _ in (image_work, text_work):
        if not parameters.trained:
            is_beside_images = tower is text and micro_batch == samples  # in several chunks it comes first
            phases[f"{tower.name} tower forward"] = {
                "activations": tower.forward_peak(micro_batch, width) + (image_waits if is_beside_images else 0.0),
                "data chunks": 2 * tower.input_bytes * micro_batch,
                "embeddings": embeddings,
                "gathered parameters": gathered_bytes(workload, parameters),
            }
    phases["loss"] = {"activations": image_waits + text_waits, **_loss_phase(workload)}
    # The text tower came last, so its backward pass comes first, while the image tower's activations wait.
    if trains_text:
        phases["text tower backward"] = {
            "activations": image_waits + text.backward_peak(samples, width, workload.checkpointing),
            "embedding gradients": 2 * embeddings,
            "reduce bucket": bucket,
            "gathered parameters": gathered_bytes(workload, text_work.parameters),
        }
    if trains_image:
        phases["image tower backward"] = {
            "activations": image.backward_peak(samples, width, workload.checkpointing),
            "embedding gradients": 2 * embeddings,
            "gradients": gradient_bytes(workload, image_done=False, text_done=True),
            "reduce bucket": bucket,
            "gathered parameters": gathered_bytes(workload, image_work.parameters),
        }
    _add_step_phases(phases, workload, states)
    return _without_zeros(phases)


def _kept_graph(workload: Workload, tower: Tower) -> float:
    """What a tower's graph of the whole local batch keeps on the GPU until its backward pass."""
    if workload.checkpointing == "cpu":
        return 0.0
    keeps = tower.waiting_inputs if workload.checkpointing else tower.saved_bytes
    return keeps(workload.local_batch, workload.compute_bytes)


def _add_step_phases(phases: dict[str, dict[str, float]], workload: Workload, states: States) -> None:
    phases["gradient reduction"] = {
        "gradients": gradient_bytes(workload, image_done=True, text_done=True),
        "reduce bucket": states.bucket,
        "reduction": states.reduction,
    }
    phases["optimizer step"] = {"gradients": reduced_gradient_bytes(workload), "update": states.update}


def _evaluation_phases(workload: Workload, evaluation: EvaluationSets) -> dict[str, dict[str, float]]:
    """Both towers without graph, whose features stay in float32; then retrieval, which keeps a copy of them without
    padding, and the choice of pictures, which takes images' features in float32 and in float64."""
    width, dimensions = workload.compute_bytes, workload.model.embed_dim
    image = image_tower(workload.model.replace(vision_cfg={"patch_dropout": 0.0}))  # all patches
    text = text_tower(workload.model)
    pairs = math.ceil(evaluation.pairs / workload.world_size)
    texts = max(EVALUATED_TEXTS if evaluation.labelled else 0, evaluation.batch if evaluation.pairs else 0)
    features = 2 * 4.0 * pairs * dimensions
    phases = {
        "evaluation: towers": {
            "activations": max(
                image.forward_peak(evaluation.batch, width) + evaluation.batch * image.input_bytes,
                text.forward_peak(texts, width),
            ),
            "features": features,
            "gathered parameters": max(gathered_bytes(workload, tower) for tower in workload.parameters),
        }
    }
    if pairs:
        # Of this rank's pairs ids and their order, best similarities and ranks; of all pairs similarities and counts.
        numbers = 8.0 * (6 * pairs + 4 * evaluation.pairs)
        copies = {"tiles": EVALUATION_TILES, "copies of features": features, "numbers": numbers}
        pictures = {"copies of features": 1.5 * features, "numbers": numbers}
        larger = max(copies, pictures, key=lambda parts: sum(parts.values()))
        phases["evaluation: retrieval"] = {"features": features, **larger}
    return _without_zeros(phases)


def _without_zeros(phases: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {part: size for part, size in phase.items() if size} for name, phase in phases.items()}


def _plan_host(plan: MemoryPlan, workload: Workload, cluster: Cluster, states: States) -> None:
    """Fill in host memory and disk, and choose where the batch waits as the run would."""
    ranks = cluster.gpus_per_host
    process = HOST_PROCESS if cluster.gpu_memory else HOST_PROCESS_CPU
    plan.cpu = {name: size * ranks for name, size in states.cpu.items()}
    plan.nvme = {name: size * ranks for name, size in states.disk.items()}
    worker_sets = 1 if workload.evaluation is None else 2  # the training ones wait while evaluation has its own
    plan.cpu["processes"] = ranks * (process + worker_sets * workload.workers * HOST_WORKER)
    plan.cpu["loader's chunks"] = ranks * loader_bytes(workload)
    if workload.sample_columns:
        state = ranks * _sample_state_bytes(workload)
        if not workload.sample_state_on_gpu:
            plan.cpu["per-sample state"] = state
        plan.cpu["its copy in a checkpoint"] = state
    if workload.checkpointing == "cpu":
        plan.cpu["block inputs"] = ranks * max(
            work.tower.waiting_inputs(work.micro_batch, workload.compute_bytes) for work in tower_work(workload)
        )
    if workload.embeddings_offload:
        plan.cpu["embeddings"] = ranks * 2 * _embedding_bytes(workload)
    plan.cpu["tokens of two steps"] = ranks * 2 * workload.local_batch * text_tower(workload.model).input_bytes
    if not cluster.gpu_memory:
        plan.cpu["model and step"] = ranks * plan.gpu_peak
    if not workload.reads_images_twice and workload.data_offload in ("auto", "reread"):
        return
    store = ranks * store_bytes(workload)
    plan.data_store = workload.data_offload
    if workload.data_offload == "auto":
        fits = sum(plan.cpu.values()) + store <= cluster.usable_host_memory
        plan.data_store = "cpu" if fits else "disk"
    if plan.data_store == "cpu":
        plan.cpu["step store"] = store
    elif plan.data_store == "disk":
        plan.disk["step store"] = store
