"""The files of ds_configs/ for FastCLIP, and their table in docs/fastclip.md, have the published settings.

`COMMANDS` has the arguments of the training commands in README.md of github.com/Optimization-AI/fast_clip (commit
efd89d5), with the names of that repository. `DEFAULTS` has the defaults of its src/training/params.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megaclip.config import load_training_config
from megaclip.losses.settings import VARIANTS
from tests.unit.test_docs import ROOT, section, table_rows

DEFAULTS: dict[str, Any] = {
    "fastclip_eps": 1e-14,
    "temperature": 0.07,
    "lr_tau": None,  # the value of --lr
    "lr_tau_scheduler": "cosine",
    "lr_min": 0.0,
    "rho": None,
    "warmup": 10_000,
}
CC3M = {"model": "RN50", "batch": 128 * 8, "epochs": 37, "wd": 0.1, "lr": 1e-3, "gamma": 0.2, "gamma_decay_epochs": 18}
V3 = {"loss": "fastclip_v3", "lr_tau_scheduler": "step_thresh"}
COMMANDS: dict[str, dict[str, Any]] = {
    "fastclip/fastclip_v0": DEFAULTS | CC3M | {"loss": "fastclip_v0"},
    "fastclip/fastclip_v1": DEFAULTS | CC3M | {"loss": "fastclip_v1"},
    "fastclip/fastclip_v2": DEFAULTS
    | CC3M
    | {"loss": "fastclip_v2", "lr_tau": 0.0133, "lr_tau_scheduler": "const", "temperature": 0.03, "rho": 7.0},
    "fastclip_v3": DEFAULTS | CC3M | V3 | {"lr_tau": 2e-4, "rho": 6.5},
    "fastclip/fastclip_v3_cc12m": DEFAULTS
    | V3
    | {"model": "ViT-B-32", "batch": 256 * 8, "epochs": 33, "wd": 0.1, "lr": 4e-4, "lr_tau": 1e-4, "rho": 8.5}
    | {"gamma": 0.2, "gamma_decay_epochs": 16},
    "fastclip/fastclip_v3_laion": DEFAULTS
    | V3
    | {"model": "ViT-B-16", "batch": 320 * 16, "epochs": 30, "wd": 0.2, "lr": 2e-4, "lr_tau": 5e-5, "rho": 16.0}
    | {"gamma": 0.8, "gamma_decay_epochs": 10, "lr_min": 4e-5, "warmup": 13_200, "fastclip_eps": 1e-6},
}
SCHEDULES = {"const": "constant", "cosine": "cosine", "step_thresh": "threshold"}


def published(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a command by our names. None: the loss does not use the setting."""
    vit = given["model"].startswith("ViT")  # get_default_params of src/training/params.py
    betas, eps = ([0.9, 0.98], 1e-6) if vit else ([0.9, 0.999], 1e-8)
    temperature = VARIANTS[given["loss"]].temperature
    learned = temperature != "constant"
    return {
        "train_batch_size": given["batch"],
        "optimizer.params.lr": given["lr"],
        "optimizer.params.betas": betas,
        "optimizer.params.eps": eps,
        "optimizer.params.weight_decay": given["wd"],
        "gradient_clipping": 0.0,
        "compat": "reference",
        "gamma_min": given["gamma"],
        "gamma_epochs": given["gamma_decay_epochs"],
        "rho": given["rho"],
        "eps": given["fastclip_eps"],
        "temperature": given["temperature"],
        "temperature_min": 0.01,  # train.py limits logit_scale to [0, log(100)]
        "temperature_max": 1.0,
        "temperature_learning_rate": (given["lr_tau"] or given["lr"]) if learned else None,
        "temperature_schedule": SCHEDULES[given["lr_tau_scheduler"]] if learned else None,
        "temperature_betas": betas if learned else None,
        "temperature_eps": eps if learned else None,
        "temperature_gradient_limit": 5 if temperature == "individual" else None,
        "--model": given["model"],
        "--epochs": given["epochs"],
        "--warmup": given["warmup"],
        "--lr-min": given["lr_min"],
    }


def effective(name: str) -> dict[str, Any]:
    """Return the settings of a file of ds_configs/, including defaults. None: the loss does not use the setting."""
    config = load_training_config(ROOT / "ds_configs" / f"{name}.json")
    params, variant = config.optimizer.params.model_dump(), VARIANTS[config.megaclip.loss]
    learned = variant.temperature != "constant"
    own = config.megaclip.fastclip.model_dump()
    for key in ("learning_rate", "schedule", "betas", "eps"):
        own[f"temperature_{key}"] = own[f"temperature_{key}"] if learned else None
    if own["temperature_gradient_limit"] is None and variant.individual and own["compat"] == "reference":
        own["temperature_gradient_limit"] = 5
    own["rho"] = own["rho"] if variant.with_rho else None
    return own | {
        "train_batch_size": json.loads(config.path.read_text())["train_batch_size"],
        "gradient_clipping": config.settings.gradient_clipping,
        **{f"optimizer.params.{key}": value for key, value in params.items()},
    }


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", COMMANDS)
def test_the_files_have_the_published_settings(name: str) -> None:
    got = effective(name)
    for setting, expected in published(COMMANDS[name]).items():
        if not setting.startswith("--"):
            assert plain(got[setting]) == expected, f"{name}: {setting}"


def test_the_table_of_the_docs_has_the_published_settings() -> None:
    header, _, *rows = table_rows(section("docs/fastclip.md", "### Published settings"))
    files = [cell.strip("`").removesuffix(".json") for cell in header[1:-1]]
    assert files == list(COMMANDS)
    documented = {cells[0].strip("`"): cells[1:-1] for cells in rows}
    expected = {name: published(given) for name, given in COMMANDS.items()}
    assert documented.keys() == expected["fastclip_v3"].keys()
    for setting, cells in documented.items():
        for name, cell in zip(files, cells, strict=True):
            wanted = expected[name][setting]
            value = None if cell == "-" else cell if setting == "--model" else json.loads(cell.strip("`"))
            assert value == wanted, f"{name}: {setting} is documented as {cell}"
    assert all(cells[-1] for cells in rows), "a row has no source"


@pytest.mark.parametrize(("name", "basis"), [("sogclr", "fastclip_v1"), ("isogclr", "fastclip_v2")])
def test_sogclr_and_isogclr_are_v1_and_v2_with_a_constant_gamma(name: str, basis: str) -> None:
    files = [json.loads(Path(ROOT / "ds_configs" / "fastclip" / f"{n}.json").read_text()) for n in (name, basis)]
    sections = [file.pop("megaclip") for file in files]
    assert files[0] == files[1]
    own, other = (section["fastclip"] for section in sections)
    assert own == {key: value for key, value in other.items() if key != "gamma_epochs"}
    assert sections[0]["loss"] == name and VARIANTS[name].gamma_schedule == "constant"
