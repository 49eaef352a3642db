"""A run with any shipped ds_config resumes with the same bits as a run that never stopped.

Each case has the optimizer, precision and ZeRO settings of a shipped file, and the small model of the engine tests. The
bits are equal on one machine with the same instruction set and number of threads.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from deepspeed import DeepSpeedEngine

from megaclip.checkpoint import store
from megaclip.config import TrainingConfig
from megaclip.zero.optimizers import set_learning_rate, update
from megaclip.zero.reshard import load_checkpoint
from tests.distributed import engine_cases
from tests.distributed.engine_cases import Case, backpropagate, masters, start_engine, training_config
from tests.distributed.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = 6, 3
"""At step 5, beta ** 5 by multiplication and by pow differ in float32 for the betas of the shipped files."""
COPIED = ("optimizer", "zero_optimization", "bf16", "data_types", "zero_allow_untested_optimizer")
SHIPPED = {path.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("ds_configs/**/*.json"))}


def distinct_cases() -> dict[str, dict]:
    """Return the relevant sections of the shipped files, by the name of the first file that has them."""
    cases: dict[str, dict] = {}
    for name, content in SHIPPED.items():
        case = {key: content[key] for key in COPIED if key in content}
        if case not in cases.values():
            cases[name] = case
    return cases


CASES: dict[str, dict] = distinct_cases() | {
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9, "nesterov": True}}},
    "Adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 1.0}}},
    "Lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1.0}}},
    "Lion": {"optimizer": {"type": "Lion", "params": {"lr": 1.0}}, "zero_optimization": {"stage": 3}},
}
QUICK = ("demo_cpu.json", "Lamb", "Lion")
LAUNCHES = {"quick": QUICK, "long": tuple(name for name in CASES if name not in QUICK)}


def start(name: str) -> DeepSpeedEngine:
    case = Case(CASES[name].get("zero_optimization", {}).get("stage", 0), 2)
    config: TrainingConfig = training_config(case)
    content = {key: value for key, value in config.deepspeed.items() if key not in COPIED}
    return start_engine(case, replace(config, deepspeed={**content, **CASES[name]}))


def train_on(engine: DeepSpeedEngine, first: int, folder: Path | None = None) -> list[float]:
    """Take the steps from `first` on. Save into `folder` at step SAVED. Return the losses."""
    losses = []
    for step in range(first, STEPS):
        if folder is not None and step == SAVED:
            store.save(engine, store.Target(folder, SAVED, {}, 1))
        losses.append(backpropagate(engine, Case(0, 2), step))
        set_learning_rate(engine, 5e-3)
        update(engine)
    return losses


End = tuple[list[float], dict[str, np.ndarray]]
"""Losses after step SAVED, and master weights."""


def train_all(root: str, names: tuple[str, ...]) -> dict[str, tuple[End, End]]:
    """Return the ends of the run that never stopped and of the resumed one, by case."""
    results = {}
    for name in names:
        folder = Path(root) / name
        folder.mkdir(exist_ok=True)
        whole = start(name)
        end = train_on(whole, 0, folder)[SAVED:], masters(whole)
        engine_cases.SEED += 1  # other initial weights
        engine = start(name)
        engine_cases.SEED -= 1
        load_checkpoint(engine, folder / f"step_{SAVED:08d}")
        results[name] = end, (train_on(engine, SAVED), masters(engine))
    return results


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Return a function that runs one of LAUNCHES on its first call, and returns the results."""
    return cache(lambda launch: run_ranks(train_all, 2, str(tmp_path_factory.mktemp("bits")), LAUNCHES[launch])[0])


@pytest.mark.parametrize(
    ("launch", "name"),
    [
        pytest.param(launch, name, marks=[pytest.mark.long] if launch == "long" else [])
        for launch, names in LAUNCHES.items()
        for name in names
    ],
)
def test_losses_and_weights_after_resume_have_the_same_bits(ends, launch, name):
    (losses, weights), (resumed_losses, resumed_weights) = ends(launch)[name]
    assert len(set(losses)) == STEPS - SAVED
    assert resumed_losses == losses
    assert [key for key, value in weights.items() if not np.array_equal(resumed_weights[key], value)] == []
