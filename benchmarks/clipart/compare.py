"""Train MegaCLIP and open_clip's own trainer on the clip-art benchmark, score all checkpoints alike, and compare.

    python benchmarks/clipart/build.py clipart/
    python benchmarks/clipart/compare.py run clipart/ results/ open_clip/clip/256/5e-4 megaclip/clip/256/5e-4 \\
        open_clip/clip/256/5e-4/timed megaclip/clip/256/5e-4/timed --seeds 0 1 2 3 4 --jobs 4
    python benchmarks/clipart/compare.py report results/ --figure docs/figures/clipart.png

A run is TRAINER/LOSS/BATCH/LEARNING_RATE. With `/timed` it is compiled, has one seed and no checkpoints, and all other
runs are paused as soon as it has left its first steps behind, so that its steps have the GPU and the cores alone.

Both trainers read the same shards with the same augmentation, the same model (ViT-S-16 at 112 pixels, 32 text
positions), optimizer, schedule and clipping of gradients. The orders of the samples are different random orders.
open_clip runs with amp_bf16, MegaCLIP with bf16; both have float32 weights in AdamW.

Each run writes OUT/RUN-SEED.json with losses, times and the scores of its checkpoints. Complete runs are not repeated.
Requires one GPU (or patience), and for open_clip: open_clip_torch, webdataset and pandas.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megaclip.checkpoint.open_clip_weights import assigned_model, read_weights
from megaclip.data import EvaluationLoader, ImageTransform, LabelledDataset, Tokenizer, load_tokenizer
from megaclip.engine.process_group import start_process_group
from megaclip.engine.saved_model import load_saved_model
from megaclip.evaluation import ModelEncoder
from megaclip.evaluation.scores import ZeroShotTask, evaluate
from megaclip.evaluation.suite import find_tasks, open_task
from megaclip.models import DualEncoder
from megaclip.models.descriptions import load_model_config

ROOT = Path(__file__).resolve().parents[2]
MODEL: dict[str, Any] = {
    "embed_dim": 384,
    "vision_cfg": {"image_size": 112, "layers": 12, "width": 384, "patch_size": 16},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 384, "heads": 6, "layers": 12},
}
"""open_clip's ViT-S-16 at another resolution and text length."""
BETAS, EPS, WEIGHT_DECAY, CLIPPING = (0.9, 0.98), 1e-6, 0.2, 1.0
WARMUP_SHARE = 0.15
"""With a tenth at 1e-3, both trainers collapse at times for the first 80 steps: all features are equal."""
LARGEST_CHUNK = 4096
"""Number of samples in one chunk at most: larger batches of MegaCLIP have several chunks."""
LOG_EVERY = 5
FASTCLIP_TEMPERATURE = 0.07
SCORES = {
    "zero_shot_top1": "zero-shot top-1",
    "zero_shot_top5": "zero-shot top-5",
    "retrieval_r1": "retrieval R@1",
    "retrieval_r5": "retrieval R@5",
}
"""Each is the mean over both sets of its kind, retrieval also over both directions."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    trainer: str
    loss: str
    batch: int
    learning_rate: float
    seed: int
    steps: int
    """Number of optimizer steps."""
    epoch_steps: int
    """Number of whole batches in the training split."""
    save_steps: int
    """Number of steps between two checkpoints; 0: none is scored."""
    is_timed: bool
    """Compile the towers, and pause all other runs during the steps."""

    @property
    def label(self) -> str:
        return f"{self.trainer}/{self.loss}/{self.batch}/{self.learning_rate:g}"

    @property
    def name(self) -> str:
        return f"{self.label.replace('/', '_')}-{'timed' if self.is_timed else self.seed}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and score")
    run.add_argument("data", type=Path, help="folder that build.py wrote")
    run.add_argument("out", type=Path, help="folder for the results")
    run.add_argument("runs", nargs="+", metavar="TRAINER/LOSS/BATCH/LEARNING_RATE[/timed]")
    run.add_argument("--seeds", type=int, nargs="+", default=[0])
    run.add_argument("--epochs", type=float, default=40, help="passes, in whole batches (default 40)")
    run.add_argument("--evaluations", type=int, default=5, help="number of checkpoints that are scored (default 5)")
    run.add_argument("--suite", default="suite", help="folder below DATA to score on; suite_val for tuning")
    run.add_argument("--timed-epochs", type=float, default=10, help="passes of the timed runs (default 10)")
    run.add_argument("--jobs", type=int, default=1, help="number of runs that share the GPU")
    run.add_argument("--workers", type=int, default=15, help="number of data workers per run (default 15)")
    run.add_argument("--keep", action="store_true", help="keep the folders of the runs, in OUT/runs")
    report = commands.add_parser("report", help="print the tables and draw the figure")
    report.add_argument("folders", type=Path, nargs="+")
    report.add_argument("--figure", type=Path, help="PNG of the curves against steps and seconds")
    report.add_argument("--tune", action="store_true", help="print only the best learning rate of each loss and batch")
    arguments = parser.parse_args(argv)
    if arguments.command == "report":
        report_results(arguments)
    else:
        run_all(arguments)


def planned_runs(arguments: argparse.Namespace) -> list[Run]:
    counts = json.loads((arguments.data / "report.json").read_text())["pictures"]
    samples = sum(own.get("train", 0) for own in counts.values())
    runs = []
    for text in arguments.runs:
        trainer, loss, batch, rate, *timed = text.split("/")
        size = min(int(batch), samples)
        size -= size % math.ceil(size / LARGEST_CHUNK)  # chunks of one size
        epoch_steps = samples // size
        steps = epoch_steps * max(1, round(arguments.timed_epochs if timed else arguments.epochs))
        save = 0 if timed else math.ceil(steps / arguments.evaluations / epoch_steps) * epoch_steps
        for seed in arguments.seeds[:1] if timed else arguments.seeds:
            run = Run(trainer, loss, size, float(rate), seed, steps, epoch_steps, save, bool(timed))
            if not (arguments.out / f"{run.name}.json").exists():
                runs.append(run)
    return runs


def run_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    start_process_group()
    place = arguments.out / "runs" if arguments.keep else Path(tempfile.mkdtemp(prefix="clipart"))
    place.mkdir(exist_ok=True)
    (place / "model.json").write_text(json.dumps(MODEL))
    programs, scorer = Programs(), Future[Scorer]()

    def carry_out(run: Run) -> None:
        started, folder, log = time.time(), place / run.name, arguments.out / f"{run.name}.log"
        command = open_clip_command if run.trainer == "open_clip" else megaclip_command
        alone_from = programs.run(command(run, folder, arguments), log, alone=run.is_timed)
        if alone_from is None:
            print(f"{run.name} FAILED: see {log}", flush=True)
            return
        outcome = {**vars(run), "label": run.label, "device": device_name(), "torch": torch.__version__}
        outcome |= {"total_s": time.time() - started, **curve(folder, started, alone_from, run.trainer == "open_clip")}
        with programs.alone:
            outcome["scores"] = {} if run.is_timed else scorer.result().score_run(run, folder)
        (arguments.out / f"{run.name}.json").write_text(json.dumps(outcome))
        last = {name: round(own, 3) for name, own in [{}, *outcome["scores"].values()][-1].items() if name in SCORES}
        facts = f"{run.steps} steps, {outcome['total_s']:.0f} s in all, {outcome['step_s'] * 1e3:.1f} ms per step"
        print(f"{run.name}: {facts}, loss {outcome['losses'][-1][1]:.3f} {last or ''}", flush=True)
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = [pool.submit(carry_out, run) for run in planned_runs(arguments)]
        try:
            scorer.set_result(Scorer(arguments.data / arguments.suite, place / "model.json", arguments.workers))
        except BaseException as error:
            scorer.set_exception(error)
            raise
    for outcome in outcomes:
        outcome.result()
    if not arguments.keep:
        shutil.rmtree(place, ignore_errors=True)


class Programs:
    """Training programs that run side by side. One of them at a time can have the machine alone."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self.alone = threading.Lock()
        """Held by whoever uses the machine alone, and by whoever scores. No program starts meanwhile."""
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        os._exit(1)

    def run(self, command: list[str], log: Path, *, alone: bool) -> float | None:
        """Run a program to its end. Return the time from which it had the machine alone, or None if it failed.

        alone: pause all other programs once the log shows twelve lines of steps. Otherwise the start is returned.
        """
        begin = time.time()
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        with log.open("w") as output, self.alone:
            program = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )
        self._running.add(program.pid)
        try:
            while alone and program.poll() is None and len(STEP_LINE.findall(log.read_text())) < 12:
                time.sleep(0.2)
            with self.alone if alone else nullcontext():
                if alone:
                    begin = time.time()
                    self._signal(signal.SIGSTOP, program.pid)
                try:
                    result = program.wait()
                finally:
                    if alone:
                        self._signal(signal.SIGCONT, program.pid)
        finally:
            self._running.discard(program.pid)
        return None if result else begin

    def _signal(self, number: signal.Signals, but: int = 0) -> None:
        for pid in self._running - {but}:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)


STEP_LINE = re.compile(r"INFO step \d+/|Train Epoch: ")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


# --- the trainers -----------------------------------------------------------------------------------------------------


def open_clip_command(run: Run, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the command of open_clip's trainer. Its loader has equal batches per worker, so not all numbers fit."""
    if run.loss != "clip":
        raise SystemExit(f"{run.label}: open_clip has no loss {run.loss}; use clip")
    shards = sorted((arguments.data / "train").glob("*.tar"))
    fits = [
        count for count in range(1, arguments.workers + 1) if run.epoch_steps % count == 0 and len(shards) % count == 0
    ]
    flags = {
        "train-data": f"{arguments.data.resolve()}/train/{{00..{len(shards) - 1:02d}}}.tar",
        "dataset-type": "webdataset",
        "train-num-samples": run.epoch_steps * run.batch,
        "model": "ViT-S-16",
        "force-image-size": MODEL["vision_cfg"]["image_size"],
        "force-context-length": MODEL["text_cfg"]["context_length"],
        "batch-size": run.batch,
        "epochs": run.steps // run.epoch_steps,
        "lr": run.learning_rate,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "eps": EPS,
        "wd": WEIGHT_DECAY,
        "grad-clip-norm": CLIPPING,
        "warmup": round(run.steps * WARMUP_SHARE),
        "precision": "amp_bf16" if torch.cuda.is_available() else "fp32",
        "workers": max(fits),
        "seed": run.seed,
        "logs": folder.parent,
        "name": run.name,
        "save-frequency": run.save_steps // run.epoch_steps,
        "log-every-n-steps": LOG_EVERY,
        "report-to": "tensorboard",
    }
    command = [sys.executable, "-m", "open_clip_train.main"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [*command, *(["--torchcompile"] if run.is_timed else [])]


def megaclip_command(run: Run, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the command of `megaclip train`."""
    chunks = math.ceil(run.batch / LARGEST_CHUNK)
    on_gpu = torch.cuda.is_available()
    section: dict[str, Any] = {"loss": run.loss, "compile": run.is_timed}
    if run.loss != "clip":
        section["fastclip"] = {"temperature": FASTCLIP_TEMPERATURE}
    rates = {"lr": run.learning_rate, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    config = {
        "train_batch_size": run.batch,
        "gradient_accumulation_steps": chunks,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": on_gpu},
        "optimizer": {"type": "AdamW", "params": rates},
        "zero_optimization": {"stage": 1 if on_gpu else 0},
        "megaclip": section,
    }
    path = folder.parent / f"{run.name}.ds_config.json"
    path.write_text(json.dumps(config))
    flags = {
        "deepspeed-config": path,
        "model": folder.parent / "model.json",
        "train-data": f"{arguments.data.resolve()}/train/*.tar",
        "train-steps": run.steps,
        "warmup": round(run.steps * WARMUP_SHARE),
        "workers": arguments.workers,
        "seed": run.seed,
        "logs": folder.parent,
        "name": run.name,
        "keep-last": 1000,
        "log-every-n-steps": LOG_EVERY,
    }
    flags |= {"save-every-steps": run.save_steps} if run.save_steps else {"save-frequency": 0}
    command = [sys.executable, "-m", "megaclip", "train"]
    return command + [text for name, value in flags.items() for text in (f"--{name}", str(value))]


def curve(folder: Path, started: float, alone_from: float, from_zero: bool) -> dict[str, Any]:
    """Return the losses as [step, loss, seconds since the start], and the seconds per step after `alone_from`.

    step_s is the median over the intervals between two log lines, so that the starts of epochs do not count.
    mean_step_s includes them. from_zero: the trainer counts steps from 0.
    """
    files = sorted(folder.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(files[0].parent), size_guidance={"scalars": 0})
    events.Reload()
    rows = [[event.step + from_zero, event.value, event.wall_time - started] for event in events.Scalars("train/loss")]
    alone = [row for row in rows if row[2] + started >= alone_from]
    rates = [(after[2] - before[2]) / (after[0] - before[0]) for before, after in pairwise(alone)] or [math.nan]
    mean = (alone[-1][2] - alone[0][2]) / (alone[-1][0] - alone[0][0]) if len(alone) > 1 else math.nan
    return {"losses": rows, "step_s": statistics.median(rates), "mean_step_s": mean}


# --- scores -----------------------------------------------------------------------------------------------------------


class Scorer:
    """Scores checkpoints of both trainers on the sets of a suite. Images are decoded once."""

    def __init__(self, suite: Path, model: Path, workers: int) -> None:
        self._config = load_model_config(model)
        self._transform = ImageTransform(MODEL["vision_cfg"]["image_size"])
        self._tokenizer: Tokenizer = load_tokenizer("clip", self._config.text_cfg.context_length)
        self._sets = []
        for task in find_tasks(suite):
            data = open_task(task)
            is_labelled = isinstance(data, LabelledDataset)
            loader = EvaluationLoader(
                data,
                self._transform,
                None if is_labelled else self._tokenizer,
                batch_size=256,
                num_workers=min(workers, 4),
            )
            self._sets.append((task.key, data, list(loader)))

    def score_run(self, run: Run, folder: Path) -> dict[int, dict[str, float]]:
        """Return the scores of the checkpoints of a run by step."""
        if run.trainer == "open_clip":
            files = {
                int(path.stem.split("_")[1]) * run.epoch_steps: path for path in folder.glob("checkpoints/epoch_*.pt")
            }
            return {step: self._score(self._from_open_clip(path)) for step, path in sorted(files.items())}
        tags = {int(path.name.split("_")[1]): path.name for path in folder.glob("checkpoints/step_*")}
        return {step: self._score(load_saved_model(folder, tag=tag).model) for step, tag in sorted(tags.items())}

    def _from_open_clip(self, path: Path) -> DualEncoder:
        return assigned_model(self._config, read_weights(path, self._config))

    def _score(self, model: DualEncoder) -> dict[str, float]:
        device = torch.device(get_accelerator().current_device_name())
        encode = ModelEncoder(
            model.to(device), self._transform.normalise, device=device, cut_captions=model.cut_captions
        )
        scores: dict[str, float] = {}
        for key, data, batches in self._sets:
            if isinstance(data, LabelledDataset):
                task = ZeroShotTask(batches, data.class_names, data.templates)
                result = evaluate(encode, tokenizer=self._tokenizer, labelled=task).metrics
            else:
                result = evaluate(encode, tokenizer=self._tokenizer, pairs=batches).metrics
                for k in (1, 5):
                    result[f"retrieval_r{k}"] = (result[f"retrieval_r{k}_i2t"] + result[f"retrieval_r{k}_t2i"]) / 2
            scores |= {f"{name} of {key}": float(value) for name, value in result.items() if name in SCORES}
        for name in SCORES:
            scores[name] = statistics.fmean(value for key, value in scores.items() if key.startswith(f"{name} of "))
        return scores


# --- report -----------------------------------------------------------------------------------------------------------


def report_results(arguments: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    timed: list[dict[str, Any]] = []
    for path in sorted(path for folder in arguments.folders for path in folder.rglob("*.json")):
        result = json.loads(path.read_text())
        if "losses" in result:
            result["scores"] = {int(step): own for step, own in result["scores"].items()}
            (found[result["label"]] if result["scores"] else timed).append(result)
    if arguments.tune:
        print_tuning(found)
        return
    print("| run | seeds | steps | loss | " + " | ".join(SCORES.values()) + " |")
    print("| --- " * (4 + len(SCORES)) + "|")
    for label, results in found.items():
        last = [own["scores"][max(own["scores"])] for own in results]
        cells = [spread([100 * own[name] for own in last], "%.1f") for name in SCORES]
        losses = spread([mean_loss(own, own["steps"]) for own in results], "%.3f")
        print(f"| {label} | {len(results)} | {results[0]['steps']} | {losses} | {' | '.join(cells)} |")
    pair = [f"{trainer}/{rest}" for rest in {label.split("/", 1)[1] for label in found} for trainer in TRAINERS]
    pair = [label for label in pair if all(f"{own}/{label.split('/', 1)[1]}" in found for own in TRAINERS)]
    if pair:
        print_agreement(found[pair[0]], found[pair[1]])
    if timed:
        print("\n| run | device | ms per step | samples/s | with starts of epochs, ms | start and compilation, s |")
        print("| --- " * 6 + "|")
    for own in timed:
        cells = [own["label"], own["device"], f"{own['step_s'] * 1e3:.1f}"]
        cells += [
            f"{own['batch'] / own['step_s']:,.0f}",
            f"{own['mean_step_s'] * 1e3:.1f}",
            f"{own['losses'][0][2]:.0f}",
        ]
        print(f"| {' | '.join(cells)} |")
    if arguments.figure and pair:
        draw(arguments.figure, {label.split("/")[0]: found[label] for label in pair}, timed)


TRAINERS = ("open_clip", "megaclip")


def spread(values: list[float], form: str) -> str:
    """Return the mean with the standard deviation over the seeds."""
    text = form % statistics.fmean(values)
    return f"{text} ± {form % statistics.stdev(values)}" if len(values) > 1 else text


def mean_loss(result: dict[str, Any], step: int) -> float:
    """Return the mean of the loss over the 20 steps up to `step`. Losses between two log lines are interpolated."""
    logged = np.array(result["losses"], dtype=np.float64)
    return float(np.interp(np.arange(max(1, step - 19), step + 1), logged[:, 0], logged[:, 1]).mean())


def print_agreement(peer: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Print both trainers' scores at equal steps, and Welch's t of their difference."""
    names: dict[str, Callable[[dict[str, Any], int], float]] = {"loss": mean_loss}
    for name, text in SCORES.items():
        names[text] = lambda result, step, name=name: 100 * result["scores"][step][name]  # type: ignore[misc]
    print(
        "\n| step | quantity | open_clip | MegaCLIP | difference | Welch's t |\n| --- | --- | --- | --- | --- | --- |"
    )
    steps = sorted(set(peer[0]["scores"]) & set(own[0]["scores"]))
    for step in steps:
        for name, value in names.items():
            sides = [[value(result, step) for result in results] for results in (peer, own)]
            means = [statistics.fmean(side) for side in sides]
            cells = [spread(side, "%.3f" if name == "loss" else "%.1f") for side in sides]
            error = math.sqrt(sum(statistics.variance(side) / len(side) for side in sides if len(side) > 1))
            t = f"{(means[1] - means[0]) / error:.1f}" if error else ""
            print(f"| {step} | {name} | {cells[0]} | {cells[1]} | {means[1] - means[0]:+.3f} | {t} |")


def print_tuning(found: dict[str, list[dict[str, Any]]]) -> None:
    best: dict[str, tuple[float, str]] = {}
    for label, results in found.items():
        for result in results:
            last = result["scores"][max(result["scores"])]
            value = (last["zero_shot_top1"] + last["retrieval_r1"]) / 2
            key = label.rpartition("/")[0]
            best[key] = max(best.get(key, (0.0, "")), (value, label))
    for value, label in best.values():
        print(f"{label}  # {100 * value:.2f}")


def draw(path: Path, found: dict[str, list[dict[str, Any]]], timed: list[dict[str, Any]]) -> None:
    """Draw loss, zero-shot and retrieval against steps and seconds, mean and standard deviation over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speed = {own["trainer"]: own["step_s"] for own in timed}
    quantities = ["loss", "zero_shot_top1", "retrieval_r5"]
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), sharey="col")
    for trainer, colour in zip(TRAINERS, ("tab:orange", "tab:blue"), strict=True):
        results = found[trainer]
        for row, scale in enumerate((1.0, speed.get(trainer, results[0]["step_s"]))):
            for column, quantity in enumerate(quantities):
                steps = (
                    [at for at, *_ in results[0]["losses"]][3::4]
                    if quantity == "loss"
                    else sorted(results[0]["scores"])
                )
                values = [
                    [mean_loss(own, s) if quantity == "loss" else 100 * own["scores"][s][quantity] for own in results]
                    for s in steps
                ]
                means = [statistics.fmean(own) for own in values]
                errors = [statistics.stdev(own) if len(own) > 1 else 0.0 for own in values]
                at = [step * scale for step in steps]
                axes[row][column].plot(at, means, color=colour, label={"megaclip": "MegaCLIP"}.get(trainer, trainer))
                low, high = zip(*((m - e, m + e) for m, e in zip(means, errors, strict=True)), strict=True)
                axes[row][column].fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
                axes[row][column].set_xlabel("seconds of training" if row else "steps")
                axes[row][column].set_ylabel("loss" if quantity == "loss" else f"{SCORES[quantity]}, %")
                axes[row][column].grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
