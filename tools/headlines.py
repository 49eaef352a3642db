"""Measure the tables of docs/headlines.md, part by part, and append each row to a file as soon as it is measured.

    python tools/headlines.py --gpus 4 --part loss --gpu h100 --json headlines.jsonl
    python tools/headlines.py --gpus 4 --part steps scaling --rows B-32 "ZeRO-1" --list
    python tools/headlines.py --gpus 4 --part plans --gpu h100 --json headlines.jsonl

loss             forward and backward pass of the loss beside open_clip, DisCo-CLIP's scheme and Inf-CL; exactness
steps            whole training steps beside compiled open_clip
scaling          whole steps on 1, 2, 4, ... GPUs at a fixed batch per GPU, by ZeRO stage
tensor-parallel  exactness, speed and memory of tensor parallelism
two-level        the ring with two halves of this host as hosts, between which NCCL uses sockets, beside the flat ring
failures         a killed rank and a lost half of this host under `megaclip launch`
plans            every row of --json beside its plan; the exit status is 1 if one is more than a tenth off

The other parts are commands of bench_loss.py, bench_train.py and pytest. --list prints them, and --rows selects those
whose names contain one of its words. They start in the order of the list, each as soon as its GPUs are free, so those
that use few GPUs run side by side. --limit ends what runs longer; its measured rows remain. --tiny replaces models and
batches by small ones, to try the commands on CPUs.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megaclip.commands.plan import add_machine_flags  # modules that import torch are imported beside the first command

Options = argparse.Namespace
ROOT = Path(__file__).resolve().parents[1]
OURS = ("megaclip ring feature", "megaclip all_gather feature", "megaclip ring feature bf16")
ONE_GPU = 'CUDA_VISIBLE_DEVICES="$(cut -d, -f$((LOCAL_RANK + 1)) <<< "$CUDA_VISIBLE_DEVICES")" LOCAL_RANK=0'
"""Each rank sees its own GPU only, so that torch.compile compiles once for all ranks and numbers of ranks."""
FIGURES = """status method batch zero_stage milliseconds extra_peak_mib step_s samples_per_s peak_mib
planned_s planned_mib first_step_s kept_graphs test seconds properties"""


@dataclass(frozen=True)
class Command:
    """One command, which measures one or several rows."""

    part: str
    name: str
    gpus: int
    words: tuple[str, ...]
    """Tool with its arguments, or the arguments of Python, from -m on."""
    variables: str = ""
    """Assignments in bash that every rank makes before it starts."""

    def argv(self) -> list[str]:
        """Return the whole command line."""
        if self.words[0] == "-m" or self.gpus == 1:
            return [sys.executable, *self.words]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.gpus}"]
        if self.variables:
            launcher += ["--no-python", "bash", "-c", f'export {self.variables}; exec "$0" "$@"', sys.executable]
        return [*launcher, *self.words]


@dataclass
class Job:
    """A started command."""

    command: Command
    gpus: list[int]
    results: Path
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    appended: dict[str, int] = field(default_factory=lambda: {"results": 0, "failed": 0})
    """Number of rows of the tool's file that have been appended, by their list in this file."""

    def new_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that the tool has written since the last call, or the results of the tests that have ended."""
        if self.command.words[0] == "-m":
            if self.process.poll() is not None and self.results.exists():
                yield from map(of_test, ElementTree.parse(self.results).iter("testcase"))
            return
        try:
            record = json.loads(self.results.read_text())
        except (OSError, ValueError):  # not written yet, or being written
            return
        for name, number in self.appended.items():
            rows = record.get(name, [])
            yield from ({"device": record["device"], "torch": record["torch"], **row} for row in rows[number:])
            self.appended[name] = len(rows)

    def end(self) -> None:
        """End the command and its ranks, after ten seconds by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                return


def of_test(case: ElementTree.Element) -> dict[str, Any]:
    """Return the row of a test in a file of pytest's --junitxml."""
    status = next((child.tag for child in case if child.tag != "properties"), "ok")
    properties = {each.get("name", ""): each.get("value") for each in case.iter("property")}
    return {"test": case.get("name"), "status": status, "seconds": float(case.get("time", 0)), "properties": properties}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of this host")
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "plans"], required=True, help="parts, in this order")
    parser.add_argument("--rows", nargs="+", default=[""], help="only commands whose names contain one of these words")
    parser.add_argument("--list", action="store_true", help="print the commands and start none")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which the commands are ended")
    parser.add_argument("--json", type=Path, default=Path("headlines.jsonl"), help="file to append rows to")
    parser.add_argument("--open-clip-source", type=Path, help="open_clip checkout, as for tools/bench_train.py")
    parser.add_argument("--seconds", type=float, default=3, help="of a call of a loss, except the ring")
    parser.add_argument("--tiny", action="store_true", help="small models and batches")
    add_machine_flags(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            command
            for part in options.part
            if part in PARTS
            for command in PARTS[part](options, Path(folder))
            if any(word in command.name for word in options.rows)
        ]
        if options.list:
            print(*(f"{each.part}: {each.name}: {' '.join(each.argv())}" for each in commands), sep="\n")
            return 0
        failed = run(commands, options, Path(folder))
    outside = compare(options.json) if "plans" in options.part else 0
    return int(failed or outside > 0)


def run(commands: list[Command], options: Options, folder: Path) -> bool:
    """Run the commands, side by side where GPUs are free, and append their rows. Return True if one has failed."""
    deadline = time.monotonic() + options.limit
    waiting, free, failed = list(commands), list(range(options.gpus)), False
    running: list[Job] = []
    while running or (waiting and time.monotonic() < deadline):
        while waiting and waiting[0].gpus <= len(free) and time.monotonic() < deadline:
            command = waiting.pop(0)
            running.append(start(command, free[: command.gpus], folder))
            free = free[command.gpus :]
        time.sleep(0.5)
        for job in list(running):
            code, seconds = job.process.poll(), time.monotonic() - job.began
            for row in job.new_rows():
                append(row, job.command, options)
            if code is None and time.monotonic() < deadline:
                continue
            if code is None:
                job.end()
            running.remove(job)
            free = sorted([*free, *job.gpus])
            failed |= code != 0
            status = "ended by --limit" if code is None else f"exit code {code}" if code else "ok"
            append({"status": status, "seconds": round(seconds, 1)}, job.command, options)
            if code != 0:
                print(*job.log.read_text(errors="replace").splitlines()[-60:], sep="\n", flush=True)
    if waiting:
        print(f"not started: {', '.join(command.name for command in waiting)}", flush=True)
    return failed or bool(waiting)


def start(command: Command, gpus: list[int], folder: Path) -> Job:
    """Start a command on these GPUs."""
    stem = str(folder / f"{command.part} {command.name}").replace(" ", "_")
    results, log = Path(f"{stem}.json"), Path(f"{stem}.log")
    words = [*command.argv(), "--junitxml" if command.words[0] == "-m" else "--json", str(results)]
    environment = {"OMP_NUM_THREADS": "8", **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    print(f"{time.strftime('%T')} {command.part}: {command.name}: starts on GPUs {gpus}", flush=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    return Job(command, gpus, results, log, process)


def append(row: dict[str, Any], command: Command, options: Options) -> None:
    """Append a row with its plan to the file, and print it."""
    row = {"part": command.part, "row": command.name, "gpus": command.gpus, **row}
    row["command"] = shlex.join(command.words).replace(f"{ROOT}/", "")
    row |= planned(row, options)
    with options.json.open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")
    figures = ((name, row[name]) for name in FIGURES.split() if row.get(name))
    shown = (f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures)
    print(f"{time.strftime('%T')} {command.part}: {command.name}: {', '.join(shown)}", flush=True)


def planned(row: dict[str, Any], options: Options) -> dict[str, float]:
    """Return the planned MiB and seconds of a measured row, as far as the planner knows them."""
    from peers import inf_cl_loss_bytes, open_clip_loss_bytes
    from plan_compare import measured_workload

    from megaclip.commands.planned_run import described_cluster
    from megaclip.losses.costs import LOSS_COSTS, Sizes
    from megaclip.ops.tiles import DEFAULT_OPTIONS
    from megaclip.planner import plan_memory, plan_time
    from megaclip.planner.phases import megaclip_loss_bytes

    method = row.get("method", "")
    cluster = described_cluster(options, gpus=row["gpus"])
    if row.get("steps") and method == "megaclip":
        workload = measured_workload(row)
        cluster = replace(cluster, rates=replace(cluster.rates, decoded=math.inf))  # synthetic samples are not decoded
        peak, step = plan_memory(workload, cluster).gpu_peak, plan_time(workload, cluster)
        return {"planned_mib": peak / 2**20, "planned_s": step.total}
    if "milliseconds" not in row:
        return {}
    sizes = Sizes(row["ranks"], row["batch"] // row["ranks"], row["embedding"], feature_bytes=2)
    if method in ("open_clip", "Inf-CL"):
        size = inf_cl_loss_bytes(sizes) if method == "Inf-CL" else open_clip_loss_bytes(sizes, autocast=False)
        return {"planned_mib": size / 2**20}
    if method not in OURS:
        return {}
    exchange, reduction, *payload = method.split()[1:]
    sizes = replace(sizes, gradient_bytes=2 if payload else 4)
    levels = 2 if row.get("row") == "two levels" else 1
    size = megaclip_loss_bytes(sizes, exchange, reduction, DEFAULT_OPTIONS.tile_budget_mib, levels=levels)
    cost, rates = LOSS_COSTS["clip"], cluster.rates
    seconds = cost.products[reduction] * sizes.logits * sizes.embedding / rates.loss_flops
    seconds += cost.traffic(exchange, reduction, sizes).total / rates.link
    return {"planned_mib": size / 2**20, "planned_s": seconds}


def compare(file: Path) -> int:
    """Print the rows of a file beside their plans. Return the number of figures that are more than a tenth off."""
    outside = 0
    for row in map(json.loads, file.read_text().splitlines()):
        seconds = row.get("step_s") or row.get("milliseconds", 0) / 1e3
        pairs = {"mib": row.get("extra_peak_mib", row.get("peak_mib")), "s": seconds}
        for unit, measured in pairs.items():
            plan = row.get(f"planned_{unit}")
            if plan and measured:
                off = abs(plan / measured - 1) > 0.1
                outside += off
                name = f"{row['row']}, {row['method']}, B = {row['batch']:,}"
                print(f"{name:66}{plan:11.5g}{measured:11.5g} {unit:4}{plan / measured:6.3f}{'  OFF' * off}")
    print(f"{outside} figures are more than a tenth off")
    return outside


def tests(part: str, name: str, options: Options, file: str, selected: str) -> Command:
    """Return a command that runs tests of tests/gpu."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", f"tests/gpu/{file}", "-k", selected)
    return Command(part, name, options.gpus, pytest)


def loss_commands(options: Options, folder: Path) -> Iterator[Command]:
    yield tests("loss", "exactness", options, "test_clip_loss_nccl.py", f"[{options.gpus}]")
    for embedding in (512, 768):
        sizes = (32, 64, 128, 256, 1024, 4096)
        yield loss(options, "loss", f"D={embedding}", sizes, embedding, *OURS, "open_clip", "DisCo-CLIP", "Inf-CL")


def loss(options: Options, part: str, name: str, kibi: tuple[int, ...], *of: Any) -> Command:
    """Return a command of tools/bench_loss.py. kibi: batches in units of 1,024. of: embedding dimension and methods."""
    batches = [64 * options.gpus] if options.tiny else [1024 * each for each in kibi]
    words = ("--batch", *map(str, batches), "--embedding", str(of[0]), "--methods", *of[1:])
    bench = (str(ROOT / "tools/bench_loss.py"), "--seconds", str(options.seconds))
    return Command(part, name, options.gpus, (*bench, *words))


def train(options: Options, part: str, name: str, gpus: int, of: tuple[str, int, int], *flags: str) -> Command:
    """Return a command of tools/bench_train.py. of: model, batch, and samples of one GPU in a tower at a time."""
    words = ["--model", of[0], "--batch", str(of[1]), "--micro-batch", str(of[2]), *flags]
    if "open_clip_compiled" in flags and options.open_clip_source:
        words += ["--open-clip-source", str(options.open_clip_source.resolve())]
    if options.tiny:
        words = ["--model", "demo-tiny", "--batch", str(32 * gpus), "--micro-batch", "8", "--precision", "fp32", *flags]
        words += ["--compile", "false", "--workers", "0", "--steps", "1"]
    return Command(part, name, gpus, (str(ROOT / "tools/bench_train.py"), *words), ONE_GPU)


def config(folder: Path, options: Options, stage: int, **settings: Any) -> str:
    """Write the ds_config.json of tools/bench_train.py with these settings of megaclip. Return its path."""
    from bench_train import DEFAULT_CONFIG

    section = DEFAULT_CONFIG["megaclip"] | settings
    changed = DEFAULT_CONFIG | {"zero_optimization": {"stage": stage}, "megaclip": section}
    if not options.tiny:
        changed |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    path = folder / f"{'_'.join([f'zero{stage}', *(f'{name}_{value}' for name, value in settings.items())])}.json"
    path.write_text(json.dumps(changed))
    return str(path)


def steps_commands(options: Options, folder: Path) -> Iterator[Command]:
    both = ["--methods", "megaclip", "open_clip_compiled"]
    for model, batch, micro, steps, methods in (
        ("ViT-B-16", 1024 * options.gpus, 1024, 3, both),
        ("ViT-B-32", 32768, 2048, 3, both),
        ("ViT-L-14", 65536, 256, 1, both),
        ("ViT-B-32", 196608, 2048, 1, both),
        ("ViT-L-14", 2**20, 256, 0, ["--methods", "megaclip", "--data-offload", "reread"]),
    ):
        flags = [*methods, "--compile", "true", "--steps", str(steps), "--seconds", "45"]
        yield train(options, "steps", f"{model} B={batch}", options.gpus, (model, batch, micro), *flags)


def scaling_commands(options: Options, folder: Path) -> Iterator[Command]:
    stages = [config(folder, options, stage) for stage in (1, 3, 2)]
    plain = [config(folder, options, stage, coalesce_gradient_reduction=False) for stage in (1, 3)]
    for count in (1, 2, 4, 8):
        for name, method, configs in (
            ("MegaCLIP", "megaclip", stages),
            ("open_clip", "open_clip_compiled", stages[:1]),
            ("uncoalesced", "megaclip", plain),
        ):
            if count <= options.gpus and (count == options.gpus or name != "uncoalesced"):
                flags = ["--deepspeed_config", *configs, "--methods", method, "--compile", "true", "--steps", "3"]
                yield train(options, "scaling", f"{name} on {count}", count, ("ViT-B-16", 4096 * count, 512), *flags)


def tensor_commands(options: Options, folder: Path) -> Iterator[Command]:
    yield tests("tensor-parallel", "exactness", options, "test_tensor_parallel_nccl.py", f"{options.gpus}_gpus")
    for model, micro, extra in (("ViT-bigG-14", 64, []), ("ViT-5B-14", 32, ["--checkpointing"])):
        for size in (2, 1, 4, 8):
            if size <= options.gpus:
                setting = config(folder, options, 1, tensor_parallel_size=size)
                flags = ["--deepspeed_config", setting, "--methods", "megaclip", *extra, "--keep-graphs", "0"]
                flags += ["--compile", "false"]  # tensor parallelism is never compiled
                of = (model, 2 * micro * options.gpus, micro)
                yield train(options, "tensor-parallel", f"{model} T={size}", options.gpus, of, *flags)


def two_level_commands(options: Options, folder: Path) -> Iterator[Command]:
    for name, ranks_per_host in (("two levels", options.gpus // 2), ("flat", options.gpus)):
        command = loss(options, "two-level", name, (32, 128), 512, *OURS)
        apart = f"NCCL_HOSTID=half$((2 * RANK / {options.gpus}))"
        yield replace(command, variables=f"LOCAL_WORLD_SIZE={ranks_per_host} {apart}")


PARTS: dict[str, Callable[[Options, Path], Iterator[Command]]] = {
    "loss": loss_commands,
    "steps": steps_commands,
    "scaling": scaling_commands,
    "tensor-parallel": tensor_commands,
    "two-level": two_level_commands,
    "failures": lambda options, folder: iter([tests("failures", "halves", options, "test_launch_gpu.py", "launch")]),
}


if __name__ == "__main__":
    sys.exit(main())
