"""Training through the engine equals one process on the whole batch, for ZeRO 0 to 3 and all features of the engine.

Two steps on one or two ranks are compared with `engine_cases.oracle` in float64. The cases are the rows of a covering
array: every pair of settings occurs. The oracle encodes captions with their whole padding. A tower's gradients are
added in the order of its chunks, whichever graphs are kept, so these cases are also compared bit by bit with the same
cases without kept graphs. The last tests plant faults that the comparison must detect, and count compiled graphs and
the parameters that ZeRO-3 holds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch._dynamo.testing import CompileCounterWithBackend

from megaclip.cache.passes import Passes
from megaclip.comm.groups import resolve
from megaclip.comm.parallelism import ONE_RANK
from megaclip.models.packing import Pieces
from megaclip.step import caption_chunks, gradient_cache
from megaclip.step.batch import Tower
from megaclip.step.caption_chunks import CaptionChunks
from tests.distributed import engine_cases
from tests.distributed.checks import covering_rows
from tests.distributed.engine_cases import CAPTION_MODEL, Case, Outcome, backpropagate, oracle, start_engine, train
from tests.distributed.harness import or_traceback, run_ranks
from tests.tolerances import CAPTION_ENGINE, ENGINE, Bound, Comparison, compare, exceeded, unnoticed

ALL = 99
"""More graphs than any case has."""


def is_possible(row: dict[str, Any]) -> bool:
    stage, offload, overlap = row.get("stage"), row.get("offload"), row.get("overlap")
    if stage == 0 and (offload or overlap or row.get("coalesce")):
        return False
    if offload == "all" and (stage not in (3, None) or overlap):
        return False
    if overlap and (stage == 3 or (stage == 1 and row.get("coalesce") is False)):
        return False
    # The moves of SGD with clipped gradients would be as small as the rounding of logit_scale.
    return row.get("optimizer") != "SGD" or not (offload or row.get("clipping"))


ROWS = covering_rows(
    is_possible,
    stage=(3, 2, 1, 0),
    chunks=((3, 2), (1, 6), (3, 1), (1, 1)),  # of images, and of captions
    locked=("", "below", "image", "text", "most", "both"),
    captions=("", "cut", "padded"),
    keep=(0, 4, ALL, 1),
    ranks=(2, 1),
    loss=("clip", "siglip"),
    exchange=("ring", "all_gather"),
    reduction=("feature", "scalar"),
    checkpointing=("", "plain", "cpu"),
    offload=("", "optimizer", "all"),
    coalesce=(False, True),
    overlap=(False, True),
    clipping=(0.0, 0.2),
    patch_dropout=(0.0, 0.5),
    embeddings_on_cpu=(False, True),
    optimizer=("AdamW", "SGD"),
    persistence_threshold=(0, 100),
)


def case_of(chunks: tuple[int, int], **settings: Any) -> Case:
    return Case(accumulation=chunks[0], text_chunks=chunks[1], **settings)


CASES = {f"row {number} zero{row['stage']}": case_of(**row) for number, row in enumerate(ROWS)}
CASES["zero0 plain"] = Case(0, 3)
CASES |= {f"zero{stage} Lion": Case(stage, 3, optimizer="Lion") for stage in (0, 3)}
CASES["zero0 Lamb"] = Case(0, 3, optimizer="Lamb")
CASES["zero0 Adafactor"] = Case(0, 3, optimizer="Adafactor")
EVERYTHING = Case(
    3, 3, text_chunks=6, offload="all", checkpointing="cpu", coalesce=True, patch_dropout=0.5, clipping=0.1
)
# The image tower is one graph at ZeRO-1. In the other cases each block is one.
CASES["zero1 compiled"] = Case(1, 3, compiled=True, patch_dropout=0.5)
CASES["zero2 compiled checkpointing"] = Case(2, 3, compiled=True, checkpointing="plain")
CASES["zero3 compiled everything"] = replace(EVERYTHING, compiled=True)
COUNTED = ("zero1 compiled", "zero2 compiled checkpointing", "zero3 compiled everything")
"""Cases whose graphs are counted: the whole image tower, and its blocks at two stages."""

# One member of each family of timm's image towers.
CASES["zero1 SigLIP compiled"] = Case(1, 3, family="siglip", loss="siglip", compiled=True, patch_dropout=0.5, ranks=1)
CASES["zero2 SigLIP locked below"] = Case(2, 3, family="siglip", loss="siglip", locked="below", text_chunks=2)
CASES["zero3 PE everything"] = replace(EVERYTHING, family="pe")
CASES["zero1 EVA-02"] = Case(1, 3, family="eva02", patch_dropout=0.5, coalesce=True)
CASES["zero3 EVA-02 compiled"] = Case(3, 3, family="eva02", compiled=True, checkpointing="plain", ranks=1)
CASES["zero2 EVA-02 enormous"] = Case(2, 3, family="eva02 enormous", text_chunks=2)

KEPT = {
    "zero0": Case(0, 3, keep=ALL, captions="cut", patch_dropout=0.5),
    "zero1 bf16": Case(1, 3, keep=2, coalesce=True, bf16=True),
    "zero2": Case(2, 3, keep=ALL, text_chunks=1, offload="optimizer"),
    "zero3 everything": replace(EVERYTHING, keep=4, bf16=True),
}
"""Cases that are compared bit by bit with the same case without kept graphs."""

Plant = Callable[[pytest.MonkeyPatch], None]


def _between_passes(fault: Callable[[Passes], None]) -> Plant:
    """Return a function that plants a fault between the forward and the backward passes of every step."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        back_propagate = Passes.back_propagate

        def faulty(self: Passes, *arguments, **named) -> None:
            fault(self)
            back_propagate(self, *arguments, **named)

        patch.setattr(Passes, "back_propagate", faulty)

    return plant


def faulty_rows(self: Passes) -> None:
    """Exchange the kept graphs of two image chunks, so that each is back-propagated with the rows of the other."""
    first, second = ((source, chunk) for source, chunk in self.order if Tower.IMAGE in source._towers and chunk < 2)
    self._graphs[first], self._graphs[second] = self._graphs[second], self._graphs[first]


def counts_of_the_last_forward(self: Passes) -> None:
    """Keep DeepSpeed's count of backward passes as it was after the last forward pass."""
    self._engine.engine.optimizer.clear_backward_seen_flag = lambda: None


def without_counts(self: Passes) -> None:
    """Keep the modules' counts of expected gradients as they were after the last forward pass."""
    for _, counts in self._graphs.values():
        counts.clear()


def _one_token_short(patch: pytest.MonkeyPatch) -> None:
    exact = caption_chunks.caption_lengths
    patch.setattr(caption_chunks, "caption_lengths", lambda *given: exact(*given) - 1)


def _cut_one_token_too_early(patch: pytest.MonkeyPatch) -> None:
    exact = caption_chunks.cut_lengths

    def short(longest: list[int], *others) -> list[int]:
        return [min(length, most - 1) for length, most in zip(exact(longest, *others), longest, strict=True)]

    patch.setattr(caption_chunks, "cut_lengths", short)


def _leave_embeddings_sorted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradient_cache, "_batch_order", lambda rows, order: rows)


def _leave_gradients_unsorted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradient_cache, "_chunk_order", lambda rows, order: rows)


CUT = Case(accumulation=3, captions="cut")
FAULTS: dict[str, tuple[Case, Plant | None, str]] = {
    # Mistakes of published code that docs/mathematics.md lists, and similar ones.
    "logit_scale gradient times chunks": (Case(3, 3, scale_fault=3.0), None, "norm"),
    "logit_scale gradient times ranks": (Case(1, 1, scale_fault=2.0), None, "norm"),
    "feature gradients over ranks": (Case(2, 3, feature_fault=0.5), None, "norm"),
    "rows of another chunk": (Case(0, 3, keep=ALL), _between_passes(faulty_rows), "parameters"),
    "DeepSpeed's counts": (Case(3, 3, keep=ALL), _between_passes(counts_of_the_last_forward), "parameters"),
    "lengths one token short": (CUT, _one_token_short, "loss"),
    "cut one token too early": (CUT, _cut_one_token_too_early, "loss"),
    "embeddings in the order of the chunks": (CUT, _leave_embeddings_sorted, "loss"),
    "gradients in the order of the batch": (CUT, _leave_gradients_unsorted, "parameters"),
}
"""Name of a fault -> its case, the function that plants it, and the quantity that must exceed its bound."""


def train_all(cases: dict[str, Case], faults: list[str]) -> dict[str, Any]:
    """Return the outcome of every case and fault on this rank, or the traceback of its exception.

    "graphs NAME" has the operations of each graph that the two steps of a case of COUNTED compile.
    """
    outcomes: dict[str, Any] = {name: or_traceback(train, case) for name, case in cases.items() if name not in COUNTED}
    for name in (name for name in COUNTED if name in cases):
        torch.compiler.reset()
        counter = CompileCounterWithBackend(engine_cases.COMPILER)
        with mock.patch.object(engine_cases, "COMPILER", counter):
            outcomes[name] = or_traceback(train, cases[name])
        graphs = ([str(n.target) for n in g.graph.nodes if n.op.startswith("call_")] for g in counter.graphs)
        outcomes[f"graphs {name}"] = list(graphs)
    for name in faults:
        case, plant, _ = FAULTS[name]
        with pytest.MonkeyPatch.context() as patch:
            if plant is not None:
                plant(patch)
            outcomes[name] = or_traceback(train, case)
    return outcomes


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Any]]]:
    """Outcomes by number of ranks and name of the case or fault, one dictionary per rank."""
    cases = CASES | {f"kept {name}": case for name, case in KEPT.items()}
    cases |= {f"not kept {name}": replace(case, keep=0) for name, case in KEPT.items()}
    by_ranks = {ranks: {name: case for name, case in cases.items() if case.ranks == ranks} for ranks in (1, 2)}
    return {n: run_ranks(train_all, n, of_n, list(FAULTS) if n == 2 else []) for n, of_n in by_ranks.items()}


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
    case, expected = CASES[name], oracle(CASES[name])
    for rank, outcomes in enumerate(trained[case.ranks]):
        pair = outcomes[name], expected
        if case.optimizer in ("Lion", "Adafactor"):
            pair = without_key_biases(outcomes[name]), without_key_biases(expected)
        bounds = CAPTION_ENGINE if case.captions else ENGINE
        assert exceeded(comparisons(*pair, bounds).values()) == [], f"rank {rank}, {case}"


@pytest.mark.parametrize("name", KEPT)
def test_kept_graphs_change_no_bit(trained, name):
    for outcomes in trained[2]:
        got, plain = outcomes[f"kept {name}"], outcomes[f"not kept {name}"]
        assert isinstance(got, Outcome) and isinstance(plain, Outcome), f"{got}\n{plain}"
        assert (got.losses, got.norms, got.scale_gradients) == (plain.losses, plain.norms, plain.scale_gradients)
        assert [n for n, value in plain.parameters.items() if not np.array_equal(got.parameters[n], value)] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_comparison(trained, name):
    case, _, quantity = FAULTS[name]
    expected, bounds = oracle(case), CAPTION_ENGINE if case.captions else ENGINE
    found = [comparisons(outcomes[name], expected, bounds)[quantity] for outcomes in trained[2]]
    assert unnoticed(found, name) == []


def test_the_comparison_detects_weight_decay_dropout_and_clipping(trained):
    """An oracle that differs in one of these settings is far away, so the comparison depends on each of them."""
    plain = trained[2][0]["zero0 plain"]
    for fault, other in {
        "decay of every parameter": oracle(Case(), decays=lambda name, p: True),
        "patch dropout": oracle(Case(patch_dropout=0.5)),
        "clipping": oracle(Case(clipping=0.1)),
    }.items():
        assert unnoticed([comparisons(plain, other)["parameters"]], fault) == []


def test_locked_parameters_keep_their_bits(trained):
    start = oracle(Case(locked="most"))  # float64 copies of the float32 start
    for name in [name for name, case in CASES.items() if case.locked == "most" and not case.captions]:
        outcome = trained[CASES[name].ranks][0][name]
        assert isinstance(outcome, Outcome), outcome
        moving = {n for n, p in start.parameters.items() if (p != outcome.parameters[n]).any()}
        assert moving <= {"visual.proj", "text.text_projection", "logit_scale"}


def test_the_rows_have_every_pair_of_settings():
    assert len(ROWS) < 50
    for one, other in (("stage", "chunks"), ("locked", "checkpointing"), ("keep", "captions"), ("offload", "ranks")):
        pairs = {(row[one], row[other]) for row in ROWS}
        assert pairs == {(x, y) for x, _ in pairs for _, y in pairs if is_possible({one: x, other: y})}


def test_a_part_is_compiled_once_for_all_chunks_and_steps(trained) -> None:
    """DeepSpeed's hooks and the state of partitioned parameters must not become guards of the compiled code."""
    for outcomes in trained[2]:
        whole, blocks_at_2, blocks_at_3 = (outcomes[f"graphs {name}"] for name in COUNTED)
        # The image tower or its first block, with and without gradients.
        assert [len(graphs) for graphs in (whole, blocks_at_2, blocks_at_3)] == [2, 2, 2]
        # DeepSpeed's own linear function would be an opaque operation, with the parameter's number as a guard.
        assert blocks_at_3 == blocks_at_2


def most_parameters_in_a_backward_pass(keep: int, fault: Callable[[Passes], None] | None) -> int:
    """Return the largest number of parameters that ZeRO-3 has gathered when a block's backward pass begins."""
    plain = Case(3, 3, keep=keep, ranks=1)
    config = engine_cases.training_config(plain)
    config.deepspeed["zero_optimization"] |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    engine = start_engine(plain, config)
    counts = []

    def count(*_: object) -> None:
        counts.append(sum(p.ds_status == ZeroParamStatus.AVAILABLE for p in engine.module.parameters()))

    for tower in (engine.module.visual, engine.module.text):
        for block in tower.transformer.resblocks:
            block.register_full_backward_pre_hook(count)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            _between_passes(fault)(patch)
        backpropagate(engine, plain, 0)
    return max(counts)


def numbers_of_parameters() -> tuple[int, int, int]:
    return (
        most_parameters_in_a_backward_pass(0, None),
        most_parameters_in_a_backward_pass(ALL, None),
        most_parameters_in_a_backward_pass(ALL, without_counts),
    )


def test_zero_3_frees_parameters_during_the_backward_passes_of_kept_graphs() -> None:
    ((encoded_again, kept, without),) = run_ranks(numbers_of_parameters, 1)
    assert kept <= encoded_again < without


def pieces_of_own_captions(lengths: list[list[int]]) -> list[list[Pieces]]:
    """Return the pieces of one chunk and of two chunks, cut alone and with the other ranks.

    lengths: numbers of tokens of each rank's captions.
    """
    text, own = CAPTION_MODEL.text_cfg, lengths[dist.get_rank()]
    tokens = torch.full((len(own), text.context_length), 3)
    tokens[range(len(own)), [length - 1 for length in own]] = text.eos_id
    return [
        [pieces for count in (1, 2) for pieces in CaptionChunks.cut(tokens, count, text, ranks=ranks).pieces]
        for ranks in (ONE_RANK, resolve())
    ]


def test_ranks_cut_at_the_lengths_of_the_longest_captions_of_any_rank() -> None:
    """The ranks then compile the same shapes in the same step."""
    lengths = [[20, 1, 10, 1, 3, 1, 3, 1], [9, 1, 1, 9, 9, 1, 1, 1]]
    alone, together = zip(*run_ranks(pieces_of_own_captions, 2, lengths), strict=True)
    assert list(alone) == [
        [((1, 24), (1, 16), (6, 8)), ((4, 24),), ((4, 8),)],
        [((4, 16), (4, 8)), ((4, 16),), ((4, 8),)],
    ]
    assert list(together) == [[((1, 24), (3, 16), (4, 8)), ((4, 24),), ((4, 8),)]] * 2
