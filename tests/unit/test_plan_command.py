"""`megaclip plan`: flags without effect, files that are no results, and outputs that cannot be written."""

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
    (tmp_path / "row.json").write_text('{"results": [{"method": "megaclip", "peak_mib": 1}]}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "figures.json"], "--json has no effect without --sweep; add --sweep PICTURE.png, or leave --json"),
        (["--sweep", "ds.json/picture.png"], "cannot write "),
        (["--sweep", "picture.png", "--model", "RN50"], "open_clip's modules run RN50; leave --sweep out"),
        (["--compare", "list.json"], "'list.json' is no file that tools/bench_train.py --json has written: TypeError"),
        (["--compare", "row.json"], "'row.json' is no file that tools/bench_train.py --json has written: KeyError"),
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
