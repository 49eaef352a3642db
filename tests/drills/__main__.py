"""Drills: faults are injected into a run of two ranks on the CPU at random times, and the run is resumed and compared.

    make test-drills                                          # 20 trials of each fault, and the soak
    make test-drills ARGS="--trials 5 --only sigterm disk_full --seed 7"

The command prints a table. The exit code is 1 if a number that must be zero is not zero. The drills of a full disk and
of a power cut mount file systems, and the network drills create interfaces. Without root they are skipped, and a line
names them.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tests.distributed.preload  # noqa: F401, imported before processes are forked
from tests.drills.faults import FAULTS, SAVE_EVERY, STEPS, Trial, Verdict, unmounted
from tests.drills.jobs import in_child, start
from tests.drills.soak import soak
from tests.end_to_end.conftest import make_inputs
from tests.end_to_end.training_runs import flags

NEED_ROOT = ("disk_full", "power_cut", "network_cut", "network_healed")
COLUMNS = ("trials", "missed", "steps lost", "broken latest", "unequal losses", "damage trained on", "hangs", "other")
"""Columns of the table. All except the first two must be zero. "missed": the run had ended before the fault."""


@dataclass
class Row:
    """Counts of one kind of fault."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    notes: list[str] = field(default_factory=list)


@dataclass
class Reference:
    """The run without a fault, with which others are compared."""

    losses: dict[int, float]
    step_s: float
    files: dict[str, bytes]
    """DeepSpeed's files of the last checkpoint."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="trials of each fault (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random choices (default: a random one)")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS), help="faults to drill")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the trials that failed")
    parser.add_argument(
        "--soak-steps", type=int, default=2000, help="steps of the soak; 0 leaves it out (default %(default)s)"
    )
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    os.environ.update({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
    root = Path(tempfile.mkdtemp(prefix="drills-"))
    try:
        inputs = root / "inputs"
        inputs.mkdir()
        in_child(partial(make_inputs, inputs))
        command = partial(_command, inputs)
        failed = drill(root, arguments.only, arguments.trials, seed, arguments.keep, command)
        if arguments.soak_steps:
            lines, grown = soak(root / "soak", command, arguments.soak_steps)
            print(f"soak of {arguments.soak_steps} steps", *lines, sep="\n")
            failed += grown
        return int(failed > 0)
    finally:
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)
        else:
            print(f"kept {root}")


def drill(root: Path, faults: list[str], trials: int, seed: int, keep: bool, command: Any) -> int:
    """Run the trials and print the table. Return the sum of the numbers that must be zero."""
    if not faults:
        return 0
    reference = run_reference(root / "reference", command)
    rows: dict[str, Row] = {}
    for name in faults:
        if name in NEED_ROOT and os.geteuid() != 0:
            print(f"{name}: left out, it requires root", flush=True)
            continue
        row, began = rows.setdefault(name, Row()), time.monotonic()
        for number in range(trials):
            folder = root / f"{name}_{number}"
            folder.mkdir()
            with unmounted(folder):
                problems = run_trial(name, f"{seed} {name} {number}", folder, command, reference, row)
            for problem in problems:
                row.notes.append(f"{name} {number}: {problem}")
                print(f"  {row.notes[-1]}", flush=True)
            if not (problems and keep):
                shutil.rmtree(folder)
        print(f"{name}: {trials} trials in {time.monotonic() - began:.0f} s", flush=True)
    print(table(rows))
    return sum(row.counts[column] for row in rows.values() for column in COLUMNS[2:])


def table(rows: dict[str, Row]) -> str:
    """Return the counts as a Markdown table."""
    lines = [f"| fault | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    lines += [
        f"| {name.replace('_', ' ')} | {' | '.join(str(row.counts[column]) for column in COLUMNS)} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def run_reference(folder: Path, command: Any) -> Reference:
    """Train without a fault."""
    job = start(command(logs=folder / "runs"), folder / "job")
    job.wait_for_step(1)
    began = time.monotonic()
    assert job.wait() and job.exit_code == 0, job.output
    losses = job.losses()
    assert sorted(losses) == list(range(1, STEPS + 1)) and job.losses(1) == losses, losses
    last = folder / "runs" / "run" / "checkpoints" / f"step_{STEPS:08d}"
    return Reference(losses, (time.monotonic() - began) / STEPS, _tensors(last))


def run_trial(name: str, seed: str, folder: Path, command: Any, reference: Reference, row: Row) -> list[str]:
    """Run one trial, add its counts to `row`, and return the problems found."""
    trial = Trial(random.Random(seed), folder, command, reference.losses, reference.step_s, logs=folder / "runs")
    problems: list[str] = []

    def count(column: str, text: str, number: int = 1) -> None:
        row.counts[column] += number
        problems.append(f"{column}: {text}")

    row.counts["trials"] += 1
    verdict: Verdict = FAULTS[name](trial)
    job = trial.job
    assert job is not None
    if not job.wait():
        count("hangs", f"the run: {_end(job.output)}")
    trial.missed = trial.missed or (job.exit_code == 0 and 0 not in verdict.codes and STEPS in job.losses())
    row.counts["missed"] += trial.missed
    if not trial.missed:
        if job.exit_code not in verdict.codes:
            count("other", f"exit code {job.exit_code} instead of {verdict.codes}: {_end(job.output)}")
        if verdict.error and verdict.error not in job.output:
            count("other", f"the log does not contain {verdict.error!r}: {_end(job.output)}")
        if "Traceback" in job.output:
            count("other", f"a traceback: {_end(job.output)}")
    if not verdict.damaged and (damage := latest_damage(trial.checkpoints)):
        count("broken latest", damage)
    for undo in trial.undo:
        undo()
    again = start(trial.command(resume="auto"), folder / "again")
    if not again.wait():
        count("hangs", f"the resumed run: {_end(again.output)}")
    if again.exit_code != 0:
        count("other", f"exit code {again.exit_code} of the resumed run: {_end(again.output)}")
        return problems
    losses = again.losses()
    resumed_at = min(losses, default=STEPS + 1) - 1
    if verdict.damaged and resumed_at == int(verdict.damaged.removeprefix("step_")):
        count("damage trained on", f"resumed from {verdict.damaged}")
    needed = job.last_step() if verdict.saves_last_step and not trial.missed else max(job.published(), default=0)
    if not verdict.damaged and resumed_at < needed:
        count(
            "steps lost", f"resumed at step {resumed_at} instead of {needed}: {_end(job.output)}", needed - resumed_at
        )
    seen = [*job.losses().items(), *job.losses(1).items(), *losses.items()]
    if wrong := [step for step, loss in seen if loss != reference.losses[step]]:
        count("unequal losses", f"of steps {wrong[:5]}: {_end(job.output)}")
    if losses and max(losses) != STEPS:
        count("other", f"the resumed run ended at step {max(losses)}")
    if _tensors(trial.checkpoints / f"step_{STEPS:08d}") != reference.files:
        count("unequal losses", "the last checkpoints differ")
    return problems


def latest_damage(checkpoints: Path) -> str:
    """Return the damage of the checkpoint that `latest` names, or "". This check does not use megaclip."""
    latest = checkpoints / "latest"
    if not latest.exists():
        complete = [path.name for path in checkpoints.glob("step_*") if (path / "megaclip_manifest.json").exists()]
        return f"there is no latest, but {complete} are complete" if len(complete) > 1 else ""
    folder = checkpoints / latest.read_text().strip()
    try:
        files = json.loads((folder / "megaclip_manifest.json").read_text())["files"]
        for name, record in files.items():
            content = (folder / name).read_bytes()
            if (len(content), f"{zlib.crc32(content):08x}") != (record["size"], record["crc32"]):
                return f"{folder.name}/{name} has changed"
    except (OSError, ValueError, KeyError) as error:
        return f"{folder.name}: {error}"
    return "" if len(files) >= 4 else f"{folder.name} lists {sorted(files)} only"


def _tensors(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.pt")}


def _end(output: str) -> str:
    """Return the end of a log as one line."""
    return " | ".join(output.splitlines()[-8:])[-1500:]


def _command(inputs: Path, **changes: Any) -> list[str]:
    """Return the command line of a run. changes: flags. None omits a flag, and "" gives a flag without a value."""
    defaults: dict[str, Any] = {
        "train_steps": STEPS,
        "save_every_steps": SAVE_EVERY,
        "workers": 1,
        "keep_last": 2,
        "lr_scheduler": "const",
    }
    return [word for word in flags(inputs, inputs / "zero1.json", **defaults | changes) if word]


if __name__ == "__main__":
    sys.exit(main())
