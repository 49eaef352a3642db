"""Mistakes of an objective that only the terms of a step show."""

from types import SimpleNamespace

import pytest
import torch

from megaclip.errors import ConfigError
from megaclip.objectives import Objective
from megaclip.step import objective_terms


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
    features = dict.fromkeys(objective_terms.Tower, torch.ones(2, 3))
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
    features = dict.fromkeys(objective_terms.Tower, torch.ones(2, 3))
    with pytest.raises(ConfigError, match=r"Head.batch_terms uses the parameter head\.(weight|bias), .*chunk_features"):
        terms.add_batch_terms(torch.tensor(5.0), features, [torch.ones(1)])
