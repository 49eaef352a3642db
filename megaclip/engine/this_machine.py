"""The memory and disk that are free on this machine, for the planner."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.groups import ranks_of_this_node
from megaclip.planner.cluster import GPUS, Cluster, describe

_CGROUP = Path("/sys/fs/cgroup")


def this_machine(world_size: int, folder: Path, nvme_paths: list[Path]) -> Cluster:
    """Return the hosts of a run, which are assumed to be like this one.

    Args:
        world_size: ranks of the run.
        folder: the folder of the step store. It may not exist yet.
        nvme_paths: the folders that ZeRO-3 offloads to. If they are on other disks, the disk with the fewest free bytes
            counts.
    """
    gpu = get_accelerator().device_name() == "cuda"
    on_host = min(world_size, torch.cuda.device_count()) if gpu else world_size
    on_host = min(world_size, ranks_of_this_node() or on_host)
    existing = _existing(folder)
    others = [path for path in map(_existing, nvme_paths) if path.stat().st_dev != existing.stat().st_dev]
    free, total = torch.cuda.mem_get_info() if gpu else (0, 0)
    name = _preset(torch.cuda.get_device_name()) if gpu else "cpu"
    return replace(
        describe(gpu=name, gpus=on_host, hosts=max(1, world_size // on_host)),
        gpu_memory=float(free),
        gpu_total_memory=float(total),
        host_memory=float(free_host_memory()),
        disk=float(shutil.disk_usage(existing).free),
        nvme=min((float(shutil.disk_usage(path).free) for path in others), default=None),
    )


def free_host_memory() -> int:
    """Return the free bytes of host memory: of the machine or, if smaller, of this process's control group."""
    free = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            cache = int(statistics["inactive_file"])  # the page cache counts as used and is freed when needed
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()) + cache)
    except (OSError, KeyError, ValueError):
        pass  # without a version 2 control group only the machine's free memory counts
    return max(0, free)


def _preset(device: str) -> str:
    """Return the GPU whose rates are used for `device`: the GPU of the same name, else the GPU that was measured."""
    words = set(re.split(r"\W+", device.lower()))  # such as "NVIDIA A100-SXM4-40GB" for "a100-40gb"
    return next((name for name in GPUS if words.issuperset(name.split("-"))), "h200")


def _existing(folder: Path) -> Path:
    """Return the folder, or the first one above it that exists."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
