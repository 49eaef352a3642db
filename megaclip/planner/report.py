"""Print a plan: the table of parts and phases, the terms of a step's time, and one line for a log."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from megaclip.logging import format_bytes
from megaclip.planner.cluster import GPUS, Cluster
from megaclip.planner.memory import IMAGE_PLACES, MemoryPlan
from megaclip.planner.phases import loss_bytes
from megaclip.planner.search import MicroBatch
from megaclip.planner.step_time import StepTime
from megaclip.planner.workload import Workload


def summary(plan: MemoryPlan, workload: Workload, cluster: Cluster) -> str:
    """Return one line: the peaks, the kept graphs, and where a step's images are kept."""
    gpu = ""
    if cluster.gpu_memory:
        gpu = (
            f"{format_bytes(plan.gpu_peak)} of {format_bytes(cluster.usable_gpu_memory)} per GPU ({plan.peak_phase}), "
        )
    disk = f", {format_bytes(plan.disk_peak)} of disk" if plan.disk_peak else ""
    return (
        f"plan for a batch of {workload.batch.global_batch}: {gpu}{format_bytes(plan.cpu_peak)} of "
        f"{format_bytes(cluster.usable_host_memory)} per host{disk}; {graphs_text(plan.workload)}; "
        f"{IMAGE_PLACES[plan.image_place]}"
    )


def graphs_text(workload: Workload) -> str:
    """Return the number of kept graphs of each tower as text. `workload` has no "auto"."""
    kept, graphs = workload.kept, workload.graphs
    towers = [("image", kept.image, graphs.image), ("text", kept.text, graphs.text)]
    counts = [f"{some} of {count} {name} chunks" for name, some, count in towers if count]
    return f"graphs of {' and '.join(counts) or 'no chunks'} are kept"


def memory_table(plan: MemoryPlan, cluster: Cluster) -> str:
    """Return the parts and their peak: per GPU, with the phases, then per host and on disk."""
    place = f"{format_bytes(cluster.gpu_memory)} each" if cluster.gpu_memory else "none: the CPU trains"
    lines = [
        f"{'per GPU, all the time':40}{'GPU':>12}   ({cluster.gpus} x {cluster.name}, {place})",
        *_rows(plan.gpu_states),
        "",
        f"{'per GPU, on top, by phase':40}{'GPU':>12}",
    ]
    for name, phase in plan.gpu_phases.by_name().items():
        mark = "  <- peak" if name == plan.peak_phase else ""
        sizes = {part.replace("_", " "): size for part, size in asdict(phase).items()}
        parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in sizes.items() if size >= 2**20)
        lines.append(f"  {name:38}{format_bytes(phase.total):>12}   {parts}{mark}")
    lines += ["", f"{'PEAK per GPU':40}{format_bytes(plan.gpu_peak):>12}"]
    lines += ["", f"{'per host':40}{'CPU':>12}", *_rows(plan.cpu)]
    lines.append(f"{'  together':40}{format_bytes(plan.cpu_peak):>12}   of {format_bytes(cluster.usable_host_memory)}")
    if plan.disk:
        lines += ["", f"{'per host':40}{'disk':>12}", *_rows(plan.disk)]
    return "\n".join(lines)


def loss_table(workload: Workload) -> str:
    """Return the GPU memory of the loss alone, with its exchange and reduction. `workload` has no "auto"."""
    name = f"{workload.megaclip.exchange} + {workload.megaclip.reduction}"
    return "\n".join([f"{'the loss alone, per GPU':40}{'GPU':>12}", *_rows({name: loss_bytes(workload)})])


def time_table(step: StepTime, cluster: Cluster) -> str:
    """Return the terms of one step and their total."""
    rates = f"rates of {cluster.name}" if cluster.rates == GPUS[cluster.name][1] else "rates as given"
    terms = {
        "towers forward": step.forward,
        "towers forward again": step.forward_again,
        "towers backward": step.backward,
        "loss": step.loss,
        "features between ranks" + (" (behind the loss)" if step.features_hidden else ""): step.features,
        "parameters between ranks" + (" (behind the towers)" if step.parameters_hidden else ""): step.parameters,
        "sums inside a tensor-parallel replica": step.tensor_parallel,
        "samples to the GPU (behind the towers)": step.copies,
        "step store on disk" + (" (behind the towers)" if step.disk_hidden else ""): step.disk,
        "decoding" + (" (other processes)" if step.decoding_hidden else ""): step.decoding,
        "ZeRO-3's host work (behind the towers)": step.host,
        "  of it beyond the towers": step.host_wait,
        "offload between host and GPU": step.offload,
        "update": step.update,
    }
    lines = [
        f"{'one step':46}{'seconds':>12}   ({rates})",
        *(f"  {name:44}{_seconds(value):>12}" for name, value in terms.items() if value),
    ]
    lines.append(
        f"{'STEP':46}{_seconds(step.total):>12}   {step.samples_per_s:,.0f} samples/s; most goes to {step.dominant}"
    )
    return "\n".join(lines)


def data_text(step: StepTime, workload: Workload, cluster: Cluster) -> str:
    """Return the rate of the loader and the cores that the rest of the step needs."""
    cores = cluster.loader_cores(workload.workers)
    needed = math.ceil(cores * step.samples_per_s_without_data / step.samples_per_s_of_data)
    rate = workload.loaded_per_core(cluster.rates.decoded)
    return (
        f"bound by data above {step.samples_per_s_of_data:,.0f} samples/s: {rate:,.0f} per second and "
        f"core, {cores:.3g} cores per GPU; {needed} per GPU would keep up with the rest of the step"
    )


def micro_batch_table(choices: list[MicroBatch], own: int) -> str:
    """Return one line per micro-batch. own: samples per chunk and rank of the run itself."""
    lines = [f"{'train_micro_batch_size_per_gpu':40}{'peak':>12}{'seconds per step':>20}"]
    fitting = [one for one in choices if not one.plan.refusals]
    best = 1.01 * min((one.seconds for one in fitting), default=0.0)
    fastest = next((one for one in fitting if one.seconds <= best), None)  # the largest of those within a percent
    for one in choices:
        plan, seconds = one
        size = plan.workload.batch.micro_batch
        marks = ["does not fit"] if plan.refusals else ["fastest"] if one is fastest else []
        peak, marks = format_bytes(plan.gpu_peak or plan.cpu_peak), marks + ["this run"] * (size == own)
        setting = plan.workload.tensor_ranks * size
        lines.append(f"  {setting:<38,}{peak:>12}{_seconds(seconds):>20}   {', '.join(marks)}".rstrip())
    return "\n".join(lines)


def _rows(parts: Mapping[str, float]) -> list[str]:
    return [f"  {name:38}{format_bytes(size):>12}" for name, size in parts.items() if size]


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
