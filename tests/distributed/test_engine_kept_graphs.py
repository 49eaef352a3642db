"""Steps that keep graphs equal steps that encode every chunk twice bit by bit, and one process on the whole batch.

Two steps are trained through the engine with features, ZeRO stages, numbers of kept graphs and numbers of ranks of a
covering array: every pair of levels of two factors occurs. A tower's gradients are added in the order of its chunks,
whichever graphs are kept. So every bit must equal the same case with megaclip.keep_graphs 0. The oracle is
`engine_cases.oracle` in float64. The last tests plant faults that the comparison must detect, and count the parameters
that ZeRO-3 holds during backward passes.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from megaclip.cache.passes import Passes
from megaclip.step.batch import Tower
from tests.distributed.checks import covering_rows
from tests.distributed.engine_cases import Case, Outcome, backpropagate, oracle, start_engine, train, training_config
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine import comparisons
from tests.tolerances import CAPTION_ENGINE, ENGINE, exceeded, unnoticed

ALL = 99
"""More graphs than any case has."""
FEATURES = {
    "plain": Case(3, 3),
    "coalesced": Case(3, 3, coalesce=True),
    "bf16": Case(3, 3, coalesce=True, bf16=True),
    "offload": Case(3, 3, offload="optimizer"),
    "offload all": Case(3, 3, offload="all", checkpointing="cpu"),
    "checkpointing": Case(3, 3, checkpointing="plain"),
    "dropout": Case(3, 3, text_chunks=2, patch_dropout=0.5, embeddings_on_cpu=True),
    "one image chunk": Case(3, 1, text_chunks=3, patch_dropout=0.5),
    "one text chunk": Case(3, 3, text_chunks=1, checkpointing="plain"),
    "image locked": Case(3, 3, locked="image"),
    "text locked": Case(3, 3, locked="text"),
    "locked below": Case(3, 3, text_chunks=2, locked="below", checkpointing="plain"),
    "cut captions": Case(3, 3, captions="cut", patch_dropout=0.5),
    "siglip": Case(3, 3, loss="siglip", clipping=0.1),
}
NEEDS_ZERO = {"coalesced", "bf16", "offload", "offload all"}
"""Features that ZeRO-0 does not have."""


def case(feature: str, stage: int, keep: int, ranks: int) -> Case:
    chosen = replace(FEATURES[feature], stage=stage, keep=keep, ranks=ranks)
    return replace(chosen, offload="optimizer") if chosen.offload == "all" and stage < 3 else chosen


KEEP = (4, ALL, 2, 1)
"""With three or two chunks per tower: all images and some texts, all chunks, some images, one image."""
STAGES, RANKS = (3, 2, 1, 0), (2, 1)


def is_possible(row: tuple[str, int, int, int]) -> bool:
    return row[1] > 0 or row[0] not in NEEDS_ZERO


ROWS = covering_rows(FEATURES, STAGES, KEEP, RANKS, possible=is_possible)
SHORT = {row for feature in FEATURES for row in [row for row in ROWS if row[0] == feature][:2]}
"""The rows that `make test` runs: the first two of each feature."""


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


Fault = Callable[[Passes], None]
FAULTS: dict[str, tuple[Case, Fault]] = {
    "rows of another chunk": (case("plain", 0, ALL, 2), faulty_rows),
    "rows of another chunk, zero3": (case("dropout", 3, ALL, 2), faulty_rows),
    "DeepSpeed's counts": (case("plain", 3, ALL, 2), counts_of_the_last_forward),
}


def with_fault(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Plant a fault between the forward and the backward passes of every step."""
    back_propagate = Passes.back_propagate

    def faulty(self: Passes, *arguments, **named) -> None:
        fault(self)
        back_propagate(self, *arguments, **named)

    patch.setattr(Passes, "back_propagate", faulty)


def train_all(cases: list[Case], faults: list[str]) -> dict[Case | str, Outcome | str]:
    """Return the outcome of every case and fault on this rank, or the traceback of its exception."""
    outcomes: dict[Case | str, Outcome | str] = {}
    for key in [*cases, *faults]:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(key, str):
                with_fault(patch, FAULTS[key][1])
            outcomes[key] = or_traceback(train, FAULTS[key][0] if isinstance(key, str) else key)
    return outcomes


@functools.cache
def trained(ranks: int, is_short: bool) -> list[dict[Case | str, Outcome | str]]:
    """Train the rows on this number of ranks, with and without kept graphs; return one dictionary per rank."""
    rows = [row for row in ROWS if row[-1] == ranks and (row in SHORT) == is_short]
    cases = {case(feature, stage, number, ranks) for feature, stage, keep, _ in rows for number in (0, keep)}
    faults = list(FAULTS) if is_short and ranks == 2 else []
    return run_ranks(train_all, ranks, sorted(cases, key=str), faults)


def check(outcomes: list[dict[Case | str, Outcome | str]], kept: Case) -> None:
    """Compare a case with the same case without kept graphs. In float32, compare it with the oracle too."""
    expected = None if kept.bf16 else oracle(replace(kept, stage=0, keep=0, coalesce=False, checkpointing=""))
    for by_case in outcomes:
        got, plain = by_case[kept], by_case[replace(kept, keep=0)]
        assert isinstance(got, Outcome) and isinstance(plain, Outcome), f"{got}\n{plain}"
        assert (got.losses, got.norms, got.scale_gradients) == (plain.losses, plain.norms, plain.scale_gradients)
        changed = [name for name, value in plain.parameters.items() if not np.array_equal(got.parameters[name], value)]
        assert changed == []
        if expected is not None:
            bounds = CAPTION_ENGINE if kept.captions else ENGINE
            assert exceeded(comparisons(got, expected, bounds).values()) == []


@pytest.mark.parametrize(
    ("feature", "stage", "keep", "ranks"),
    [pytest.param(*row, marks=() if row in SHORT else pytest.mark.long) for row in ROWS],
)
def test_kept_graphs_change_no_bit(feature: str, stage: int, keep: int, ranks: int) -> None:
    check(trained(ranks, (feature, stage, keep, ranks) in SHORT), case(feature, stage, keep, ranks))


def test_every_pair_of_levels_occurs_in_few_rows() -> None:
    grid = [row for row in itertools.product(FEATURES, STAGES, KEEP, RANKS) if is_possible(row)]
    for one, other in itertools.combinations(range(4), 2):
        assert {(row[one], row[other]) for row in ROWS} == {(row[one], row[other]) for row in grid}
    assert len(grid) == 416 and len(ROWS) == 56


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_detected(name: str) -> None:
    expected = oracle(FAULTS[name][0])
    for outcomes in trained(2, is_short=True):
        got = outcomes[name]
        assert isinstance(got, Outcome), got
        assert unnoticed([comparisons(got, expected)["parameters"]], name) == []


def most_parameters_in_a_backward_pass(keep: int, fault: Fault | None) -> int:
    """Return the largest number of parameters that ZeRO-3 has gathered when a block's backward pass begins."""
    plain = case("plain", 3, keep, 1)
    config = training_config(plain)
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
            with_fault(patch, fault)
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
