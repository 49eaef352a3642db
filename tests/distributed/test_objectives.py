"""Terms of an objective equal one process on the whole batch, for every pair of chunks, ranks, ZeRO stages and others.

Every case takes two steps and is compared with `engine_cases.OracleTraining` in float64, which adds the same terms to
the loss with autograd, without the gradient cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaclip.errors import ConfigError
from megaclip.models import build_model
from megaclip.objectives import Chunk, Objective, WholeBatch
from megaclip.objectives.distillation import Distillation
from megaclip.step.objective_terms import StepTerms
from tests.distributed import engine_cases
from tests.distributed.checks import covering_rows
from tests.distributed.engine_cases import Case, OracleTraining, Outcome
from tests.distributed.harness import or_traceback, run_ranks
from tests.distributed.test_engine import comparisons
from tests.tolerances import CAPTION_ENGINE, ENGINE, exceeded


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


TEACHERS = [
    {"image": "i", "text": "t", "dims": [5, 6], "logit_scale": 20.0},
    {"image": "j", "text": "u", "dims": [16], "logit_scale": 30.0},
]


def teacher_fields(step: int) -> dict[str, Tensor]:
    """Return the stored features of the teachers, which are not of unit length, in the order of the dataset."""
    generator = torch.Generator().manual_seed(step)
    sizes = {"image_0": 11, "text_0": 11, "image_1": 16, "text_1": 16}
    return {name: torch.randn(engine_cases.BATCH, size, generator=generator) for name, size in sizes.items()}


def distillation() -> Objective:
    return Distillation(teachers=TEACHERS, weight=3.0, contrastive_weight=0.25)


def rows_of_similarities(x: Tensor, y: Tensor, scale: Tensor, u: Tensor, v: Tensor, teacher_scale: float) -> Tensor:
    """Return the KL divergence of the similarity rows in both directions, with the matrices of the whole batch."""
    s, t = scale * x @ y.T, teacher_scale * u @ v.T
    pairs = [(s.log_softmax(1), t.log_softmax(1)), (s.T.log_softmax(1), t.T.log_softmax(1))]
    return sum(F.kl_div(*pair, reduction="batchmean", log_target=True) for pair in pairs) / 2


def whole_distillation(loss: Tensor, x: Tensor, y: Tensor, step: int, case: Case, model: Any) -> Tensor:
    stored = {name: by_rank(values, case.ranks).double() for name, values in teacher_fields(step).items()}
    parts = [(0, slice(0, 5), 20.0), (0, slice(5, 11), 20.0), (1, slice(0, 16), 30.0)]
    terms = []
    for number, part, scale in parts:
        u, v = (F.normalize(stored[f"{tower}_{number}"][:, part]) for tower in ("image", "text"))
        terms.append(rows_of_similarities(x, y, model.logit_scale.exp(), u, v, scale))
    return 0.25 * loss + 3.0 * sum(terms) / 3


def feature_distillation() -> Objective:
    return Distillation(teachers=TEACHERS[1:], weight=0.0, feature_weight=2.0, feature_loss="mse")


def whole_feature_distillation(loss: Tensor, x: Tensor, y: Tensor, step: int, case: Case, model: Any) -> Tensor:
    stored = {name: by_rank(values, case.ranks).double() for name, values in teacher_fields(step).items()}
    images, texts = (F.normalize(stored[f"{tower}_1"]) for tower in ("image", "text"))
    return loss + (x - images).square().mean() + (y - texts).square().mean()


class Projections:
    """Stand-in for `TeacherModel`: linear functions of pixels and tokens."""

    embed_dim, logit_scale = 16, 15.0

    def load(self) -> None: ...

    def encode(self, tower: str, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        rows = inputs.flatten(1)
        matrix = torch.randn(rows.shape[1], 16, generator=torch.Generator().manual_seed(9))
        rows = rows if rows.is_floating_point() else rows.float()
        return F.normalize(rows @ matrix.to(rows.dtype))


def live_distillation() -> Objective:
    objective = Distillation(teachers=[{"model": "unread"}], weight=3.0, feature_weight=2.0)
    objective._models = {0: Projections()}
    return objective


def whole_live_distillation(loss: Tensor, x: Tensor, y: Tensor, step: int, case: Case, model: Any) -> Tensor:
    pixels, tokens = (by_rank(each, case.ranks) for each in engine_cases.whole_batch(step))
    images = (pixels.double() / 255 - engine_cases.MEAN) / engine_cases.STD
    u, v = (
        Projections().encode("image", images, torch.float64),
        Projections().encode("text", tokens.double(), torch.float64),
    )
    distance = 2 - (x * u).sum(1).mean() - (y * v).sum(1).mean()
    return loss + 3.0 * rows_of_similarities(x, y, model.logit_scale.exp(), u, v, 15.0) + distance


class Paired(Objective):
    """A linear layer and a term of pairs, with a divisor of its own."""

    paired = True

    def build(self, model: Any) -> None:
        self.head = torch.nn.Linear(model.config.embed_dim, 16)

    def counts(self, tokens: Tensor, fields: dict[str, Tensor]) -> dict[str, int]:
        return {"pairs": int(tokens[:, 0].sum())}

    def chunk_terms(self, chunk: Chunk) -> dict[str, Tensor]:
        return {"pairs": paired_term(self, chunk.image_features, chunk.text_features, chunk.fields["target"])}


def paired_term(objective: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return 40 * (objective.head(x) * y - target).square().sum()


def whole_paired(loss: Tensor, x: Tensor, y: Tensor, step: int, case: Case, model: Any) -> Tensor:
    target = by_rank(targets_of(step), case.ranks).double()
    _, tokens = engine_cases.whole_batch(step, captions=bool(case.captions))
    return loss + paired_term(model.objective, x, y, target) / tokens[:, 0].sum()


Oracle = Callable[..., Tensor]
OBJECTIVES: dict[str, tuple[Callable[[], Objective], Oracle]] = {
    "two kinds": (TwoKinds, two_kinds),
    "distillation": (distillation, whole_distillation),
    "features": (feature_distillation, whole_feature_distillation),
    "live": (live_distillation, whole_live_distillation),
    "paired": (Paired, whole_paired),
}


@dataclass(frozen=True)
class ObjectiveCase(Case):
    """A case with an objective."""

    objective: str = "two kinds"


def batch_of(case: ObjectiveCase, step: int) -> engine_cases.MemoryBatch:
    batch = engine_cases.batch_of(case, step)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    stored = teacher_fields(step)
    renamed = {"image_0": stored["image_1"], "text_0": stored["text_1"]} if case.objective == "features" else {}
    batch._fields = {name: values[own] for name, values in {"target": targets_of(step), **stored, **renamed}.items()}
    return batch


def train(case: ObjectiveCase) -> Outcome:
    engine = engine_cases.start_engine(case, objective=OBJECTIVES[case.objective][0]())
    outcome = Outcome()
    for step in range(engine_cases.STEPS):
        engine_cases.take_step(engine, case, step, outcome, batch=batch_of(case, step))
    outcome.parameters = engine_cases.whole_parameters(engine)
    return outcome


def is_possible(row: dict[str, Any]) -> bool:
    stage, objective, chunks = row.get("stage"), row.get("objective"), row.get("chunks")
    if stage == 0 and (row.get("offload") or row.get("coalesce")):
        return False
    if objective == "paired" and chunks == (3, 2):
        return False
    # The captions of `engine_cases` are those of one batch, which three ranks do not have.
    if row.get("captions") and (row.get("ranks") == 3 or objective in ("live", "paired")):
        return False
    return not row.get("locked") or objective in (None, "two kinds", "paired")


ROWS = covering_rows(
    is_possible,
    objective=tuple(OBJECTIVES),
    stage=(3, 2, 1, 0),
    ranks=(2, 1, 3),
    chunks=((3, 3), (1, 1), (3, 2)),
    keep=(0, 2, 1),
    captions=("", "cut"),
    locked=("", "image"),
    offload=("", "optimizer"),
    coalesce=(False, True),
    patch_dropout=(0.0, 0.5),
    embeddings_on_cpu=(False, True),
)
CASES = {
    f"row {number} zero{row['stage']} {row['objective']}": ObjectiveCase(
        accumulation=row["chunks"][0], text_chunks=row["chunks"][1], **{n: v for n, v in row.items() if n != "chunks"}
    )
    for number, row in enumerate(ROWS)
}


@contextmanager
def batch_for(ranks: int) -> Iterator[None]:
    """Let a batch of the cases have a multiple of 3 chunks on each of `ranks` ranks."""
    with mock.patch.object(engine_cases, "BATCH", 18 if ranks == 3 else 12):
        yield


def train_all(cases: dict[str, ObjectiveCase]) -> dict[str, Outcome | str]:
    with batch_for(dist.get_world_size()):
        return {name: or_traceback(train, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Outcome | str]]]:
    """Outcomes by number of ranks and name of the case, one dictionary per rank."""
    by_ranks = {ranks: {name: case for name, case in CASES.items() if case.ranks == ranks} for ranks in (1, 2, 3)}
    return {ranks: run_ranks(train_all, ranks, cases) for ranks, cases in by_ranks.items()}


@pytest.mark.parametrize("name", CASES)
def test_terms_equal_one_process_on_the_whole_batch(trained, name):
    case = CASES[name]
    with batch_for(case.ranks):
        torch.manual_seed(engine_cases.SEED)
        model = build_model(engine_cases.model_of(case))
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(engine_cases.trains(parameter_name, case))
        model.objective = OBJECTIVES[case.objective][0]()
        torch.manual_seed(engine_cases.SEED)
        model.objective.attach(model)
        training = OracleTraining(case, model=model.double())
        oracle = OBJECTIVES[case.objective][1]
        expected = training.train(training.features, lambda *values: oracle(*values, case, training.model))
    bounds = CAPTION_ENGINE if case.captions else ENGINE
    for rank, outcome in enumerate(trained[case.ranks]):
        assert exceeded(comparisons(outcome[name], expected, bounds).values()) == [], f"rank {rank}, {case}"


def check_names(second_step: list[str]) -> str:
    terms = StepTerms(TwoKinds(), None, torch.device("cpu"))
    try:
        terms._check_names(["a", "b"] if dist.get_rank() == 0 or second_step else ["a"])
        terms._check_names(second_step)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("second_step", [[], ["b"]])
def test_other_terms_on_another_rank_or_in_another_step_are_refused_on_all_ranks(second_step):
    for message in run_ranks(check_names, 2, second_step):
        assert f"the terms a, b on one rank or in one step, and {'b' if second_step else 'a'} in another" in message
