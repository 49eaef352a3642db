"""Where a step's images wait between the two passes: page-locked host memory, a file, or nowhere.

`megaclip.data_offload` asks, what is free decides, and the log says. All ranks choose the same, before training starts:
a batch that fits nowhere is refused, and a disk that is too small is found when the file is made, not in the middle of
a step.
"""

import mmap
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megaclip.comm.collectives import gather_objects, raise_together
from megaclip.errors import ConfigError, first_line
from megaclip.logging import get_logger
from megaclip.planner.constants import EMBEDDINGS_SHARE, HOST_MARGIN
from megaclip.planner.memory import gigabytes

logger = get_logger(__name__)

WINDOW = 3
"""Slots where nothing is kept: one in use, one on its way to the device, one being filled."""
_CGROUP = Path("/sys/fs/cgroup")


class Place(NamedTuple):
    """Where images go, and whether they are kept there from the first pass to the second."""

    name: str
    """"cpu", "disk" or "reread"."""
    keeps: bool


class _Host(NamedTuple):
    """What one rank sees of its host."""

    name: str
    free_memory: int
    free_disk: int


def choose_place(wanted: str, nbytes: int, folder: Path, *, passes: int) -> Place:
    """Decide for all ranks, which call it together.

    Args:
        wanted: `megaclip.data_offload`.
        nbytes: of one rank's pixels of a step.
        folder: where a file would be made; exists.
        passes: how often the image tower asks for them in a step, 1 or 2.

    Raises:
        ConfigError: on every rank: they do not fit where they should go, or anywhere.
    """
    hosts = gather_objects(_Host(socket.gethostname(), free_memory(), _free_disk(folder)))
    names = [host.name for host in hosts]
    memory_share = min(host.free_memory / names.count(host.name) for host in hosts) * HOST_MARGIN
    disk_share = min(host.free_disk / names.count(host.name) for host in hosts) * HOST_MARGIN
    needs = f"{gigabytes(nbytes)} of images a rank"
    in_memory = f"{gigabytes(memory_share)} of free host memory ({HOST_MARGIN:.0%} of it)"
    on_disk = f"{gigabytes(disk_share)} of free disk in {folder} ({HOST_MARGIN:.0%} of it)"
    if wanted == "auto" and passes == 1:
        return _chosen(Place("reread", keeps=False), "images pass by once")
    if wanted == "reread":
        why = "images are read twice" if passes == 2 else "images pass by once"
        return _chosen(Place("reread", keeps=False), why)
    if wanted == "disk":
        if nbytes > disk_share:
            raise ConfigError(
                f'megaclip.data_offload "disk": {needs}, but {on_disk} a rank; point --data-offload-dir at a larger '
                'disk, set "reread" (they are decoded twice), or a smaller batch'
            )
        return _chosen(Place("disk", keeps=True), f"{needs}, {on_disk}")
    if nbytes <= memory_share:
        return _chosen(Place("cpu", keeps=True), f"{needs}, {in_memory}")
    if wanted == "cpu":
        raise ConfigError(
            f'megaclip.data_offload "cpu": {needs}, but {in_memory} a rank; set "disk" or "reread", or a smaller batch'
        )
    if nbytes <= disk_share:
        return _chosen(Place("disk", keeps=True), f"{needs}, {in_memory}, {on_disk}")
    raise ConfigError(
        f"a step's images fit nowhere: {needs}, but {in_memory} and {on_disk} a rank; point --data-offload-dir at a "
        'larger disk, set megaclip.data_offload "reread" (they are decoded twice), or a smaller batch'
    )


def _chosen(place: Place, why: str) -> Place:
    logger.info("data offload: %s: %s", place.name, why)
    return place


def _free_disk(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def free_memory() -> int:
    """Bytes of host memory that this process may still take: the machine's, or what its control group leaves."""
    free = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            cache = int(statistics["inactive_file"])  # counted as used, and given up when needed
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()) + cache)
    except (OSError, KeyError, ValueError):
        pass  # no control group of version 2: the machine's figure stands
    return max(0, free)


class Slots:
    """`tensor`: (S, ...) uint8 in memory or in a file, until `close`. All ranks make theirs together."""

    def __init__(self, place: Place, shape: tuple[int, ...], folder: Path, device: torch.device) -> None:
        """device: that the tensor will be copied to. Raises ConfigError, on every rank, if one of them has no room."""
        self._is_pinned = False
        error: Exception | None = None
        try:
            self.tensor = self._in_file(shape, folder) if place.name == "disk" else self._in_memory(shape, device)
        except (OSError, RuntimeError) as problem:
            size, where = gigabytes(torch.Size(shape).numel()), folder if place.name == "disk" else "page-locked memory"
            error = ConfigError(
                f"data offload: cannot reserve {size} in {where}: {first_line(problem)}; free space, point "
                "--data-offload-dir elsewhere, or set another megaclip.data_offload"
            )
        raise_together(error)

    def _in_file(self, shape: tuple[int, ...], folder: Path) -> torch.Tensor:
        size = torch.Size(shape).numel()
        with tempfile.TemporaryFile(dir=folder) as file:  # has no name, so that nothing is left behind
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here, not as a signal in a step
            return _tensor_in(mmap.mmap(file.fileno(), size)).view(shape)

    def _in_memory(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        pages = mmap.mmap(-1, torch.Size(shape).numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = _tensor_in(pages).view(shape)
        if device.type == "cuda":
            # Registered, not allocated as pinned: torch's allocator would round the size up to a power of two.
            code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
            if code != 0:
                raise RuntimeError(f"CUDA error {code} while locking pages")
            self._is_pinned = True
        return tensor

    def close(self) -> None:
        """Give memory or file back; the tensor must not be used afterwards."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor


def _tensor_in(pages: mmap.mmap) -> torch.Tensor:
    pages.madvise(mmap.MADV_DONTFORK)  # data workers are forked, and have no use for it
    return torch.frombuffer(pages, dtype=torch.uint8)


def embeddings_on_cpu(wanted: bool | str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """What `megaclip.embeddings_offload` means for embeddings of this shape, (b, D), of two towers."""
    nbytes = 4 * torch.Size(shape).numel() * dtype.itemsize  # two towers, and as much for their gradients
    on_cpu = bool(wanted)
    if wanted == "auto":
        on_cpu = device.type != "cpu" and nbytes > EMBEDDINGS_SHARE * get_accelerator().total_memory()
    where = "in host memory while the towers run" if on_cpu else f"on {device.type}"
    logger.info("embeddings and their gradients: %s a rank, %s", gigabytes(nbytes), where)
    return on_cpu
