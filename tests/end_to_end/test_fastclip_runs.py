"""Whole runs with global contrastive losses: exact resume, exported temperature, state per rank.

The runs have two ranks and two gradient-cache chunks, at ZeRO-1 and ZeRO-3. Longer runs would add nothing to the test.
Resumed runs are compared bit by bit on one machine with the same instruction set and number of threads.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from megaclip.checkpoint.saved_states import consolidated_weights
from tests.end_to_end.conftest import TRAINING_SCENES
from tests.end_to_end.training_runs import flags, run_in_ranks, scalars
from tests.tolerances import WRITTEN, assert_close

STEPS, SAVED = 6, 3  # an epoch has 4 steps, so the second part uses samples again
FASTCLIP = {
    "fastclip_v3": {"temperature_learning_rate": 0.01, "gamma_epochs": 2},
    "isogclr": {"temperature_learning_rate": 0.01, "temperature": 0.05, "rho": 7.0},
}
CASES = {"fastclip_v3": "zero3", "isogclr": "zero1"}


@pytest.fixture(scope="module")
def runs(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each case as a whole and in two parts, try a wrong resume, and return the folder of the runs."""
    folder = tmp_path_factory.mktemp("fastclip")
    commands = []
    for loss, stage in CASES.items():
        config = json.loads((tiny_run / f"{stage}.json").read_text())
        config["megaclip"] = {"loss": loss, "fastclip": FASTCLIP[loss]}
        path = folder / f"{loss}.json"
        path.write_text(json.dumps(config))
        shared = {"train_steps": STEPS, "save_every_steps": SAVED, "keep_last": 9}
        commands.append(flags(tiny_run, path, folder, name=f"{loss}_whole", **shared))
        commands.append(flags(tiny_run, path, folder, name=f"{loss}_parts", stop_after_steps=SAVED, **shared))
        commands.append(flags(tiny_run, path, folder, name=f"{loss}_parts", resume="auto", **shared))
    wrong = tiny_run / "zero1.json"
    last = folder / "isogclr_whole" / "checkpoints"
    commands.append(flags(tiny_run, wrong, folder, name="wrong", resume=last, train_steps=STEPS))
    ends = run_in_ranks(commands)
    for command in ends[:-1]:
        assert [end.exit_code for end in command] == [0, 0], command[0].output
    (folder / "wrong.txt").write_text("\n".join(ends[-1][0].errors))
    assert ends[-1][0].exit_code == 78
    return folder


@pytest.mark.parametrize("loss", CASES)
def test_resumed_losses_are_bit_identical(runs: Path, loss: str) -> None:
    whole, parts = (scalars(runs / f"{loss}_{name}") for name in ("whole", "parts"))
    names = [name for name in whole if "samples_per" not in name and "memory" not in name and "data" not in name]
    assert any("loss" in name for name in names)
    for name in names:
        later = {step: value for step, value in whole[name].items() if step > SAVED}
        if "loss" in name or "scale" in name:
            assert later and later == {step: parts[name][step] for step in later}, name


@pytest.mark.parametrize("loss", CASES)
def test_the_state_of_both_runs_is_equal_and_complete(runs: Path, loss: str) -> None:
    seen = 0
    for rank in (0, 1):
        parts = [
            torch.load(
                runs / f"{loss}_{name}" / "checkpoints" / f"step_{STEPS:08d}" / f"loss_rank_{rank:05d}.pt",
                weights_only=True,
            )["samples"]["values"]
            for name in ("whole", "parts")
        ]
        assert torch.equal(parts[0].nan_to_num(), parts[1].nan_to_num())
        seen += int((~parts[0][:, 0].isnan()).sum())
    assert seen == TRAINING_SCENES  # every scene was used


def test_the_exported_logit_scale_is_the_temperature_of_the_loss(runs: Path) -> None:
    checkpoints = runs / "fastclip_v3_whole" / "checkpoints"
    part = torch.load(checkpoints / f"step_{SAVED:08d}" / "loss_rank_00000.pt", weights_only=True)
    own = float(part["temperature"]["log_scale"])
    exported = float(consolidated_weights(checkpoints, f"step_{SAVED:08d}")["logit_scale"])
    assert_close(exported, own, WRITTEN)
    assert abs(own + math.log(0.07)) > 0.01  # the temperature changed
    shown = next(values for name, values in scalars(runs / "fastclip_v3_whole").items() if "scale" in name)
    # exp magnifies the rounding of its argument
    assert_close(shown[SAVED + 1], math.exp(own), WRITTEN.magnified(own))


def test_resume_with_another_loss_is_refused(runs: Path) -> None:
    assert "holds per-sample state of a global contrastive loss" in (runs / "wrong.txt").read_text()
