"""A checkpoint of tensor-parallel ranks loads at any other tensor-parallel size, number of ranks and ZeRO stage.

Two replicas of two ranks save. Masters, moments and working copies must be equal bit by bit, and the next loss up to
rounding. The tests read an engine's state with DeepSpeed's own accessors and join it over the ranks of a replica.
"""

from dataclasses import replace
from pathlib import Path

import deepspeed.comm as dist
import numpy as np
import pytest

from megaclip.checkpoint import saved_states, store
from megaclip.zero.reshard import load_checkpoint
from tests.distributed import engine_cases
from tests.distributed.engine_cases import STEPS, Case
from tests.distributed.harness import run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.distributed.test_reshard import State, check_joined, start, state_of, train_step
from tests.tolerances import ENGINE, assert_close

pytestmark = [MEGATRON, pytest.mark.long]

TAG = f"step_{STEPS:08d}"
SAVED = {
    "zero0": Case(0, 1),
    "zero1": Case(1, 1),
    "zero2 locked": Case(2, 1, locked="most"),
    "zero3": Case(3, 1, persistence_threshold=100),
    "zero3 locked, offloaded": Case(3, 1, offload="all", locked="below"),
}
SHAPES: dict[tuple[int, int], dict[str, tuple[str, int]]] = {
    (1, 1): {"zero0": ("zero0", 0), "zero3 to 1": ("zero3", 1)},
    (1, 3): {"zero1 to 3": ("zero1", 3), "zero2 locked": ("zero2 locked", 2)},
    (2, 2): {"zero3 to 2": ("zero3", 2), "zero3 locked": ("zero3 locked, offloaded", 3)},
    (4, 4): {"zero0 to 3": ("zero0", 3), "zero1": ("zero1", 1), "zero2 locked to 3": ("zero2 locked", 3)},
}
"""(tensor-parallel size, ranks) -> name -> the checkpoint and the ZeRO stage that loads it."""
EVERY = [(*shape, name) for shape, cases in SHAPES.items() for name in cases]


def save_all(folder: str, size: int, cases: dict[str, Case]) -> dict[str, tuple[State, float]]:
    """Train and save every case. Return the state at the save and the loss of the next step by name."""
    results = {}
    for name, case in cases.items():
        case = replace(case, tensor_parallel=size, ranks=dist.get_world_size())
        engine = start(case)
        for step in range(STEPS):
            train_step(engine, case, step)
        (Path(folder) / name).mkdir(exist_ok=True)
        store.save(engine, store.Target(Path(folder) / name, STEPS, {}, 1))
        results[name] = (state_of(engine, case), train_step(engine, case, STEPS))
    return results


def load_all(folder: str, size: int, cases: dict[str, tuple[str, int]]) -> dict[str, tuple[State, float]]:
    """Load every checkpoint into an engine with another seed. Return by name the state and the next loss."""
    results = {}
    engine_cases.SEED += 1
    for name, (source, stage) in cases.items():
        case = replace(SAVED[source], stage=stage, tensor_parallel=size, ranks=dist.get_world_size())
        case = case if stage == 3 else replace(case, offload="optimizer" if stage and case.offload else "")
        engine = start(case)
        load_checkpoint(engine, Path(folder) / source / TAG)
        results[name] = (state_of(engine, case), train_step(engine, case, STEPS))
    return results


def load_with_a_fault(folder: str) -> State:
    """Load columns as if they were rows."""
    case = replace(SAVED["zero1"], tensor_parallel=1, ranks=1)
    engine = start(case)
    with pytest.MonkeyPatch.context() as patch:
        exact = saved_states.split_dim
        patch.setattr(saved_states, "split_dim", lambda name: None if exact(name) is None else 0)
        load_checkpoint(engine, Path(folder) / "zero1" / TAG)
    return state_of(engine, case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def saved(folder) -> dict[str, tuple[State, float]]:
    return run_ranks(save_all, 4, folder, 2, SAVED)[0]


@pytest.fixture(scope="module")
def loaded(folder, saved) -> dict[tuple[int, int], list[dict[str, tuple[State, float]]]]:
    return {(size, ranks): run_ranks(load_all, ranks, folder, size, cases) for (size, ranks), cases in SHAPES.items()}


def unequal(state: State, expected: State) -> list[str]:
    assert state.keys() == expected.keys()
    return [key for key in expected if not np.array_equal(state[key], expected[key])]


@pytest.mark.parametrize(("size", "ranks", "name"), EVERY)
def test_states_are_equal_bit_for_bit_and_the_next_loss_up_to_rounding(saved, loaded, size, ranks, name):
    """Both runs use the same machine."""
    expected, next_loss = saved[SHAPES[size, ranks][name][0]]
    for results in loaded[size, ranks]:
        assert unequal(results[name][0], expected) == []
        assert_close(results[name][1], next_loss, ENGINE["loss"])


def test_a_checkpoint_of_one_replica_loads_at_tensor_parallel_size_2(tmp_path):
    (saved,) = run_ranks(save_all, 1, str(tmp_path), 1, {"zero1": SAVED["zero1"], "zero3": SAVED["zero3"]})
    cases = {"zero1": ("zero1", 1), "zero3": ("zero3", 3), "zero1 to 3": ("zero1", 3)}
    for results in run_ranks(load_all, 2, str(tmp_path), 2, cases):
        for name, (source, _) in cases.items():
            assert unequal(results[name][0], saved[source][0]) == []
            assert_close(results[name][1], saved[source][1], ENGINE["loss"])


@pytest.mark.parametrize("name", SAVED)
def test_joined_weights_are_the_masters(saved, folder, name):
    check_joined(Path(folder) / name, saved[name][0])


def test_columns_read_as_rows_are_detected(saved, folder):
    (state,) = run_ranks(load_with_a_fault, 1, folder)
    assert {key.split()[0].split(".", 4)[-1] for key in unequal(state, saved["zero1"][0])} == {
        "attn.out_proj.weight",
        "mlp.c_proj.weight",
    }
