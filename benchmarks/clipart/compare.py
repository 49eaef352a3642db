"""Train MegaCLIP and open_clip's own trainer on the clip-art benchmark, score all checkpoints alike, and compare.

    python benchmarks/clipart/build.py clipart/
    python benchmarks/clipart/compare.py run clipart/ results/ open_clip/clip/256/5e-4 megaclip/clip/256/5e-4 \\
        --seeds 0 1 2 3 4 --jobs 5
    python benchmarks/clipart/compare.py run clipart/ results/ open_clip/clip/256/5e-4/timed \\
        megaclip/clip/256/5e-4/timed --jobs 2
    python benchmarks/clipart/compare.py report results/ --figure docs/figures/clipart.png

A run is TRAINER/LOSS/BATCH/LEARNING_RATE. With `/timed` it is compiled, has one seed and no checkpoints, and all other
runs are paused as soon as it has left its first steps behind, so that its steps have the GPU and the cores alone. The
runs of the first seed start first, then those of the second, and so on.

Both trainers read the same shards with the same augmentation, the same model (ViT-S-16 at 112 pixels, 32 text
positions), optimizer, schedule and clipping of gradients. The orders of the samples are different random orders.
open_clip runs with amp_bf16, MegaCLIP with bf16; both have float32 weights in AdamW. With `/small`, which open_clip
does not know, the towers have 6 layers of width 256 at 64 pixels, so that many runs take minutes.

Each run writes OUT/RUN-SEED.json with losses, times, and the scores of its checkpoints on the test and the validation
sets. Complete runs are not repeated. Requires one GPU (or patience), and for open_clip: open_clip_torch, webdataset and
pandas.
"""

import argparse
import functools
import importlib
import json
import math
import os
import re
import runpy
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
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
from megaclip.evaluation import Evaluator, ModelEncoder, classify, evaluate_pairs, image_features
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
SMALL_MODEL: dict[str, Any] = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 64, "layers": 6, "width": 256, "patch_size": 16},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 6},
}
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
VALIDATION = "validation "
"""Prefix of the scores on the validation sets."""


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
    is_small: bool
    """Train the small model."""

    @property
    def label(self) -> str:
        small = "/small" if self.is_small else ""
        return f"{self.trainer}/{self.loss}/{self.batch}/{self.learning_rate:g}{small}"

    @property
    def model(self) -> str:
        """Return the name of the file of the model."""
        return "small.json" if self.is_small else "model.json"

    @property
    def name(self) -> str:
        return f"{self.label.replace('/', '_')}-{'timed' if self.is_timed else self.seed}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and score")
    run.add_argument("data", type=Path, help="folder that build.py wrote")
    run.add_argument("out", type=Path, help="folder for the results")
    run.add_argument("runs", nargs="+", metavar="TRAINER/LOSS/BATCH/LEARNING_RATE[/small][/timed]")
    run.add_argument("--seeds", type=int, nargs="+", default=[0])
    run.add_argument("--epochs", type=float, default=40, help="passes, in whole batches (default 40)")
    run.add_argument("--evaluations", type=int, default=5, help="number of checkpoints that are scored (default 5)")
    run.add_argument("--timed-epochs", type=float, default=10, help="passes of the timed runs (default 10)")
    run.add_argument("--jobs", type=int, default=1, help="number of runs that share the GPU")
    run.add_argument("--workers", type=int, default=15, help="number of data workers per run (default 15)")
    run.add_argument("--timed-workers", type=int, default=15, help="number of data workers per timed run (default 15)")
    run.add_argument("--keep", action="store_true", help="keep the folders of the runs, in OUT/runs")
    report = commands.add_parser("report", help="print the tables and draw the figure")
    report.add_argument("folders", type=Path, nargs="+")
    report.add_argument("--figure", type=Path, help="PNG of the curves against steps and seconds")
    report.add_argument("--best", action="store_true", help="print only the best learning rate of each loss and batch")
    arguments = parser.parse_args(argv)
    if arguments.command == "report":
        report_results(arguments)
    elif os.environ.get(DEVICE_CHECK) == "1":
        run_all(arguments)
    else:
        os.environ[DEVICE_CHECK] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])


DEVICE_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable, read while modules are imported. With 1 they do not start CUDA, which a fork could not use."""


def planned_runs(arguments: argparse.Namespace) -> list[Run]:
    counts = json.loads((arguments.data / "report.json").read_text())["pictures"]
    samples = sum(own.get("train", 0) for own in counts.values())
    runs = []
    for seed in arguments.seeds:
        for text in arguments.runs:
            trainer, loss, batch, rate, *options = text.split("/")
            if not set(options) <= {"small", "timed"}:
                raise SystemExit(f"{text}: expected /small, /timed or both after the learning rate")
            small, timed = "small" in options, "timed" in options
            if trainer == "open_clip" and (loss != "clip" or small):
                raise SystemExit(f"{text}: open_clip trains only with the loss clip, and without /small")
            if timed and seed != arguments.seeds[0]:
                continue
            size = min(int(batch), samples)
            size -= size % math.ceil(size / LARGEST_CHUNK)  # chunks of one size
            epoch_steps = samples // size
            steps = epoch_steps * max(1, round(arguments.timed_epochs if timed else arguments.epochs))
            save = 0 if timed else math.ceil(steps / arguments.evaluations / epoch_steps) * epoch_steps
            run = Run(trainer, loss, size, float(rate), seed, steps, epoch_steps, save, timed, small)
            if not (arguments.out / f"{run.name}.json").exists():
                runs.append(run)
    return runs


def run_all(arguments: argparse.Namespace) -> None:
    """Fork a process for each run, `arguments.jobs` at a time.

    The runs share the imported modules and the decoded images of the evaluation sets. This process itself never uses
    the GPU, because a fork cannot use the GPU after its parent has.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    place = arguments.out / "runs" if arguments.keep else Path(tempfile.mkdtemp(prefix="clipart"))
    place.mkdir(exist_ok=True)
    (place / "model.json").write_text(json.dumps(MODEL))
    (place / "small.json").write_text(json.dumps(SMALL_MODEL))
    waiting, running = planned_runs(arguments), dict[int, Run]()
    for name in {name for run in waiting for name in PRELOADED[run.trainer]}:
        importlib.import_module(name)
    names = {run.model for run in waiting if not run.is_timed}
    scorers = {name: Scorer(arguments.data, place / name, arguments.workers) for name in names}
    alone = 0  # the process that has the machine alone
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while waiting or running:
            if waiting and len(running) < arguments.jobs and not alone:
                run = waiting.pop(0)
                log_of(run, arguments).write_text("")
                work = functools.partial(carry_out, run, place / run.name, arguments, scorers)
                running[start(work)] = run
                continue
            for process, run in running.items():
                if run.is_timed and not alone and len(STEP_LINE.findall(log_of(run, arguments).read_text())) >= 12:
                    alone = process
                    alone_mark(run, arguments).write_text(str(time.time()))
                    send(signal.SIGSTOP, running.keys() - {alone})
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                time.sleep(0.1)
                continue
            run = running.pop(process)
            if process == alone:
                alone = 0
                send(signal.SIGCONT, running)
            if status:
                print(f"{run.name} FAILED: see {log_of(run, arguments)}", flush=True)
    finally:
        send(signal.SIGKILL, running)
        if not arguments.keep:
            shutil.rmtree(place, ignore_errors=True)


PRELOADED = {
    "megaclip": ["megaclip.commands.train", "megaclip.engine.run", "torch.utils.tensorboard"],
    "open_clip": ["open_clip_train.main", "torch.utils.tensorboard"],
}


def start(work: Callable[[], None]) -> int:
    """Run a function in a forked process, the leader of a process group of its own. Return the process id."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process, number)


def log_of(run: Run, arguments: argparse.Namespace) -> Path:
    return arguments.out / f"{run.name}.log"


def alone_mark(run: Run, arguments: argparse.Namespace) -> Path:
    """Return the file with the time from which a timed run has the machine alone."""
    return arguments.out / f"{run.name}.alone"


def carry_out(run: Run, folder: Path, arguments: argparse.Namespace, scorers: dict[str, "Scorer"]) -> None:
    """Train, score the checkpoints, and write the outcome. The trainer is a fork, so that this process has no group."""
    started, terminal = time.time(), os.dup(1)
    arguments_of = open_clip_arguments if run.trainer == "open_clip" else megaclip_arguments
    module, *flags = arguments_of(run, folder, arguments)

    def train() -> None:
        os.setpgid(0, os.getppid())  # paused and ended with its parent
        sys.argv = [module, *flags]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    with log_of(run, arguments).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _, status = os.waitpid(start(train), 0)
    if status:
        raise SystemExit(1)
    mark = alone_mark(run, arguments)
    alone_from = float(mark.read_text()) if mark.exists() else started
    outcome: dict[str, Any] = {**vars(run), "label": run.label, "torch": torch.__version__}
    outcome |= {"train_s": time.time() - started, **curve(folder, started, alone_from, run.trainer == "open_clip")}
    start_process_group()
    outcome["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    outcome["scores"] = {} if run.is_timed else scorers[run.model].score_run(run, folder)
    outcome["total_s"] = time.time() - started
    (arguments.out / f"{run.name}.json").write_text(json.dumps(outcome))
    last = {name: round(own, 3) for name, own in [{}, *outcome["scores"].values()][-1].items() if name in SCORES}
    facts = f"{run.steps} steps, {outcome['total_s']:.0f} s in all, {outcome['step_s'] * 1e3:.1f} ms per step"
    os.dup2(terminal, 1)
    print(f"{run.name}: {facts}, loss {outcome['losses'][-1][1]:.3f} {last or ''}", flush=True)
    if not arguments.keep:
        shutil.rmtree(folder, ignore_errors=True)


STEP_LINE = re.compile(r"INFO step \d+/|Train Epoch: ")


# --- the trainers -----------------------------------------------------------------------------------------------------


def open_clip_arguments(run: Run, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return module and arguments of open_clip's trainer.

    Its loader has equal batches per worker, so not all numbers of workers fit.
    """
    shards = sorted((arguments.data / "train").glob("*.tar"))
    most = arguments.timed_workers if run.is_timed else arguments.workers
    fits = [count for count in range(1, most + 1) if run.epoch_steps % count == 0 and len(shards) % count == 0]
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
    command = ["open_clip_train.main"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [*command, *(["--torchcompile"] if run.is_timed else [])]


def megaclip_arguments(run: Run, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return module and arguments of `megaclip train`."""
    chunks = math.ceil(run.batch / LARGEST_CHUNK)
    on_gpu = torch.cuda.is_available()
    section: dict[str, Any] = {"loss": run.loss, "compile": run.is_timed}
    if chunks > 1:
        section["keep_graphs"] = 0  # several runs share the GPU
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
        "model": folder.parent / run.model,
        "train-data": f"{arguments.data.resolve()}/train/*.tar",
        "train-steps": run.steps,
        "warmup": round(run.steps * WARMUP_SHARE),
        "workers": arguments.timed_workers if run.is_timed else arguments.workers,
        "seed": run.seed,
        "logs": folder.parent,
        "name": run.name,
        "keep-last": 1000,
        "log-every-n-steps": LOG_EVERY,
    }
    flags |= {"save-every-steps": run.save_steps} if run.save_steps else {"save-frequency": 0}
    return ["megaclip", "train"] + [text for name, value in flags.items() for text in (f"--{name}", str(value))]


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
    """Scores checkpoints of both trainers on the test and the validation sets. Images are decoded once."""

    def __init__(self, data: Path, model: Path, workers: int) -> None:
        self._config = load_model_config(model)
        self._transform = ImageTransform(self._config.vision_cfg.image_size)
        self._tokenizer: Tokenizer = load_tokenizer("clip", self._config.text_cfg.context_length)
        self._sets = []
        for part, suite in (("", "suite"), (VALIDATION, "suite_val")):
            for task in find_tasks(data / suite):
                own = open_task(task)
                tokenizer = None if isinstance(own, LabelledDataset) else self._tokenizer
                loader = EvaluationLoader(own, self._transform, tokenizer, batch_size=256, num_workers=min(workers, 4))
                self._sets.append((part, task.key, own, list(loader)))

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
        evaluator = Evaluator(encode, self._transform, self._tokenizer, batch_size=256, num_workers=0)
        scores: dict[str, float] = {}
        for part, key, data, batches in self._sets:
            if isinstance(data, LabelledDataset):
                found = classify(image_features(encode, batches), evaluator.class_weights(data))
                result = {f"zero_shot_top{k}": found.accuracy(k) for k in (1, 5)}
            else:
                result = evaluate_pairs(encode, batches).metrics
                for k in (1, 5):
                    result[f"retrieval_r{k}"] = (result[f"retrieval_r{k}_i2t"] + result[f"retrieval_r{k}_t2i"]) / 2
            scores |= {f"{part}{name} of {key}": float(value) for name, value in result.items() if name in SCORES}
        for name in [part + name for part in ("", VALIDATION) for name in SCORES]:
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
    best = best_rates(found)
    if arguments.best:
        print(*best.values(), sep="\n")
        return
    print_scores(found, best)
    pair = [f"{trainer}/{rest}" for rest in {label.split("/", 1)[1] for label in found} for trainer in TRAINERS]
    pair = [label for label in pair if all(f"{own}/{label.split('/', 1)[1]}" in found for own in TRAINERS)]
    if pair:
        print_agreement(found[pair[0]], found[pair[1]])
        print_seconds([found[label] for label in pair[:2]], timed)
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
            difference = f"{means[1] - means[0]:+.3f}"
            print(f"| {step} | {name} | {cells[0]} | {cells[1]} | {difference} | {welch(*sides)} |")


def best_rates(found: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, str, str, bool], str]:
    """Return the label with the best learning rate for each trainer, loss, batch and size of the model.

    The best learning rate has the best score on the validation sets with the first seed.
    """
    rates: dict[tuple[str, str, str, bool], dict[float, str]] = defaultdict(dict)
    for label, results in found.items():
        trainer, loss, batch, _, *small = label.split("/")
        rates[trainer, loss, batch, bool(small)][selection_score(results[0])] = label
    return {group: own[max(own)] for group, own in sorted(rates.items(), key=lambda item: int(item[0][2]))}


def print_scores(found: dict[str, list[dict[str, Any]]], best: dict[tuple[str, str, str, bool], str]) -> None:
    """Print the last scores at the best learning rates, and Welch's t against InfoNCE with the same batch."""
    columns = [f"{text}{part}" for text in SCORES.values() for part in (", %", ", t")]
    print(f"\n| run | seeds | steps | loss | {' | '.join(columns)} |")
    print("| --- " * (4 + len(columns)) + "|")
    for (trainer, _, batch, small), label in best.items():
        own, cells = found[label], []
        base = found.get(best.get((trainer, "clip", batch, small), ""), [])
        for name in SCORES:
            sides = [[100 * last_scores(result)[name] for result in results] for results in (base, own)]
            cells += [spread(sides[1], "%.1f"), "" if base is own else welch(*sides)]
        losses = spread([mean_loss(result, result["steps"]) for result in own], "%.3f")
        print(f"| {label} | {len(own)} | {own[0]['steps']} | {losses} | {' | '.join(cells)} |")


def print_seconds(sides: list[list[dict[str, Any]]], timed: list[dict[str, Any]]) -> None:
    """Print the seconds of training, as in the timed runs, that each trainer requires for the scores of each step."""
    seconds = {own["trainer"]: own["mean_step_s"] for own in timed}
    if set(TRAINERS) <= set(seconds):
        print("\n| step | open_clip, s | MegaCLIP, s |\n| --- | --- | --- |")
        for step in sorted(set(sides[0][0]["scores"]) & set(sides[1][0]["scores"])):
            print(f"| {step} | {' | '.join(f'{step * seconds[trainer]:.0f}' for trainer in TRAINERS)} |")


def last_scores(result: dict[str, Any]) -> dict[str, float]:
    scores: dict[str, float] = result["scores"][max(result["scores"])]
    return scores


def selection_score(result: dict[str, Any]) -> float:
    """Return the score by which a learning rate is selected: the mean of zero-shot top-1 and R@5 in validation."""
    last = last_scores(result)
    return (last[f"{VALIDATION}zero_shot_top1"] + last[f"{VALIDATION}retrieval_r5"]) / 2


def welch(base: list[float], values: list[float]) -> str:
    """Return Welch's t of the difference of two means, or "" if there are too few values."""
    if min(len(base), len(values)) < 2:
        return ""
    error = math.sqrt(statistics.variance(base) / len(base) + statistics.variance(values) / len(values))
    return f"{(statistics.fmean(values) - statistics.fmean(base)) / error:+.1f}" if error else ""


def draw(path: Path, found: dict[str, list[dict[str, Any]]], timed: list[dict[str, Any]]) -> None:
    """Draw loss, zero-shot and retrieval against steps, and against seconds if both trainers have a timed run.

    Lines are means over the seeds, bands standard deviations.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speed = {own["trainer"]: own["mean_step_s"] for own in timed}
    quantities = ["loss", "zero_shot_top1", "retrieval_r5"]
    height = 2 if set(TRAINERS) <= set(speed) else 1
    figure, axes = plt.subplots(height, 3, figsize=(11, 2.9 * height), sharey="col", squeeze=False)
    for trainer, colour in zip(TRAINERS, ("tab:orange", "tab:blue"), strict=True):
        results = found[trainer]
        for row, scale in enumerate((1.0, speed.get(trainer, 1.0))[:height]):
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
