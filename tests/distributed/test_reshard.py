"""Checkpoints of two ranks load bit-exactly on one and three ranks, and at other ZeRO stages.

The tests read the state of an engine with DeepSpeed's accessors, parameter by parameter. Engines that load a checkpoint
are initialised with another seed. Their third step must equal the third step of the engines that saved.
test_resume_bits.py resumes on the same number of ranks.

Values loaded from files have the same bits on any machine.
"""

import re
from pathlib import Path

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from megaclip.checkpoint import store
from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.errors import CheckpointError
from megaclip.zero.optimizers import set_learning_rate, update
from megaclip.zero.reshard import load_checkpoint
from tests.distributed import engine_cases
from tests.distributed.engine_cases import (
    STEPS,
    Case,
    backpropagate,
    start_engine,
    training_config,
    whole_parameters,
    whole_value,
)
from tests.distributed.harness import run_ranks
from tests.tolerances import ENGINE, assert_close, compare, exceeded

ACCUMULATION = 2
RATE = 5e-3

SAVED = {
    "zero0": Case(0, ACCUMULATION),
    "zero1": Case(1, ACCUMULATION),
    "zero1 locked": Case(1, ACCUMULATION, locked="most"),
    "zero2 offloaded": Case(2, ACCUMULATION, offload="optimizer"),
    "zero2 bf16": Case(2, ACCUMULATION, bf16=True),
    "zero3": Case(3, ACCUMULATION, persistence_threshold=100),
    "zero3 locked offloaded": Case(3, ACCUMULATION, offload="all", locked="most"),
    "zero3 Lion": Case(3, ACCUMULATION, optimizer="Lion"),
}
LOADED = {
    1: {name: (name, SAVED[name]) for name in ("zero2 offloaded", "zero3")}
    | {"zero0 to 3": ("zero0", SAVED["zero3"]), "zero1 to 3": ("zero1", SAVED["zero3"])},
    3: {name: (name, SAVED[name]) for name in ("zero1 locked", "zero2 bf16", "zero3 locked offloaded", "zero3 Lion")}
    | {
        "zero1 to 0": ("zero1", SAVED["zero0"]),
        "zero2 bf16 to float32": ("zero2 bf16", Case(2, ACCUMULATION)),
        "zero3 to 1": ("zero3", SAVED["zero1"]),
        "zero3 to 2, locked": ("zero3 locked offloaded", Case(2, ACCUMULATION, locked="most")),
    },
}
"""Number of ranks -> name of the test case -> name of the saved case, and the case that loads it."""
EVERY = [(ranks, name) for ranks, cases in LOADED.items() for name in cases]
State = dict[str, np.ndarray]
"""Name and kind of every float32 master and every optimizer state tensor -> its whole values."""


def start(case: Case, *, torch_adam: bool = False) -> DeepSpeedEngine:
    """Start an engine.

    ZeRO-1 and 3 use torch's AdamW, which counts its steps in tensors. The sub-groups of ZeRO-3 are so small that their
    boundaries depend on the number of ranks.
    """
    config = training_config(case)
    if torch_adam or (case.stage in (1, 3) and case.optimizer == "AdamW" and not case.offload):
        config.deepspeed["optimizer"]["params"]["torch_adam"] = True
    if case.stage == 3:
        config.deepspeed["zero_optimization"]["sub_group_size"] = 3000
    return start_engine(case, config)


def train_step(engine: DeepSpeedEngine, case: Case, step: int) -> float:
    loss = backpropagate(engine, case, step)
    set_learning_rate(engine, RATE)
    update(engine)
    return loss


def state_of(engine: DeepSpeedEngine, case: Case) -> State:
    """Return the whole optimizer state, and the working copies of all parameters."""
    state = {}
    if case.stage in (1, 2):  # DeepSpeed links the state after the first group's step, when other groups have none
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    kinds = ("exp_avg",) if case.optimizer == "Lion" else ("exp_avg", "exp_avg_sq")
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if case.stage == 0:
            state[f"{name} fp32"] = _joined(engine, name, parameter)
            for kind in kinds:
                state[f"{name} {kind}"] = _joined(engine, name, engine.optimizer.state[parameter][kind])
        else:
            state[f"{name} fp32"] = _joined(engine, name, safe_get_full_fp32_param(parameter))
            for kind in kinds:
                state[f"{name} {kind}"] = _joined(engine, name, safe_get_full_optimizer_state(parameter, kind))
    state |= {f"{name} working": torch.from_numpy(value) for name, value in whole_parameters(engine).items()}
    counting = [*engine.basic_optimizer.state.values(), *engine.basic_optimizer.param_groups]
    state["steps"] = torch.tensor(max(int(place.get("step", 0)) for place in counting))
    return {name: value.detach().float().cpu().clone().numpy() for name, value in state.items()}


def _joined(engine: DeepSpeedEngine, name: str, part: torch.Tensor) -> torch.Tensor:
    return whole_value(name, part.detach().float().cpu(), engine.module.tensor)


def save_all(folder: str) -> dict[str, tuple[State, float, State]]:
    """Train, save, and train one more step. Return state at the save, third loss, and later parameters by name.

    In "zero0 torch_adam", PyTorch's Adam has loaded "zero0", which DeepSpeed's Adam saved.
    """
    results = {}
    for name, case in SAVED.items():
        engine = start(case)
        for step in range(STEPS):
            train_step(engine, case, step)
        (Path(folder) / name).mkdir(exist_ok=True)
        groups = engine.optimizer.param_groups
        decays = [group["weight_decay"] for group in groups]
        for group in groups:  # shows whether a loading engine keeps its own settings
            group["weight_decay"] = 0.7
        tag = store.save(engine, store.Target(Path(folder) / name, STEPS, {}, 1))
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        results[name] = (state_of(engine, case), train_step(engine, case, STEPS), whole_parameters(engine))
    engine = start(SAVED["zero0"], torch_adam=True)
    load_checkpoint(engine, Path(folder) / "zero0" / tag)
    loss = train_step(engine, SAVED["zero0"], STEPS)
    results["zero0 torch_adam"] = ({}, loss, whole_parameters(engine))
    return results


def load_all(folder: str) -> dict[str, tuple[State, float, State, list[float], int]]:
    """Load and train one step. Return by name the values of `save_all`, the weight decays and the step count."""
    results = {}
    engine_cases.SEED += 1
    for name, (saved, case) in LOADED[dist.get_world_size()].items():
        engine = start(case)
        load_checkpoint(engine, Path(folder) / saved / f"step_{STEPS:08d}")
        decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
        counted = engine.global_steps
        results[name] = (
            state_of(engine, case),
            train_step(engine, case, STEPS),
            whole_parameters(engine),
            decays,
            counted,
        )
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def saved(folder) -> dict[str, tuple[State, float, State]]:
    return run_ranks(save_all, 2, folder)[0]


@pytest.fixture(scope="module")
def loaded(folder, saved):
    """Results of every rank by number of ranks."""
    return {ranks: run_ranks(load_all, ranks, folder) for ranks in LOADED}


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_loaded_state_equals_the_saved_state(saved, loaded, ranks, name):
    source, case = LOADED[ranks][name]
    expected = saved[source][0]
    if SAVED[source].bf16 and not case.bf16:  # the working copy of a float32 engine is the master
        expected = expected | {key: expected[key.replace(" working", " fp32")] for key in expected if " working" in key}
    for results in loaded[ranks]:
        state, *_, decays, counted = results[name]
        assert state.keys() == expected.keys()
        assert [key for key in expected if not np.array_equal(state[key], expected[key])] == []
        assert decays == ([0.1, 0.0] if case.locked else [0.1, 0.0, 0.0])  # logit_scale has its own group
        assert counted == STEPS


@pytest.mark.parametrize(("ranks", "name"), [pair for pair in EVERY if "bf16" not in pair[1]])
def test_next_step_equals_that_of_the_saving_engine(saved, loaded, ranks, name):
    _, expected_loss, expected = saved[LOADED[ranks][name][0]]
    for results in loaded[ranks]:
        _, loss, parameters, *_ = results[name]
        if "Lion" in name:  # Lion turns rounding errors of a zero gradient into full steps
            parameters = {key: value for key, value in parameters.items() if "k_proj.bias" not in key}
        assert_close(loss, expected_loss, ENGINE["loss"], "loss")
        bound = ENGINE["parameters"]
        assert exceeded(compare(parameters[key], expected[key], bound, key, size=RATE) for key in parameters) == []


def test_another_implementation_of_adam_continues_the_count_of_steps(saved):
    (_, expected_loss, expected), (_, loss, parameters) = saved["zero0"], saved["zero0 torch_adam"]
    assert_close(loss, expected_loss, ENGINE["loss"], "loss")
    bound = ENGINE["parameters"]
    assert exceeded(compare(parameters[key], expected[key], bound, key, size=RATE) for key in parameters) == []


@pytest.mark.parametrize("name", SAVED)
def test_joined_weights_are_the_masters(saved, folder, name):
    check_joined(Path(folder) / name, saved[name][0])


def check_joined(folder: Path, state: State) -> None:
    """Compare the weights that an export of the checkpoint has with the masters, or with the frozen working copies."""
    joined = consolidated_weights(folder, f"step_{STEPS:08d}")
    assert joined.keys() == {key.removesuffix(" working") for key in state if key.endswith(" working")}
    for parameter, value in joined.items():
        expected = state.get(f"{parameter} fp32", state[f"{parameter} working"])
        assert torch.equal(value, torch.from_numpy(expected)), parameter


def refusals(folder: str) -> dict[str, str]:
    """Return the error message for each kind of checkpoint that cannot be loaded."""
    step = Path(folder) / "zero1" / f"step_{STEPS:08d}"
    last = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    engine, messages = start(SAVED["zero1"]), {}

    def refuse(name: str, path: Path) -> None:
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(engine, path)
        messages[name] = str(error.value)

    refuse("other locked towers", Path(folder) / "zero1 locked" / step.name)
    last.write_bytes(last.read_bytes()[:1000])
    refuse("damaged file", step)
    last.unlink()
    refuse("missing file", step)
    return messages


@pytest.fixture(scope="module")
def refused(loaded, folder) -> dict[str, str]:
    """Error messages by kind. Depends on `loaded`, because it damages the checkpoints."""
    return run_ranks(refusals, 1, folder)[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("other locked towers", r"has 0 elements of visual\..*locked towers"),
        ("damaged file", r"rank_1_mp_rank_00_optim_states\.pt' cannot be read"),
        ("missing file", r"has \d+ elements of .*, but this run requires \d+"),
    ],
)
def test_checkpoint_that_cannot_be_loaded_is_refused(refused, name, expected):
    assert re.search(expected, refused[name])
