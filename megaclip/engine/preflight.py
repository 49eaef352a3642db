"""Before a run: does it fit this machine? The planner's formulas against the memory that is free here and now.

On GPUs a run that cannot fit is refused. On CPUs, where other programs share the memory and may give it back, the plan
is only logged, as a warning if it does not fit. Shared memory that is too small for the loader is refused on both.
"""

import shutil
from pathlib import Path

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.collectives import raise_together
from megaclip.comm.groups import ranks_of_this_node
from megaclip.config import TrainArguments
from megaclip.data.workers import SHARED_MEMORY_ADVICE
from megaclip.engine.data_offload import free_memory
from megaclip.engine.inputs import Inputs
from megaclip.errors import ConfigError
from megaclip.logging import get_logger
from megaclip.planner import MemoryPlan, Workload, advice, describe, last_resort, plan_memory
from megaclip.planner.cluster import GPUS, Cluster
from megaclip.planner.memory import gigabytes, loader_bytes
from megaclip.planner.report import summary
from megaclip.planner.workload import EvaluationSets

logger = get_logger(__name__)

_SHARED_MEMORY = Path("/dev/shm")


def check_fit(arguments: TrainArguments, inputs: Inputs) -> MemoryPlan:
    """Plan the run, log it in a line, and refuse it, on every rank, if it cannot fit (unless --no-plan).

    Every rank calls it, after the process group exists and before the model is built. Raises ConfigError.
    """
    workload = workload_of(arguments, inputs, dist.get_world_size())
    folder = Path(arguments.data_offload_dir or arguments.logs)
    cluster = this_machine(dist.get_world_size(), folder, [Path(path) for path in workload.zero.nvme_paths])
    plan = plan_memory(workload, cluster)
    if arguments.no_plan:
        return plan
    raise_together(_shared_memory_error(workload, cluster.gpus_per_host))
    error = None
    if plan.refusals:
        changes = "; or ".join(advice(workload, cluster)) or last_resort(workload)
        message = f"this run does not fit: {'; '.join(plan.refusals)}. Change: {changes} (or --no-plan)"
        if cluster.gpu_memory:
            error = ConfigError(message)
        else:
            logger.warning("%s", message)
    raise_together(error)
    logger.info("%s", summary(plan, workload, cluster))
    return plan


def _shared_memory_error(workload: Workload, ranks: int) -> ConfigError | None:
    """Whether what the loader processes of this host's ranks may hold ready is more than shared memory has free."""
    if not workload.workers or not _SHARED_MEMORY.exists():
        return None
    needed, free = ranks * loader_bytes(workload), shutil.disk_usage(_SHARED_MEMORY).free
    if needed <= free:
        return None
    return ConfigError(
        f"loader processes hand over what they read through {_SHARED_MEMORY}, up to {gigabytes(needed)} on this host, "
        f"and {gigabytes(free)} are free there; {SHARED_MEMORY_ADVICE} (or --no-plan)"
    )


def report_peak(plan: MemoryPlan) -> None:
    """Log the planned and the measured peak of this rank's GPU, at the end of a run."""
    if get_accelerator().device_name() != "cuda":
        return
    measured = torch.cuda.max_memory_allocated()
    logger.info(
        "GPU memory: planned %s (%s), measured %s, ratio %.2f",
        gigabytes(plan.gpu_peak),
        plan.peak_phase,
        gigabytes(measured),
        plan.gpu_peak / max(1, measured),
    )


def workload_of(arguments: TrainArguments, inputs: Inputs, world_size: int) -> Workload:
    """What the command line and ds_config.json ask for."""
    model = inputs.model_config
    if arguments.force_patch_dropout is not None:
        model = model.replace(vision_cfg={"patch_dropout": arguments.force_patch_dropout})
    pairs, labelled = (len(data) if data is not None else 0 for data in (inputs.validation, inputs.labelled))
    return Workload.of(
        model,
        inputs.config,
        world_size,
        image_unlocked=arguments.lock_image_unlocked_groups if arguments.lock_image else None,
        text_unlocked=arguments.lock_text_unlocked_layers if arguments.lock_text else None,
        workers=arguments.workers,
        samples=len(inputs.train),
        evaluation=EvaluationSets(arguments.eval_batch_size, pairs, labelled) if pairs or labelled else None,
    )


def this_machine(world_size: int, folder: Path, nvme_paths: list[Path]) -> Cluster:
    """The hosts of this run, taken to be like this one: what is free on this rank's GPU, in memory, on the disk of
    `folder` and, if they are on another one, on the smallest of those that ZeRO-3 offloads to."""
    gpu = get_accelerator().device_name() == "cuda"
    on_host = min(world_size, torch.cuda.device_count()) if gpu else world_size
    on_host = ranks_of_this_node() or on_host
    name = _preset(torch.cuda.get_device_name()) if gpu else "cpu"
    cluster = describe(gpu=name, gpus=on_host, hosts=max(1, world_size // on_host))
    existing = _existing(folder)
    others = [path for path in map(_existing, nvme_paths) if path.stat().st_dev != existing.stat().st_dev]
    return cluster.measured(
        gpu_memory=float(torch.cuda.mem_get_info()[0]) if gpu else 0.0,
        host_memory=float(free_memory()),
        disk=float(shutil.disk_usage(existing).free),
        nvme=min((float(shutil.disk_usage(path).free) for path in others), default=None),
    )


def _preset(device: str) -> str:
    """The GPU whose rates are taken for this one: its namesake, else the one that was measured."""
    return next((name for name in GPUS if name in device.lower()), "h200")


def _existing(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
