"""The machines of a plan: memory and rates by GPU name (`GPUS`), by flags, or measured (`Rates`)."""

import json
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megaclip.errors import ConfigError, nearest
from megaclip.losses.way import CPU, Machine
from megaclip.planner import constants
from megaclip.planner.constants import GIB, MEMORY_SHARE

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_LINKS = ("link", "network")


@dataclass(frozen=True)
class Rates:
    """Rates of one rank, per second: measured by `tools/measure_rates.py`, or those of a preset."""

    product_flops: float
    """Operations per second of a large bf16 matrix product."""
    attention_flops: float
    """Operations per second of attention, forward and backward, in whole tiles."""
    memory: float
    """Bytes per second that norms, activation functions and sums read and write."""
    loss_flops: float
    """Operations per second of the contrastive loss, counted as 8 b B D."""
    host_to_device: float
    """Bytes per second from pinned host memory to the GPU."""
    link: float
    """Bytes per second that one rank sends to the other ranks of its host."""
    network: float
    """Bytes per second that one rank sends to other hosts."""
    disk_write: float
    """Bytes per second that a host writes to its disk; the planner reads at the same rate."""
    decoded: float
    """Samples per second that one core reads, decodes and crops."""

    @classmethod
    def read(cls, path: str | Path, preset: "Rates") -> "Rates":
        """Read a file of `tools/measure_rates.py`. `preset` has the link rates that one rank cannot measure. Raises
        ConfigError."""
        names = [field.name for field in fields(cls)]
        try:
            values = {
                name: float(value)
                for name, value in json.loads(Path(path).read_text(encoding="utf-8"))["rates"].items()
            }
            measured = {name: values[name] for name in names if name in values or name not in _LINKS}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"--rates {str(path)!r} is not a file of tools/measure_rates.py: {error!r}") from None
        for name, value in values.items():
            if name not in names:
                raise ConfigError(f"--rates {str(path)!r} has the unknown rate {name!r}{nearest(name, set(names))}")
            if not 0 < value < math.inf:
                raise ConfigError(f"--rates {str(path)!r}: {name} is {value}; write a number above 0 per second")
        return replace(preset, **measured)


@dataclass(frozen=True)
class Cluster:
    """Hosts with equal memory, GPUs and rates."""

    name: str
    gpus_per_host: int
    hosts: int
    gpu_memory: float
    """Bytes of one GPU that are free for the run. 0: training runs on the CPU."""
    gpu_total_memory: float
    """Bytes of one GPU, free or not."""
    host_memory: float
    """Bytes of host memory that are free for the run."""
    disk: float
    """Bytes that are free on the disk of the step store."""
    rates: Rates
    cores: int | None = None
    """CPU cores of a host. None: a core for each loader process."""
    measured: Machine | None = None
    """Links and products that all ranks of a run have measured, for the choice of exchange and reduction. None: those
    of `rates`."""

    @property
    def gpus(self) -> int:
        return self.gpus_per_host * self.hosts

    def loader_cores(self, workers: int) -> float:
        """Return the number of cores on which one rank's samples are decoded. workers: its loader processes."""
        available = math.inf if self.cores is None else self.cores / self.gpus_per_host
        return min(float(max(1, workers)), available)

    @property
    def hides_exchanges(self) -> bool:
        """True if features are exchanged while tiles are computed: between hosts and on CPUs. Between GPUs of one host
        the copies use the GPU's multiprocessors, so the tiles wait for them (docs/losses.md)."""
        return self.hosts > 1 or not self.gpu_memory

    def loss_machine(self, free_bytes: float) -> Machine:
        """Return the figures from which exchange and reduction are chosen, if `free_bytes` of a GPU are free. On CPUs
        they are fixed."""
        if not self.gpu_memory:
            return CPU
        measured = self.measured or Machine(self.slowest_link, self.rates.product_flops, free_bytes)
        return measured._replace(free_bytes=free_bytes)

    @property
    def slowest_link(self) -> float:
        """Bytes per second that a rank sends in a collective of all ranks."""
        return self.rates.link if self.hosts == 1 else min(self.rates.link, self.rates.network)

    def tensor_link(self, ranks: int) -> float:
        """Return the bytes per second that a rank sends to its tensor-parallel group of `ranks` consecutive ranks.

        A rate of NVLink that is given or measured is taken for groups of any size.
        """
        if self.gpus_per_host % ranks:
            return self.slowest_link
        return self.rates.link * (constants.WIDE_SUMS_GAIN if ranks >= 4 and self.rates.link in _NVLINKS else 1)

    @property
    def usable_gpu_memory(self) -> float:
        """Bytes of one GPU that PyTorch's allocator may hold."""
        return max(0.0, self.gpu_memory - constants.OUTSIDE_ALLOCATOR)

    @property
    def usable_host_memory(self) -> float:
        """Bytes of host memory that a plan may use."""
        return self.host_memory * constants.HOST_MARGIN

    @property
    def usable_disk(self) -> float:
        """Bytes of disk that a plan may use for the step store."""
        return self.disk * constants.HOST_MARGIN


def _preset(product: float, memory: float, link: float, host_to_device: float, share: float = MEMORY_SHARE) -> Rates:
    """Return a GPU's rates. memory, link: the maker's bytes per second, of the link in one direction."""
    return Rates(
        product_flops=product,
        attention_flops=product * constants.ATTENTION_SHARE,
        memory=memory * share,
        loss_flops=product * constants.LOSS_SHARE,
        host_to_device=host_to_device,
        link=link * constants.LINK_SHARE,
        network=25e9,
        disk_write=2e9,
        decoded=constants.DECODED_PER_CORE,
    )


# Memory is the total that PyTorch reports. The H200's product rate was measured (docs/performance.md). Other product
# rates are three quarters of the maker's figure for dense bf16 products that accumulate in float32 (H100: two thirds).
# The H100's share of the memory rate is fitted to tests/unit/planner/h100_runs.json.
# PCIe: three quarters of the maker's figure, in one direction.
GPUS: dict[str, tuple[float, Rates]] = {
    "a100-40gb": (39.4 * GIB, _preset(234e12, 1.56e12, 300e9, 24e9)),
    "a100": (79.2 * GIB, _preset(234e12, 2.04e12, 300e9, 24e9)),
    "a800": (79.2 * GIB, _preset(234e12, 2.04e12, 200e9, 24e9)),
    "h20": (95.1 * GIB, _preset(111e12, 4.0e12, 450e9, 48e9)),
    "h100": (79.1 * GIB, _preset(660e12, 3.35e12, 450e9, 48e9, 0.75)),
    "h200": (139.8 * GIB, _preset(730e12, 4.8e12, 450e9, 48e9)),
    "b200": (178.3 * GIB, _preset(1690e12, 8.0e12, 900e9, 48e9)),
    "a10g": (22.1 * GIB, _preset(52e12, 0.6e12, 32e9, 24e9)),
    "a6000": (47.5 * GIB, _preset(116e12, 0.77e12, 32e9, 24e9)),
    "l4": (22.1 * GIB, _preset(91e12, 0.3e12, 32e9, 24e9)),
    "l40s": (44.4 * GIB, _preset(272e12, 0.86e12, 32e9, 24e9)),
    "rtx-3090": (23.6 * GIB, _preset(53e12, 0.94e12, 32e9, 24e9)),
    "rtx-4090": (23.6 * GIB, _preset(124e12, 1.01e12, 32e9, 24e9)),
    "rtx-5090": (31.3 * GIB, _preset(157e12, 1.79e12, 64e9, 48e9)),
    "cpu": (0.0, _preset(5e10, 2e10, 3e9, 1e10)),
}
HOPPER_GPUS = ("h20", "h100", "h200")
_NVLINKS = {rates.link for _, rates in GPUS.values() if rates.link > 100e9 * constants.LINK_SHARE}


def gpu_preset(gpu: str) -> tuple[float, Rates]:
    """Return the memory and the rates of a GPU of `GPUS`, in upper or lower case. Raises ConfigError."""
    if gpu.lower() not in GPUS:
        raise ConfigError(f"--gpu {gpu!r} is unknown; use one of {', '.join(GPUS)}, with --gpu-memory for another GPU")
    return GPUS[gpu.lower()]


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
    """Return the cluster that the command line describes, with `gpus` per host. Raises ConfigError for wrong values."""
    memory, preset = gpu_preset(gpu)
    if gpu_memory is not None and not memory:
        raise ConfigError(f"--gpu-memory {gpu_memory!r} has no effect with --gpu {gpu!r}; leave one of them out")
    memory = memory if gpu_memory is None else parse_size(gpu_memory, "--gpu-memory")
    links = {"link": link, "network": network}
    given = {name: parse_size(text, f"--{name}") for name, text in links.items() if text is not None}
    return Cluster(
        name=gpu.lower(),
        gpus_per_host=gpus,
        hosts=hosts,
        gpu_memory=memory,
        gpu_total_memory=memory,
        host_memory=parse_size(host_memory, "--host-memory"),
        disk=parse_size(disk, "--disk"),
        rates=replace(rates or preset, **given),
    )


def parse_size(text: str, flag: str) -> float:
    """Return the bytes of "80GiB", "141 GB" or "4TB", or bytes per second of "300GB/s".

    Raises ConfigError, which names the flag, for anything else. A number without a unit, such as "24", is refused.
    Bits, as in "200Gb/s", are refused too, because the rates of links are often given in bits.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)(/s)?\s*", text)
    if match and re.fullmatch("[KMGT]i?b", match.group(2)):
        raise ConfigError(f"{flag} {text!r} is a number of bits; write an eighth of it with a B, for bytes")
    unit = match and _UNITS.get(match.group(2).upper())
    size = float(match.group(1)) * unit if match and unit else 0.0
    if not 0 < size < math.inf:
        raise ConfigError(f"{flag} {text!r} is not a size with its unit; write for example 80GiB, 141GB or 4TB")
    return size
