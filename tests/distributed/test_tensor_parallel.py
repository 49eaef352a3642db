"""Training with tensor-parallel towers equals one process on the whole batch.

Four ranks as two replicas of two ranks, and as one replica of four; two AdamW steps against `engine_cases.oracle` in
float64. All cases of one tensor-parallel size share one launch, because DeepSpeed keeps the groups of a process.
"""

import traceback
from dataclasses import replace

import pytest

from tests.distributed import engine_cases
from tests.distributed.engine_cases import Case, Outcome, oracle
from tests.distributed.harness import run_ranks
from tests.distributed.test_engine import differences

pytest.importorskip("megatron.core", reason="tensor parallelism requires megatron-core: pip install megaclip[megatron]")

RANKS = 4
TOLERANCES = {"parameters": 1e-6, "loss": 2e-6, "norm": 3e-6, "scale_gradient": 2e-6}

WAYS = {
    "zero0": Case(0, 3),
    "zero1": Case(1, 3, exchange="all_gather", reduction="scalar"),
    "zero2": Case(2, 3),
    "zero3": Case(3, 3, persistence_threshold=100),
    "zero0 clipped": Case(0, 3, clipping=0.1),
    "zero1 clipped": Case(1, 3, clipping=0.1),
    "zero2 clipped": Case(2, 3, clipping=0.1),
    "zero3 clipped": Case(3, 3, clipping=0.1),
    "zero1 coalesced": Case(1, 3, coalesce=True),
    "zero2 offloaded": Case(2, 3, offload="optimizer"),
    "zero3 everything": Case(
        3, 3, text_chunks=1, offload="all", checkpointing="cpu", coalesce=True, patch_dropout=0.5, clipping=0.1
    ),
    "zero0 checkpointing, patch dropout": Case(0, 3, checkpointing="plain", patch_dropout=0.5),
    "zero1 locked below": Case(1, 3, locked="below"),
    "zero3 locked": Case(3, 3, locked="most"),
    "zero1 siglip": Case(1, 3, loss="siglip"),
    "zero3 siglip": Case(3, 1, loss="siglip", exchange="all_gather"),
}
CASES = {
    (size, name): replace(case, tensor_parallel=size, ranks=RANKS) for size in (2, 4) for name, case in WAYS.items()
}


def train_all(size: int) -> dict[str, Outcome | str]:
    """Return the outcome of every case of this tensor-parallel size on this rank, or its traceback."""
    outcomes: dict[str, Outcome | str] = {}
    for (case_size, name), case in CASES.items():
        if case_size != size:
            continue
        try:
            outcomes[name] = engine_cases.train(case)
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Outcome | str]]]:
    return {size: run_ranks(train_all, RANKS, size) for size in (2, 4)}


@pytest.mark.parametrize(("size", "name"), CASES)
def test_two_steps_equal_one_process_on_the_whole_batch(trained, size, name):
    expected = oracle(CASES[size, name])
    for outcomes in trained[size]:
        found = differences(outcomes[name], expected)
        assert {key: value for key, value in found.items() if not value <= TOLERANCES[key]} == {}
