"""tools/compare_losses.py at a tiny size: it trains missing runs, repeats none, and refuses a folder of other runs.

The tests also run tools/inspect_estimators.py on these runs.
"""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from tests.distributed.fastclip_oracle import batch_g
from tests.tolerances import VALUE, assert_close
from tools.compare_losses import METHODS, SCORES, main
from tools.inspect_estimators import error_of, one_batch_log_g, whole_log_g
from tools.inspect_estimators import main as inspect

LABELS = ["InfoNCE", "FastCLIP v3"]


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments of the command, after it has trained its runs."""
    folder = tmp_path_factory.mktemp("compare")
    sizes = ["--scenes", "80", "--held-out", "12", "--steps", "4", "--seeds", "3", "--jobs", "2"]
    arguments = [*sizes, "--data", str(folder / "data"), "--out", str(folder / "out"), "--methods", *LABELS]
    assert main(arguments) == 0
    return arguments


def test_runs_once_and_records_every_evaluation(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    out = Path(command[command.index("--out") + 1])
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [(run["label"], run["seed"]) for run in runs] == [(label, 3) for label in LABELS]
    for run in runs:
        for name in SCORES:
            assert [step for step, _ in run["scores"][name]] == [1, 2, 3, 4]
        folder = out / f"{run['label'].lower().replace(' ', '_')}_seed3"
        assert json.loads((folder / "metrics.json").read_text())["zero_shot_top1"] == pytest.approx(
            run["scores"]["zero_shot_top1"][-1][1]
        )
        settings = json.loads((folder / "settings.json").read_text())
        assert settings["ds_config"] == METHODS[run["label"]].deepspeed_config()
        assert settings["ds_config"]["train_batch_size"] == 32
    assert runs[0]["train_loss"] != runs[1]["train_loss"]

    written = [path.stat().st_mtime_ns for path in sorted(out.glob("*/metrics.json"))]
    capfd.readouterr()
    assert main([*command, "--seeds", "3"]) == 0
    assert [path.stat().st_mtime_ns for path in sorted(out.glob("*/metrics.json"))] == written
    mean = statistics.mean([runs[1]["scores"]["zero_shot_top1"][-1][1]])
    assert f"| FastCLIP v3 | {mean:.3f} |" in capfd.readouterr().out


def test_a_folder_with_other_runs_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--steps", "5"]) == 1
    assert "contains a run with other settings" in capsys.readouterr().err


def test_estimators_are_compared_with_the_whole_dataset(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, data = (Path(command[command.index(flag) + 1]) for flag in ("--out", "--data"))
    written = out / "estimators.json"
    data_flags = ["--train-data", str(data / "train" / "*.tar"), "--batch", "8", "--json", str(written)]
    assert inspect([str(out / "fastclip_v3_seed3"), *data_flags]) == 0
    found = json.loads(written.read_text())
    assert found["samples"] == found["seen"] == 80
    assert found["temperature"] == pytest.approx(0.07, rel=0.01)  # changed by 4 steps of its learning rate
    assert -1 < found["log_g"]["mean"] < 1  # positives are like negatives, because the model is hardly trained
    assert abs(found["batch_error"]["bias"]) < 0.3 and found["batch_error"]["correlation"] > 0.5
    assert found["log_u_error"]["rms"] > found["batch_error"]["rms"]  # u was updated by earlier states of the model
    assert inspect([str(out / "infonce_seed3"), *data_flags]) == 1
    assert "keeps no state per sample" in capsys.readouterr().err


def test_log_g_equals_its_definition() -> None:
    x, y = (normalize(torch.randn(20, 5, dtype=torch.float64), dim=1) for _ in range(2))
    tau = torch.tensor(0.3, dtype=torch.float64)
    truth = torch.stack(batch_g(x, y, tau, tau), dim=1).log()
    assert_close(whole_log_g(x, y, 0.3), truth, VALUE[torch.float64])
    assert_close(one_batch_log_g(x, y, 0.3, 20), truth, VALUE[torch.float64])
    part = one_batch_log_g(x, y, 0.3, 8)
    assert int((~part.isnan().any(dim=1)).sum()) == 16
    shifted = truth + math.log(2)
    assert error_of(shifted, truth) == pytest.approx({"bias": math.log(2), "rms": math.log(2), "correlation": 1.0})
