"""timm's optimizers, where they differ from DeepSpeed's of the same names, and bit-exact resume of DeepSpeed's Adam.

tests/distributed/test_engine.py tests whole updates.
"""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from megaclip.config.optimizers import Optimizer
from megaclip.errors import ConfigError
from megaclip.models import load_model_config, meta_model
from megaclip.zero import optimizers
from megaclip.zero.op_builds import prepare_ops
from megaclip.zero.optimizers import step_without_history, timm_optimizer


def settings(kind: str, **params: float) -> Optimizer:
    return Optimizer.model_validate({"type": kind, "params": params})


@pytest.mark.parametrize("kind", ["Lion", "Lamb"])
def test_a_parameter_without_gradient_only_decays(kind):
    """Example: the embedding of a token that is not in the batch, beside one that is."""
    embedding = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = timm_optimizer(settings(kind, lr=0.1, weight_decay=0.5), [{"params": [embedding], "weight_decay": 0.0}])
    embedding.grad = torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 2.0]])
    optimizer.step()
    assert torch.equal(embedding.detach()[0], torch.ones(3))
    assert (embedding.detach()[1] != 1).all()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    embedding.grad = torch.zeros(2, 3)
    optimizer.step()
    assert (embedding.detach()[0] < 1).all()


def test_lamb_leaves_clipping_to_gradient_clipping():
    """By default timm clips at norm 1, in addition to DeepSpeed's gradient_clipping."""
    optimizer = timm_optimizer(settings("Lamb", lr=0.1), [{"params": [torch.zeros(1)]}])
    assert optimizer.defaults["max_grad_norm"] is None


def test_only_the_written_parameters_are_handed_to_the_optimizer():
    optimizer = timm_optimizer(settings("Lion", lr=0.1), [{"params": [torch.zeros(1)]}])
    other = timm_optimizer(settings("Lion", lr=0.1, weight_decay=0.5), [{"params": [torch.zeros(1)]}])
    assert optimizer.defaults["weight_decay"] == 0.0 and other.defaults["weight_decay"] == 0.5


def test_a_missing_timm_is_one_line_that_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(ConfigError, match=r"Lion requires timm.*pip install timm"):
        timm_optimizer(settings("Lion", lr=0.1), [])


def test_the_norm_of_no_gradients_is_summed_on_the_device_of_the_model(monkeypatch):
    """NCCL sums no tensors of host memory. Here only the logit scale has a gradient, and it is not split."""
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(optimizers, "sum_over_ranks", lambda values, group: summed.append(values) or values)
    model = meta_model(load_model_config("demo-tiny"))
    model.logit_scale.grad = torch.empty_like(model.logit_scale)
    optimizers._gradient_norm(model)
    assert [values.is_meta for values in summed] == [True]


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
def test_adam_on_the_cpu_continues_with_the_same_bits(kind):
    """Bits are equal on one machine.

    Without an update with step number 0 they would differ from the second step after the restart on.
    """

    prepare_ops()

    def start() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(1000))
        optimizer = kind([parameter], lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
        engine: Any = SimpleNamespace(basic_optimizer=optimizer)
        step_without_history(engine)
        return parameter, optimizer

    def train(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
            optimizer.step()

    whole, optimizer = start()
    train(whole, optimizer, range(3))
    saved, state = whole.detach().clone(), copy.deepcopy(optimizer.state_dict())
    train(whole, optimizer, range(3, 12))
    resumed, optimizer = start()
    resumed.data.copy_(saved)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, range(3, 12))
    assert torch.equal(resumed, whole)
