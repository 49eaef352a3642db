"""Collect the facts that a rank sends to `megaclip check-hosts`: software, disks and data of its host, speed of its
device.
"""

import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel, ConfigDict

import megaclip
from megaclip.data.patterns import expand_pattern
from megaclip.errors import DataError, first_line
from megaclip.logging import local_rank_from_environment
from megaclip.zero.op_builds import is_built

PACKAGES = ("torch", "deepspeed", "numpy", "pillow", "open_clip_torch", "timm", "transformers", "triton")
"""Packages whose versions must be equal on all hosts. A package may be missing on all of them."""
HUB = "on the hub"
"""Value of `HostFacts.data` for data of the Hugging Face hub, which are not checked."""
_PRODUCTS = 5
"""Number of timed matrix products. The fastest counts, to reduce the effect of other programs."""


class HostFacts(BaseModel):
    """The properties of one host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str
    packages: dict[str, str]
    """Versions by package."""
    commit: str
    """Commit of the checkout, with "+ changes" if files differ from it; the version if there is no checkout."""
    accelerators: str
    """Number and name of the accelerators, such as "8 x NVIDIA H200"; "cpu" without accelerators."""
    driver: str
    """Version of the GPU driver, "" on CPUs."""
    ops: dict[str, bool]
    """DeepSpeed's ops that the run uses -> True if it is compiled or installed."""
    can_compile: bool
    """True if g++ and ninja are on PATH."""
    free_gib: float | None
    """Free GiB in the shared folder. None: there is none."""
    token: str
    """Content of the token file in the shared folder, "" if it cannot be read."""
    data: dict[str, str]
    """"N files", or the reason why there are none, by pattern of training data."""


class Report(BaseModel):
    """Facts about one rank and its host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    local_rank: int
    matmul_ms: float | None
    """Duration of a matrix product in milliseconds. None: this rank has no GPU."""
    matmul_is_right: bool
    """True if a product of integers is exact."""
    time_s: float
    """Seconds since 1970 by the host's clock."""
    facts: HostFacts | None
    """None on the ranks of a host that are not its first one."""
    network: str = ""
    """Reason why the rank could not take part in the collectives, "" if it could."""
    mib_per_s: float | None = None
    """Rate of messages to the first rank and back. None: not measured."""


def report(*, shared: Path | None, token: str, data: Sequence[str], ops: Sequence[str]) -> Report:
    """Return the report of this rank, without the network. All ranks call it at the same moment, to compare clocks.

    Args:
        shared: folder that all hosts should share. None: not checked.
        token: name of the file in it whose content is returned.
        data: paths and patterns that should exist.
        ops: DeepSpeed's ops that should be compiled.
    """
    time_s, local_rank = time.time(), local_rank_from_environment()
    product_ms, is_right = _matrix_product(local_rank)
    return Report(
        host=socket.gethostname(),
        local_rank=local_rank,
        matmul_ms=product_ms,
        matmul_is_right=is_right,
        time_s=time_s,
        facts=_host_facts(shared, token, data, ops) if local_rank == 0 else None,
    )


def _host_facts(shared: Path | None, token: str, data: Sequence[str], ops: Sequence[str]) -> HostFacts:
    is_gpu = get_accelerator().device_name() == "cuda"
    gpus = torch.cuda.device_count() if is_gpu else 0
    return HostFacts(
        python=platform.python_version(),
        packages={package: _version(package) for package in PACKAGES},
        commit=_commit(),
        accelerators=f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "cpu",
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if is_gpu else "",
        ops={name: is_built(name) for name in ops},
        can_compile=all(shutil.which(program) for program in ("g++", "ninja")),
        free_gib=None if shared is None else _free_gib(shared),
        token="" if shared is None else _read(shared / token),
        data={pattern: _visible(pattern) for pattern in data},
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _output(*command: str) -> str:
    """Return the first line that a command prints, or "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def _commit() -> str:
    """Return the commit of the checkout that is imported."""
    root = Path(megaclip.__file__).parents[1]
    commit = _output("git", "-C", str(root), "rev-parse", "--short=10", "HEAD") if (root / ".git").exists() else ""
    if not commit:
        return f"version {megaclip.__version__}"
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} + changes" if changed else commit


def _free_gib(folder: Path) -> float:
    with suppress(OSError):
        return round(shutil.disk_usage(folder).free / 2**30, 1)
    return 0.0


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def _visible(pattern: str) -> str:
    if pattern.startswith("hf:"):
        return HUB
    try:
        return f"{len(expand_pattern(pattern))} files"
    except (DataError, OSError) as error:
        return first_line(error)


def _matrix_product(local_rank: int) -> tuple[float | None, bool]:
    """Return the milliseconds of a matrix product, and whether the product of small integers is exact.

    The product has 8192 rows in bfloat16 on a GPU (1.1e12 operations), and 1024 in float32 on a CPU (2e9). Return
    (None, True) if this rank has no GPU.
    """
    is_gpu = get_accelerator().device_name() == "cuda"
    if is_gpu and local_rank >= torch.cuda.device_count():
        return None, True
    device = torch.device("cuda", local_rank) if is_gpu else torch.device("cpu")
    rows, dtype = (8192, torch.bfloat16) if is_gpu else (1024, torch.float32)
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    seconds = float("inf")
    for _ in range(_PRODUCTS + 1):
        started = time.perf_counter()
        matrix @ matrix
        if is_gpu:
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - started)
    integers = (torch.arange(1024 * 1024) % 7 - 3).view(1024, 1024)
    product = integers.to(device, torch.float32) @ integers.to(device, torch.float32).T
    exact = integers.double() @ integers.double().T
    return round(seconds * 1000, 2), bool((product.cpu().double() == exact).all())
