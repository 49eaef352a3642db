"""Plan a run before it starts, and refuse it if it does not fit this machine.

`check_fit` compares the planner's formulas with the memory that is free now, and decides where the run keeps a step's
images and its embeddings, how many graphs it keeps between its passes, and the exchange and reduction of its loss. The
run follows the plan. After its first steps it may keep more graphs (`keep_more_graphs`).

A run that does not fit is refused on GPUs. On CPUs it starts with a warning, because other programs share the memory
and may free it. On both a run is refused if a step's images do not fit where `data_offload` keeps them. With --no-plan
nothing is refused; the run still uses its plan.
"""

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import deepspeed.comm as dist
import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megaclip.cache.kept_graphs import MEASURED_MARGIN, free_at_peak
from megaclip.comm.collectives import gather_integers, gather_objects
from megaclip.comm.groups import by_node, ranks_of_this_node, resolve
from megaclip.comm.machine import machine_of
from megaclip.config import TrainArguments
from megaclip.data import PairDataset, bytes_to_come
from megaclip.engine.compile_trial import compiled_is_faster
from megaclip.engine.inputs import Inputs
from megaclip.engine.schedule import RunLength
from megaclip.errors import ConfigError
from megaclip.logging import format_bytes, get_logger
from megaclip.models import OpenClipConfig
from megaclip.planner import Cluster, MemoryPlan, Workload, advice, faster_run, plan_memory
from megaclip.planner.cluster import GPUS, describe
from megaclip.planner.compile_estimate import check_recomputation, compile_estimate
from megaclip.planner.memory import IMAGE_PLACES, choose_way_of_loss, store_bytes, with_kept_graphs
from megaclip.planner.phases import graph_bytes
from megaclip.planner.report import graphs_text, summary
from megaclip.planner.workload import EvaluationSets
from megaclip.step.layout import graphs_that_fit

logger = get_logger(__name__)

_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def check_fit(arguments: TrainArguments, inputs: Inputs) -> MemoryPlan:
    """Plan the run, log the plan and, without --no-plan, check that it fits; return the plan.

    Every rank calls it, after the process group exists and before the model is built.

    Raises:
        ConfigError: on every rank, if the run does not fit on one of them.
    """
    requested = workload_of(arguments, inputs, dist.get_world_size())
    if inputs.objective is not None and inputs.objective.changes_graphs():
        keep = requested.megaclip.keep_graphs
        requested = requested.with_megaclip(keep_graphs=0 if keep == "auto" else keep)
        logger.info(
            'plan: the memory of megaclip.objective %s is not planned, so keep_graphs "auto" keeps none; set a number '
            "if the GPU has memory left",
            inputs.config.megaclip.objective,
        )
    folder = Path(arguments.data_offload_dir or arguments.logs)
    cluster = this_machine(dist.get_world_size(), folder)
    if arguments.shard_cache is not None:
        cluster = _beside_shard_cache(cluster, folder, Path(arguments.shard_cache), arguments, inputs)
    cluster = _of_all_ranks(cluster)
    device = torch.device(get_accelerator().current_device_name())
    chooses_way = requested.world_size > 1 and "auto" in (requested.megaclip.exchange, requested.megaclip.reduction)
    if chooses_way:
        cluster = replace(cluster, measured=machine_of(by_node(resolve(None)), device))
    measured = ""
    if requested.megaclip.compile == "measure" and compile_estimate(requested, cluster).pays:
        compiles, measured = compiled_is_faster(requested, device)
        requested = requested.with_megaclip(compile=compiles)
    plan = plan_memory(requested, cluster)
    chosen = plan.workload.megaclip
    check_recomputation(requested.megaclip.selective_recompute, compiles=chosen.compile is True)
    workload = requested.with_megaclip(
        selective_recompute=chosen.selective_recompute, exchange=chosen.exchange, reduction=chosen.reduction
    )
    reason = _reason_for_graphs(plan, requested.megaclip.keep_graphs, cluster)
    logger.info("%s: %s", graphs_text(plan.workload), reason)
    if chooses_way:
        section = requested.megaclip
        allowed = plan.workload.with_megaclip(exchange=section.exchange, reduction=section.reduction)
        choice, machine = choose_way_of_loss(allowed, cluster)
        logger.info("%s", choice._replace(exchange=chosen.exchange, reduction=chosen.reduction).described(machine))
    _log_places(plan, workload, cluster, folder)
    _log_compilation(plan, workload, cluster, measured)
    if arguments.no_plan:
        return plan
    _check_plan(plan, workload, cluster)
    if faster := faster_run(workload, cluster):
        logger.warning("%s", faster)
    logger.info("%s", summary(plan, workload, cluster))
    return plan


def _beside_shard_cache(
    cluster: Cluster, folder: Path, cache: Path, arguments: TrainArguments, inputs: Inputs
) -> Cluster:
    """Return the cluster without the bytes that --shard-cache may still take on the disk of the step store."""
    cache = _existing(cache)
    if cache.stat().st_dev != _existing(folder).stat().st_dev:
        return cluster
    sizes = [shard.size for shard in inputs.train.remote_shards(Path(arguments.shard_cache or "")).values()]
    taken = bytes_to_come(cache, arguments.shard_cache_bytes, sizes)
    logger.info("--shard-cache may take %s more on the disk of %s", format_bytes(taken), folder)
    return replace(cluster, disk=max(0.0, cluster.disk - taken))


def _of_all_ranks(cluster: Cluster) -> Cluster:
    """Return the machines for which all ranks plan: those of the first rank, with the least free memory of any rank.

    GPUs and hosts may have different amounts of free memory and disk. From equal figures all ranks make the same plan.
    """
    clusters = gather_objects(cluster)
    least = {
        name: min(getattr(one, name) for one in clusters)
        for name in ("gpu_memory", "gpu_total_memory", "host_memory", "disk")
    }
    return replace(clusters[0], **least)


def keep_more_graphs(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with as many more kept graphs as fit into the memory that is free on every GPU after some steps.

    Every rank calls it, between two steps. Only "auto" keeps more graphs.
    """
    kept = sum(plan.workload.kept)
    if kept >= len(plan.graph_bytes):
        return plan
    free, total = free_at_peak()
    # Captions of later steps may be longer, and their kept graphs larger.
    longer_captions = plan.workload.kept.text * graph_bytes(plan.workload)[1]
    own = graphs_that_fit(kept, plan.graph_bytes, free - longer_captions - MEASURED_MARGIN * total)
    number = min(number for (number,) in gather_integers([own]))
    if number > kept:
        plan = with_kept_graphs(plan, number)
        logger.info("%s from now on: %s of the GPU were free", graphs_text(plan.workload), format_bytes(free))
    return plan


def _reason_for_graphs(plan: MemoryPlan, setting: int | str, cluster: Cluster) -> str:
    """Return the reason for the number of kept graphs. setting: megaclip.keep_graphs."""
    if plan.workload.one_chunk_each:
        return "each trained tower has one chunk"
    if plan.graph_bytes:
        image, text = graph_bytes(plan.workload)
        return (
            f"a graph takes {format_bytes(image)} (image) or {format_bytes(text)} (text), and the GPU has "
            f"{format_bytes(cluster.usable_gpu_memory)} to use; planned peak {format_bytes(plan.gpu_peak)}"
        )
    if setting != "auto":
        return f"megaclip.keep_graphs {setting}"
    return f'megaclip.keep_graphs "auto" keeps none {"with cpu_checkpointing" if cluster.gpu_memory else "on CPUs"}'


def _log_places(plan: MemoryPlan, workload: Workload, cluster: Cluster, folder: Path) -> None:
    why = IMAGE_PLACES[plan.image_place]
    if plan.keeps_images:
        rest = plan.cpu_peak - plan.cpu.get("step store", 0.0)
        why = (
            f"{format_bytes(store_bytes(workload))} of images per rank; usable on this host: "
            f"{format_bytes(cluster.usable_host_memory)} of free memory, of which {format_bytes(rest)} are for other "
            f"data, and {format_bytes(cluster.usable_disk)} of free disk in {folder}"
        )
    logger.info("data offload: %s: %s", plan.image_place, why)
    on_cpu = plan.workload.megaclip.embeddings_offload
    where = "in host memory while the towers run" if on_cpu else "on the device of the towers"
    logger.info("embeddings and their gradients are kept %s", where)


def _log_compilation(plan: MemoryPlan, workload: Workload, cluster: Cluster, measured: str) -> None:
    """Log whether torch.compile runs the towers, with the estimate or the measurement that "auto" depends on."""
    setting = workload.megaclip.compile
    estimate = compile_estimate(workload, cluster)
    if isinstance(workload.model, OpenClipConfig):
        logger.info("plan: the workspaces of convolution kernels are not planned")
    if measured:
        reason = measured
    elif isinstance(setting, bool):
        reason = f"megaclip.compile is {json.dumps(setting)}"
    elif not cluster.gpu_memory:
        reason = f"megaclip.compile is {json.dumps(setting)} and training runs on the CPU"
    elif setting == "auto" and isinstance(workload.model, OpenClipConfig):
        reason = 'megaclip.compile is "auto"; "measure" or true compiles open_clip\'s modules'
    elif not estimate.pays and estimate.saved > estimate.startup:
        reason = f"it cannot be used with {workload.megaclip.untraced}"
    else:
        reason = (
            f"{workload.steps} steps of compiled towers save about {estimate.saved:,.0f} s and the compilation takes "
            f"about {estimate.startup:.0f} s"
        )
    logger.info("torch.compile: %s: %s", "on" if plan.workload.megaclip.compile else "off", reason)


def _check_plan(plan: MemoryPlan, workload: Workload, cluster: Cluster) -> None:
    """Raise ConfigError if the run cannot fit. On CPUs only warn if other programs may free enough memory."""
    if not plan.refusals:
        return
    images_fit = plan.cpu.get("step store", 0.0) <= cluster.usable_host_memory and plan.disk_peak <= cluster.usable_disk
    changes = advice(workload, cluster)
    if not images_fit:
        changes.append('for a step\'s images, a larger disk (--data-offload-dir) or megaclip.data_offload "reread"')
    message = f"this run does not fit: {'; '.join(plan.refusals)}. Change: {'; or '.join(changes)} (or --no-plan)"
    if cluster.gpu_memory or not images_fit:
        raise ConfigError(message)
    logger.warning("%s", message)


def report_peak(plan: MemoryPlan) -> None:
    """Log the planned and the measured peak of this rank's GPU, at the end of a run."""
    if get_accelerator().device_name() != "cuda":
        return
    measured = torch.cuda.max_memory_allocated()
    logger.info(
        "GPU memory: planned %s (%s), measured %s, ratio %.2f",
        format_bytes(plan.gpu_peak),
        plan.peak_phase,
        format_bytes(measured),
        plan.gpu_peak / max(1, measured),
    )


def workload_of(arguments: TrainArguments, inputs: Inputs, world_size: int) -> Workload:
    """Return the workload of the command line and ds_config.json."""
    batch = inputs.config.batch_layout(world_size).global_batch
    steps = RunLength.of(arguments, len(inputs.train), batch).total_steps
    pairs, labelled = (len(data) if data is not None else 0 for data in (inputs.validation, inputs.labelled))
    pairs = max([pairs, *(len(data) for _, data in inputs.suite if isinstance(data, PairDataset))])
    labelled = max([labelled, *(len(data) for _, data in inputs.suite if not isinstance(data, PairDataset))])
    return Workload.of(
        inputs.model_config,
        inputs.config,
        world_size,
        image_unlocked=arguments.lock_image_unlocked_groups if arguments.lock_image else None,
        text_unlocked=arguments.lock_text_unlocked_layers if arguments.lock_text else None,
        cached_images=arguments.feature_cache is not None,
        may_decode_on_gpu=arguments.image_decoder != "cpu",
        workers=arguments.workers,
        samples=len(inputs.train),
        evaluation=EvaluationSets(arguments.eval_batch_size, pairs, labelled) if pairs or labelled else None,
        steps=min(steps, arguments.stop_after_steps or steps),
        objective_pairs=inputs.objective is not None and inputs.objective.encodes_pairs(),
        async_save=arguments.async_save,
    )


def this_machine(world_size: int, folder: Path) -> Cluster:
    """Return the hosts of a run, which are assumed to be like this one. folder: of the step store; it may not exist."""
    gpu = get_accelerator().device_name() == "cuda"
    on_host = min(world_size, torch.cuda.device_count()) if gpu else world_size
    on_host = min(world_size, ranks_of_this_node() or on_host)
    free, total = torch.cuda.mem_get_info() if gpu else (0, 0)
    name = _preset(torch.cuda.get_device_name()) if gpu else "cpu"
    return replace(
        describe(gpu=name, gpus=on_host, hosts=max(1, world_size // on_host)),
        gpu_memory=float(free),
        gpu_total_memory=float(total),
        host_memory=float(free_host_memory()),
        disk=float(shutil.disk_usage(_existing(folder)).free),
    )


def free_host_memory() -> int:
    """Return the free bytes of host memory: of the machine or, if smaller, of a control group of this process."""
    free, own = psutil.virtual_memory().available, None
    with contextlib.suppress(OSError, ValueError):
        own = re.search("^0::/(.*)", _OWN_CGROUP.read_text(), re.MULTILINE)
    group = _CGROUPS / (own[1] if own else "")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, KeyError, ValueError):  # no version 2 control group, or no limit: "max"
            limit = int((folder / "memory.max").read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cache = int(statistics["inactive_file"])  # the page cache counts as used and is freed when needed
            free = min(free, limit - int((folder / "memory.current").read_text()) + cache)
    return max(0, free)


def _preset(device: str) -> str:
    """Return the GPU whose rates are used for `device`: the GPU of the same name, else the GPU that was measured."""
    words = set(re.split(r"\W+", device.lower()))  # such as "NVIDIA A100-SXM4-40GB" for "a100-40gb"
    return next((name for name in GPUS if words.issuperset(name.split("-"))), "h200")


def _existing(folder: Path) -> Path:
    """Return the folder, or the first one above it that exists."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
