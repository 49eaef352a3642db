"""Measure time and memory of whole training steps of this project and of open_clip, plain and compiled.

    python tools/bench_train.py --model ViT-B-16 --batch 4096 16384 --micro-batch 512 --json train.json
    python tools/bench_train.py --model ViT-B-16 --batch 1024 --micro-batch 1024 --open-clip-source open_clip \\
        --methods megaclip open_clip_compiled open_clip_compiled_task
    deepspeed --num_gpus 4 tools/bench_train.py --model ViT-g-14 --batch 8192 --micro-batch 128 \\
        --deepspeed_config ds_configs/zero3_offload.json --methods megaclip --json giant.json
    python tools/bench_train.py --model demo-tiny --batch 64 --micro-batch 16 --precision fp32 --workers 0

For each global batch and method it prints samples per second (median over the steps after the second one in which
nothing was compiled), peak GPU memory of a step, the shares of the step for the loss with its gradient, for waiting for
data and for the update, and the milliseconds of the update. The method megaclip_deepspeed_update has the update of
DeepSpeed's own step. The seconds before the first step and those of the first step are printed apart. The first step
compiles; what an earlier command has compiled is taken from the cache on disk (TORCHINDUCTOR_CACHE_DIR).

All methods use the same weights, the same optimizer settings and the same samples from this project's loader:
synthetic samples in memory (see bench_samples.py), or --train-data. Synthetic captions have 8 to 32 tokens with a tail
to 77, or with --caption-lengths full the context length. With --micro-batch equal to the batch of a rank there is one
chunk and no second pass. open_clip's pixels are on the GPU before the clock of a step starts (see bench_open_clip.py);
this project copies them from host memory during the step. A method that does not fit in memory gets a row with the
status "out of memory". --json writes each row when it is measured.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from bench_kernels import step_kernels, table
from bench_methods import Case, Clock, DeepSpeedUpdateSteps, MegaclipSteps, free_memory
from bench_open_clip import CompiledOpenClipSteps, CompiledOpenClipTaskSteps, OpenClipSteps, use_source
from bench_samples import CAPTION_LENGTHS
from deepspeed.accelerator import get_accelerator
from torch._dynamo.utils import counters

from megaclip.cache.kept_graphs import MEASURED_STEPS
from megaclip.comm.collectives import gather_objects
from megaclip.engine.metrics import peak_memory_mib
from megaclip.engine.process_group import start_process_group
from megaclip.errors import ConfigError, MegaclipError

DEFAULT_CONFIG: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.2},
    },
    "zero_optimization": {"stage": 1},
    "megaclip": {"loss": "clip", "coalesce_gradient_reduction": True},
}
METHODS: dict[str, Callable[[Case, Clock], MegaclipSteps | OpenClipSteps]] = {
    "megaclip": MegaclipSteps,
    "megaclip_deepspeed_update": DeepSpeedUpdateSteps,
    "open_clip": OpenClipSteps,
    "open_clip_compiled": CompiledOpenClipSteps,
    "open_clip_compiled_task": CompiledOpenClipTaskSteps,
}
DEFAULT_METHODS = ["megaclip", "open_clip_compiled"]


@dataclass
class Row:
    """One line of the table. It has figures only if at least one step was measured."""

    method: str
    model: str
    world_size: int
    batch: int
    micro_batch: int
    text_micro_batch: int
    zero_stage: int
    offload: list[str]
    checkpointing: bool
    precision: str
    exchange: str
    data_offload: str
    kept_graphs: list[int]
    """Number of image chunks and of text chunks whose graphs the last step kept; empty for open_clip."""
    config: str
    ds_config: dict[str, Any]
    caption_lengths: str
    text_positions_saved: float = 0.0
    program: str = ""
    """Name and version of the measured program."""
    compiled: bool = False
    """True if torch.compile ran the towers."""
    selective_recompute: bool = False
    """True if the compiled towers recomputed selectively."""
    status: str = "ok"
    startup_s: float = 0.0
    """Seconds until the first step: model, engine or DDP, optimizer, loader."""
    first_step_s: float = 0.0
    """Seconds of the first step, in which torch.compile and Triton compile."""
    steps: int = 0
    step_s: float = 0.0
    samples_per_s: float = 0.0
    peak_mib: float = 0.0
    loss_share: float = 0.0
    data_share: float = 0.0
    update_share: float = 0.0
    update_ms: float = 0.0
    losses: list[float] | None = None
    kernels: dict[str, Any] | None = None
    """`StepKernels` of one more step, with --kernels."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16", help="preset, or the path of a model JSON")
    parser.add_argument("--batch", type=int, nargs="+", default=[4096], help="global batch sizes B")
    parser.add_argument("--micro-batch", type=int, default=512, help="samples of one rank in a tower at a time")
    parser.add_argument("--text-micro-batch", type=int, help="captions of one rank in MegaCLIP's text tower at a time")
    parser.add_argument(
        "--methods", nargs="+", choices=list(METHODS), default=DEFAULT_METHODS, help="methods to measure"
    )
    parser.add_argument(
        "--precision", choices=["pure_bf16", "amp_bf16", "fp32"], default="pure_bf16", help="precision of open_clip"
    )
    parser.add_argument(
        "--deepspeed_config",
        type=Path,
        nargs="+",
        default=[],
        help="ds_config.json (default: ZeRO-1) for everything except the batch; of several, open_clip takes the first",
    )
    parser.add_argument(
        "--caption-lengths",
        choices=CAPTION_LENGTHS,
        default=CAPTION_LENGTHS[0],
        help="lengths of synthetic captions: 8 to 32 tokens with a tail to 77 (megaclip/planner/text_chunks.py), or "
        "the context length",
    )
    parser.add_argument("--data-offload", help="megaclip.data_offload: where images are kept between the passes")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing, in all methods")
    parser.add_argument("--keep-graphs", help='megaclip.keep_graphs: a number of graphs or "auto" (the default)')
    parser.add_argument(
        "--compile", choices=["true", "false", "auto", "measure"], help="megaclip.compile: torch.compile of the towers"
    )
    parser.add_argument(
        "--open-clip-source", type=Path, help="open_clip checkout to measure instead of the installed package"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="list this number of kernels and pauses of one more step, on a GPU"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps to measure, after two warm-up steps")
    parser.add_argument(
        "--seconds", type=float, default=600, help="limit of a row's steps after the first one, which compiles"
    )
    parser.add_argument("--train-data", nargs="+", default=[], help="real data, as for launch/train.py")
    parser.add_argument("--workers", type=int, default=8, help="data worker processes per rank")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.kernels and not torch.cuda.is_available():
        parser.error("--kernels requires a GPU")
    try:
        bases = {str(path): json.loads(path.read_text()) for path in options.deepspeed_config}
    except (OSError, ValueError) as error:
        print(f"error: cannot read {' or '.join(map(str, options.deepspeed_config))}: {error}", file=sys.stderr)
        return 1
    start_process_group()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, bases or {"default": DEFAULT_CONFIG}, Path(folder))
        try:
            if options.open_clip_source:
                use_source(options.open_clip_source)
            bench.run()
        except MegaclipError as error:
            print_rank_0(f"error: {error}")
            return 1
    dist.destroy_process_group()
    return 0


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def print_rank_0(line: str) -> None:
    """Print `line` on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


class Bench:
    """Measures and keeps all rows of one command."""

    def __init__(self, options: argparse.Namespace, bases: dict[str, dict[str, Any]], folder: Path) -> None:
        self.options = options
        self.bases = bases
        self.name, self.base = next(iter(bases.items()))
        self.folder = folder
        self.device = torch.device(get_accelerator().current_device_name())
        self.rows: list[Row] = []

    def run(self) -> None:
        """Measure every batch with every method. Write each row at once."""
        shown = f"{'step s':>9}{'samples/s':>11}{'peak MiB':>10}{'loss':>7}{'data':>7}{'update':>8}{'ms':>8}"
        shown += f"{'start s':>9}{'first s':>9}"
        print_rank_0(f"{self.options.model}, {dist.get_world_size()} rank(s), micro-batch {self.options.micro_batch}")
        print_rank_0(f"{'method':24}{'batch':>10}{'micro':>7}{shown}")
        first = self.name
        for batch in self.options.batch:
            for name in self.bases:
                self.name, self.base = name, self.bases[name]
                for method in self.options.methods if name == first else ["megaclip"]:
                    self._keep(self._measure(method, batch))

    def _measure(self, method: str, batch: int) -> Row:
        """Measure steps of one method at one batch."""
        config = self._config(batch)
        path = self.folder / f"{method}-{batch}.json"
        path.write_text(json.dumps(config))
        options = self.options
        case = Case(
            options.model, path, options.precision, options.train_data, options.workers, options.caption_lengths
        )
        row = self._describe(method, config)
        clock = Clock(self.device)
        steps: MegaclipSteps | OpenClipSteps | None = None
        start = time.perf_counter()
        try:
            steps = METHODS[method](case, clock)
            startup_s = time.perf_counter() - start
            row = replace(
                row,
                program=steps.program,
                compiled=steps.compiled,
                selective_recompute=steps.recomputes,
                text_micro_batch=steps.text_micro_batch or row.micro_batch,
                startup_s=startup_s,
            )
            row = self._timed(row, steps, clock)
            if options.kernels:
                steps.prepare()
                kernels = step_kernels(steps.step)
                row.kernels = asdict(kernels)
                print_rank_0(table(kernels, options.kernels))
        except MegaclipError as error:
            row.status = f"refused: {error}".replace(f"{path}: ", "")
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if "out of memory" not in str(error).lower():
                raise
            row.status = "out of memory"
        if steps is not None:
            steps.close()
        del steps
        free_memory()
        return row

    def _timed(self, row: Row, steps: MegaclipSteps | OpenClipSteps, clock: Clock) -> Row:
        """Measure --steps steps after the warm-up, without steps in which torch.compile ran on any rank.

        MegaCLIP ends its warm-up with the second step: it may keep more graphs, and collects garbage once. A step
        compiles if the captions of a rank have a new length. If --seconds leaves no time for a step without
        compilation, or if there is none in twice as many steps, the last step is measured.
        """
        wanted = self.options.steps
        seconds: list[float] = []
        parts: list[dict[str, float]] = []
        losses: list[float] = []
        measured: list[int] = []  # numbers of steps
        reset_peak()
        for number in range(MEASURED_STEPS + 2 * wanted if wanted else 1):
            steps.prepare()
            self._wait()
            start, graphs = time.perf_counter(), compiled_graphs()
            losses.append(steps.step())
            self._wait()
            of_ranks = gather_objects((time.perf_counter() - start, compiled_graphs() - graphs))
            took, compiled = map(max, zip(*of_ranks, strict=True))
            parts.append(clock.take())
            seconds.append(took)
            if number >= MEASURED_STEPS and not compiled:
                measured.append(number)
            noted = " (torch.compile ran)" if compiled else ""
            rate = f"{row.batch / took:.0f} samples/s"
            print_rank_0(
                f"  {row.method} {row.batch}: step {number} in {took:.3f} s, {rate}{noted}, loss {losses[-1]:.5f}"
            )
            over = number > 0 and sum(seconds[1:]) + took > self.options.seconds
            if over or len(measured) == wanted:
                break
            if number == 0:
                reset_peak()
        measured = measured or [len(seconds) - 1]
        step_s = statistics.median(seconds[number] for number in measured)
        total = sum(seconds[number] for number in measured)
        share = {
            name: sum(parts[number].get(name, 0.0) for number in measured) / total
            for name in ("loss", "data", "update")
        }
        return replace(
            row,
            first_step_s=seconds[0],
            steps=len(measured),
            step_s=step_s,
            samples_per_s=row.batch / step_s,
            peak_mib=max(gather_objects(peak_memory_mib())),
            kept_graphs=steps.kept_graphs,
            loss_share=share["loss"],
            data_share=share["data"],
            update_share=share["update"],
            update_ms=1e3 * share["update"] * total / len(measured),
            text_positions_saved=steps.text_positions_saved,
            losses=losses,
        )

    def _config(self, batch: int) -> dict[str, Any]:
        """Return ds_config.json for this batch."""
        world_size = dist.get_world_size()
        micro_batch = min(self.options.micro_batch, batch // world_size)
        if micro_batch == 0 or batch % (micro_batch * world_size):
            raise ConfigError(f"--batch {batch} must be a multiple of --micro-batch {micro_batch} x {world_size} ranks")
        config = json.loads(json.dumps(self.base))
        replica_ranks = config.get("megaclip", {}).get("tensor_parallel_size", 1)
        config |= {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro_batch * replica_ranks,
            "gradient_accumulation_steps": batch // (micro_batch * world_size),
        }
        if not self.options.deepspeed_config and self.options.precision != "fp32":
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
        if self.options.checkpointing:
            config.setdefault("activation_checkpointing", {})
        section = config.setdefault("megaclip", {})
        if self.options.text_micro_batch:
            section["text_micro_batch_size"] = self.options.text_micro_batch
        if self.options.compile:
            section["compile"] = {"true": True, "false": False}.get(self.options.compile, self.options.compile)
        if self.options.data_offload:
            section["data_offload"] = self.options.data_offload
        if keep := self.options.keep_graphs:
            section["keep_graphs"] = int(keep) if keep.isdecimal() else keep
        return config

    def _describe(self, method: str, config: dict[str, Any]) -> Row:
        ours = method.startswith("megaclip")
        zero = config.get("zero_optimization", {}) if ours else {}
        section = config["megaclip"] if ours else {}
        own_precision = "bf16" if config.get("bf16", {}).get("enabled") else "fp32"
        micro_batch = config["train_micro_batch_size_per_gpu"]
        return Row(
            method=method,
            model=self.options.model,
            world_size=dist.get_world_size(),
            batch=config["train_batch_size"],
            micro_batch=micro_batch,
            text_micro_batch=micro_batch,
            zero_stage=zero.get("stage", 0),
            offload=[part for part in ("optimizer", "param") if zero.get(f"offload_{part}", {}).get("device") == "cpu"],
            checkpointing="activation_checkpointing" in config,
            precision=own_precision if ours else self.options.precision,
            exchange=section.get("exchange", "auto") if ours else "all_gather",
            data_offload=section.get("data_offload", "auto") if ours else "gpu",
            kept_graphs=[],
            config=self.name,
            ds_config=config,
            caption_lengths="data" if self.options.train_data else self.options.caption_lengths,
        )

    def _keep(self, row: Row) -> None:
        """Print a row and write all rows measured so far."""
        figures = row.status
        if row.steps:
            shares = f"{row.loss_share:7.1%}{row.data_share:7.1%}{row.update_share:8.1%}{row.update_ms:8.1f}"
            figures = f"{row.step_s:9.2f}{row.samples_per_s:11.0f}{row.peak_mib:10.0f}{shares}"
            figures += f"{row.startup_s:9.1f}{row.first_step_s:9.1f}"
            figures += "" if row.status == "ok" else f"  {row.status}"
        print_rank_0(f"{row.method:24}{row.batch:10}{row.micro_batch:7}{figures}")
        self.rows.append(row)
        if self.options.json and dist.get_rank() == 0:
            record = {"device": self._device_name(), "torch": torch.__version__, **vars(self.options)}
            record["results"] = [asdict(kept) for kept in self.rows]
            self.options.json.write_text(json.dumps(record, indent=1, default=str))

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def reset_peak() -> None:
    """Reset the measured peak memory. On a CPU it is the peak of the process and cannot be reset."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main())
