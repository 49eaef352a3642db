"""Run the demo: train, evaluate and export a small CLIP model on two CPU cores.

    python demo.py [--seed N] [--steps N] [--name NAME]

It draws scenes of real handwritten digits and trains a tokenizer on their captions. It trains a small CLIP model under
the deepspeed launcher: two ranks, ZeRO-3 with optimizer offload, activation checkpointing, a gradient cache of 4 chunks
and the ring exchange (ds_configs/demo_cpu.json). It evaluates on held-out scenes, exports to open_clip's format and
verifies the export with open_clip itself. At the end it prints a table and writes RUN/metrics.json. Everything is
written to data/ and runs/ in the current directory.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from megaclip.commands.argument_types import CommandParser, integer

DATA = Path("data/digit_scenes")
RUNS = Path("runs")
RANKS = 2
STEPS = 300
BATCH = 256
CHANCE = {"zero_shot_top1": 0.1, "retrieval_r1_i2t": 0.001, "retrieval_r1_t2i": 0.001}


def main() -> int:
    arguments = parse_arguments()
    data, run = DATA, RUNS / arguments.name
    started = time.monotonic()
    try:
        make_data(data, arguments.steps)
        train(data, run, arguments)
        difference = export_and_verify(run)
    except subprocess.CalledProcessError as error:
        print(f"error: `{' '.join(map(str, error.cmd))}` failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    metrics = json.loads((run / "metrics.json").read_text())
    metrics |= {
        "export_max_abs_diff": difference,
        "seed": arguments.seed,
        "wall_s": round(time.monotonic() - started, 1),
    }
    (run / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print_table(metrics, run)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the training run (default: %(default)s)")
    parser.add_argument(
        "--steps", type=integer(1), default=STEPS, help=f"steps of batch {BATCH} (default: %(default)s)"
    )
    parser.add_argument(
        "--name", default="demo", help="name of the run's folder in runs/; an older run with this name is deleted"
    )
    arguments = parser.parse_args()
    if Path(arguments.name).name != arguments.name or arguments.name in ("", ".."):
        parser.error(f"--name {arguments.name!r} is not the name of a folder in runs/, which would be deleted")
    return arguments


def megaclip(*command: str | Path, capture: bool = False) -> str:
    """Run a command of MegaCLIP. Its output goes to the terminal or, with `capture`, is returned."""
    done = subprocess.run(
        [sys.executable, "-m", "megaclip", *map(str, command)],
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    return done.stdout or ""


def make_data(data: Path, steps: int) -> None:
    """Make the scenes for one pass of the curriculum and a tokenizer, unless an earlier call has made them."""
    scenes = Path(__file__).with_name("make_scenes.py")
    subprocess.run([sys.executable, scenes, data, "--train", str(steps * BATCH)], check=True)
    tokenizer = data / "tokenizer.model"
    if not tokenizer.exists():
        megaclip("tokenizer", data / "train/*.tar", "--out", tokenizer, "--vocab-size", "192")


def train(data: Path, run: Path, arguments: argparse.Namespace) -> None:
    """Train one run under the deepspeed launcher. An older run with this name is deleted."""
    shutil.rmtree(run, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        **os.environ,
    }
    command = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", RANKS, "--master_port", port,
        "--module", "megaclip", "train", "--deepspeed_config", "demo_cpu", "--model", "demo-tiny",
        "--train-data", data / "train/*.tar", "--shard-order", "sequential", "--tokenizer", data / "tokenizer.model",
        "--val-data", data / "held_out/*.tar", "--zeroshot-data", data / "zero_shot",
        "--train-steps", arguments.steps, "--warmup", arguments.steps // 3, "--workers", 0,
        "--aug-scale", 1, 1,
        "--seed", arguments.seed, "--logs", run.parent, "--name", run.name, "--log-every-n-steps", 20,
        "--eval-every-steps", 100,
    ]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True, env=environment)


def export_and_verify(run: Path) -> float:
    """Write RUN/open_clip and return the largest difference between MegaCLIP's and open_clip's features."""
    output = megaclip("export", run / "checkpoints", run / "open_clip", "--verify", capture=True)
    print(output, end="")
    found = re.search(r"^export_max_abs_diff (\S+)$", output, re.MULTILINE)
    assert found is not None, "megaclip export --verify prints export_max_abs_diff"
    return float(found.group(1))


def print_table(metrics: dict[str, float], run: Path) -> None:
    print(f"\n{'held-out':28} {'result':>8} {'chance':>8}")
    for name, chance in CHANCE.items():
        print(f"{name:28} {metrics[name]:8.3f} {chance:8.3f}")
    print(f"{'export_max_abs_diff':28} {metrics['export_max_abs_diff']:8.1e}")
    print(f"{'steps':28} {metrics['steps']:8.0f}")
    print(f"{'samples_per_s':28} {metrics['samples_per_s']:8.0f}")
    print(f"\nmetrics      {run / 'metrics.json'}")
    print(f"open_clip    {run / 'open_clip'}   (a complete local-dir: export)")
    print(f"pictures     tensorboard --logdir {run / 'tensorboard'}")


if __name__ == "__main__":
    sys.exit(main())
