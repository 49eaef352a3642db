"""Mistakes of an objective that only the terms of a step show."""

from types import SimpleNamespace

import pytest
import torch

from megaclip.data import ImageTransform
from megaclip.errors import ConfigError
from megaclip.models import build_model, load_model_config
from megaclip.objectives import Objective
from megaclip.step import objective_terms
from megaclip.step.batch import DeviceFeed
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from tests.distributed.memory_batch import MemoryBatch, PlainEngine, cross_entropy


class Margin(Objective):
    def __init__(self):
        super().__init__()
        self.weights = {"margn": 2.0}

    def batch_terms(self, batch):
        return {"margin": batch.image_features.sum()}


@pytest.mark.parametrize(
    ("objective", "warning"),
    [(Objective(), "none of its methods returns a term"), (Margin(), "its weights name 'margn', and there is no such")],
)
def test_an_objective_without_an_effect_gives_a_warning(monkeypatch, objective, warning):
    lines = []
    monkeypatch.setattr(objective_terms, "log_once", lambda _, line: lines.append(line))
    batch = SimpleNamespace(rows=lambda: 2, fields=dict)
    terms = objective_terms.StepTerms(objective, batch, torch.device("cpu"))
    features = dict.fromkeys(objective_terms.Tower, torch.ones(2, 3, requires_grad=True))
    own = terms.add_batch_terms(torch.tensor(5.0), features, [torch.ones(1)])
    assert own == terms.total(torch.tensor(5.0), values := {}) == sum(values.values())
    assert len(lines) == 1 and warning in lines[0]


class Head(Objective):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 1)

    def batch_terms(self, batch):
        return {"used": batch.image_features.sum(), "head": self.head(batch.image_features).mean()}


def test_a_term_of_the_batch_with_a_parameter_is_refused():
    """Its gradient would come outside of the engine's backward passes."""
    batch = SimpleNamespace(rows=lambda: 2, fields=dict)
    terms = objective_terms.StepTerms(Head(), batch, torch.device("cpu"))
    features = dict.fromkeys(objective_terms.Tower, torch.ones(2, 3, requires_grad=True))
    with pytest.raises(ConfigError, match=r"Head.batch_terms uses the parameter head\.(weight|bias), .*chunk_features"):
        terms.add_batch_terms(torch.tensor(5.0), features, [torch.ones(1)])


class Once(Objective):
    """Its features have a gradient, and are returned the first time only."""

    def chunk_features(self, chunk):
        return {} if chunk.images is None or chunk.is_repeated else {"once": chunk.image_features}

    def batch_terms(self, batch):
        return {"term": batch.features["once"].sum()}


class Twice(Objective):
    """Its features of both towers have one name."""

    def chunk_features(self, chunk):
        return {"twice": chunk.text_features if chunk.images is None else chunk.image_features}

    def batch_terms(self, batch):
        return {"term": batch.features["twice"].sum()}


class Labels(Objective):
    """Its features are integers."""

    def chunk_features(self, chunk):
        return {} if chunk.images is None else {"label": chunk.images[:, 0, 0, 0].round().long()}

    def batch_terms(self, batch):
        assert batch.features["label"].dtype == torch.int64
        return {"label": (batch.image_features.sum(1) * batch.features["label"]).mean()}


def take_step(objective, chunks):
    """Return the terms of a step of four samples with this objective."""
    model = build_model(load_model_config("demo-tiny"))
    model.objective = objective
    objective.attach(model)
    size, length = model.config.vision_cfg.image_size, model.config.text_cfg.context_length
    feed = DeviceFeed(torch.device("cpu"), torch.float32, ImageTransform(size).normalise)
    pixels = torch.zeros(4, 3, size, size, dtype=torch.uint8).chunk(chunks)
    batch = MemoryBatch(pixels, torch.ones(4, length, dtype=torch.int64), feed, text_chunks=chunks)
    arguments = PlainEngine(model), cross_entropy, batch, lambda: [torch.zeros(1)], RandomState(0, 0, 0)
    accumulate_gradients(*arguments, coalesce=False, term_values=(values := {}))
    return values


@pytest.mark.parametrize(
    ("objective", "chunks", "message"),
    [
        (Once(), 2, "depends on 'once', which chunk_features returned the first time only"),
        (Twice(), 1, "'twice' names features of images and of captions"),
        (Twice(), 2, "'twice' names features of images and of captions"),
    ],
)
def test_features_whose_gradient_would_be_lost_are_refused(objective, chunks, message):
    with pytest.raises(ConfigError, match=message):
        take_step(objective, chunks)


@pytest.mark.parametrize("chunks", [1, 2])
def test_features_may_be_integers(chunks):
    assert take_step(Labels(), chunks)["label"] != 0
