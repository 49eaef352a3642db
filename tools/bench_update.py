"""Measure the optimizer update of whole training steps, and list the kernels that it launches.

    python tools/bench_update.py --model ViT-B-16 --stages 0 1 2 3 --json update.json
    torchrun --nproc_per_node 2 tools/bench_update.py --model ViT-L-14 --stages 1 2 3
    python tools/bench_update.py --model demo-tiny --batch 8 --fp32

Each row is one ZeRO stage and one way to update:

* deepspeed: DeepSpeed's own step with its default, `bf16.check_grad_overflow: true` (ZeRO-1 and 2);
* unchecked: DeepSpeed's own step without this check;
* megaclip: the update of a run (megaclip/zero/update.py).

It prints the milliseconds of an update on the slowest rank (median over the steps after the warm-up) and on the GPU
alone, and the number of kernels and of waits for the GPU. A second table lists the kernels of one update. ZeRO-0 runs
in float32, the other stages in bfloat16. On a CPU the operations of PyTorch are listed instead of kernels.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import torch
from bench_methods import Case, Clock, MegaclipSteps
from bench_train import DEFAULT_CONFIG
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megaclip.comm.collectives import gather_objects
from megaclip.config.training import DEEPSPEED_DEFAULTS
from megaclip.engine import trainer
from megaclip.engine.process_group import start_process_group
from megaclip.zero import build
from megaclip.zero.optimizers import update

WARM_UP = 2
"""Steps before those that are measured."""
WAYS = ("deepspeed", "unchecked", "megaclip")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Calls in which the host waits for the GPU. `_local_scalar_dense` is the only one on a CPU."""


@dataclass
class Kernel:
    """A kernel of one update. On a CPU, an operation of PyTorch."""

    name: str
    count: int
    ms: float


@dataclass
class Row:
    """One line of the table."""

    model: str
    world_size: int
    zero_stage: int
    way: str
    update_ms: float = 0.0
    """Milliseconds from the end of the backward pass to the end of the update, on the slowest rank."""
    kernels_ms: float = 0.0
    """Sum of the times of the kernels."""
    launches: int = 0
    waits: int = 0
    gradient_norms: list[float] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16", help="preset, or the path of a model JSON")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="ZeRO stages")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways to update")
    parser.add_argument("--batch", type=int, default=256, help="samples of one rank, in one chunk")
    parser.add_argument("--steps", type=int, default=5, help="steps to measure, after the warm-up")
    parser.add_argument("--torch-adam", action="store_true", help="PyTorch's AdamW instead of DeepSpeed's FusedAdam")
    parser.add_argument("--fp32", action="store_true", help="float32 at every stage")
    parser.add_argument("--kernels", type=int, default=15, help="kernels to list per row; 0 lists none")
    parser.add_argument("--json", type=Path, help="file to write the rows to, with all kernels")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    start_process_group()
    print_rank_0(f"{'stage':>5}  {'way':10}{'update ms':>10}{'kernels ms':>11}{'launches':>9}{'waits':>6}")
    rows: list[Row] = []
    for stage in options.stages:
        for way in options.ways:
            if stage in (0, 3) and way == "unchecked":
                continue  # these stages have no such check
            rows.append(measure(options, stage, way))
            show(rows[-1], options.kernels)
            if options.json and dist.get_rank() == 0:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    dist.destroy_process_group()
    return 0


def measure(options: argparse.Namespace, stage: int, way: str) -> Row:
    """Train some steps at a ZeRO stage and measure their updates."""
    row = Row(options.model, dist.get_world_size(), stage, way)
    device = torch.device(get_accelerator().current_device_name())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(ds_config(options, stage, way)))
        case = Case(options.model, path, "pure_bf16", [], workers=0)
        own = mock.patch.object(build, "group_kernels", lambda engine: None)
        DEEPSPEED_DEFAULTS["bf16"]["check_grad_overflow"] = way == "deepspeed"  # ds_config.json may not set it
        with nullcontext() if way == "megaclip" else own:
            steps = MegaclipSteps(case, Clock(device))
        updates = Updates(row, device)
        with mock.patch.object(trainer, "update", updates.timed):
            for _ in range(WARM_UP + options.steps):
                steps.step()
        with mock.patch.object(trainer, "update", updates.profiled):
            steps.step()
        steps.close()
    slowest_ms = [max(step) for step in zip(*gather_objects(updates.times_ms), strict=True)]
    row.update_ms = statistics.median(slowest_ms[WARM_UP:])
    return row


class Updates:
    """Two replacements of `update` in a run's steps: one is timed, one is profiled."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.row = row
        self.device = device
        self.times_ms: list[float] = []

    def timed(self, engine: DeepSpeedEngine, step: int, loss: torch.Tensor) -> float:
        """Update, and append the milliseconds to `times_ms`."""
        elapsed_ms = start(self.device)
        norm = update(engine, step, loss)
        self.times_ms.append(elapsed_ms())
        self.row.gradient_norms.append(norm)
        return norm

    def profiled(self, engine: DeepSpeedEngine, step: int, loss: torch.Tensor) -> float:
        """Update, and list the kernels in the row."""
        synchronize(self.device)
        on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
            norm = update(engine, step, loss)
            synchronize(self.device)
        read_profile(self.row, profiler)
        return norm


def ds_config(options: argparse.Namespace, stage: int, way: str) -> dict[str, Any]:
    """Return ds_config.json: that of tools/bench_train.py with FusedAdam, at a stage, with one chunk per rank."""
    config = json.loads(json.dumps(DEFAULT_CONFIG))
    config |= {
        "train_batch_size": options.batch * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": stage},
        "megaclip": {"loss": "clip"},
    }
    config["optimizer"]["params"]["torch_adam"] = options.torch_adam
    if stage and not options.fp32:
        config["bf16"] = {"enabled": True}
    return config


def start(device: torch.device) -> Callable[[], float]:
    """Start a measurement. The returned function ends it and returns milliseconds; a GPU is timed by its own clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        return lambda: 1e3 * (time.perf_counter() - began)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()

    def elapsed_ms() -> float:
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    return elapsed_ms


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def read_profile(row: Row, profiler: profile) -> None:
    """Set the figures of `row` that come from the profile of one update."""
    averages = profiler.key_averages()
    on_gpu = [event for event in averages if event.device_type == DeviceType.CUDA]
    if on_gpu:
        events = [event for event in on_gpu if not getattr(event, "is_user_annotation", False)]
        row.kernels = [Kernel(event.key, event.count, event.self_device_time_total / 1e3) for event in events]
    else:
        events = [event for event in averages if event.key.startswith("aten::")]
        row.kernels = [Kernel(event.key, event.count, event.self_cpu_time_total / 1e3) for event in events]
    row.kernels.sort(key=lambda kernel: kernel.ms, reverse=True)
    row.kernels_ms = sum(kernel.ms for kernel in row.kernels)
    row.launches = sum(kernel.count for kernel in row.kernels)
    calls = {event.key: event.count for event in averages}
    row.waits = sum(calls.get(name, 0) for name in WAITS[:-1]) if on_gpu else calls.get(WAITS[-1], 0)


def show(row: Row, kernels: int) -> None:
    """Print a row and its longest kernels."""
    figures = f"{row.update_ms:10.2f}{row.kernels_ms:11.2f}{row.launches:9}{row.waits:6}"
    print_rank_0(f"{row.zero_stage:5}  {row.way:10}{figures}")
    for kernel in row.kernels[:kernels]:
        print_rank_0(f"{kernel.count:16} x{kernel.ms:10.3f} ms  {kernel.name[:110]}")
    left = row.kernels[kernels:]
    if kernels and left:
        print_rank_0(
            f"{sum(one.count for one in left):16} x{sum(one.ms for one in left):10.3f} ms  {len(left)} other kernels"
        )


def print_rank_0(line: str) -> None:
    """Print `line` on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
