"""Every file of ds_configs/ trains under the deepspeed launcher, and what it saves is what open_clip then loads.

Two ranks on the CPU, two steps. Only the batch numbers differ from the file, where its batch is too large for the tiny
data. The one with the most settings runs with the other tests, the rest by `make test-long`.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from megaclip.config import load_training_config
from tests.end_to_end.training_runs import ROOT, WORLD_SIZE, flags, launch, scalars
from tests.tolerances import EXPORT, assert_close
from tools import export_open_clip

RICHEST = "zero3_offload"
CONFIGS = [
    pytest.param(path, id=path.stem, marks=[] if path.stem == RICHEST else pytest.mark.long)
    for path in sorted((ROOT / "ds_configs").glob("*.json"))
]
MOST_SAMPLES = 256
"""All that the tiny run has."""


def small_copy(path: Path, folder: Path) -> Path:
    """The file itself, or a copy whose batch is about one pair per rank and gradient-cache chunk, at least 16 pairs."""
    config = json.loads(path.read_text())
    if config["train_batch_size"] <= MOST_SAMPLES:
        return path
    chunks = config.get("gradient_accumulation_steps", 4)
    config["train_batch_size"] = max(16, WORLD_SIZE * chunks)
    if "train_micro_batch_size_per_gpu" in config:
        config["train_micro_batch_size_per_gpu"] = config["train_batch_size"] // (WORLD_SIZE * chunks)
    if "text_micro_batch_size" in config["megaclip"]:
        config["megaclip"]["text_micro_batch_size"] = config["train_batch_size"] // WORLD_SIZE // 2
    copy = folder / path.name
    copy.write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("path", CONFIGS)
def test_two_steps_then_export(path, tiny_run, tmp_path, monkeypatch, capsys):
    config = small_copy(path, tmp_path)
    data = {"val_data": tiny_run / "held_out" / "*.tar", "zeroshot_data": tiny_run / "zero_shot", "eval_batch_size": 16}
    before = shared_memory_of_deepspeed()
    done = launch(flags(tiny_run, config, tmp_path, workers=1, **data))
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output
    assert shared_memory_of_deepspeed() <= before  # DeepSpeed's own start-up on CPUs leaves 67 MB per rank behind
    stage = load_training_config(path).zero_stage
    assert f"ZeRO-{stage} on 2 ranks" in done.output

    run = tmp_path / "run"
    shown = scalars(run)
    assert sorted(shown["train/loss"]) == [1, 2]
    assert 2 in shown["evaluation/retrieval_r1_i2t"]
    scores = json.loads((run / "metrics.json").read_text())
    assert scores["steps"] == 2 and 0 <= scores["zero_shot_top1"] <= scores["zero_shot_top5"] <= 1
    assert (run / "checkpoints" / "latest").read_text() == "step_00000002"
    difference = export_difference(run / "checkpoints", tmp_path / "exported", monkeypatch, capsys)
    assert_close(difference, 0.0, EXPORT, size=1)  # features have length 1


def shared_memory_of_deepspeed() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed*"))


def export_difference(checkpoints: Path, target: Path, monkeypatch, capsys) -> float:
    """What the export command prints, called here because loading open_clip takes longer than exporting."""
    monkeypatch.setattr(sys, "argv", ["export_open_clip.py", str(checkpoints), str(target), "--verify"])
    export_open_clip.main()  # exits when features or tokens differ
    printed = re.search(r"export_max_abs_diff (\S+)", capsys.readouterr().out)
    assert printed
    return float(printed.group(1))
