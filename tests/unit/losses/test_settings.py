"""Settings of the losses: every name, default and bound comes from `megaclip.losses.settings`."""

import inspect
import re
from typing import Any

import pytest
import torch

from megaclip.config import MegaclipSection
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.schedule import RunLength
from megaclip.errors import ConfigError
from megaclip.losses import LOSSES, ClipLoss, FastClipLoss, SigLipLoss
from megaclip.losses.settings import FastClipSettings, LossSettings


@pytest.mark.parametrize("kind", [ClipLoss, SigLipLoss, FastClipLoss])
def test_the_signature_lists_the_settings_with_their_defaults(kind: type) -> None:
    listed = inspect.signature(kind).parameters
    expected = {**LossSettings.model_fields, **(FastClipSettings.model_fields if kind is FastClipLoss else {})}
    assert {name: listed[name].default for name in expected} == {n: field.default for n, field in expected.items()}
    assert {"group", "precision"} <= listed.keys() and "settings" not in listed
    assert ("cuda_graphs" in listed) == (kind is not FastClipLoss)  # no part of a FastCLIP step is recorded


def test_every_setting_of_the_section_reaches_the_loss() -> None:
    """Each value differs from its default, so the test fails for a setting that does not reach the loss."""
    common = {"exchange": "ring", "reduction": "scalar", "payload": "bf16", "implementation": "torch"}
    common["tile_budget_mib"] = 7.5
    own = {
        "gamma_min": 0.5,
        "gamma_epochs": 3.0,
        "gamma_schedule": "constant",
        "gamma_per": "step",
        "rho": 2.0,
        "eps": 1e-3,
        "temperature": 0.3,
        "temperature_min": 0.2,
        "temperature_max": 0.4,
        "temperature_learning_rate": 0.1,
        "temperature_schedule": "cosine",
        "temperature_betas": (0.5, 0.6),
        "temperature_eps": 1e-4,
        "temperature_warmup": 7,
        "temperature_gradient_limit": 2.0,
        "compat": "reference",
        "state_device": "accelerator",
    }
    assert common.keys() == LossSettings.model_fields.keys() and own.keys() == FastClipSettings.model_fields.keys()
    assert all(own[name] != field.default for name, field in FastClipSettings.model_fields.items())
    section = MegaclipSection(loss="fastclip_v3", fastclip=own, **common)
    loss = RunLoss(section, RunLength(9, 2, 9), 0, torch.device("cpu"))._loss
    expected = {**common, **own, "variant": "fastclip_v3", "samples": 9, "precision": "auto"}
    assert loss.settings.model_dump() == expected
    assert (loss.tiles.implementation, loss.tiles.tile_budget_mib) == ("torch", 7.5)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_refuses_features_without_channels_or_rows(name: str, shape: tuple[int, int]) -> None:
    is_global = name not in ("clip", "siglip")
    loss = LOSSES[name](**({"samples": 4} if is_global else {}))
    further: dict[str, Any] = {"ids": torch.arange(shape[0]), "epoch": 0.0} if is_global else {}
    message = re.escape(f"image_features and text_features have shapes {shape} and {shape} on rank 0; expected one")
    with pytest.raises(ValueError, match=message):
        loss(torch.ones(shape), torch.ones(shape), torch.tensor(10.0), **further)


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_run_passes_the_section_to_the_loss_and_does_not_record_it(loss: str) -> None:
    section = MegaclipSection(loss=loss, exchange="ring", reduction="scalar", payload="bf16")
    built = RunLoss(section, RunLength(9, 2, 9), 0, torch.device("cpu"))._loss
    assert built.settings.cuda_graphs is False
    assert (built.settings.exchange, built.settings.reduction, built.settings.payload) == ("ring", "scalar", "bf16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exchange": "gather"}, r"exchange: Input should be 'auto', 'ring' or 'all_gather', got 'gather'"),
        ({"reduction": "ring"}, "reduction: Input should be 'auto'"),
        ({"payload": "fp8"}, "payload: Input should be 'auto'"),
        ({"tile_budget_mib": -3}, "tile_budget_mib: Input should be greater than 0, got -3"),
        ({"tile_budget_mib": "128"}, "tile_budget_mib: Input should be a valid number"),
        ({"precision": "fp8"}, "precision: Input should be"),
        ({"gamma_min": 0}, "gamma_min: Input should be greater than 0"),
        ({"gamma_min": 1.1}, "gamma_min: Input should be less than or equal to 1"),
        ({"temperature_warmup": -1}, "temperature_warmup: Input should be greater than or equal to 0"),
        ({"temperature_gradient_limit": -1.0}, "temperature_gradient_limit: Input should be greater than or equal to"),
        ({"temperature_gradient_limit": float("inf")}, "temperature_gradient_limit: Input should be a finite number"),
        ({"temperature_betas": (float("nan"), 0.9)}, r"temperature_betas\.0: Input should be"),
        ({"eps": -1e-3}, "eps: Input should be greater than or equal to 0"),
        ({"rho": float("nan")}, "rho: Input should be a finite number"),
        (
            {"temperature": 0.001},
            r"temperature: must lie between temperature_min and temperature_max, 0\.01 to 1\.0, got",
        ),
        ({"temperature_min": 0.5}, r"temperature: must lie between .* 0\.5 to 1\.0, got 0\.07"),
        ({"temperature_max": 0.05}, r"temperature: must lie between .* 0\.01 to 0\.05, got 0\.07"),
        ({"temperature_betas": [0.9]}, r"temperature_betas\.1 is required"),
        ({"temperature_betas": [0.9, 1.0]}, r"temperature_betas\.1: Input should be less than 1"),
        ({"variant": "fastclip_v4"}, "variant: Input should be"),
        ({"samples": 1}, "samples: Input should be greater than or equal to 2, got 1"),
        ({"samples": None}, "samples: Input should be a valid integer, got None"),
    ],
)
def test_a_wrong_value_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FastClipLoss(**{"samples": 9, **settings})


@pytest.mark.parametrize("name", LOSSES)
def test_an_unknown_name_is_refused(name: str) -> None:
    needed = {} if name in ("clip", "siglip") else {"samples": 9}
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama_min'"):
        LOSSES[name](gama_min=0.2, **needed)
