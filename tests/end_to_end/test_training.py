"""Every file of ds_configs/ trains, and open_clip loads the exported model.

Each run has two ranks on the CPU and two steps. A file whose batch is too large for the tiny data runs with a smaller
batch. `make test` runs the file with the most settings, under the deepspeed launcher. `make test-long` runs the others
in one launch of the harness.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from megaclip.commands import export_open_clip
from megaclip.config import load_training_config
from tests.end_to_end.conftest import TRAINING_SCENES
from tests.end_to_end.training_runs import ROOT, WORLD_SIZE, Finished, flags, launch, run_in_ranks, scalars
from tests.tolerances import EXPORT, assert_close

RICHEST = ROOT / "ds_configs/zero3_offload.json"
OTHERS = sorted(set((ROOT / "ds_configs").glob("*.json")) - {RICHEST})


def small_copy(path: Path, folder: Path) -> Path:
    """Return the file itself or, if its batch is too large, a copy with about one pair per rank and chunk."""
    config = json.loads(path.read_text())
    if config["train_batch_size"] <= TRAINING_SCENES:
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


def command(path: Path, tiny_run: Path, folder: Path, **changes: int) -> list[str]:
    data = {"val_data": tiny_run / "held_out" / "*.tar", "zeroshot_data": tiny_run / "zero_shot", "eval_batch_size": 16}
    return flags(tiny_run, small_copy(path, folder), folder, name=path.stem, **data, **changes)


def test_two_steps_under_the_launcher_then_export(tiny_run, tmp_path, monkeypatch, capsys):
    done = launch(command(RICHEST, tiny_run, tmp_path, workers=1))
    check_run(RICHEST, done, tmp_path, monkeypatch, capsys)
    port = re.search(r"--master_port=(\d+)", done.output)[1]
    assert not list(Path("/dev/shm").glob(f"deepspeed*_{port}_*"))  # DeepSpeed's default leaves 67 MB per rank


@pytest.mark.long
def test_two_steps_of_the_other_files_then_export(tiny_run, tmp_path, monkeypatch, capsys):
    ends = run_in_ranks([command(path, tiny_run, tmp_path) for path in OTHERS])
    for path, (first, _) in zip(OTHERS, ends, strict=True):
        check_run(path, first, tmp_path, monkeypatch, capsys)


def check_run(path: Path, done: Finished, folder: Path, monkeypatch, capsys) -> None:
    """Check the log, the curves, the scores and the export of a run with the file `path`."""
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output
    assert f"ZeRO-{load_training_config(path).zero_stage} on 2 ranks" in done.output

    run = folder / path.stem
    assert f"megaclip export {run} OUT_DIR --verify" in done.output
    shown = scalars(run)
    assert sorted(shown["train/loss"]) == [1, 2]
    assert 2 in shown["evaluation/retrieval_r1_i2t"]
    scores = json.loads((run / "metrics.json").read_text())
    assert scores["steps"] == 2 and 0 <= scores["zero_shot_top1"] <= scores["zero_shot_top5"] <= 1
    assert (run / "checkpoints" / "latest").read_text() == "step_00000002"
    best = json.loads((run / "best_checkpoint.json").read_text())
    evaluated = shown["evaluation/zero_shot_top1"]
    first_best = min(step for step in evaluated if evaluated[step] == max(evaluated.values()))
    assert best["checkpoint"] == f"step_{first_best:08d}" and best["value"] == pytest.approx(max(evaluated.values()))
    assert f"megaclip export {run} OUT_DIR --tag {best['checkpoint']} --verify" in done.output
    difference = export_difference(run / "checkpoints", folder / f"exported_{path.stem}", monkeypatch, capsys)
    assert_close(difference, 0.0, EXPORT, size=1)  # features have length 1


def export_difference(checkpoints: Path, target: Path, monkeypatch, capsys) -> float:
    """Run the export command in this process, which has imported open_clip. Return the difference that it prints."""
    monkeypatch.setattr(sys, "argv", ["export_open_clip.py", str(checkpoints), str(target), "--verify"])
    export_open_clip.main()  # exits if features or tokens differ
    printed = re.search(r"export_max_abs_diff (\S+)", capsys.readouterr().out)
    assert printed
    return float(printed.group(1))
