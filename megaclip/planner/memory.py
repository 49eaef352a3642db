"""Bytes of a step on the GPU, in host memory and on disk, by part and by phase, and the peak of each.

On the GPU the states are always in memory. Everything else belongs to a phase (`megaclip.planner.phases`) of a step, or
of an evaluation between two steps. So

    peak = states + max over phases

With megaclip.keep_graphs "auto", a step on a GPU keeps as many graphs as fit into the remaining memory. `resolve_auto`
calculates the number.
"""

import math
from dataclasses import dataclass, field, replace

from megaclip.data import slots_ahead
from megaclip.data.workers import PREFETCHED
from megaclip.logging import format_bytes
from megaclip.losses.costs import LOSS_COSTS
from megaclip.losses.way import Choice, Machine, choose_way
from megaclip.models import OpenClipConfig
from megaclip.planner import constants
from megaclip.planner.cluster import Cluster
from megaclip.planner.compile_estimate import compile_estimate
from megaclip.planner.phases import Phases, embedding_bytes, graph_bytes, step_phases
from megaclip.planner.states import checkpoint_bytes, gradient_bytes, states_of
from megaclip.planner.towers import tower_work
from megaclip.planner.traffic import exchange_sizes
from megaclip.planner.workload import Workload
from megaclip.step.layout import chunks_held, graphs_that_fit

IMAGE_PLACES = {
    "cpu": "images are kept in host memory",
    "disk": "images are kept on disk",
    "reread": "images of chunks that are encoded twice are read twice",
    "once": "images are read once",
}
"""Place where a step's images are kept between the two passes over them -> the place in words, for logs."""


@dataclass
class MemoryPlan:
    """Bytes per rank on the GPU, and per host in host memory and on disk, by part."""

    workload: Workload
    """The planned step. Its section `megaclip` has the plan's decisions instead of "auto"."""
    gpu_states: dict[str, float]
    gpu_phases: Phases
    """Bytes of each phase on top of the states."""
    cpu: dict[str, float]
    disk: dict[str, float]
    image_place: str
    """Place where a step's images are kept, in the plan and in the run: a key of `IMAGE_PLACES`."""
    graph_bytes: list[float]
    """Largest number of bytes by which each graph that the step may keep raises the peak, in the order in which graphs
    are kept. Empty if megaclip.keep_graphs is a number, or if "auto" may keep none."""
    refusals: list[str] = field(default_factory=list)
    """Reasons why the run does not fit on the cluster; empty if it fits."""

    @property
    def keeps_images(self) -> bool:
        """True if the images stay in their place until the next step."""
        return self.image_place in ("cpu", "disk")

    @property
    def peak_phase(self) -> str:
        return self.gpu_phases.largest[0]

    @property
    def gpu_peak(self) -> float:
        """Planned value of `torch.cuda.max_memory_allocated`."""
        return _gpu_peak(self.gpu_states, self.gpu_phases)

    @property
    def cpu_peak(self) -> float:
        return sum(self.cpu.values())

    @property
    def disk_peak(self) -> float:
        return sum(self.disk.values())

    def needs(self, cluster: Cluster) -> list[tuple[str, float, str, float]]:
        """Return each limit: of "a GPU" or "a host", the planned bytes, what they are in words, the usable bytes."""
        gpu = ("a GPU", self.gpu_peak, f" ({self.peak_phase})", cluster.usable_gpu_memory)
        return [
            *([gpu] if cluster.gpu_memory else []),
            ("a host", self.cpu_peak, " of memory", cluster.usable_host_memory),
            ("a host", self.disk_peak, " of disk", cluster.usable_disk),
        ]


def plan_memory(workload: Workload, cluster: Cluster) -> MemoryPlan:
    """Plan one rank's GPU and one host of `cluster`. The plan's `refusals` list what does not fit."""
    setting = workload.megaclip.keep_graphs
    workload = resolve_auto(workload, cluster)
    may_keep = _graphs_that_auto_keeps(workload.with_megaclip(keep_graphs=setting), cluster)
    ranks = cluster.gpus_per_host
    gpu, phases = _gpu_states(workload, cluster), step_phases(workload)
    cpu = _host_parts(workload, cluster)
    if not cluster.gpu_memory:
        cpu["model and step"] = ranks * _gpu_peak(gpu, phases)
    disk: dict[str, float] = {}
    images = ranks * store_bytes(workload)
    place = place_images(
        workload.megaclip.data_offload,
        encoded_again=workload.encoded_again[0],
        nbytes=images,
        host_memory=cluster.usable_host_memory - sum(cpu.values()),
    )
    if place in ("cpu", "disk"):
        (cpu if place == "cpu" else disk)["step store"] = images
    else:
        held = chunks_held(workload.batch.accumulation, workload.encoded_again[0], keeps=False)
        cpu["loader's chunks"] += images * held / workload.batch.accumulation
    plan = MemoryPlan(workload, gpu, phases, cpu, disk, place, may_keep)
    plan.refusals = [
        f"{owner} would need {format_bytes(needed)}{what} and has {format_bytes(usable)} to use"
        for owner, needed, what, usable in plan.needs(cluster)
        if needed > usable
    ]
    return plan


def place_images(setting: str, *, encoded_again: int, nbytes: float, host_memory: float) -> str:
    """Return where a step's images are kept, a key of `IMAGE_PLACES`. setting: megaclip.data_offload.

    encoded_again: number of image chunks that are encoded twice. nbytes: bytes of the images of all ranks of a host.
    host_memory: bytes of a host that are left for them beside the other data of the run.
    """
    if setting == "reread" or (setting == "auto" and not encoded_again):
        return "reread" if encoded_again else "once"
    if setting == "auto":
        return "cpu" if nbytes <= host_memory else "disk"
    return setting


def with_kept_graphs(plan: MemoryPlan, number: int) -> MemoryPlan:
    """Return the plan of the same step with `number` kept graphs. Images stay where they are."""
    workload = plan.workload.with_megaclip(keep_graphs=number)
    return replace(plan, workload=workload, gpu_phases=step_phases(workload))


def _gpu_peak(states: dict[str, float], phases: Phases) -> float:
    return sum(states.values()) + phases.largest[1].total


def _gpu_states(workload: Workload, cluster: Cluster) -> dict[str, float]:
    """Return the bytes that are always in a rank's GPU memory, by part."""
    parts = dict(states_of(workload).gpu)
    if workload.megaclip.fastclip.state_device == "accelerator":
        parts["per-sample state"] = _sample_state_bytes(workload)
    if cluster.gpu_memory:
        parts["library workspaces"] = constants.CUBLAS_WORKSPACES
        if workload.may_decode_on_gpu:
            parts["image decoder"] = constants.GPU_DECODER
    return parts


def resolve_auto(workload: Workload, cluster: Cluster) -> Workload:
    """Return the workload with the values of "auto" on this cluster: whether the towers are compiled and recompute
    selectively, where embeddings are kept, exchange and reduction, and the number of kept graphs.

    A run follows the values of its plan. On GPUs its ranks have measured their links and products
    (`Cluster.measured`), so it may choose another exchange than `megaclip plan` does at the rates of a preset.
    """
    has_two_levels = cluster.hosts > 1 and cluster.gpus_per_host > 1 and workload.megaclip.tensor_parallel_size == 1
    workload = replace(workload, ring_levels=1 + has_two_levels)
    workload = workload.with_megaclip(compile=compile_estimate(workload, cluster).pays)
    section = workload.megaclip
    if section.embeddings_offload == "auto":
        on_cpu = 0 < constants.EMBEDDINGS_SHARE * cluster.gpu_total_memory < 2 * embedding_bytes(workload)
        workload = workload.with_megaclip(embeddings_offload=on_cpu)
    workload = workload.with_megaclip(selective_recompute=_recomputes(workload, cluster))
    return _with_graphs_and_way(workload, cluster)


def _recomputes(workload: Workload, cluster: Cluster) -> bool:
    """Return whether the compiled towers recompute selectively.

    "auto" recomputes if the step does not fit without it, or keeps enough more image graphs with it.
    """
    section = workload.megaclip
    if section.compile is not True:
        return False
    if section.selective_recompute != "auto":
        return section.selective_recompute
    if isinstance(workload.model, OpenClipConfig):  # the plan does not know the saved memory
        return False
    workload = _with_full_captions(workload)
    without, with_it = (
        _with_graphs_and_way(workload.with_megaclip(selective_recompute=setting), cluster) for setting in (False, True)
    )
    peak = _gpu_peak(_gpu_states(without, cluster), step_phases(without))
    fits_without = not cluster.gpu_memory or peak <= cluster.usable_gpu_memory
    more_kept = with_it.kept.image - without.kept.image
    return not fits_without or more_kept >= max(1, constants.RECOMPUTE_SHARE * workload.chunks[0])


def _with_graphs_and_way(workload: Workload, cluster: Cluster) -> Workload:
    """Return the workload with the number of kept graphs, exchange and reduction instead of "auto"."""
    section = workload.megaclip
    way, _ = choose_way_of_loss(workload, cluster)
    if section.keep_graphs == "auto":
        resolved = workload.with_megaclip(exchange=way.exchange, reduction=way.reduction)
        workload = workload.with_megaclip(keep_graphs=_planned_graphs(resolved, cluster))
        way, _ = choose_way_of_loss(workload, cluster)  # kept graphs leave the loss less memory
    return workload.with_megaclip(exchange=way.exchange, reduction=way.reduction)


def choose_way_of_loss(workload: Workload, cluster: Cluster) -> tuple[Choice, Machine]:
    """Return exchange and reduction of the loss, beside the graphs that the workload keeps, and the figures from which
    they are chosen."""
    section = workload.megaclip
    graphs = sum(count * size for count, size in zip(workload.kept, graph_bytes(workload), strict=True))
    held = sum(states_of(workload).gpu.values()) + graphs + embedding_bytes(workload)
    machine = cluster.loss_machine(max(0.0, cluster.usable_gpu_memory - held))
    choice = choose_way(
        section.exchange,
        section.reduction,
        sizes=exchange_sizes(workload),
        held_bytes=workload.compute_bytes,
        cost=LOSS_COSTS[section.loss],
        machine=machine,
        hides_exchanges=cluster.hides_exchanges,
    )
    return choice, machine


def _planned_graphs(workload: Workload, cluster: Cluster) -> int:
    """Return the number of graphs that fit into the GPU beside the rest of a step, with a margin for the plan's error.

    workload: has exchange and reduction, but "auto" for kept graphs.
    """
    workload = _with_full_captions(workload)
    sizes = _graphs_that_auto_keeps(workload, cluster)
    if not sizes:
        return 0
    phases = step_phases(workload.with_megaclip(keep_graphs=len(sizes)))
    beside = max(phase.total - phase.kept_graphs for phase in phases.by_name().values() if phase.kept_graphs)
    limit = (1 - constants.KEPT_GRAPHS_MARGIN) * cluster.usable_gpu_memory
    return graphs_that_fit(0, sizes, limit - sum(_gpu_states(workload, cluster).values()) - beside)


def _with_full_captions(workload: Workload) -> Workload:
    """Return the workload as a run sees it before its first step: any chunk may have captions of full length."""
    return replace(workload, text_positions_saved=None)


def _graphs_that_auto_keeps(workload: Workload, cluster: Cluster) -> list[float]:
    """Return the largest number of bytes by which each graph that "auto" may keep raises the peak, in keeping order.

    It keeps none on CPUs, and none with cpu_checkpointing, where a graph's bytes are in host memory. The first graph of
    the text tower is back-propagated before the images, so the tower's gradients are added to it.
    """
    section = workload.megaclip
    if section.keep_graphs != "auto" or not cluster.gpu_memory or workload.checkpointing == "cpu":
        return []
    image, text = graph_bytes(workload)
    if workload.pairs:
        return [image, text] * workload.graphs.text
    trained = workload.parameters[1].trained
    gradients = gradient_bytes(workload, trained) + workload.gradient_sum_bytes * trained
    texts = [text + gradients, *[text] * (workload.graphs.text - 1)] if workload.graphs.text else []
    return [*[image] * workload.graphs.image, *texts]


def store_bytes(workload: Workload) -> float:
    """Return the bytes of one rank's images of a step in the step store: uint8 pixels, or cached features."""
    features = workload.model.embed_dim * workload.compute_bytes
    return float(workload.local_batch * (features if workload.cached_images else workload.image_bytes))


def loader_bytes(workload: Workload) -> float:
    """Return the bytes of what one rank's loader processes prepare: the slots of training chunks that they have begun,
    and whole chunks of an evaluation, one of them copied. During an evaluation the training chunks stay in memory."""
    sample = workload.image_bytes + 2 * workload.caption_bytes + 8  # tokens and the sample's number are int64 here
    rows = slots_ahead(workload.batch.micro_batch, workload.workers) * workload.batch.micro_batch
    if workload.evaluation is not None:
        batch = workload.evaluation.batch
        longest = max(workload.evaluation.pairs, workload.evaluation.labelled)
        chunks = math.ceil(longest / (batch * workload.world_size))
        rows += (2 + min(workload.workers * PREFETCHED, chunks)) * batch
    return float(rows * sample)


def _sample_state_bytes(workload: Workload) -> float:
    """Return the bytes of one rank's part of the samples' state, which the global losses keep; 0 for other losses."""
    return 4.0 * workload.sample_columns * -(-workload.samples // workload.world_size)


def _host_parts(workload: Workload, cluster: Cluster) -> dict[str, float]:
    """Return the bytes in a host's memory by part, without a step's images and without what a CPU trains in it."""
    ranks = cluster.gpus_per_host
    process = constants.HOST_PROCESS if cluster.gpu_memory else constants.HOST_PROCESS_CPU
    worker_sets = 1 if workload.evaluation is None else 2  # an evaluation has its own beside those of the training
    parts = {name: size * ranks for name, size in states_of(workload).cpu.items()}
    parts["processes"] = ranks * (process + worker_sets * workload.workers * constants.HOST_WORKER)
    parts["loader's chunks"] = ranks * loader_bytes(workload)
    state = _sample_state_bytes(workload)
    if workload.megaclip.fastclip.state_device == "cpu":
        parts["per-sample state"] = ranks * state
    parts["its copy in a checkpoint"] = ranks * state
    if workload.async_save:
        each, first = checkpoint_bytes(workload)
        parts["copy of a checkpoint"] = ranks * (each + state) + min(ranks, workload.tensor_ranks) * first
    if workload.checkpointing == "cpu":
        chunks = [(work, work.micro_batch * work.costs.backward.block_inputs) for work in tower_work(workload)]
        again = max((size for work, size in chunks if work.encoded_again), default=0.0)
        parts["block inputs"] = ranks * max(again, sum(work.kept * size for work, size in chunks))
    if workload.megaclip.embeddings_offload:
        parts["embeddings"] = ranks * 2 * embedding_bytes(workload)
    parts["tokens of two steps"] = ranks * 2 * workload.local_batch * workload.caption_bytes
    return parts
