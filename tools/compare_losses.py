"""Compare InfoNCE and FastCLIP v0 to v3 at a small batch: all runs, tables and plots of docs/fastclip.md.

    python tools/compare_losses.py [--jobs 2]            the comparison: every method, five seeds
    python tools/compare_losses.py --tune [--jobs 2]     the trials from which the settings were chosen, on another seed

The command draws a small set of digit scenes and trains one model per method and seed with launch/train.py, one rank
each. The set is small so that the runs visit every sample several times, because the global losses keep state per
sample.

It prints a table and writes OUT/results.json (with --tune: OUT/tuning.json). With --figures DIR it also draws the
plots, which requires matplotlib. OUT/RUN.log contains the output of a run. The command can be stopped and started
again: complete runs are not repeated, and an incomplete run starts from its beginning.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SCENES = 1920
STEPS = 480
SEEDS = (0, 1, 2, 3, 4)
TUNING_SEED = 100
EVALUATIONS = 4  # per run, evenly spread
SCORES = {
    "zero_shot_top1": "zero-shot top-1",
    "retrieval_r1_i2t": "R@1, image to text",
    "retrieval_r1_t2i": "R@1, text to image",
}


@dataclass(frozen=True)
class Method:
    """A loss with its settings. All other settings are equal in every run."""

    loss: str
    learning_rate: float
    batch: int = 32
    fastclip: dict[str, Any] = field(default_factory=dict)

    def deepspeed_config(self) -> dict[str, Any]:
        section: dict[str, Any] = {"loss": self.loss}
        if self.fastclip:
            section["fastclip"] = self.fastclip
        rates = {"lr": self.learning_rate, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.1}
        return {
            "train_batch_size": self.batch,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": rates},
            "zero_optimization": {"stage": 0},
            "megaclip": section,
        }


LIMITED = {"temperature_gradient_limit": 5.0}  # the published limit of v2's temperature gradients

METHODS = {
    "InfoNCE": Method("clip", 5e-4),
    "FastCLIP v0": Method("fastclip_v0", 5e-4, fastclip={"temperature_learning_rate": 5e-3}),
    "FastCLIP v1": Method("fastclip_v1", 5e-4, fastclip={"temperature": 0.1}),
    "FastCLIP v2": Method(
        "fastclip_v2", 5e-4, fastclip=LIMITED | {"rho": 1.0, "temperature": 0.07, "temperature_learning_rate": 2e-3}
    ),
    "FastCLIP v3": Method("fastclip_v3", 5e-4, fastclip={"temperature_learning_rate": 1e-3, "rho": 1.0}),
    # With gamma 1, u is g of the batch, so the difference to FastCLIP v1 is the effect of the memory alone.
    "v1 with gamma 1": Method("fastclip_v1", 5e-4, fastclip={"temperature": 0.1, "gamma_min": 1.0}),
    "InfoNCE at 256": Method("clip", 1.4e-3, batch=256),  # InfoNCE's rate times sqrt(8), not tuned
}


@dataclass(frozen=True)
class Run:
    """One training run and its folder."""

    label: str
    method: Method
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def is_finished(self, steps: int) -> bool:
        """Return whether the folder contains this run, completed. Raise ValueError if it contains another
        run."""
        summary = self.folder / "metrics.json"
        if not summary.exists():
            return False
        saved = json.loads((self.folder / "settings.json").read_text())
        if saved["ds_config"] != self.method.deepspeed_config() or saved["arguments"]["train_steps"] != steps:
            raise ValueError(f"{self.folder} contains a run with other settings: remove it, or choose another --out")
        return True


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    data = arguments.data.resolve()
    methods, seeds = (trials(), [TUNING_SEED]) if arguments.tune else (METHODS, arguments.seeds)
    if arguments.methods:
        methods = {label: methods[label] for label in arguments.methods}
    runs = [
        Run(label, method, seed, arguments.out.resolve() / f"{slug(label)}_seed{seed}")
        for label, method in methods.items()
        for seed in seeds
    ]
    try:
        make_data(data, arguments.scenes, arguments.held_out)
        train_all(runs, data, arguments.steps, arguments.jobs)
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = {
        "scenes": arguments.scenes,
        "steps": arguments.steps,
        "runs": [record(run) for run in runs],
    }
    out = arguments.out / ("tuning.json" if arguments.tune else "results.json")
    out.write_text(json.dumps(results, indent=1) + "\n")
    print_tables(results["runs"])
    print(f"\nresults  {out}")
    if arguments.figures:
        draw_scores(results["runs"], arguments.figures / "fastclip_scores.png")
        draw_curves(results["runs"], arguments.figures / "fastclip_curves.png")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help=f"run the trials on seed {TUNING_SEED}, not the comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "compare_losses", help="folder of the runs")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "compare_losses", help="folder of the scenes")
    parser.add_argument("--figures", type=Path, help="folder for the plots")
    parser.add_argument("--jobs", type=int, default=1, help="simultaneous runs, one core each (default 1)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds of each method (default 0 1 2 3 4)"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of every run (default {STEPS})")
    parser.add_argument("--scenes", type=int, default=SCENES, help=f"training scenes (default {SCENES})")
    parser.add_argument("--held-out", type=int, default=1000, help="scenes per evaluation (default 1000)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=f"run only these methods: {', '.join(METHODS)}")
    arguments = parser.parse_args(argv)
    known = trials() if arguments.tune else METHODS
    if unknown := set(arguments.methods or []) - set(known):
        parser.error(f"--methods {unknown.pop()!r} is unknown: choose from {', '.join(known)}")
    if arguments.figures and arguments.tune:
        parser.error("--figures draws only the comparison: leave out --figures or --tune")
    if arguments.figures and importlib.util.find_spec("matplotlib") is None:
        parser.error("--figures requires matplotlib: pip install matplotlib")
    if arguments.steps < EVALUATIONS:
        parser.error(f"--steps {arguments.steps} must be at least {EVALUATIONS}")
    return arguments


def slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", label.lower())


# ---------------------------------------------------------------- the runs


def make_data(data: Path, scenes: int, held_out: int) -> None:
    """Create the scenes and a tokenizer, unless they exist. One shard contains all scenes, so an epoch shuffles all."""
    counts = ["--train", scenes, "--shard-size", scenes, "--held-out", held_out, "--zero-shot", held_out]
    python("-m", "megaclip", "demo-data", data, *counts)
    tokenizer = data / "tokenizer.model"
    if not tokenizer.exists():
        python("-m", "megaclip", "tokenizer", data / "train/*.tar", "--out", tokenizer, "--vocab-size", 192)


def python(*command: Any) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def train_all(runs: list[Run], data: Path, steps: int, jobs: int) -> None:
    """Train the runs that are not complete, `jobs` at a time. Raise ValueError if a run fails."""
    missing = [run for run in runs if not run.is_finished(steps)]
    total = sum(run.method.batch * steps for run in missing)
    with tqdm(total=total, unit=" samples", desc=f"{len(missing)} of {len(runs)} runs") as bar:

        def work(run: Run) -> None:
            train(run, data, steps)
            bar.update(run.method.batch * steps)
            bar.set_postfix_str(f"{run.label}, seed {run.seed}")

        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(work, run) for run in missing]
            try:
                for done in waiting:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)


def train(run: Run, data: Path, steps: int) -> None:
    """Train one run with launch/train.py on one rank, from its beginning. Raise ValueError if it fails."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    config = run.folder / "ds_config.json"
    config.write_text(json.dumps(run.method.deepspeed_config(), indent=1) + "\n")
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ, "MASTER_PORT": "0"}  # any free port
    command = [
        sys.executable, "launch/train.py", "--deepspeed_config", config, "--model", "demo-tiny",
        "--train-data", data / "train/*.tar", "--tokenizer", data / "tokenizer.model",
        "--val-data", data / "held_out/*.tar", "--zeroshot-data", data / "zero_shot",
        "--train-steps", steps, "--warmup", steps // 5, "--workers", 0, "--aug-scale", 1, 1,
        "--seed", run.seed, "--logs", run.folder.parent, "--name", run.folder.name,
        "--log-every-n-steps", max(1, steps // 24), "--eval-every-steps", steps // EVALUATIONS, "--save-frequency", 0,
    ]  # fmt: skip
    with run.log.open("w") as log:
        finished = subprocess.run(
            [str(part) for part in command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    if finished.returncode != 0:
        last = run.log.read_text().strip().splitlines()[-1:]
        raise ValueError(
            f"{run.label}, seed {run.seed} ended with exit code {finished.returncode}: {last} (see {run.log})"
        )


def record(run: Run) -> dict[str, Any]:
    """Return a complete run as JSON: settings, scores over the steps, and temperature, loss and gradient norm."""
    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()

    def curve(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(tag)]

    return {
        "label": run.label,
        "seed": run.seed,
        "loss": run.method.loss,
        "batch": run.method.batch,
        "learning_rate": run.method.learning_rate,
        "fastclip": run.method.fastclip,
        "scores": {name: curve(f"evaluation/{name}") for name in SCORES},
        "temperature": [(step, 1 / scale) for step, scale in curve("train/logit_scale")],
        "train_loss": curve("train/loss"),
        "gradient_norm": curve("train/gradient_norm"),
    }


# ---------------------------------------------------------------- tables and plots


def final_scores(records: list[dict[str, Any]], label: str, name: str) -> list[float]:
    """Return the last score of each seed."""
    return [record["scores"][name][-1][1] for record in records if record["label"] == label]


def labels_of(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["label"] for record in records))


def print_tables(records: list[dict[str, Any]]) -> None:
    """Print two markdown tables: scores with sample standard deviations, and differences with standard errors.

    The differences are to the first method, seed by seed: runs of one seed have equal initial weights and data order.
    """
    print_table({label: {name: final_scores(records, label, name) for name in SCORES} for label in labels_of(records)})
    first, *others = labels_of(records)
    differences = {f"{label} - {first}": differences_by_seed(records, label, first) for label in others}
    paired = {label: found for label, found in differences.items() if all(len(values) > 1 for values in found.values())}
    if paired:
        print_table(paired, signed=True)


def differences_by_seed(records: list[dict[str, Any]], label: str, other: str) -> dict[str, list[float]]:
    """Return the last score of `label` minus that of `other`, for the seeds that both have."""
    last = {(r["label"], r["seed"], name): r["scores"][name][-1][1] for r in records for name in SCORES}
    seeds = [record["seed"] for record in records if record["label"] == label]
    return {
        name: [last[label, seed, name] - last[other, seed, name] for seed in seeds if (other, seed, name) in last]
        for name in SCORES
    }


def print_table(rows: dict[str, dict[str, list[float]]], *, signed: bool = False) -> None:
    """Print one markdown table. signed: the values are differences, printed with the standard error of their mean."""
    print("\n| | " + " | ".join(SCORES.values()) + " |\n" + "| --- " * (len(SCORES) + 1) + "|")
    for label, scores in rows.items():
        cells = []
        for values in scores.values():
            mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None
            if spread is not None and signed:
                spread /= len(values) ** 0.5
            cells.append(f"{mean:{'+' if signed else ''}.3f}" + (f" ± {spread:.3f}" if spread is not None else ""))
        print(f"| {label} | " + " | ".join(cells) + " |")


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


COLOURS = dict(zip(METHODS, ("#444444", "#3a78b5", "#12784a", "#c0702a", "#8a5aa8", "#7fc8a0", "#b0b0b0"), strict=True))


def draw_scores(records: list[dict[str, Any]], out: Path) -> None:
    """Draw one panel per score: every seed as a dot, the mean as a line."""
    plt = pyplot()
    labels = labels_of(records)
    figure, axes = plt.subplots(1, len(SCORES), figsize=(11, 3.2), sharey=True)
    for axis, (name, title) in zip(axes, SCORES.items(), strict=True):
        for row, label in enumerate(reversed(labels)):
            values = final_scores(records, label, name)
            axis.plot(values, [row] * len(values), "o", color=COLOURS[label], alpha=0.6, markersize=5)
            axis.plot([statistics.mean(values)] * 2, [row - 0.3, row + 0.3], color=COLOURS[label], linewidth=2)
        axis.set_yticks(range(len(labels)), list(reversed(labels)))
        axis.set_xlim(left=0)
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def draw_curves(records: list[dict[str, Any]], out: Path) -> None:
    """Draw means over the seeds by step with a band of one standard deviation. The last panel is the temperature."""
    plt = pyplot()
    labels = labels_of(records)
    figure, axes = plt.subplots(1, len(SCORES) + 1, figsize=(14, 3.4))
    panels = [*SCORES.items(), ("temperature", "temperature (v2: mean of a batch)")]
    for axis, (name, title) in zip(axes, panels, strict=True):
        for label in labels:
            chosen = [record for record in records if record["label"] == label]
            curves = [record["temperature"] if name == "temperature" else record["scores"][name] for record in chosen]
            steps = [step for step, _ in curves[0]]
            columns = list(zip(*([value for _, value in curve] for curve in curves), strict=True))
            means = [statistics.mean(column) for column in columns]
            axis.plot(steps, means, color=COLOURS[label], label=label, linewidth=1.5)
            if len(chosen) > 1:
                spreads = [statistics.stdev(column) for column in columns]
                low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
                axis.fill_between(steps, low, high, color=COLOURS[label], alpha=0.12, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("steps", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


# ---------------------------------------------------------------- the trials


def trials() -> dict[str, Method]:
    """Return the trials on the tuning seed: three per method, four for v2 and v3."""
    low, high = 5e-4, 1e-3
    v0: dict[str, Any] = {"temperature_learning_rate": 1e-3}
    v2: dict[str, Any] = LIMITED | {"temperature": 0.03, "temperature_learning_rate": 0.0133}  # published
    milder: dict[str, Any] = LIMITED | {"rho": 1.0, "temperature": 0.07}
    v3: dict[str, Any] = {"temperature_learning_rate": 1e-3}  # rho 6.5, published
    return {
        "InfoNCE, lr 2.5e-4": Method("clip", 2.5e-4),
        "InfoNCE, lr 5e-4": Method("clip", low),
        "InfoNCE, lr 1e-3": Method("clip", high),
        "v0, lr 5e-4": Method("fastclip_v0", low, fastclip=v0),
        "v0, lr 1e-3": Method("fastclip_v0", high, fastclip=v0),
        "v0, lr 5e-4, tau's lr 5e-3": Method("fastclip_v0", low, fastclip={"temperature_learning_rate": 5e-3}),
        "v1, lr 5e-4": Method("fastclip_v1", low),
        "v1, lr 1e-3": Method("fastclip_v1", high),
        "v1, lr 5e-4, tau 0.1": Method("fastclip_v1", low, fastclip={"temperature": 0.1}),
        "v2, lr 5e-4": Method("fastclip_v2", low, fastclip=v2),
        "v2, lr 5e-4, rho 3": Method("fastclip_v2", low, fastclip=v2 | {"rho": 3.0}),
        "v2, lr 5e-4, rho 1, initial tau 0.07": Method("fastclip_v2", low, fastclip=v2 | milder),
        "v2, lr 5e-4, rho 1, initial tau 0.07, tau's lr 2e-3": Method(
            "fastclip_v2", low, fastclip=milder | {"temperature_learning_rate": 2e-3}
        ),
        "v3, lr 5e-4": Method("fastclip_v3", low, fastclip=v3),
        "v3, lr 1e-3": Method("fastclip_v3", high, fastclip=v3),
        "v3, lr 5e-4, rho 3": Method("fastclip_v3", low, fastclip=v3 | {"rho": 3.0}),
        "v3, lr 5e-4, rho 1": Method("fastclip_v3", low, fastclip=v3 | {"rho": 1.0}),
    }


if __name__ == "__main__":
    sys.exit(main())
