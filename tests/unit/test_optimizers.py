"""timm's optimizers, where DeepSpeed's of the same names differ. Whole updates: tests/distributed/test_engine.py."""

import sys

import pytest
import torch

from megaclip.engine.optimizers import timm_optimizer
from megaclip.errors import ConfigError


@pytest.mark.parametrize("kind", ["Lion", "Lamb"])
def test_a_parameter_without_gradient_only_decays(kind):
    """A token that the batch lacks: its row of the embedding, beside one that was there."""
    embedding = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = timm_optimizer(kind, {"lr": 0.1, "weight_decay": 0.5}, [{"params": [embedding], "weight_decay": 0.0}])
    embedding.grad = torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 2.0]])
    optimizer.step()
    assert torch.equal(embedding.detach()[0], torch.ones(3))
    assert (embedding.detach()[1] != 1).all()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    embedding.grad = torch.zeros(2, 3)
    optimizer.step()
    assert (embedding.detach()[0] < 1).all()


def test_lamb_leaves_clipping_to_gradient_clipping():
    """By itself timm's would clip at norm 1, and with moments that differ in scale the next step would show it."""
    assert timm_optimizer("Lamb", {"lr": 0.1}, [{"params": [torch.zeros(1)]}]).defaults["max_grad_norm"] is None


def test_a_missing_timm_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(ConfigError, match=r"Lion is timm's.*pip install timm"):
        timm_optimizer("Lion", {"lr": 0.1}, [])
