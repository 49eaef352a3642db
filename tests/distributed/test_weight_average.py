"""Moving averages of the weights equal those computed by hand from a plain PyTorch run, at every ZeRO stage.

Two ranks take two steps. The oracle averages the float64 weights of one process on the whole batch. Averages are read
from checkpoints, as an export reads them. A resumed engine continues the average, with the same bits at the same stage.
At another stage the average is partitioned again. While the model has the averages, its parameters are those of the
checkpoint. The next steps are the same with and without this. tests/end_to_end/test_nonfinite_runs.py tests skipped
steps.
"""

from dataclasses import dataclass
from pathlib import Path

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deepspeed import DeepSpeedEngine

from megaclip.checkpoint import store
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.comm.collectives import raise_on_all_ranks, wait_for_all_ranks
from megaclip.errors import CheckpointError, DataError
from megaclip.zero.optimizers import set_learning_rate, update
from megaclip.zero.reshard import load_checkpoint
from megaclip.zero.weight_average import WeightAverage
from tests.distributed.engine_cases import (
    BATCH,
    LEARNING_RATES,
    STEPS,
    WORLD_SIZE,
    Case,
    OracleTraining,
    backpropagate,
    start_engine,
    whole_parameters,
)
from tests.distributed.harness import or_traceback, run_ranks
from tests.tolerances import ENGINE, WEIGHT_AVERAGE, compare, exceeded, unnoticed

DECAY = 0.7
TAGS = [f"step_{step + 1:08d}" for step in range(STEPS)]
"""Names of the checkpoints."""


@dataclass(frozen=True)
class Averaged:
    """Settings of a training, and of the engine that loads its checkpoint after the first update."""

    case: Case
    loads: Case | None = None
    """Case of the engine that continues. None: the same case."""


QUICK = {
    "zero0 to 3": Averaged(Case(0, 2), Case(3, 2)),
    "zero1": Averaged(Case(1, 2, locked="below")),
    "zero3 to 1": Averaged(Case(3, 2, persistence_threshold=100, offload="optimizer"), Case(1, 2)),
}
RATES = (("image_layer_decay", 1.0),)
GRID = {
    "zero0 SGD to 1": Averaged(Case(0, 2, optimizer="SGD"), Case(1, 2, optimizer="SGD")),
    "zero1 rates to 2": Averaged(Case(1, 2, section=RATES), Case(2, 2, section=RATES)),
    "zero2 locked to 3": Averaged(Case(2, 2, locked="image"), Case(3, 2, locked="image")),
    "zero2 offloaded to 0": Averaged(Case(2, 2, offload="optimizer"), Case(0, 2)),
    "zero3 Lion, rates": Averaged(Case(3, 2, optimizer="Lion", section=RATES)),
    "zero3 all offloaded to 2": Averaged(Case(3, 2, offload="all"), Case(2, 2)),
}


def run_case(name: str, averaged: Averaged, folder: Path) -> None:
    """Train and save after each step. Repeat the second step in two engines that load the first checkpoint.

    `NAME same` has the same stage. `NAME other` has the stage `averaged.loads`, and also saves what it has loaded.
    """
    case, loads = averaged.case, averaged.loads or averaged.case
    whole, same, other = (folder / f"{name} {part}" for part in ("whole", "same", "other"))
    engine, average = start(case)
    for step in range(STEPS):
        take_step(engine, average, case, step)
        store.save(engine, store.Target(whole, step + 1, {}, 9))
        if step == 0:
            np.savez(whole / f"in_model_{dist.get_rank()}.npz", **parameters_with(engine, average))
    engine, average = start(case)
    load_checkpoint(engine, whole / TAGS[0])
    average.loaded(1)
    take_step(engine, average, case, 1)
    store.save(engine, store.Target(same, 2, {}, 9))
    engine, average = start(loads)
    load_checkpoint(engine, whole / TAGS[0])
    average.loaded(1)
    store.save(engine, store.Target(other, 1, {}, 9))
    take_step(engine, average, loads, 1)
    store.save(engine, store.Target(other, 2, {}, 9))


def start(case: Case) -> tuple[DeepSpeedEngine, WeightAverage]:
    engine = start_engine(case)
    return engine, WeightAverage(engine, DECAY)


def take_step(engine: DeepSpeedEngine, average: WeightAverage, case: Case, step: int) -> None:
    backpropagate(engine, case, step)
    set_learning_rate(engine, LEARNING_RATES[step])
    update(engine)
    average.update()


def parameters_with(engine: DeepSpeedEngine, average: WeightAverage) -> dict[str, np.ndarray]:
    """Return the model's parameters while it has the averages. Later, also after an error, it has its own again."""
    own = whole_parameters(engine)
    with average.in_model():
        averaged = whole_parameters(engine)
    with pytest.raises(DataError), average.in_model():
        raise DataError("an evaluation that fails on all ranks")
    again = whole_parameters(engine)
    assert all((own[name] == again[name]).all() for name in own)
    return averaged


def fail_on_one_rank() -> str:
    """Return the error of this rank after a bug on the first rank. That rank then waits for the other rank."""
    engine, average = start(Case(1, 2))
    take_step(engine, average, Case(1, 2), 0)
    with pytest.raises(Exception) as caught, average.in_model(), raise_on_all_ranks():
        if dist.get_rank() == 0:
            raise RuntimeError("a bug in a loader")
    wait_for_all_ranks()
    return f"{caught.type.__name__}: {caught.value}"


def test_after_an_error_of_one_rank_the_other_does_not_wait_for_it() -> None:
    first, second = run_ranks(fail_on_one_rank, WORLD_SIZE, time_limit_s=120)
    assert first == "RuntimeError: a bug in a loader"
    assert second.startswith("MegaclipError: rank 0 failed with RuntimeError: a bug in a loader")


def run_all(cases: dict[str, Averaged], folder: Path) -> dict[str, str | None]:
    """Return None, or the traceback of its exception, for every case."""
    return {name: or_traceback(run_case, name, averaged, folder) for name, averaged in cases.items()}


def prepared(folder: Path, cases: dict[str, Averaged]) -> Path:
    for name in cases:
        for part in ("whole", "same", "other"):
            (folder / f"{name} {part}").mkdir()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepared(tmp_path_factory.mktemp("averages"), QUICK)
    for outcomes in run_ranks(run_all, WORLD_SIZE, QUICK, folder):
        assert set(outcomes.values()) == {None}, outcomes
    return folder


def averages_by_hand(case: Case, decay: float = DECAY) -> tuple[dict[str, torch.Tensor], float]:
    """Return the averages after two steps in float64, and the largest distance of a weight from its start."""
    training = OracleTraining(case)
    average = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    for step in range(STEPS):
        x, y = training.features(step)
        logits, labels = training.model.logit_scale.exp() * x @ y.T, torch.arange(BATCH)
        training.optimizer.zero_grad()
        ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
        training.update(step)
        for name, p in training.model.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * p.detach()
    return average, training.parameters()[1]


def check(folder: Path, name: str, averaged: Averaged) -> None:
    """Compare the averages of the three engines with the oracle, and with each other."""
    expected, size = averages_by_hand(averaged.case)
    whole, same, other = (folder / f"{name} {part}" for part in ("whole", "same", "other"))
    lion = averaged.case.optimizer == "Lion"  # Lion turns the rounding errors of zero gradients into steps
    for checkpoints in (whole, other):
        got = consolidated_weights(checkpoints, TAGS[1], ema=True)
        assert got.keys() == expected.keys()
        names = [key for key in got if not (lion and "k_proj.bias" in key)]
        found = [compare(got[key], expected[key], ENGINE["parameters"], key, size=size) for key in names]
        assert exceeded(found) == [], f"{name}: {checkpoints}"
    expected_in_model = consolidated_weights(whole, TAGS[0], ema=True)
    for rank in range(WORLD_SIZE):
        in_model = np.load(whole / f"in_model_{rank}.npz")
        assert all((in_model[key] == value.numpy()).all() for key, value in expected_in_model.items()), f"{name} {rank}"
    for tag, first, second in ((TAGS[1], whole, same), (TAGS[0], whole, other)):
        a, b = consolidated_weights(first, tag, ema=True), consolidated_weights(second, tag, ema=True)
        assert all(torch.equal(a[key], b[key]) for key in a), f"{name}: {second}"


@pytest.mark.parametrize("name", QUICK)
def test_averages_equal_those_by_hand_and_continue_after_resume(folder, name):
    check(folder, name, QUICK[name])


def test_the_comparison_detects_another_decay_and_a_late_start(folder):
    name, case = "zero0 to 3", QUICK["zero0 to 3"].case
    got = consolidated_weights(folder / f"{name} whole", TAGS[1], ema=True)
    weights = consolidated_weights(folder / f"{name} whole", TAGS[1])
    for fault, decay in (("another decay", 0.65), ("no average", 0.0)):
        wrong, size = averages_by_hand(case, decay)
        found = [compare(got[key], wrong[key], ENGINE["parameters"], key, size=size) for key in got]
        assert unnoticed([max(found, key=lambda comparison: comparison.share)], fault) == []
    wrong, size = averages_by_hand(case, 0.0)  # the average is equal to the weights
    assert exceeded([compare(weights[key], wrong[key], ENGINE["parameters"], key, size=size) for key in got]) == []


def without_average(folder: Path, checkpoints: Path) -> None:
    """Load a checkpoint with averages into an engine without them, and its next checkpoint into one with them."""
    case = QUICK["zero1"].case
    engine = start_engine(case)
    load_checkpoint(engine, checkpoints / TAGS[1])
    WeightAverage(engine, None).loaded(2)
    store.save(engine, store.Target(folder, 1, {}, 9))
    engine, average = start(case)
    load_checkpoint(engine, folder / TAGS[0])
    average.loaded(2)
    take_step(engine, average, case, 0)
    store.save(engine, store.Target(folder, 2, {}, 9))


@pytest.mark.long
def test_an_average_can_be_turned_off_and_starts_anew(folder, tmp_path):
    run_ranks(without_average, WORLD_SIZE, tmp_path, folder / "zero1 whole")
    with pytest.raises(CheckpointError, match=r"has no moving averages of the weights \(--ema\), .*leave out --ema"):
        consolidated_weights(tmp_path, TAGS[0], ema=True)
    before, after = (consolidated_weights(tmp_path, tag) for tag in TAGS)
    average = consolidated_weights(tmp_path, TAGS[1], ema=True)
    for key, value in average.items():
        expected = DECAY * before[key].double() + (1 - DECAY) * after[key].double()
        assert exceeded([compare(value, expected, WEIGHT_AVERAGE, key)]) == []


@pytest.mark.long
def test_every_stage_optimizer_and_offload(tmp_path):
    outcomes = run_ranks(run_all, WORLD_SIZE, GRID, prepared(tmp_path, GRID), time_limit_s=1100)
    failed = {name: problem for of_rank in outcomes for name, problem in of_rank.items() if problem}
    for name, averaged in GRID.items():
        if name not in failed:
            try:
                check(tmp_path, name, averaged)
            except AssertionError as error:
                failed[name] = str(error)
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
