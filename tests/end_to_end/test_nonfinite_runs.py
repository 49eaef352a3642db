"""Runs with a NaN loss stop with advice, or skip the step and continue as if its update had never been attempted.

In the reference run, the bad step raises the error before anything is read or computed. Weights and running statistics
of batch norms are equal to the reference bit by bit. The same holds for the checkpoint that a run saves when its data
fail in a step. The images of a step are kept in memory, or read again. A skipped step does not read them a second time.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megaclip.checkpoint.saved_states import consolidated_weights
from megaclip.engine.run_loss import RunLoss
from megaclip.engine.trainer import Trainer
from megaclip.errors import DataError, NonFiniteError
from megaclip.step.sample_store import StepStore
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, flags, run_by_name, scalars, write_config
from tests.tolerances import WEIGHT_AVERAGE, assert_close, assert_far

STEPS, BAD = 6, (3, 4)
DECAY = 0.6
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"data_offload": "cpu", "ema_decay": DECAY},
    "fastclip": {"loss": "fastclip_v3", "reduction": "scalar", "ema_decay": DECAY},
    "batch norm": {"data_offload": "reread"},
}
RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64}


@dataclass
class Ends:
    """The ends of the runs on each rank, by name, and their folder."""

    logs: Path
    by_name: dict[str, list[Finished]]


def with_bad_steps(patch: pytest.MonkeyPatch, name: str) -> None:
    """In the bad steps the loss is NaN, the data fail, or an error is raised at once."""
    kind = name.split()[-1]
    bind, accumulate, agree = RunLoss.bind, Trainer._accumulate, StepStore.agree
    current = [0]

    def note_step(trainer: Trainer, *arguments: Any) -> Any:
        current[0] = trainer.step
        if kind == "raises" and trainer.step in BAD:
            raise NonFiniteError("raised before anything is computed")
        return accumulate(trainer, *arguments)

    def spoil(loss: RunLoss, *arguments: Any) -> Any:
        bound, is_nan = bind(loss, *arguments), kind not in ("raises", "data") and current[0] in BAD
        factor = math.nan if is_nan else 1.0
        return lambda *features: factor * bound(*features)

    def fail(batch: StepStore) -> None:
        agree(batch)
        if kind == "data" and current[0] in BAD:
            raise DataError("the data of a rank failed")

    patch.setattr(StepStore, "agree", fail)
    patch.setattr(Trainer, "_accumulate", note_step)
    patch.setattr(RunLoss, "bind", spoil)


@pytest.fixture(scope="module")
def ends(tiny_run, tmp_path_factory) -> Ends:
    logs = tmp_path_factory.mktemp("nonfinite")
    commands = {}
    resnet, model = logs / "resnet.json", json.loads((tiny_run / "model.json").read_text())
    resnet.write_text(json.dumps({name: model[name] for name in ("embed_dim", "text_cfg")} | {"vision_cfg": RESNET}))
    for name, section in SETTINGS.items():
        config = write_config(logs / f"{name}.json", megaclip=section)
        changes = {"train_steps": STEPS, "on_nonfinite": "skip:2", "save_every_steps": 4, "keep_last": 9}
        if name == "batch norm":
            changes["model"] = resnet
        for kind in ("nan", "raises", "data") if name == "batch norm" else ("nan", "raises"):
            commands[f"{name} {kind}"] = flags(tiny_run, config, logs, name=f"{name}_{kind}", **changes)
    config, changes = logs / "cpu.json", {"train_steps": STEPS, "save_every_steps": 1}
    commands["stop"] = flags(tiny_run, config, logs, name="stop", **changes)
    commands["limit"] = flags(tiny_run, config, logs, name="limit", on_nonfinite="skip:1", **changes)
    return Ends(logs, run_by_name(commands, with_bad_steps))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_with_skipped_steps_equals_one_in_which_they_never_happened(ends, name):
    for kind in ("nan", "raises"):
        assert [end.exit_code for end in ends.by_name[f"{name} {kind}"]] == [0] * WORLD_SIZE, ends.by_name
    skipped, reference = (ends.logs / f"{name}_{kind}" for kind in ("nan", "raises"))
    for tag in ("step_00000004", f"step_{STEPS:08d}"):
        weights, expected = (consolidated_weights(run / "checkpoints", tag) for run in (skipped, reference))
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
    curves, wanted = scalars(skipped), scalars(reference)
    assert curves["train/skipped_steps"] == wanted["train/skipped_steps"]
    assert list(curves["train/skipped_steps"].values()) == [0, 0, 0, 1, 2, 2]
    good = [step for step in range(1, STEPS + 1) if step - 1 not in BAD]
    assert [curves["train/loss"][step] for step in good] == [wanted["train/loss"][step] for step in good]
    assert math.isnan(curves["train/loss"][BAD[0] + 1])
    first = ends.by_name[f"{name} nan"][0]
    assert "step 3: the loss is nan" in first.output and "skipped, 2 in a row, 2 in all" in first.output


def test_a_checkpoint_of_a_run_whose_data_fail_contains_nothing_of_the_failed_step(ends):
    assert [end.exit_code for end in ends.by_name["batch norm data"]] == [1] * WORLD_SIZE
    failed, skipped = (ends.logs / f"batch norm_{kind}" / "checkpoints" for kind in ("data", "raises"))
    weights = consolidated_weights(failed, f"step_{BAD[0]:08d}")
    expected = consolidated_weights(skipped, f"step_{BAD[0] + 1:08d}")  # the last step of the reference was skipped
    assert "visual.bn1.running_mean" in weights
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("name", "done"), [("stop", 3), ("limit", 4)])
def test_a_run_that_stops_gives_advice_that_does_not_repeat_the_step(ends, name, done):
    assert [end.exit_code for end in ends.by_name[name]] == [1] * WORLD_SIZE
    (error,) = ends.by_name[name][0].errors
    assert f"step {done}: the loss is nan" in error and "resuming with the same settings repeats this" in error
    assert (ends.logs / name / "checkpoints" / "latest").read_text() == f"step_{done:08d}"


def test_moving_averages_leave_skipped_steps_out(ends):
    """The run `stop` has the same weights and saves every step, so its average can be computed by hand."""
    checkpoints, tags = ends.logs / "stop" / "checkpoints", [f"step_{step:08d}" for step in (1, 2, 3)]
    average = consolidated_weights(checkpoints, tags[0], ema=True)
    for tag in tags[1:]:
        weights = consolidated_weights(checkpoints, tag)
        average = {name: DECAY * value + (1 - DECAY) * weights[name] for name, value in average.items()}
    skipped = ends.logs / "cpu_nan" / "checkpoints"
    got, weights = (consolidated_weights(skipped, "step_00000004", ema=ema) for ema in (True, False))
    for name, value in average.items():
        assert_close(got[name], value, WEIGHT_AVERAGE, name)
    counted = {name: DECAY * value + (1 - DECAY) * weights[name] for name, value in average.items()}
    largest = max(average, key=lambda name: float((counted[name] - average[name]).abs().max()))
    assert_far(counted[largest], average[largest], WEIGHT_AVERAGE, "a skipped step that counts")


def test_the_scale_of_a_loss_with_its_own_scale_is_not_averaged(ends):
    checkpoints = ends.logs / "fastclip_nan" / "checkpoints"
    weights, average = (consolidated_weights(checkpoints, f"step_{STEPS:08d}", ema=ema) for ema in (False, True))
    assert torch.equal(weights["logit_scale"], average["logit_scale"])
    assert not torch.equal(weights["visual.proj"], average["visual.proj"])
