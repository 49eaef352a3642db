"""FastCLIP with tensor-parallel towers equals one process on the whole batch: parameters, estimators, temperatures.

Two replicas of two ranks. The loss's state is sharded over all four ranks, whatever the replicas.
"""

from dataclasses import replace

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.megatron_mark import MEGATRON
from tests.distributed.test_engine_fastclip import CASES, Trained, check, through_the_engine

pytestmark = MEGATRON

RANKS = 4
SPLIT = {name: replace(case, tensor_parallel=2, ranks=RANKS, text_chunks=0) for name, case in CASES.items()}


def train_all() -> dict[str, Trained]:
    return {name: through_the_engine(case) for name, case in SPLIT.items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Trained]]:
    return run_ranks(train_all, RANKS)


@pytest.mark.parametrize("name", SPLIT)
def test_two_steps_equal_one_process_on_the_whole_batch(trained, name):
    check(SPLIT[name], [results[name] for results in trained])
