"""settings.json: changed settings of a resumed run are logged by name. metrics.json: the step that was evaluated."""

import json
from pathlib import Path

import pytest

from megaclip.engine.run_folder import summarised_step, write_settings

SETTINGS = {
    "arguments": {"name": "a", "warmup": 10, "aug_scale": (0.9, 1.0), "resume": None},
    "ds_config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.98]}}, "bf16": {}},
}


def test_changed_settings_of_a_resumed_run_are_reported_with_both_values(tmp_path, caplog):
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    now = json.loads(json.dumps(SETTINGS))
    now["arguments"] |= {"name": "b", "resume": "auto", "aug_scale": (0.9, 1.0), "set": ["optimizer.params.lr=0.001"]}
    write_settings(tmp_path, now, tmp_path)
    assert caplog.text == "", "these settings belong to the start of the run"
    now["ds_config"]["optimizer"]["params"]["lr"] = 0.01
    now["ds_config"]["gradient_clipping"] = 1.0
    now["arguments"]["warmup"] = None
    write_settings(tmp_path, now, tmp_path)
    assert "resumed with changed settings" in caplog.text and "--warmup from 10 to null" in caplog.text
    assert "optimizer.params.lr from 0.001 to 0.01\n" in caplog.text and "betas" not in caplog.text
    assert "gradient_clipping from null to 1.0" in caplog.text


def test_a_damaged_file_of_settings_ends_no_run(tmp_path):
    path = tmp_path / "settings.json"
    for content in (b"", b"[1]", b"\xff", b"[" * 100_000, b'{"arguments": 3}'):
        path.write_bytes(content)
        write_settings(tmp_path, SETTINGS, tmp_path)
        assert json.loads(path.read_text())["ds_config"] == SETTINGS["ds_config"]
    write_settings(tmp_path, SETTINGS, tmp_path / "missing")


@pytest.mark.parametrize(("content", "step"), [('{"steps": 6}', 6), ("{}", None), ("[]", None), ("7", None)])
def test_a_summary_with_other_content_is_ignored(content: str, step: int | None, tmp_path: Path) -> None:
    """The run then evaluates again."""
    (tmp_path / "metrics.json").write_text(content)
    assert summarised_step(tmp_path) == step
