"""A plan as text: the table of parts and phases, the time's terms, and one line for a log."""

from megaclip.planner.cluster import GPUS, Cluster
from megaclip.planner.losses import inf_cl_loss_bytes, megaclip_loss_bytes, open_clip_loss_bytes
from megaclip.planner.memory import MemoryPlan, gigabytes, loss_sizes
from megaclip.planner.step_time import StepTime
from megaclip.planner.workload import Workload


def summary(plan: MemoryPlan, workload: Workload, cluster: Cluster) -> str:
    """One line: the peaks, and where the batch waits."""
    gpu = ""
    if cluster.gpu_memory:
        gpu = f"{gigabytes(plan.gpu_peak)} of {gigabytes(cluster.usable_gpu_memory)} per GPU ({plan.peak_phase}), "
    disk = f", {gigabytes(plan.disk_peak)} of disk" if plan.disk_peak else ""
    store = {
        "cpu": "images wait in host memory",
        "disk": "images wait on disk",
        "reread": "images are read twice",
        "once": "images pass by once",
    }[plan.data_store]
    return (
        f"plan for a batch of {workload.global_batch}: {gpu}{gigabytes(plan.cpu_peak)} of "
        f"{gigabytes(cluster.usable_host_memory)} per host{disk}; {store}"
    )


def memory_table(plan: MemoryPlan, cluster: Cluster) -> str:
    """Parts in rows; per GPU, per host and on disk in columns; then the phases and the peak."""
    place = f"{gigabytes(cluster.gpu_memory)} each" if cluster.gpu_memory else "none: the CPU trains"
    lines = [
        f"{'per GPU, all the time':40}{'GPU':>12}   ({cluster.gpus} x {cluster.name}, {place})",
        *_rows(plan.gpu_states),
        "",
        f"{'per GPU, on top, by phase':40}{'GPU':>12}",
    ]
    for name, phase in plan.gpu_phases.items():
        mark = "  <- peak" if name == plan.peak_phase else ""
        parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in phase.items() if size >= 2**20)
        lines.append(f"  {name:38}{gigabytes(sum(phase.values())):>12}   {parts}{mark}")
    lines += ["", f"{'PEAK per GPU':40}{gigabytes(plan.gpu_peak):>12}"]
    lines += ["", f"{'per host':40}{'CPU':>12}", *_rows(plan.cpu)]
    lines.append(f"{'  together':40}{gigabytes(plan.cpu_peak):>12}   of {gigabytes(cluster.usable_host_memory)}")
    if plan.disk or plan.nvme:
        lines += ["", f"{'per host':40}{'disk':>12}", *_rows(plan.disk), *_rows(plan.nvme)]
    return "\n".join(lines)


def loss_table(workload: Workload) -> str:
    """What the loss of a settled workload takes per GPU, here and in open_clip's and Inf-CL's code."""
    sizes = loss_sizes(workload)
    ours = megaclip_loss_bytes(
        sizes,
        workload.exchange,
        workload.reduction,
        workload.tile_budget_mib,
        workload.loss,
        payload_bytes=workload.payload_bytes,
    )
    rows = {
        f"MegaCLIP, {workload.exchange} + {workload.reduction}": ours,
        "open_clip (local loss, bf16 autocast)": open_clip_loss_bytes(sizes),
        "Inf-CL": inf_cl_loss_bytes(sizes),
    }
    return "\n".join([f"{'the loss alone, per GPU':40}{'GPU':>12}", *_rows(rows)])


def time_table(step: StepTime, cluster: Cluster) -> str:
    """The terms of one step and what they add up to."""
    rates = f"rates of {cluster.name}" if cluster.rates == GPUS[cluster.name][1] else "rates as given"
    terms = {
        "towers without graph": step.forward,
        "towers again, with graph": step.forward_again,
        "towers backward": step.backward,
        "loss": step.loss,
        "features between ranks" + (" (behind the loss)" if step.features_hidden else ""): step.features,
        "parameters between ranks" + (" (behind the towers)" if step.parameters_hidden else ""): step.parameters,
        "samples to the GPU (behind the towers)": step.copies,
        "step store on disk" + (" (behind the towers)" if step.disk_hidden else ""): step.disk,
        "decoding (other processes)": step.decoding,
        "ZeRO-3's host work (behind the towers)": step.host,
        "offload between host and GPU": step.offload,
        "offload between host and disk": step.swap,
        "optimizer in host memory": step.optimizer,
    }
    lines = [
        f"{'one step':46}{'seconds':>12}   ({rates})",
        *(f"  {name:44}{_seconds(value):>12}" for name, value in terms.items() if value),
    ]
    lines.append(
        f"{'STEP':46}{_seconds(step.total):>12}   {step.samples_per_s:,.0f} samples/s; most goes to {step.dominant}"
    )
    return "\n".join(lines)


def _rows(parts: dict[str, float]) -> list[str]:
    return [f"  {name:38}{gigabytes(size):>12}" for name, size in parts.items() if size]


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
