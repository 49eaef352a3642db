"""Terms of an objective equal one process on the whole batch, for all chunks, ranks and ZeRO stages.

Every case takes two steps and is compared with `engine_cases.OracleTraining` in float64, which adds the same terms to
the loss with autograd, without the gradient cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from torch import Tensor

from megaclip.objectives import Chunk, Objective, WholeBatch
from megaclip.step.batch import StepBatch
from tests.distributed import engine_cases
from tests.distributed.engine_cases import Case, OracleTraining, Outcome
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine import comparisons
from tests.tolerances import exceeded


def targets_of(step: int) -> Tensor:
    """Return an extra field of the samples, in the order of the dataset."""
    return torch.randn(engine_cases.BATCH, 16, generator=torch.Generator().manual_seed(step))


def by_rank(values: Tensor, ranks: int) -> Tensor:
    """Return values per sample of the batch, in the order in which `OracleTraining.features` has the samples."""
    return torch.cat([values[rank::ranks] for rank in range(ranks)])


class TwoKinds(Objective):
    """A term of each kind, both of features and a field."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = {"contrastive": 0.5, "squares": 2.0, "whole": 3.0}

    def chunk_features(self, chunk: Chunk) -> dict[str, Tensor]:
        return {} if chunk.image_features is None else {"cubes": chunk.image_features**3}

    def chunk_terms(self, chunk: Chunk) -> dict[str, Tensor]:
        features = chunk.text_features if chunk.image_features is None else chunk.image_features
        return {"squares": ((features - chunk.fields["target"]) ** 4).sum()}

    def batch_terms(self, batch: WholeBatch) -> dict[str, Tensor]:
        rows = (batch.features["cubes"] * batch.fields["target"] * batch.text_features).sum(1)
        return {"whole": batch.logit_scale.squeeze() * rows.mean()}


def two_kinds(loss: Tensor, x: Tensor, y: Tensor, step: int, case: Case, model: Any) -> Tensor:
    t = by_rank(targets_of(step), case.ranks).double()
    towers = [y] if case.locked == "image" else [x, y]  # a tower that is not trained has no term
    squares = sum(((side - t) ** 4).sum() for side in towers) / len(x)
    whole = model.logit_scale.exp().squeeze() * (x**3 * t * y).sum(1).mean()
    return 0.5 * loss + 2.0 * squares + 3.0 * whole


Oracle = Callable[..., Tensor]
OBJECTIVES: dict[str, tuple[Callable[[], Objective], Oracle]] = {"two kinds": (TwoKinds, two_kinds)}


@dataclass(frozen=True)
class ObjectiveCase(Case):
    """A case with an objective."""

    objective: str = "two kinds"
    options: dict[str, Any] = field(default_factory=dict)


def batch_of(case: Case, step: int) -> StepBatch:
    batch = engine_cases.batch_of(case, step)
    batch._fields = {"target": targets_of(step)[dist.get_rank() :: dist.get_world_size()]}
    return batch


def train(case: ObjectiveCase) -> Outcome:
    engine = engine_cases.start_engine(case, objective=OBJECTIVES[case.objective][0]())
    outcome = Outcome()
    for step in range(engine_cases.STEPS):
        engine_cases.take_step(engine, case, step, outcome, batch=batch_of(case, step))
    outcome.parameters = engine_cases.whole_parameters(engine)
    return outcome


CASES: dict[str, ObjectiveCase] = {
    f"zero{stage} x {chunks}": ObjectiveCase(stage, chunks, keep=chunks) for stage in range(4) for chunks in (1, 3)
}
CASES["zero3 offloaded"] = ObjectiveCase(3, 3, text_chunks=2, offload="all", coalesce=True)
CASES["zero2 captions"] = ObjectiveCase(2, 1, captions="cut", keep=1)
CASES["zero1 captions"] = ObjectiveCase(1, 3, text_chunks=2, captions="cut", embeddings_on_cpu=True)
CASES["zero0 image frozen"] = ObjectiveCase(0, 3, locked="image")


@contextmanager
def batch_for(ranks: int) -> Iterator[None]:
    """Let a batch of the cases have a multiple of 3 chunks on each of `ranks` ranks."""
    with mock.patch.object(engine_cases, "BATCH", 18 if ranks == 3 else 12):
        yield


def train_all(cases: dict[str, ObjectiveCase]) -> dict[str, Outcome | str]:
    with batch_for(dist.get_world_size()):
        return {name: or_traceback(train, case) for name, case in cases.items()}


def cases_of(ranks: int) -> dict[str, ObjectiveCase]:
    """Return the cases by name. The captions of `engine_cases` are those of one batch."""
    return {name: replace(case, ranks=ranks) for name, case in CASES.items() if ranks < 3 or not case.captions}


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Outcome | str]]]:
    """Outcomes by number of ranks and name of the case, one dictionary per rank."""
    return {ranks: run_ranks(train_all, ranks, cases_of(ranks)) for ranks in (1, 2, 3)}


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (1, 2, 3) for name in cases_of(ranks)])
def test_terms_equal_one_process_on_the_whole_batch(trained, ranks, name):
    case = cases_of(ranks)[name]
    with batch_for(ranks):
        training = OracleTraining(case)
        oracle = OBJECTIVES[case.objective][1]
        expected = training.train(training.features, lambda *values: oracle(*values, case, training.model))
    for rank, outcome in enumerate(trained[ranks]):
        assert exceeded(comparisons(outcome[name], expected).values()) == [], f"rank {rank}"
