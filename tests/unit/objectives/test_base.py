"""Wrong terms of a chunk are refused. tests/distributed/test_objectives.py compares gradients with autograd."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaclip.errors import ConfigError
from megaclip.models import build_model
from megaclip.objectives import Chunk, Objective
from tests.distributed import engine_cases


class Head(Objective):
    """A linear layer, whose term may be detached, and a layer that may be used as well."""

    paired = True

    def __init__(self, detached: bool = False, both: bool = True) -> None:
        super().__init__()
        self.detached, self.both = detached, both
        self.head, self.other = nn.Linear(4, 1), nn.Linear(4, 1)

    def chunk_features(self, chunk: Chunk) -> dict[str, Tensor]:
        return {"other": self.other(chunk.image_features)} if self.both else {}

    def chunk_terms(self, chunk: Chunk) -> dict[str, Tensor]:
        term = self.head(chunk.image_features).sum()
        return {"head": term.detach() if self.detached else term}


def inputs() -> dict[str, Any]:
    return {"fields": {}, "counts": {}, "is_repeated": False, "image_features": torch.ones(3, 4)}


def test_a_term_without_gradients_is_refused_unless_its_weight_is_zero():
    objective = Head(detached=True)
    with pytest.raises(ConfigError, match=r"Head\.chunk_terms returned 'head' without gradients"):
        objective(inputs())
    objective.weights = {"head": 0}
    assert set(objective(inputs())) == {"head", "other"}


@pytest.mark.parametrize("both", [True, False])
def test_a_parameter_that_nothing_uses_is_named(both, caplog):
    with caplog.at_level(logging.WARNING, logger="megaclip"):
        Head(both=both)(inputs())
    named = [record.message for record in caplog.records]
    assert not named if both else all("other" in message for message in named) and len(named) == 2


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (None, "chunk_features returned NoneType; return a dict"),
        ({"a": [1.0] * 3}, "returned 'a' of type list"),
        ({"a": torch.zeros(2, 4)}, r"returned 'a' of shape \(2, 4\); return one row for each of the 3 samples"),
        ({"head": torch.zeros(3, 4)}, "under a name that is no term's"),
    ],
)
def test_features_of_another_form_are_refused_in_one_line(features, message):
    objective = Head()
    objective.chunk_features = lambda chunk: features
    with pytest.raises(ConfigError, match=message):
        objective(inputs())


class Wide(Objective):
    def more_images(self, images: Tensor) -> Tensor:
        return images[0]


def test_more_images_of_another_shape_are_refused():
    model = build_model(engine_cases.model_of(engine_cases.Case(1, 1)))
    model.objective = Wide()
    model.objective.attach(model)
    with pytest.raises(ConfigError, match=r"Wide.more_images returned images of shape \(3, \d+, \d+\); return \(k, 3"):
        images = torch.zeros(2, 3, 32, 32)
        model._encode_images(images, {"image": inputs()})
