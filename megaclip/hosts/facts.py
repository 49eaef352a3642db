"""What a rank reports to `megaclip check-hosts`: software, disk and data of its host, and the speed of its device."""

import platform
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel

import megaclip
from megaclip.data.patterns import expand_pattern
from megaclip.errors import DataError, first_line
from megaclip.logging import local_rank_from_environment
from megaclip.zero.op_builds import is_built

PACKAGES = ("torch", "deepspeed", "numpy", "pillow", "open_clip_torch", "timm", "transformers", "triton")
"""Packages whose versions must be equal on all hosts. A package may be missing on all of them."""
_PRODUCTS = 5
"""Number of timed matrix products. The fastest counts, to reduce the effect of other programs."""


class Report(BaseModel):
    """Facts about one rank and, on the first rank of a host, about the host."""

    host: str
    local_rank: int
    time_s: float
    """Seconds since 1970 by the host's clock."""
    properties: dict[str, str] = {}
    """Properties of the host that must be equal on all hosts, by name. Empty on its other ranks."""
    product_ms: float | None = None
    """Duration of a matrix product in milliseconds. None: this rank has no GPU."""
    problems: list[str] = []
    """Problems that this rank can find alone: text with what to do."""
    mib_per_s: float | None = None
    """Rate of messages to the first rank and back. None: not measured."""


def report(*, shared: Path | None, sign: str, min_free_gib: float, data: Sequence[str], ops: Sequence[str]) -> Report:
    """Return the report of this rank, without the network. All ranks call it at the same moment, to compare clocks.

    Args:
        shared: folder that all hosts should share. None: not checked.
        sign: name of a file in it.
        min_free_gib: GiB that must be free in it.
        data: paths and patterns that should exist.
        ops: DeepSpeed's ops that the run uses.
    """
    local_rank = local_rank_from_environment()
    own = Report(host=socket.gethostname(), local_rank=local_rank, time_s=time.time())
    if get_accelerator().device_name() == "cuda" and local_rank >= torch.cuda.device_count():
        own.problems.append(f"no GPU for local rank {local_rank}; correct --nproc-per-node, or CUDA_VISIBLE_DEVICES")
    else:
        own.product_ms, is_right = _matrix_product(torch.device(get_accelerator().device_name(local_rank)))
        if not is_right:
            broken = "is wrong: the GPU, processor or memory is broken; leave out the host"
            own.problems.append(f"a matrix product of local rank {local_rank} {broken}")
    if local_rank == 0:
        own.properties = _properties()
        missing = [name for name in ops if not is_built(name)]  # the run compiles them when it starts
        if missing and not all(map(shutil.which, ("g++", "ninja"))):
            advice = "g++ or ninja is not on PATH; install them, or set PATH"
            own.problems.append(f"{', '.join(missing)} not compiled, and {advice}")
        if shared is not None and not (shared / sign).exists():
            advice = "mount the same file system there"
            own.problems.append(f"does not see a file that the first host has written to --logs; {advice}")
        elif shared is not None and (free_gib := shutil.disk_usage(shared).free / 2**30) < min_free_gib:
            advice = f"{min_free_gib:g} needed; delete files, or choose another folder"
            own.problems.append(f"{free_gib:.1f} GiB free in --logs, {advice}")
        for pattern in data:
            try:
                if not pattern.startswith("hf:"):
                    own.properties[f"data {pattern}"] = f"{len(expand_pattern(pattern))} files"
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
