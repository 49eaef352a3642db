"""The machines a plan is for: how much memory, how fast. By name (`GPUS`), by flags, or measured (`Rates`)."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megaclip.errors import ConfigError
from megaclip.planner.constants import (
    DECODED_PER_CORE,
    GIB,
    HOST_MARGIN,
    IMAGE_SHARE,
    LOSS_SHARE,
    OUTSIDE_ALLOCATOR,
    TEXT_SHARE,
)

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_LINKS = ("link", "network")


@dataclass(frozen=True)
class Rates:
    """How fast one rank works: numbers per second, measured by tools/plan.py --calibrate or a preset's."""

    product_flops: float
    """Of a large bf16 matrix product."""
    image_flops: float
    """Of the image tower's forward and backward pass."""
    text_flops: float
    """Of the text tower's."""
    loss_flops: float
    """Of the contrastive loss, counted on 8 b B D."""
    host_to_device: float
    """Bytes, from pinned host memory."""
    link: float
    """Bytes that one rank sends to the others of its host."""
    network: float
    """Bytes that one rank sends to other hosts."""
    disk_write: float
    """Bytes, per host, until they are on the disk; reading is taken to be as fast."""
    decoded: float
    """Images read, decoded and cropped, per loader process."""

    @classmethod
    def read(cls, path: str | Path, preset: "Rates") -> "Rates":
        """What `--calibrate` wrote; `preset` has the links that one rank cannot measure. Raises ConfigError."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))["rates"]
            measured = [field.name for field in fields(cls) if field.name in values or field.name not in _LINKS]
            return replace(preset, **{name: float(values[name]) for name in measured})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cannot read rates from {str(path)!r} (tools/plan.py --calibrate): {error!r}") from None


def rates_json(machine: str, measured: Mapping[str, float]) -> str:
    """The file that `Rates.read` reads: what was measured, by the names of Rates."""
    return json.dumps({"machine": machine, "rates": measured}, indent=1)


@dataclass(frozen=True)
class Cluster:
    """Hosts that are all alike."""

    name: str
    gpus_per_host: int
    hosts: int
    gpu_memory: float
    """Bytes of one GPU; 0: training runs on the CPU."""
    host_memory: float
    """Bytes that a host has free for the run."""
    disk: float
    """Bytes free where the step store would go."""
    rates: Rates
    nvme: float | None = None
    """Bytes free where ZeRO-3 would offload to disk, if that is another one."""

    @property
    def gpus(self) -> int:
        return self.gpus_per_host * self.hosts

    @property
    def hides_exchanges(self) -> bool:
        """Whether features travel while tiles are computed: between hosts and on CPUs. Between GPUs of one host the
        GPU's own multiprocessors copy, and the tiles wait for them (docs/losses.md)."""
        return self.hosts > 1 or not self.gpu_memory

    @property
    def usable_gpu_memory(self) -> float:
        """What PyTorch's allocator may hold."""
        return max(0.0, self.gpu_memory - OUTSIDE_ALLOCATOR)

    @property
    def usable_host_memory(self) -> float:
        return self.host_memory * HOST_MARGIN

    def measured(self, *, gpu_memory: float, host_memory: float, disk: float, nvme: float | None = None) -> "Cluster":
        """The same with what is really free."""
        return replace(self, gpu_memory=gpu_memory, host_memory=host_memory, disk=disk, nvme=nvme)


def _preset(product: float, link: float, host_to_device: float) -> Rates:
    return Rates(
        product_flops=product,
        image_flops=product * IMAGE_SHARE,
        text_flops=product * TEXT_SHARE,
        loss_flops=product * LOSS_SHARE,
        host_to_device=host_to_device,
        link=link,
        network=25e9,
        disk_write=2e9,
        decoded=DECODED_PER_CORE,
    )


# Memory as the driver reports it. Product rates: H200 measured (docs/performance.md), the others three quarters of the
# maker's dense bf16 figure; links and PCIe: three quarters of the maker's figure for one direction.
GPUS: dict[str, tuple[float, Rates]] = {
    "a100-40gb": (39.4 * GIB, _preset(234e12, 225e9, 24e9)),
    "a100": (79.2 * GIB, _preset(234e12, 225e9, 24e9)),
    "a800": (79.2 * GIB, _preset(234e12, 150e9, 24e9)),
    "h100": (79.1 * GIB, _preset(660e12, 337e9, 48e9)),
    "h200": (139.8 * GIB, _preset(730e12, 337e9, 48e9)),
    "cpu": (0.0, _preset(5e10, 1e9, 1e10)),
}


def describe(
    *,
    gpu: str = "h200",
    gpus: int = 8,
    hosts: int = 1,
    gpu_memory: str | None = None,
    host_memory: str = "1000GiB",
    disk: str = "4TB",
    rates: Rates | None = None,
    link: str | None = None,
    network: str | None = None,
) -> Cluster:
    """A cluster by the words of the command line; `gpus` per host. Raises ConfigError for what it does not know."""
    if gpu.lower() not in GPUS:
        raise ConfigError(f"unknown GPU {gpu!r}: known are {', '.join(GPUS)}; give another one by --gpu-memory")
    if gpus < 1 or hosts < 1:
        raise ConfigError(f"expected at least one GPU and one host, got {gpus} and {hosts}")
    memory, preset = GPUS[gpu.lower()]
    chosen = rates or preset
    if link is not None:
        chosen = replace(chosen, link=parse_size(link))
    if network is not None:
        chosen = replace(chosen, network=parse_size(network))
    return Cluster(
        name=gpu.lower(),
        gpus_per_host=gpus,
        hosts=hosts,
        gpu_memory=memory if gpu_memory is None else parse_size(gpu_memory),
        host_memory=parse_size(host_memory),
        disk=parse_size(disk),
        rates=chosen,
    )


def parse_size(text: str) -> float:
    """Bytes of "80GiB", "141 GB", "4TB" or a bare number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)(/s)?\s*", text)
    unit = match and _UNITS.get(match.group(2).upper())
    try:
        if match and unit:
            return float(match.group(1)) * unit
    except ValueError:
        pass
    raise ConfigError(f"{text!r} is not a size: write for example 80GiB, 141GB or 4TB")
