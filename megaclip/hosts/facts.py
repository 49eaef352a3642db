"""Collect what `megaclip check-hosts` compares, on one host: software, accelerators, disks, data and speed."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel, ConfigDict

import megaclip
from megaclip.data.patterns import expand_pattern
from megaclip.errors import DataError, first_line
from megaclip.zero.op_builds import is_built

PACKAGES = ("torch", "deepspeed", "numpy", "pillow", "open_clip_torch", "timm", "transformers", "triton")
"""Packages whose versions must be equal on all hosts. A package may be missing on all of them."""
OPS = ("cpu_adam", "fused_adam")
"""DeepSpeed's ops that runs use."""
HUB = "on the hub"
"""Value of `Facts.data` for data of the Hugging Face hub, which are not checked."""
_PRODUCTS = 5
"""Number of timed matrix products. The fastest counts, to reduce the effect of other programs."""


class Facts(BaseModel):
    """The properties of one host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str
    packages: dict[str, str]
    """Versions by package."""
    commit: str
    """Commit of the checkout, with "+ changes" if files differ from it; the version if there is no checkout."""
    accelerator: str
    """Number and name of the accelerators, such as "8 x NVIDIA H200"; "cpu" without accelerators."""
    accelerators: int
    """Number of accelerators, 0 on CPUs."""
    driver: str
    """Version of the GPU driver, "" on CPUs."""
    ops: dict[str, bool]
    """Name of an op -> True if it is compiled or installed."""
    can_compile: bool
    """True if g++ and ninja are on PATH."""
    time_s: float
    """Seconds since 1970 by the host's clock."""
    ran_s: float
    """Age in seconds of the answering process when it read the clock."""
    free_gib: dict[str, float]
    """Free GiB by folder."""
    token: str
    """Content of the token file in the shared folder, "" if it cannot be read."""
    data: dict[str, str]
    """"N files", or the reason why there are none, by pattern of training data."""
    matmul_ms: list[float]
    """Duration of a matrix product in milliseconds, by accelerator; one value on CPUs."""
    matmul_is_right: bool
    """True if the products of all accelerators are exact."""


def collect(*, shared: Path | None, token: str, data: Sequence[str]) -> Facts:
    """Return the properties of this host.

    Args:
        shared: folder that all hosts should share. None: not checked.
        token: name of the file in it whose content is returned.
        data: paths and patterns that should exist.
    """
    devices = list(_devices())
    products = [_matrix_product(device) for device in devices]
    is_gpu = get_accelerator().device_name() == "cuda"
    return Facts(
        python=platform.python_version(),
        packages=dict(_versions()),
        commit=_commit(),
        accelerator=f"{len(devices)} x {torch.cuda.get_device_name(0)}" if is_gpu and devices else "cpu",
        accelerators=len(devices) if is_gpu else 0,
        driver=_driver() if is_gpu else "",
        ops={name: is_built(name) for name in OPS},
        can_compile=all(shutil.which(program) for program in ("g++", "ninja")),
        time_s=time.time(),
        ran_s=_running_s(),
        free_gib=dict(_free_gib([*([shared] if shared else []), Path("/tmp"), Path("/dev/shm")])),
        token=_read(shared / token) if shared is not None and token else "",
        data={pattern: _visible(pattern) for pattern in data},
        matmul_ms=[milliseconds for milliseconds, _ in products],
        matmul_is_right=all(is_right for _, is_right in products),
    )


def _running_s() -> float:
    """Return the age of this process in seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime in `man proc_pid_stat`
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "missing"


def _commit() -> str:
    """Return the commit of the checkout that is imported."""
    root = Path(megaclip.__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    version = f"version {megaclip.__version__}"
    if not (root / ".git").exists() or shutil.which("git") is None:
        return version
    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    except subprocess.TimeoutExpired:
        return version
    return f"{commit} + changes" if commit and changed else commit or version


def _driver() -> str:
    """Return the version of NVIDIA's driver, "" if nvidia-smi does not report it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def _free_gib(folders: Sequence[Path]) -> Iterator[tuple[str, float]]:
    for folder in folders:
        try:
            yield str(folder), round(shutil.disk_usage(folder).free / 2**30, 1)
        except OSError:
            yield str(folder), 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _visible(pattern: str) -> str:
    if pattern.startswith("hf:"):
        return HUB
    try:
        return f"{len(expand_pattern(pattern))} files"
    except (DataError, OSError) as error:
        return first_line(error)


def _devices() -> Iterator[torch.device]:
    if get_accelerator().device_name() == "cuda":
        yield from (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    else:
        yield torch.device("cpu")


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
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - started)
    integers = (torch.arange(1024 * 1024) % 7 - 3).view(1024, 1024)
    product = integers.to(device, torch.float32) @ integers.to(device, torch.float32).T
    exact = integers.double() @ integers.double().T
    return round(seconds * 1000, 2), bool((product.cpu().double() == exact).all())
