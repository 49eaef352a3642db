"""FastCLIP with tensor-parallel towers equals one process on the whole batch: parameters, estimators, temperatures.

Four ranks form two replicas of two ranks. The loss's state is sharded over all four ranks, independently of the
replicas. The long test has every pair of a layout of the ranks, a way to train, a ZeRO stage, and FastCLIP v2 or
v3. It adds runs without tensor parallelism, and runs with one replica of four ranks.
"""

from dataclasses import replace

import pytest

from tests.distributed.engine_cases import Case
from tests.distributed.harness import run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.distributed.test_engine_fastclip import CASES, Trained, check, one_process, through_the_engine
from tests.distributed.test_tensor_parallel import every_pair, split

pytestmark = MEGATRON

RANKS = 4
SHORT = {name: replace(case, text_chunks=0) for name, case in CASES.items()} | {
    "fastclip_v3 zero2 locked, clipped": Case(2, 3, loss="fastclip_v3", locked="below", text_chunks=1, clipping=0.1),
    "fastclip_v2 zero3 everything": Case(
        3,
        3,
        loss="fastclip_v2",
        text_chunks=1,
        offload="all",
        checkpointing="cpu",
        coalesce=True,
        patch_dropout=0.5,
        clipping=0.1,
    ),
}
LONG_LAUNCHES = every_pair(
    {
        "fastclip_v2": {"exchange": "ring", "reduction": "scalar"},
        "fastclip_v3": {"exchange": "all_gather", "reduction": "feature"},
    }
)


def train_all(size: int, cases: dict[str, Case]) -> dict[str, Trained]:
    return {name: through_the_engine(split(case, size)) for name, case in cases.items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Trained]]:
    return run_ranks(train_all, RANKS, 2, SHORT)


@pytest.mark.parametrize("name", SHORT)
def test_two_steps_equal_one_process_on_the_whole_batch(trained, name):
    check(split(SHORT[name], 2, RANKS), [results[name] for results in trained])


def test_the_clipped_cases_clip():
    for case in SHORT.values():
        if case.clipping:
            assert min(one_process(split(case, 2, RANKS)).norms) > 4 * case.clipping


@pytest.mark.long
@pytest.mark.parametrize(("size", "ranks"), LONG_LAUNCHES)
def test_every_pair_of_settings_equals_one_process(size, ranks):
    cases = LONG_LAUNCHES[size, ranks]
    results = run_ranks(train_all, ranks, size, cases, time_limit_s=1100)
    wrong = {}
    for name, case in cases.items():
        try:
            check(split(case, size, ranks), [result[name] for result in results])
        except AssertionError as error:
            wrong[name] = str(error)
    assert wrong == {}
