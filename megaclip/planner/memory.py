"""Bytes of a step on the GPU, in host memory and on disk, by part and by phase, and the peak of each.

A step has the phases of the gradient cache: each tower without graph, chunk by chunk; the loss over all embeddings;
each tower again with its graph and its backward pass, chunk by chunk; the reduction of the last gradients; the
optimizer's step. Between steps a run may evaluate: towers without graph, then the similarities of their embeddings. On
the GPU the states are held throughout, and everything else belongs to a phase, so

    peak = states + max over phases

The sizes of the phases do not depend on the batch, except the loss, the embeddings and their gradients.
"""

import math
from dataclasses import dataclass, field

from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.plan import CPU, Machine, choose_way
from megaclip.planner import rules
from megaclip.planner.cluster import Cluster
from megaclip.planner.constants import (
    CUBLAS_WORKSPACES,
    EVALUATED_TEXTS,
    EVALUATION_TILES,
    GIB,
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
from megaclip.planner.towers import image_tower, text_tower, tower_work, towers
from megaclip.planner.traffic import exchange_sizes
from megaclip.planner.workload import EvaluationSets, Workload

Phases = dict[str, dict[str, float]]


@dataclass
class MemoryPlan:
    """Bytes per rank on the GPU, and per host in host memory and on disk, by part."""

    gpu_states: dict[str, float]
    gpu_phases: Phases
    """Bytes of each phase on top of the states."""
    cpu: dict[str, float]
    disk: dict[str, float]
    nvme: dict[str, float]
    """Bytes that ZeRO-3 offloads to disk."""
    image_place: rules.ImagePlace
    """Place where a step's images are kept, in the plan and in the run."""
    embeddings_on_cpu: bool
    """True if embeddings and their gradients are kept in host memory while the towers run."""
    refusals: list[str] = field(default_factory=list)
    """Reasons why this cannot run on the cluster; empty if it fits."""

    @property
    def peak_phase(self) -> str:
        return max(self.gpu_phases, key=lambda name: sum(self.gpu_phases[name].values()))

    @property
    def gpu_peak(self) -> float:
        """Planned value of `torch.cuda.max_memory_allocated`."""
        return _gpu_peak(self.gpu_states, self.gpu_phases)

    @property
    def cpu_peak(self) -> float:
        return sum(self.cpu.values())

    @property
    def disk_peak(self) -> float:
        return sum(self.disk.values()) + sum(self.nvme.values())

    def disk_needs(self, cluster: Cluster) -> list[tuple[str, float, float]]:
        """Return each disk's name, its planned bytes and its usable bytes."""
        if cluster.usable_nvme is None:
            return [("disk", self.disk_peak, cluster.usable_disk)]
        return [
            ("disk", sum(self.disk.values()), cluster.usable_disk),
            ("disk at nvme_path", sum(self.nvme.values()), cluster.usable_nvme),
        ]


def plan_memory(workload: Workload, cluster: Cluster) -> MemoryPlan:
    """Plan one rank's GPU and one host of `cluster`; `refusals` of the plan lists what does not fit."""
    workload = resolve_auto(workload, cluster)
    ranks, states = cluster.gpus_per_host, states_of(workload)
    gpu = dict(states.gpu)
    if workload.sample_columns and workload.megaclip.fastclip.state_device == "accelerator":
        gpu["per-sample state"] = _sample_state_bytes(workload)
    if cluster.gpu_memory:
        gpu["library workspaces"] = CUBLAS_WORKSPACES
    phases = _cached_phases(workload, states) if workload.cached else _plain_phases(workload, states)
    if workload.evaluation is not None:
        phases |= _evaluation_phases(workload, workload.evaluation)
    cpu = _host_parts(workload, cluster, states)
    if not cluster.gpu_memory:
        cpu["model and step"] = ranks * _gpu_peak(gpu, phases)
    disk: dict[str, float] = {}
    nvme = {name: size * ranks for name, size in states.disk.items()}
    images = ranks * store_bytes(workload)
    place = rules.place_images(
        workload.megaclip.data_offload,
        passes=workload.image_passes,
        nbytes=images,
        host_memory=cluster.usable_host_memory - sum(cpu.values()),
        disk=cluster.usable_disk - (sum(nvme.values()) if cluster.nvme is None else 0.0),
    )
    if place.keeps:
        (cpu if place.name == "cpu" else disk)["step store"] = images
    plan = MemoryPlan(gpu, phases, cpu, disk, nvme, place, workload.megaclip.embeddings_offload is True)
    plan.refusals = _refusals(plan, cluster)
    return plan


def _refusals(plan: MemoryPlan, cluster: Cluster) -> list[str]:
    needs = [("a host", "of memory", plan.cpu_peak, cluster.usable_host_memory)]
    needs += [("a host", f"of {disk}", needed, usable) for disk, needed, usable in plan.disk_needs(cluster)]
    if cluster.gpu_memory:
        needs.insert(0, ("a GPU", f"({plan.peak_phase})", plan.gpu_peak, cluster.usable_gpu_memory))
    return [
        f"{what} would need {format_bytes(needed)} {kind} and has {format_bytes(usable)} to use"
        for what, kind, needed, usable in needs
        if needed > usable
    ]


def _gpu_peak(states: dict[str, float], phases: Phases) -> float:
    return sum(states.values()) + max(sum(phase.values()) for phase in phases.values())


def resolve_auto(workload: Workload, cluster: Cluster) -> Workload:
    """Return the workload with what "auto" becomes on this cluster: where embeddings are kept, exchange and reduction.

    The rules are the run's. A run on GPUs measures its links, products and free memory (`megaclip.comm.machine`), so
    it may choose another exchange than the cluster's rates suggest; a run on CPUs uses fixed figures, as this does.
    """
    section, embeddings = workload.megaclip, _embedding_bytes(workload)
    on_cpu = rules.embeddings_on_cpu(section.embeddings_offload, 2 * embeddings, cluster.gpu_total_memory)
    machine = CPU
    if cluster.gpu_memory:
        kept = sum(states_of(workload).gpu.values()) + sum(_kept_activations(workload)) + embeddings
        free = max(0.0, cluster.usable_gpu_memory - kept)
        machine = Machine(cluster.slowest_link, cluster.rates.product_flops, free)
    choice = choose_way(
        section.exchange,
        section.reduction,
        sizes=exchange_sizes(workload),
        held_bytes=workload.compute_bytes,
        cost=LOSS_COSTS[section.loss],
        machine=machine,
        hides_exchanges=cluster.hides_exchanges,
    )
    return workload.with_megaclip(embeddings_offload=on_cpu, exchange=choice.exchange, reduction=choice.reduction)


def format_bytes(size: float) -> str:
    """Return bytes as text: in GiB, or in MiB below one GiB."""
    if abs(size) >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.{0 if abs(size) >= 10 * MIB else 1}f} MiB"


def store_bytes(workload: Workload) -> float:
    """Return the bytes of one rank's images of a step in the step store: uint8 pixels."""
    image, _ = towers(workload)
    return float(workload.local_batch * image.input_bytes)


def loader_bytes(workload: Workload) -> float:
    """Return the bytes of the chunks that one rank's loader processes hold ready in shared memory, and of the one it
    uses. An evaluation reads while the training chunks are still held."""
    image, text = towers(workload)
    sample = image.input_bytes + 8 * text.tokens + 8  # tokens and the sample's number are int64 here
    chunks = workload.workers * PREFETCHED_BATCHES + 1
    rows = chunks * workload.batch.micro_batch
    if workload.evaluation is not None:
        batch = workload.evaluation.batch
        longest = max(workload.evaluation.pairs, workload.evaluation.labelled)
        rows += min(chunks, math.ceil(longest / (batch * workload.world_size))) * batch
    return float(rows * sample)


def loss_sizes(workload: Workload) -> LossSizes:
    """Return the loss's sizes on one rank."""
    return LossSizes(workload.local_batch, workload.model.embed_dim, workload.world_size, workload.compute_bytes)


def loss_bytes(workload: Workload) -> float:
    """Return the loss's peak on one rank's GPU; `workload` has no "auto" left (`resolve_auto`)."""
    section = workload.megaclip
    return megaclip_loss_bytes(
        loss_sizes(workload),
        section.exchange,
        section.reduction,
        section.tile_budget_mib,
        section.loss,
        payload_bytes=workload.payload_bytes,
    )


def _sample_state_bytes(workload: Workload) -> float:
    """Return the bytes of one rank's part of the samples' state, which the global losses keep."""
    return 4.0 * workload.sample_columns * -(-workload.samples // workload.world_size)


def _embedding_bytes(workload: Workload) -> float:
    """Return the bytes of both towers' embeddings of the local batch; their gradients take as much again."""
    return 2.0 * loss_sizes(workload).features


def _cached_phases(workload: Workload, states: States) -> Phases:
    image, text = tower_work(workload)
    embeddings = 0.0 if workload.megaclip.embeddings_offload else _embedding_bytes(workload)
    phases: Phases = {}
    for work in (image, text):
        phases[f"{work.tower.name} tower forward"] = {
            "activations": work.tower.forward_peak(work.micro_batch, workload.compute_bytes),
            "data chunks": 2 * work.tower.input_bytes * work.micro_batch,
            "embeddings": embeddings / 2 if work is image else embeddings,
            "gathered parameters": gathered_bytes(workload, work.parameters),
        }
    phases["loss"] = {"embeddings": _embedding_bytes(workload), "loss": loss_bytes(workload)}
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
            "reduce bucket": 0.0 if workload.coalesces else states.bucket,
            "reduction": reduction_under_way(workload, states, parameters, activations),
            "gathered parameters": gathered_bytes(workload, parameters, other=other.parameters),
        }
    _add_step_phases(phases, workload, states)
    return _without_zeros(phases)


def _plain_phases(workload: Workload, states: States) -> Phases:
    """Return the phases of a step without cache: a trained tower, in one chunk, keeps its graph during the loss."""
    image_work, text_work = tower_work(workload)
    image, text = image_work.tower, text_work.tower
    samples, width = workload.local_batch, workload.compute_bytes
    kept_images, kept_texts = _kept_activations(workload)
    embeddings = _embedding_bytes(workload)
    bucket = 0.0 if workload.coalesces else states.bucket
    phases: Phases = {}
    for tower, parameters, micro_batch, _ in (image_work, text_work):
        if not parameters.trained:
            is_beside_images = tower is text and micro_batch == samples  # in several chunks it runs first
            phases[f"{tower.name} tower forward"] = {
                "activations": tower.forward_peak(micro_batch, width) + (kept_images if is_beside_images else 0.0),
                "data chunks": 2 * tower.input_bytes * micro_batch,
                "embeddings": embeddings,
                "gathered parameters": gathered_bytes(workload, parameters),
            }
    phases["loss"] = {
        "activations": kept_images + kept_texts,
        "embeddings": embeddings,
        "loss": loss_bytes(workload),
    }
    # The text tower's backward pass comes first, while the image tower's activations are kept.
    if text_work.parameters.trained:
        phases["text tower backward"] = {
            "activations": kept_images + text.backward_peak(samples, width, workload.checkpointing),
            "embedding gradients": 2 * embeddings,
            "reduce bucket": bucket,
            "gathered parameters": gathered_bytes(workload, text_work.parameters),
        }
    if image_work.parameters.trained:
        phases["image tower backward"] = {
            "activations": image.backward_peak(samples, width, workload.checkpointing),
            "embedding gradients": 2 * embeddings,
            "gradients": gradient_bytes(workload, image_done=False, text_done=True),
            "reduce bucket": bucket,
            "gathered parameters": gathered_bytes(workload, image_work.parameters),
        }
    _add_step_phases(phases, workload, states)
    return _without_zeros(phases)


def _kept_activations(workload: Workload) -> tuple[float, float]:
    """Return the bytes of inputs and graphs that the image tower and the text tower keep on the GPU during the loss."""
    kept = [0.0, 0.0]
    for index, work in enumerate(tower_work(workload)):
        if work.parameters.trained and not workload.cached:
            kept[index] = workload.local_batch * work.tower.input_numbers * workload.compute_bytes
            if workload.checkpointing != "cpu":
                keeps = work.tower.block_input_bytes if workload.checkpointing else work.tower.saved_bytes
                kept[index] += keeps(workload.local_batch, workload.compute_bytes)
    return kept[0], kept[1]


def _add_step_phases(phases: Phases, workload: Workload, states: States) -> None:
    phases["gradient reduction"] = {
        "gradients": gradient_bytes(workload, image_done=True, text_done=True),
        "reduce bucket": states.bucket,
        "reduction": states.reduction,
    }
    phases["optimizer step"] = {"gradients": reduced_gradient_bytes(workload), "update": states.update}


def _evaluation_phases(workload: Workload, evaluation: EvaluationSets) -> Phases:
    """Return the phases of an evaluation: both towers without graph, whose features are kept in float32; then
    retrieval, which copies them without padding, and the choice of example pictures, which takes the images' features
    in float32 and in float64."""
    width, dimensions = workload.compute_bytes, workload.model.embed_dim
    # An evaluation reads all patches.
    image = image_tower(workload.model.replace(vision_cfg={"patch_dropout": 0.0}), workload.tensor_ranks)
    text = text_tower(workload.model, workload.tensor_ranks)
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
        # This rank's pairs have ids, their order, best similarities and ranks; all pairs have similarities and counts.
        numbers = 8.0 * (6 * pairs + 4 * evaluation.pairs)
        copies = {"tiles": EVALUATION_TILES, "copies of features": features, "numbers": numbers}
        pictures = {"copies of features": 1.5 * features, "numbers": numbers}
        larger = max(copies, pictures, key=lambda parts: sum(parts.values()))
        phases["evaluation: retrieval"] = {"features": features, **larger}
    return _without_zeros(phases)


def _without_zeros(phases: Phases) -> Phases:
    return {name: {part: size for part, size in phase.items() if size} for name, phase in phases.items()}


def _host_parts(workload: Workload, cluster: Cluster, states: States) -> dict[str, float]:
    """Return the bytes in a host's memory by part, without a step's images and without what a CPU trains in it."""
    ranks = cluster.gpus_per_host
    process = HOST_PROCESS if cluster.gpu_memory else HOST_PROCESS_CPU
    worker_sets = 1 if workload.evaluation is None else 2  # an evaluation has its own beside those of the training
    parts = {name: size * ranks for name, size in states.cpu.items()}
    parts["processes"] = ranks * (process + worker_sets * workload.workers * HOST_WORKER)
    parts["loader's chunks"] = ranks * loader_bytes(workload)
    if workload.sample_columns:
        state = ranks * _sample_state_bytes(workload)
        if workload.megaclip.fastclip.state_device == "cpu":
            parts["per-sample state"] = state
        parts["its copy in a checkpoint"] = state
    if workload.checkpointing == "cpu":
        parts["block inputs"] = ranks * max(
            work.tower.block_input_bytes(work.micro_batch, workload.compute_bytes) for work in tower_work(workload)
        )
    if workload.megaclip.embeddings_offload:
        parts["embeddings"] = ranks * 2 * _embedding_bytes(workload)
    parts["tokens of two steps"] = ranks * 2 * workload.local_batch * text_tower(workload.model).input_bytes
    return parts
