"""Parameters of odd sizes at ZeRO-1 and 2: each one starts at a multiple of 16 bytes, and training stays exact."""

from dataclasses import replace
from unittest import mock

import pytest

from tests.distributed import engine_cases
from tests.distributed.engine_cases import WORLD_SIZE, Case, Outcome, start_engine, train, training_config
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine import comparisons
from tests.tolerances import exceeded

ODD = engine_cases.MODEL.replace(
    vision_cfg={"mlp_ratio": 101 / 32}, text_cfg={"mlp_ratio": 75 / 32, "vocab_size": 33}, embed_dim=15
)
CASES = {
    "zero1 clipped": Case(1, 3, clipping=0.1),
    "zero1 offloaded": Case(1, 3, offload="optimizer"),
    "zero2 coalesced": Case(2, 3, coalesce=True),
}


def use_odd_sizes() -> mock._patch:
    return mock.patch.object(engine_cases, "model_of", lambda case: ODD)


def addresses(stage: int, aligned: bool) -> set[int]:
    """Return the parameters' addresses modulo 16 bytes. aligned: False turns parameter_alignment off."""
    config = training_config(Case(stage, 3, bf16=True))
    if not aligned:
        zero = config.deepspeed["zero_optimization"] | {"parameter_alignment": False}
        config = replace(config, deepspeed={**config.deepspeed, "zero_optimization": zero})
    model = start_engine(Case(stage, 3, bf16=True), config).module
    # The weights of the loss are not operands of matrix products.
    return {p.data_ptr() % 16 for name, p in model.named_parameters() if "logit" not in name}


def run_all() -> tuple[dict[str, Outcome | str], list[set[int]]]:
    with use_odd_sizes():
        outcomes = {name: or_traceback(train, case) for name, case in CASES.items()}
        return outcomes, [addresses(1, True), addresses(2, True), addresses(1, False)]


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[str, Outcome | str], list[set[int]]]]:
    return run_ranks(run_all, WORLD_SIZE)


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_one_process_on_the_whole_batch(results, name: str) -> None:
    with use_odd_sizes():
        expected = engine_cases.oracle(CASES[name])
    assert any(value.size % 4 for value in expected.parameters.values())
    for outcomes, _ in results:
        assert exceeded(comparisons(outcomes[name], expected).values()) == []


def test_parameters_start_at_multiples_of_16_bytes(results) -> None:
    for _, (first, second, without) in results:
        assert first == second == {0}
        assert without > {0}, "without the setting some parameters must be misaligned"
