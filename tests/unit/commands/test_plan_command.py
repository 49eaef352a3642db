"""`megaclip plan`: flags that are wrong, and settings that a run would refuse."""

import json
import sys
from pathlib import Path

import pytest

from megaclip.commands import plan

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h2000", "--rates", "list.json"], "--gpu 'h2000' is unknown; use one of a100-40gb, a100, a800"),
        (["--gpu", "H100", "--rates", "list.json"], "--rates 'list.json' is not a file of tools/measure_rates.py"),
        (["--lock-image", "100"], "--lock-image with 100 unlocked groups trains every parameter of the image tower"),
        (["--model", "RN50", "--lock-text", "100"], "--lock-text with 100 unlocked groups trains every parameter"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", "--deepspeed_config", "ds.json", "--model", "ViT-B-32", "--gpus", "1", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    assert plan.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_a_plan_refuses_recomputation_that_the_run_refuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "ds.json").read_text())
    section = {"compile": False, "selective_recompute": True}
    (folder / "recompute.json").write_text(json.dumps({**config, "megaclip": section}))
    command = ["plan", "--deepspeed_config", "recompute.json", "--model", "ViT-B-32", "--gpus", "1"]
    monkeypatch.setattr(sys, "argv", command)
    assert plan.main() == 1
    assert "selective_recompute true requires torch.compile" in capsys.readouterr().err
