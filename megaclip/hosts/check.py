"""The check of hosts before a run: what each rank reports, its connections, and the problems that the reports show."""

import platform
import shlex
import shutil
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel
from torch.utils.cpp_extension import CUDA_HOME

import megaclip
from megaclip.data.sources import data_files
from megaclip.errors import DataError, first_line, public
from megaclip.logging import format_count, local_rank_from_environment
from megaclip.zero.op_builds import is_built

PACKAGES = ("torch", "deepspeed", "numpy", "pillow", "simplejpeg", "open_clip_torch", "timm", "transformers", "triton")
"""Packages whose versions must be equal on all hosts. A package may be missing on all of them."""
_PRODUCTS = 5
"""Number of timed matrix products. The fastest counts, to reduce the effect of other programs."""
LIMIT_S = 60.0
"""Seconds within which the ranks must have exchanged their messages."""
_MIB, _MESSAGES = 16, 4
"""Size of a message in MiB, and number of messages."""
CLOCK_LIMIT_S = 2.0
"""Largest allowed difference of a clock from the median clock, in seconds."""
SLOW_FACTOR = 1.5
"""A rank is slow if its matrix product takes more than this many times as long as the median."""
SLOW_LINK_FACTOR = 2.0
"""A host's network is slow if its rate is this many times lower than the median."""
_ADVICE = {
    "commit": "check out the same commit without changes on all hosts",
    "accelerators": "leave out the host, or look for a failed GPU with nvidia-smi",
    "data": "mount the same data there",
}
"""Advice for a property that differs between hosts, by its first word. For other properties: install one version."""


class Report(BaseModel):
    """Facts about one rank and, on the first rank of a host, about the host."""

    host: str
    local_rank: int
    time_s: float
    """Seconds since 1970 by the host's clock."""
    properties: dict[str, str] = {}
    """Properties of the host that must be equal on all hosts, by name. Empty on its other ranks."""
    product_ms: float | None = None
    """Duration of a matrix product in milliseconds. None: there is no GPU for this local rank, or the product fails."""
    problems: list[str] = []
    """Problems that this rank can find alone: text with what to do."""
    mib_per_s: float | None = None
    """Rate of messages to the first rank and back. None: not measured."""


def report(*, shared: Path | None, sign: str, min_free_gib: float, data: Sequence[str], ops: Sequence[str]) -> Report:
    """Return the report of this rank, without the network. All ranks call it at the same moment, to compare clocks.

    shared: folder that all hosts should share, with a file `sign`. data: paths and patterns that should exist. ops:
    DeepSpeed's ops that the run uses.
    """
    local_rank = local_rank_from_environment()
    own = Report(host=socket.gethostname(), local_rank=local_rank, time_s=time.time())
    if get_accelerator().device_name() == "cuda" and local_rank >= torch.cuda.device_count():
        own.problems.append(f"no GPU for local rank {local_rank}; correct --nproc-per-node, or CUDA_VISIBLE_DEVICES")
    else:
        try:
            own.product_ms, is_right = _matrix_product(torch.device(get_accelerator().device_name(local_rank)))
            problem = "" if is_right else "is wrong: the GPU, processor or memory is broken"
        except RuntimeError as error:
            problem = f"fails: {first_line(error)}"
        if problem:
            own.problems.append(f"a matrix product of local rank {local_rank} {problem}; leave out the host")
    if local_rank == 0:
        own.properties = _properties()
        missing = [name for name in ops if not is_built(name)]  # the run compiles them when it starts
        tools = {"g++": shutil.which("g++"), "ninja": shutil.which("ninja")}
        tools |= {"nvcc": CUDA_HOME} if get_accelerator().device_name() == "cuda" else {}
        absent = ", ".join(tool for tool, place in tools.items() if place is None)
        if missing and absent:
            advice = "install what is missing, or set PATH, or for nvcc CUDA_HOME"
            own.problems.append(f"{', '.join(missing)} not compiled, and {absent} not found; {advice}")
        if shared is not None and not (shared / sign).exists():
            advice = "mount the same file system there"
            own.problems.append(f"does not see a file that the first host has written to --logs; {advice}")
        elif shared is not None and (free_gib := shutil.disk_usage(shared).free / 2**30) < min_free_gib:
            advice = f"{min_free_gib:g} needed; delete files, or choose another folder"
            own.problems.append(f"{free_gib:.1f} GiB free in --logs, {advice}")
        for pattern in data:
            try:
                if not pattern.startswith("hf:") or pattern.startswith("hf://"):
                    own.properties[f"data {public(pattern)}"] = format_count(len(data_files(pattern)), "file")
            except (DataError, OSError) as error:
                own.problems.append(f"{first_line(error)}; mount the data under the same path on all hosts")
    return own


def _properties() -> dict[str, str]:
    gpus = torch.cuda.device_count() if get_accelerator().device_name() == "cuda" else 0
    root = Path(megaclip.__file__).parents[1]
    describe = f"git -C {shlex.quote(str(root))} describe --always --dirty --abbrev=10 --exclude='*'"
    driver = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    found = {
        "accelerators": f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "cpu",
        "Python": platform.python_version(),
        "commit": _first_line_of(describe) if (root / ".git").exists() else f"version {megaclip.__version__}",
        "driver": _first_line_of(driver) if gpus else "none",
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _first_line_of(command: str) -> str:
    """Return the first line that a command prints, which is its error if it fails."""
    return subprocess.getoutput(command).partition("\n")[0]


def _matrix_product(device: torch.device) -> tuple[float, bool]:
    """Return the milliseconds of a matrix product, and whether the product of small integers is exact.

    The product has 8192 rows in bfloat16 on a GPU (1.1e12 operations), and 1024 in float32 on a CPU (2e9).
    """
    rows, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    seconds = float("inf")
    for _ in range(_PRODUCTS + 1):
        started = time.perf_counter()
        matrix @ matrix
        get_accelerator().synchronize(device)
        seconds = min(seconds, time.perf_counter() - started)
    integers = (torch.arange(1024 * 1024) % 7 - 3).view(1024, 1024)
    product = integers.to(device, torch.float32) @ integers.to(device, torch.float32).T
    exact = integers.double() @ integers.double().T
    return round(seconds * 1000, 2), bool((product.cpu().double() == exact).all())


def measure(store: dist.Store, rank: int, world_size: int, others: list[int]) -> tuple[str, float | None]:
    """Exchange messages with the other ranks; every rank calls this function at the same time.

    Return the problem of this rank, "" without one, and its rate to rank 0 in MiB/s if it is one of `others`, which are
    the same on all ranks.
    """
    device = torch.device(get_accelerator().device_name(local_rank_from_environment()))
    try:
        get_accelerator().set_device(device)
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=limit)
        numbers = torch.arange(1000.0, device=device) * (rank + 1)
        dist.all_reduce(numbers)
        if not torch.equal(numbers.cpu(), torch.arange(1000.0) * (world_size * (world_size + 1) // 2)):
            return "an all-reduce has a wrong result: the network or memory is broken", None
        return "", _rate(rank, others, device)
    except RuntimeError as error:
        advice = "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to the interface that leads to them, and open all ports"
        return f"cannot exchange data with the other hosts ({first_line(error)}); {advice}", None


def _rate(rank: int, others: list[int], device: torch.device) -> float | None:
    """Return the MiB/s between this rank and rank 0, if this rank is one of `others`. Pairs are measured in turn."""
    message = torch.zeros(_MIB * 2**18, device=device)
    rate = None
    for other in others:
        dist.all_reduce(torch.zeros(1, device=device))
        if rank not in (0, other):
            continue
        for number in range(_MESSAGES + 1):
            if number == 1:  # the first message connects
                started = time.perf_counter()
            for transfer in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
                transfer(message, other if rank == 0 else 0)
        get_accelerator().synchronize(device)
        if rank == other:
            rate = 2 * _MESSAGES * _MIB / (time.perf_counter() - started)
    return rate


def find_problems(reports: Sequence[Report]) -> list[tuple[str, str]]:
    """Return (host, description of a fault and what to do) for all faults, in the order of the ranks.

    reports: one per rank, in the order of the ranks.
    """
    order = list(dict.fromkeys(one.host for one in reports))
    found = [(one.host, text) for one in reports for text in one.problems]
    for differences in (_different_properties, _clocks, _devices, _networks):
        found += differences(reports)
    return sorted(found, key=lambda problem: order.index(problem[0]))


def _different_properties(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    """Yield the hosts that differ from the most frequent value, or from the first of equally frequent values."""
    for name in dict.fromkeys(name for one in reports for name in one.properties):
        values = {one.host: one.properties[name] for one in reports if name in one.properties}
        usual = Counter(values.values()).most_common(1)[0][0]
        advice = _ADVICE.get(name.split()[0], "install the same version on all hosts")
        for host, value in values.items():
            if value != usual:
                yield host, f"{name}: {value}, most hosts have {usual}; {advice}"


def _clocks(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    times_s = {one.host: one.time_s for one in reports if one.properties}
    middle_s = statistics.median_low(times_s.values())
    for host, time_s in times_s.items():
        if abs(time_s - middle_s) > CLOCK_LIMIT_S:
            yield host, f"its clock differs by {time_s - middle_s:+.1f} s; synchronise it, for example with chrony"


def _devices(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    timed = [(one, one.product_ms) for one in reports if one.product_ms is not None]
    middle_ms = statistics.median_low([product_ms for _, product_ms in timed] or [0.0])
    for one, product_ms in timed:
        if product_ms > SLOW_FACTOR * middle_ms:
            slow = f"slow: a matrix product of local rank {one.local_rank} takes {product_ms:g} ms"
            advice = "end other programs there, check for power or temperature limits, or leave out the host"
            yield one.host, f"{slow}, on most ranks {middle_ms:g} ms; {advice}"


def _networks(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    rates = {one.host: one.mib_per_s for one in reports if one.mib_per_s is not None}
    middle = statistics.median_high(rates.values() or [0.0])
    for host, rate in rates.items():
        if rate * SLOW_LINK_FACTOR < middle:
            text = f"slow network: {rate:.0f} MiB/s, most hosts {middle:.0f}"
            yield host, f"{text}; check its cable, switch and interface"


def table(reports: Sequence[Report], problems: Sequence[tuple[str, str]]) -> str:
    """Return the text of the report: a line per host, then a line per problem."""
    columns = ("accelerators", "Python", "torch", "commit")
    rows: list[tuple[str, ...]] = [("host", "ranks", *columns, "product ms", "MiB/s", "state")]
    bad = {host for host, _ in problems}
    for one in reports:
        if one.properties:
            own = [other for other in reports if other.host == one.host]
            product = f"{max(other.product_ms or 0.0 for other in own):g}"
            rate = "-" if one.mib_per_s is None else f"{one.mib_per_s:.0f}"
            values = (one.properties[column] for column in columns)
            rows.append((one.host, str(len(own)), *values, product, rate, "problem" if one.host in bad else "ok"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{host}: {text}" for host, text in problems)])
