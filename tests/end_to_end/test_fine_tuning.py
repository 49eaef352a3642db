"""Complete runs with rates of towers and layers, a moving average, and weights of one tower: train, resume, export."""

import json
import re
import sys

import pytest
import torch

from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.checkpoint.search import LOCKED_WEIGHTS, STATE
from megaclip.checkpoint.weight_files import read_tensors
from megaclip.commands import evaluate, export_open_clip
from tests.end_to_end.training_runs import flags, run_in_ranks, write_config

STEPS, DECAY = 4, 0.8
LAST = f"step_{STEPS:08d}"
SECTION = {"image_layer_decay": 0.5, "image_lr": 0.001, "text_weight_decay": 0.3, "ema_decay": DECAY}


@pytest.mark.long
def test_fine_tuning_resumes_exports_its_average_and_supplies_a_tower(tiny_run, tmp_path, monkeypatch, capsys):
    settings = {stage: write_config(tmp_path / f"zero{stage}.json", stage, SECTION) for stage in (2, 3)}
    shared = {"train_steps": STEPS, "save_every_steps": 2, "keep_last": 9}
    evaluation = {"val_data": tiny_run / "held_out" / "*.tar", "eval_batch_size": 16, "eval_every_steps": 2}
    commands = [
        flags(tiny_run, settings[2], tmp_path, name="whole", **shared, **evaluation, eval_ema=[]),
        flags(tiny_run, settings[2], tmp_path, name="stopped", stop_after_steps=2, **shared),
        flags(tiny_run, settings[2], tmp_path, name="stopped", resume="auto", **shared),
        flags(
            tiny_run, settings[3], tmp_path, name="zero3", resume=tmp_path / "whole/checkpoints/step_00000002", **shared
        ),
        flags(
            tiny_run,
            write_config(tmp_path / "plain.json", 2),
            tmp_path,
            name="plain",
            resume=tmp_path / "whole/checkpoints/step_00000002",
            **shared,
        ),
    ]
    *ends, refused = run_in_ranks(commands)
    assert all(end.exit_code == 0 for command in ends for end in command), [command[0].output for command in ends]
    log = ends[0][0].output
    assert "image tower: learning rate 0.001 in 4 layer groups, 0.000125 in the first one, weight decay 0.1" in log
    assert "text tower: learning rate 0.002 in 1 layer group," in log and "moving average with decay 0.8" in log
    assert (
        refused[0].exit_code == 78
        and "written with parameter_groups.image 'layers', and this run has" in refused[0].errors[0]
    )

    assert "evaluation of the moving average at step 2: " in log
    assert re.search(r"trained to step \d+\. To export it: megaclip export \S+/whole OUT_DIR --ema --verify", log)
    assert re.search(r"To export it: megaclip export \S+/whole OUT_DIR --tag step_\d+ --ema --verify", log)
    scores = tmp_path / "scores.json"
    command = ["evaluate", str(tmp_path / "whole"), "--ema", "--val-data", str(evaluation["val_data"])]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(scores), "--workers", "0"])
    evaluate.main()
    during_training = json.loads((tmp_path / "whole" / "metrics.json").read_text())
    for name, value in json.loads(scores.read_text())["metrics"].items():
        assert during_training[name] == pytest.approx(value, abs=1e-3), name

    averages = {
        name: consolidated_weights(tmp_path / name / "checkpoints", LAST, ema=True)
        for name in ("whole", "stopped", "zero3")
    }
    weights = consolidated_weights(tmp_path / "whole/checkpoints", LAST)
    for name, value in averages["whole"].items():
        assert torch.equal(averages["stopped"][name], value), name
        torch.testing.assert_close(averages["zero3"][name], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(averages["whole"]["visual.proj"], weights["visual.proj"])

    exported = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "whole"), str(exported), "--ema", "--verify"])
    export_open_clip.main()  # exits if open_clip's features differ
    assert "export_max_abs_diff" in capsys.readouterr().out
    assert torch.equal(read_tensors(exported)["visual.proj"], averages["whole"]["visual.proj"])

    command = flags(
        tiny_run,
        write_config(tmp_path / "new_text.json", 3, bf16={"enabled": True}),
        tmp_path,
        name="new_text",
        train_steps=2,
        pretrained_image=exported,
    )
    # The locked tower is float32 in exports of the run, of its continuation, and of a run in another folder.
    first = tmp_path / "new_text/checkpoints/step_00000001"
    locked = [*command, "--lock-image", "--save-every-steps", "1"]
    elsewhere = ["new_text_2" if flag == "new_text" else flag for flag in locked]
    commands = [
        [*locked, "--stop-after-steps", "1"],
        [*locked, "--resume", "auto"],
        [*elsewhere, "--resume", str(first)],
    ]
    for end, _ in run_in_ranks(commands):
        assert end.exit_code == 0, end.output
    kept = tmp_path / "new_text/checkpoints/model" / LOCKED_WEIGHTS
    assert kept.stat().st_mtime_ns < (first / STATE).stat().st_mtime_ns, "the resumed run has not written it again"
    trained = consolidated_weights(tmp_path / "new_text_2/checkpoints", "step_00000002")
    other = consolidated_weights(tmp_path / "new_text/checkpoints", "step_00000002")
    for name, value in averages["whole"].items():
        if name.startswith("visual."):
            assert torch.equal(trained[name], value) and torch.equal(other[name], value), name
    assert not torch.equal(trained["text.text_projection"], averages["whole"]["text.text_projection"])
