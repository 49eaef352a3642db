"""settings.json: changed settings of a resumed run are logged by name, with both values."""

import json
import logging
from pathlib import Path

import pytest

from megaclip.engine.run_folder import write_settings

SETTINGS = {
    "arguments": {"name": "a", "warmup": 10, "aug_scale": (0.9, 1.0), "resume": None},
    "ds_config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98]}}, "bf16": {}},
}


def lines(caplog, monkeypatch, path: Path, now: dict) -> str:
    monkeypatch.setattr(logging.getLogger("megaclip"), "propagate", True)
    caplog.clear()
    write_settings(path.parent, now, path.parent)
    return caplog.text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(SETTINGS))
    return path


def test_equal_settings_and_settings_of_the_start_are_not_reported(path, caplog, monkeypatch):
    now = json.loads(json.dumps(SETTINGS))
    now["arguments"] |= {"name": "b", "resume": "auto", "aug_scale": (0.9, 1.0), "set": ["optimizer.params.lr=0.001"]}
    assert lines(caplog, monkeypatch, path, now) == ""


def test_a_changed_learning_rate_is_reported_with_both_values(path, caplog, monkeypatch):
    now = json.loads(json.dumps(SETTINGS))
    now["ds_config"]["optimizer"]["params"]["lr"] = 0.01
    now["ds_config"]["gradient_clipping"] = 1.0
    now["arguments"]["warmup"] = None
    text = lines(caplog, monkeypatch, path, now)
    assert "resumed with changed settings" in text and "--warmup from 10 to null" in text
    assert "optimizer.params.lr from 0.001 to 0.01" in text and "gradient_clipping from null to 1.0" in text
    assert "betas" not in text


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"[" * 100_000, b'{"arguments": 3}'])
def test_a_damaged_file_of_settings_ends_no_run(tmp_path, caplog, monkeypatch, content):
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    lines(caplog, monkeypatch, path, SETTINGS)
    assert json.loads(path.read_text())["ds_config"] == SETTINGS["ds_config"]
    write_settings(tmp_path, SETTINGS, tmp_path / "missing")
