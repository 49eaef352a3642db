"""A run goes on with another number of ranks, and at another ZeRO stage, as if nothing had changed.

Each run is compared with the one that never stopped. The sums over ranks and chunks are then taken in another order, so
losses and gradient norms differ by a few float32 roundings (3e-7 of themselves was seen). A sample that is repeated or
left out, a moment or an estimator that is not restored moves them much further.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.conftest import DS_CONFIG
from tests.end_to_end.training_runs import flags, launch, run_in_ranks, scalars
from tests.tolerances import RUN, assert_close, assert_far

STEPS, SAVED = 11, 8  # an epoch has 8: what is compared meets samples whose state was saved
ZERO = {
    "zero1": {"stage": 1},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 100},
}
FASTCLIP_V2 = {"loss": "fastclip_v2", "fastclip": {"temperature_learning_rate": 0.01, "gamma_epochs": 2}}
FASTCLIP_V3 = {"loss": "fastclip_v3", "fastclip": {"temperature_learning_rate": 0.01, "gamma_epochs": 2}}
# name -> ranks and ds_config of the run that never stops, then of the one that goes on from its eighth step
CASES = {
    "two to one, ZeRO-1": (2, "zero1", 1, "zero1", {}),
    "two to one, ZeRO-3 with FastCLIP v3": (2, "zero3", 1, "zero3", FASTCLIP_V3),
    "one to two, ZeRO-1 with FastCLIP v2": (1, "zero1", 2, "zero1", FASTCLIP_V2),
    "one to two, ZeRO-2 to 3": (1, "zero2_offload", 2, "zero3", {}),
}


@pytest.fixture(scope="module")
def folder(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the runs `NAME whole` and `NAME continued`, all made in one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("other_ranks")

    def command(name: str, zero: str, section: dict, **changes) -> list[str]:
        # One file for any number of ranks: DeepSpeed's accumulation follows from the two batch sizes.
        config = {key: value for key, value in DS_CONFIG.items() if key != "gradient_accumulation_steps"}
        config |= {"zero_optimization": ZERO[zero], "megaclip": DS_CONFIG["megaclip"] | section}
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        shared = {"train_steps": STEPS, "save_every_steps": SAVED, "keep_last": 9, "aug_scale": [0.5, 1.0]}
        return flags(tiny_run, path, folder, name=name, **shared, **changes)

    for ranks in (2, 1):
        commands = [command(f"{name} whole", c[1], c[4]) for name, c in CASES.items() if c[0] == ranks]
        ends = run_in_ranks(commands, ranks)
        assert all(end.exit_code == 0 for command in ends for end in command), [command[0].output for command in ends]
    for ranks in (1, 2):
        saved = {name: folder / f"{name} whole" / "checkpoints" / f"step_{SAVED:08d}" for name in CASES}
        chosen = {name: c for name, c in CASES.items() if c[2] == ranks}
        commands = [command(f"{name} continued", c[3], c[4], resume=saved[name]) for name, c in chosen.items()]
        ends = run_in_ranks(commands, ranks)
        assert all(end.exit_code == 0 for command in ends for end in command), [command[0].output for command in ends]
        assert all("dividing a checkpoint of" in command[0].output for command in ends)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_run_that_never_stopped(folder: Path, name: str) -> None:
    whole, continued = scalars(folder / f"{name} whole"), scalars(folder / f"{name} continued")
    for scalar in ("loss", "logit_scale", "gradient_norm"):
        expected = {step: value for step, value in whole[f"train/{scalar}"].items() if step > SAVED}
        assert sorted(expected) == list(range(SAVED + 1, STEPS + 1))
        got = continued[f"train/{scalar}"]
        assert got.keys() == expected.keys()
        assert_close(
            [got[step] / value for step, value in expected.items()], [1.0] * len(expected), RUN[scalar], scalar
        )
        if scalar == "loss":
            # The steps before the checkpoint stand for a run that repeats samples.
            repeated = [whole["train/loss"][step - 1] / value for step, value in expected.items()]
            assert_far(repeated, [1.0] * len(expected), RUN[scalar], "a run one step behind")


@pytest.mark.long
def test_the_launcher_with_another_number_of_ranks_just_works(folder: Path, tiny_run: Path) -> None:
    """--resume auto, in the run's own folder; the two ranks' eighth step is the newest checkpoint.

    The losses are equal bit by bit: same machine, same instruction set, same number of threads.
    """
    name = "two to one, ZeRO-1"
    run, tag = folder / "launched", f"step_{SAVED:08d}"
    shutil.copytree(folder / f"{name} whole" / "checkpoints" / f"step_{SAVED:08d}", run / "checkpoints" / tag)
    (run / "checkpoints" / "latest").write_text(tag)
    shared = {"train_steps": STEPS, "aug_scale": [0.5, 1.0], "resume": "auto"}
    done = launch(flags(tiny_run, folder / f"{name} whole.json", folder, name="launched", **shared), ranks=1)
    assert done.exit_code == 0, done.output
    assert scalars(run)["train/loss"] == scalars(folder / f"{name} continued")["train/loss"]


def test_the_batch_must_stay_the_same(folder: Path, tiny_run: Path) -> None:
    """A ds_config without train_batch_size gives one rank half the batch of two."""
    config = json.loads((folder / "two to one, ZeRO-1 whole.json").read_text())
    del config["train_batch_size"]
    (folder / "half.json").write_text(json.dumps(config | {"gradient_accumulation_steps": 2}))
    saved = folder / "two to one, ZeRO-1 whole"
    command = flags(tiny_run, folder / "half.json", folder, name="half", resume=saved, train_steps=STEPS)
    (((end,),)) = run_in_ranks([command], 1)
    assert end.exit_code == 1
    assert "batch of 32 and this run's is 16: set train_batch_size to 32" in end.errors[0]
