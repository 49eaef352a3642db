"""The loss of a run: ids, the epoch and settings reach it, and the model's own scalars receive zero gradients."""

import pytest
import torch
import torch.nn.functional as F

from megaclip.config import MegaclipSection
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedule import RunLength
from megaclip.errors import ConfigError
from megaclip.losses import ClipLoss, SigLipLoss
from megaclip.losses.settings import FastClipSettings

RUN = RunLength(samples=10, global_batch=4, total_steps=50), 5, torch.device("cpu")
"""Length of a run of 20 epochs, its steps of warm-up and its device."""


def test_a_models_scale_and_bias_receive_zero_gradients() -> None:
    section = MegaclipSection(loss="fastclip_v3", fastclip=FastClipSettings(rho=2.0))
    loss = RunLoss(section, *RUN)
    x, y = (F.normalize(torch.randn(4, 6), dim=1).requires_grad_() for _ in range(2))
    scale, bias = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    loss.bind(lambda: torch.tensor([0, 8, 3, 5]), 0.0)(x, y, scale, bias).backward()
    assert loss.own is not None
    loss.own.step(0, 50)
    assert scale.grad is not None and scale.grad.item() == 0 and bias.grad is not None and bias.grad.item() == 0
    state = loss.own.checkpoint_state()
    seen = ~state["samples"]["values"][:, 0].isnan()
    assert seen.nonzero().flatten().tolist() == [0, 3, 5, 8]


@pytest.mark.parametrize("meaning", ["mask", "positive"])
def test_ids_of_equal_pairs_reach_the_loss(meaning: str) -> None:
    x, y = (F.normalize(torch.randn(4, 6), dim=1) for _ in range(2))
    ids, scale, bias = torch.tensor([3, 5, 3, 7]), torch.ones(1), torch.zeros(1)
    for name, kind in (("clip", ClipLoss), ("siglip", SigLipLoss)):
        loss = RunLoss(MegaclipSection(loss=name, same_ids=meaning), *RUN)
        bound = loss.bind(lambda: ids, 0.0, lambda: ids)
        assert torch.equal(bound(x, y, scale, bias), kind(ids=meaning)(x, y, scale, bias, ids=ids))
        assert not torch.equal(bound(x, y, scale, bias), kind()(x, y, scale, bias))


def test_gamma_falls_over_half_of_the_run_by_default() -> None:
    for given, expected in (({}, 10), ({"gamma_epochs": None}, 10), ({"gamma_epochs": 3}, 3)):
        section = MegaclipSection(loss="fastclip_v3", fastclip=given)
        loss = RunLoss(section, *RUN)._loss
        assert loss.gamma_epochs == expected


def test_the_temperatures_cosine_has_the_warmup_of_the_run_by_default() -> None:
    """Adam's first step moves log(1/tau) by the learning rate. In step 0 this is a fifth of the peak rate."""
    for given, factor in (({}, 1 / 5), ({"temperature_warmup": 4}, 1 / 4), ({"temperature_warmup": 0}, 1.0)):
        settings = {"temperature_schedule": "cosine", "temperature_learning_rate": 0.01, **given}
        loss = RunLoss(MegaclipSection(loss="fastclip_v0", fastclip=settings), *RUN)
        before = loss._loss.log_scale.item()
        x, y = (F.normalize(torch.randn(4, 6), dim=1) for _ in range(2))
        loss.bind(lambda: torch.arange(4), 0.0)(x.requires_grad_(), y, torch.ones(1)).backward()
        assert loss.own is not None
        loss.own.step(0, 50)
        assert abs(loss._loss.log_scale.item() - before) == pytest.approx(factor * 0.01, rel=1e-3)


def test_a_warmup_of_the_temperature_that_is_longer_than_the_run_is_refused() -> None:
    section = MegaclipSection(loss="fastclip_v0", fastclip={"temperature_schedule": "cosine", "temperature_warmup": 51})
    with pytest.raises(ConfigError, match=r"temperature_warmup 51 is longer than the run of 50 steps; set it to 50 or"):
        RunLoss(section, *RUN)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("clip", {}, None),
        ("fastclip_v3", {}, "gamma_epochs"),
        ("fastclip_v3", {"gamma_epochs": 3}, None),
        ("fastclip_v3", {"gamma_schedule": "constant"}, None),
        ("sogclr", {}, None),
        ("sogclr", {"gamma_schedule": "cosine"}, "gamma_epochs"),
        ("fastclip_v3", {"gamma_epochs": 3, "temperature_schedule": "cosine"}, "temperature_schedule"),
    ],
)
def test_settings_that_depend_on_the_length_of_the_run_are_named(name: str, given: dict, expected: str | None) -> None:
    section = MegaclipSection(loss=name, fastclip=given)
    loss = RunLoss(section, *RUN)
    setting = loss.length_dependent_setting
    assert setting is None if expected is None else expected in (setting or "")
