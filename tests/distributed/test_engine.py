"""Training through the engine equals one process on the whole batch, for ZeRO 0 to 3 and all features of the engine.

Every case takes two steps on two ranks and is compared with `engine_cases.oracle` in float64. All cases run in one
launch. The last tests show that the comparison can fail.
"""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.distributed import engine_cases
from tests.distributed.engine_cases import WORLD_SIZE, Case, Outcome, oracle, train
from tests.distributed.harness import or_traceback, run_ranks
from tests.tolerances import ENGINE, Bound, Comparison, compare, exceeded, unnoticed

WAYS = {
    "ring": {"exchange": "ring", "reduction": "feature"},
    "gather": {"exchange": "all_gather", "reduction": "scalar"},
}
CASES = {
    f"zero{stage} x {chunks}": Case(stage, chunks, persistence_threshold=100 * (chunks == 3), **WAYS[way])
    for (stage, chunks), way in zip(itertools.product(range(4), (1, 3)), itertools.cycle(WAYS))
}
for _stage in (0, 3):
    CASES[f"zero{_stage} checkpointing"] = Case(_stage, 3, checkpointing="plain" if _stage == 3 else "cpu")
    CASES[f"zero{_stage} locked"] = Case(_stage, 3, locked="most", checkpointing="plain")
    CASES[f"zero{_stage} locked below"] = Case(_stage, 3, text_chunks=2, locked="below")
    CASES[f"zero{_stage} patch dropout"] = Case(_stage, 3, patch_dropout=0.5)
for _stage in range(4):
    CASES[f"zero{_stage} clipped"] = Case(_stage, 3, clipping=0.1)
for _stage in (1, 2, 3):
    CASES[f"zero{_stage} coalesced"] = Case(_stage, 3, coalesce=True)
    CASES[f"zero{_stage} offloaded"] = Case(_stage, 3, offload="optimizer")
for _stage in range(4):
    CASES[f"zero{_stage} siglip"] = Case(_stage, 3, loss="siglip", **WAYS["gather" if _stage % 2 else "ring"])
    CASES[f"zero{_stage} SGD"] = Case(_stage, 3, optimizer="SGD")
    CASES[f"zero{_stage} Lion"] = Case(_stage, 3, optimizer="Lion")
# The towers have different numbers of chunks, so some backward passes do not use all parameters.
for _stage in range(4):
    CASES[f"zero{_stage} text x 2"] = Case(_stage, 3, text_chunks=2, patch_dropout=0.5, embeddings_on_cpu=True)
    CASES[f"zero{_stage} text x 6 offloaded"] = Case(
        _stage, 1, text_chunks=6, patch_dropout=0.5, offload="optimizer" if _stage else ""
    )
    CASES[f"zero{_stage} image frozen"] = Case(_stage, 3, text_chunks=1, locked="image")
    CASES[f"zero{_stage} text frozen"] = Case(_stage, 2, text_chunks=3, locked="text", coalesce=_stage > 0)
for _stage in (1, 2):
    CASES[f"zero{_stage} overlapped"] = Case(_stage, 3, overlap=True, coalesce=_stage == 1)
CASES["zero1 text x 2 coalesced"] = Case(1, 3, text_chunks=2, coalesce=True, clipping=0.1)
CASES["zero3 both frozen"] = Case(3, 3, text_chunks=2, locked="both")
CASES["zero0 Lamb"] = Case(0, 3, optimizer="Lamb")
CASES["zero0 Adafactor"] = Case(0, 3, optimizer="Adafactor")
CASES["zero3 everything"] = Case(
    3, 3, text_chunks=6, offload="all", checkpointing="cpu", coalesce=True, patch_dropout=0.5, clipping=0.1
)
# The image tower is one graph at ZeRO-1, and at ZeRO-2 with coalesced gradients. In the other cases each block is one.
CASES["zero1 compiled"] = Case(1, 3, compiled=True, patch_dropout=0.5)
CASES["zero2 compiled coalesced"] = Case(2, 3, text_chunks=2, compiled=True, coalesce=True)
CASES["zero2 compiled checkpointing"] = Case(2, 3, compiled=True, checkpointing="plain")
CASES["zero3 compiled"] = Case(3, 3, text_chunks=2, compiled=True, patch_dropout=0.5)
CASES["zero3 compiled locked below"] = Case(3, 3, locked="below", compiled=True)
CASES["zero3 compiled everything"] = replace(CASES["zero3 everything"], compiled=True)

# One member of each family of timm's image towers.
CASES["zero1 SigLIP compiled"] = Case(1, 3, family="siglip", loss="siglip", compiled=True, patch_dropout=0.5)
CASES["zero2 SigLIP locked below"] = Case(2, 3, family="siglip", loss="siglip", locked="below", text_chunks=2)
CASES["zero3 SigLIP"] = Case(3, 3, family="siglip", loss="siglip", checkpointing="plain", persistence_threshold=100)
CASES["zero0 PE compiled"] = Case(0, 3, family="pe", compiled=True, patch_dropout=0.5)
CASES["zero3 PE everything"] = replace(CASES["zero3 everything"], family="pe")
CASES["zero1 EVA-02"] = Case(1, 3, family="eva02", patch_dropout=0.5, coalesce=True)
CASES["zero3 EVA-02 compiled"] = Case(3, 3, family="eva02", compiled=True, checkpointing="plain")
CASES["zero2 EVA-02 enormous"] = Case(2, 3, family="eva02 enormous", text_chunks=2)

# Mistakes of published code that docs/mathematics.md lists, and similar ones.
FAULTS = {
    "logit_scale gradient times chunks": Case(3, 3, scale_fault=3.0),
    "logit_scale gradient times ranks": Case(1, 1, scale_fault=2.0),
    "logit_bias gradient times chunks": Case(2, 3, loss="siglip", scale_fault=3.0),
    "feature gradients over ranks": Case(2, 3, feature_fault=0.5),
    "feature gradients over chunks": Case(0, 3, feature_fault=1 / 3),
}


def train_all(cases: dict[str, Case]) -> dict[str, Outcome | str]:
    """Return the outcome of every case on this rank, or the traceback of its exception."""
    return {name: or_traceback(train, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Outcome | str]]:
    """Outcomes by the name of the case, one dictionary per rank."""
    return run_ranks(train_all, WORLD_SIZE, {**CASES, **FAULTS})


def comparisons(got: Outcome | str, expected: Outcome, bounds: dict[str, Bound] = ENGINE) -> dict[str, Comparison]:
    """Compare each quantity that `bounds` names. Differences of parameters are relative to their largest move."""
    assert isinstance(got, Outcome), got
    assert got.parameters.keys() == expected.parameters.keys()
    assert got.statistics.keys() == expected.statistics.keys()
    bound, size = bounds["parameters"], expected.largest_move
    parameters = [compare(got.parameters[n], p, bound, n, size=size) for n, p in expected.parameters.items()]
    norms = [norm / wanted for norm, wanted in zip(got.norms, expected.norms, strict=True)]
    found = {
        "parameters": max(parameters, key=lambda comparison: comparison.share),
        "loss": compare(got.losses, expected.losses, bounds["loss"], "losses"),
        "norm": compare(norms, [1.0] * len(norms), bounds["norm"], "gradient norms"),
    }
    if "scale_gradient" in bounds:
        found["scale_gradient"] = compare(
            got.scale_gradients, expected.scale_gradients, bounds["scale_gradient"], "logit_scale gradients"
        )
    if expected.statistics:
        statistics = [compare(got.statistics[n], s, bounds["statistics"], n) for n, s in expected.statistics.items()]
        found["statistics"] = max(statistics, key=lambda comparison: comparison.share)
    return found


def without_key_biases(outcome: Outcome | str) -> Outcome:
    """Leave out the biases of the keys, which have no effect on the loss.

    Their true gradient is zero. Lion and Adafactor turn its rounding errors into whole steps.
    """
    assert isinstance(outcome, Outcome), outcome
    return replace(outcome, parameters={n: p for n, p in outcome.parameters.items() if "k_proj.bias" not in n})


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_one_process_on_the_whole_batch(trained, name):
    expected = oracle(CASES[name])
    for rank, outcomes in enumerate(trained):
        pair = outcomes[name], expected
        if CASES[name].optimizer in ("Lion", "Adafactor"):
            pair = without_key_biases(outcomes[name]), without_key_biases(expected)
        assert exceeded(comparisons(*pair).values()) == [], f"rank {rank}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_scale_fails_the_same_comparison(trained, name):
    expected = oracle(FAULTS[name])
    for outcomes in trained:
        found = comparisons(outcomes[name], expected)
        for quantity in ("parameters", "norm"):
            assert unnoticed([found[quantity]], name) == []


def test_the_comparison_detects_weight_decay_dropout_and_clipping(trained):
    """An oracle that differs in one of these settings is far away, so the comparison depends on each of them."""
    plain = trained[0]["zero3 x 3"]
    for fault, other in {
        "decay of every parameter": oracle(Case(), decays=lambda name, p: True),
        "patch dropout": oracle(Case(patch_dropout=0.5)),
        "clipping": oracle(Case(clipping=0.1)),
    }.items():
        assert unnoticed([comparisons(plain, other)["parameters"]], fault) == []


@pytest.mark.parametrize("name", ["zero0 locked", "zero3 locked"])
def test_locked_parameters_keep_their_bits(trained, name):
    start = oracle(Case(locked="most"))  # float64 copies of the float32 start
    outcome = trained[0][name]
    assert isinstance(outcome, Outcome), outcome
    moving = {n for n, p in start.parameters.items() if (p != outcome.parameters[n]).any()}
    assert moving <= {"visual.proj", "text.text_projection", "logit_scale"}


def graphs_of(cases: list[Case]) -> list[list[list[str]]]:
    """Return the operations of each graph that the two steps of each case compile on this rank."""
    graphs = []
    for case in cases:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        with mock.patch.object(engine_cases, "COMPILER", counter):
            train(case)
        graphs.append([[str(n.target) for n in g.graph.nodes if n.op.startswith("call_")] for g in counter.graphs])
    return graphs


def test_a_part_is_compiled_once_for_all_chunks_and_steps() -> None:
    """DeepSpeed's hooks and the state of partitioned parameters must not become guards of the compiled code."""
    blocks = Case(2, 3, compiled=True)
    cases = [Case(1, 3, compiled=True), blocks, replace(blocks, stage=3, offload="all", checkpointing="plain")]
    for whole, blocks_at_2, blocks_at_3 in run_ranks(graphs_of, WORLD_SIZE, cases):
        # The image tower or its first block, with and without gradients.
        assert [len(graphs) for graphs in (whole, blocks_at_2, blocks_at_3)] == [2, 2, 2]
        # DeepSpeed's own linear function would be an opaque operation, with the parameter's number as a guard.
        assert blocks_at_3 == blocks_at_2
