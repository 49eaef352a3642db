"""A run never trains on a damaged checkpoint, never deletes a checkpoint of another run, and never executes its code.

One run is trained on two ranks. Its checkpoints folder is copied several times, and each copy is damaged in another way
before a run resumes from it. Files with code have a correct manifest, because an attacker can write one.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megaclip.checkpoint import manifest, search
from megaclip.checkpoint.model_directory import export_checkpoint
from megaclip.commands import check_checkpoint, evaluate
from megaclip.errors import CheckpointError
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, flags, run_in_ranks, scalars, write_config
from tests.unit.checkpoint.test_manifest import flip_a_bit

STEPS, EVERY, LAST = 4, 1, 3
SCHEDULE = {"train_steps": STEPS, "save_every_steps": EVERY, "keep_last": 9}
TAGS = {step: f"step_{step:08d}" for step in range(EVERY, STEPS + 1, EVERY)}
MODEL_FILE, OPTIMIZER_FILE = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


class Malicious:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.evidence),)


def plant_code(path: Path) -> None:
    """Plant code in one of DeepSpeed's files, and update the manifest. The code creates RUN/executed."""
    content = torch.load(path, weights_only=False)  # the test's own file
    torch.save({"code": Malicious(path.parents[2] / "executed"), **content}, path)
    manifest.write(path.parent, run=str(search.run_of(path.parent.parent, path.parent.name)))


@dataclass(frozen=True)
class Trial:
    """A change of a copied checkpoints folder, and how a run resumes from it."""

    damage: Callable[[Path], None]
    """Function that changes the copy. Its argument is the checkpoints folder of the copy."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Flags. In texts, COPY is replaced by the folder of the copy."""
    config: str = "zero1.json"
    exit_code: int = 78


AUTO = {"resume": "auto"}
TRIALS = {
    "a flipped bit": Trial(lambda folder: flip_a_bit(folder / TAGS[LAST] / OPTIMIZER_FILE), AUTO, exit_code=0),
    "back to an earlier step": Trial(
        lambda folder: None,
        {"resume": f"COPY/checkpoints/{TAGS[1]}", "keep_last": 1, "stop_after_steps": 2},
        exit_code=0,
    ),
    "code": Trial(lambda folder: plant_code(folder / TAGS[LAST] / MODEL_FILE), AUTO),
    "code at another stage": Trial(lambda folder: plant_code(folder / TAGS[LAST] / OPTIMIZER_FILE), AUTO, "zero3.json"),
}


@pytest.fixture(scope="module")
def root(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the complete run `whole`, and the copies before their runs: NAME/checkpoints up to step LAST."""
    root = tmp_path_factory.mktemp("damaged")
    for stage in (1, 3):
        write_config(root / f"zero{stage}.json", stage)
    (ends,) = run_in_ranks([flags(tiny_run, root / "zero1.json", root, name="whole", **SCHEDULE)])
    assert [end.exit_code for end in ends] == [0] * WORLD_SIZE, ends[0].output
    for name, trial in TRIALS.items():
        folder = shutil.copytree(root / "whole" / "checkpoints", root / name / "checkpoints")
        shutil.rmtree(folder / TAGS[STEPS])
        (folder / "latest").write_text(TAGS[LAST])
        trial.damage(folder)
    return root


@pytest.fixture(scope="module")
def ends(root: Path, tiny_run: Path) -> dict[str, list[Finished]]:
    """Exit code and output of each rank, by trial."""

    def command(name: str, trial: Trial) -> list[str]:
        changes = {key: str(value).replace("COPY", str(root / name)) for key, value in trial.changes.items()}
        return flags(tiny_run, root / trial.config, root, name=name, **{**SCHEDULE, **changes})

    return dict(zip(TRIALS, run_in_ranks([command(*trial) for trial in TRIALS.items()]), strict=True))


@pytest.mark.parametrize("name", TRIALS)
def test_every_rank_ends_in_the_same_way_without_a_traceback(ends, name):
    assert [end.exit_code for end in ends[name]] == [TRIALS[name].exit_code] * WORLD_SIZE, ends[name][0].output
    assert len(ends[name][0].errors) == (TRIALS[name].exit_code != 0)
    assert not any("Traceback" in end.output for end in ends[name])


def test_a_damaged_checkpoint_is_skipped_and_the_losses_are_the_same(ends, root):
    output = ends["a flipped bit"][0].output
    assert f"{TAGS[LAST]} is damaged, trying the previous one: {OPTIMIZER_FILE} has changed" in output
    assert f"{TAGS[2]} at step 2" in output
    expected = {step: loss for step, loss in scalars(root / "whole")["train/loss"].items() if step > 2}
    assert scalars(root / "a flipped bit")["train/loss"] == expected
    for tag in TAGS.values():  # the damaged checkpoint was written again
        assert manifest.find_damage(root / "a flipped bit" / "checkpoints" / tag) == []


def test_a_run_that_goes_back_keeps_the_later_checkpoints(ends, root):
    folder = root / "back to an earlier step" / "checkpoints"
    assert "are kept until you delete them" in ends["back to an earlier step"][0].output
    whole = {path.name for path in folder.glob("step_*") if manifest.find_damage(path) == []}
    assert whole == {TAGS[1], TAGS[2], f"{TAGS[2]}.old1", TAGS[3]}
    assert search.run_of(folder, TAGS[3]) == search.run_of(folder, f"{TAGS[2]}.old1") != search.run_of(folder, TAGS[2])


@pytest.mark.parametrize("name", [name for name in TRIALS if name.startswith("code")])
def test_code_in_a_checkpoint_is_not_executed_by_resuming(ends, root, name):
    (error,) = ends[name][0].errors
    assert "states.pt' contains objects other than tensors and numbers" in error and "it uses posix.mkdir" in error
    assert not (root / name / "executed").exists()


def test_the_planted_code_works(root):
    """Without restriction, loading the file executes the code. So the tests above can fail."""
    evidence = root / "code" / "executed"
    torch.load(root / "code" / "checkpoints" / TAGS[LAST] / MODEL_FILE, weights_only=False)
    assert evidence.is_dir()
    evidence.rmdir()


@pytest.mark.parametrize("name", [name for name in TRIALS if name.startswith("code")])
def test_code_in_a_checkpoint_is_not_executed_by_a_tool(root, name, tmp_path, monkeypatch, capsys):
    run = root / name
    with pytest.raises(CheckpointError, match="contains objects other than tensors and numbers"):
        export_checkpoint(run, tmp_path / "out", None)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(run), "--val-data", "none.tar"])
    with pytest.raises(CheckpointError, match="contains objects other than tensors and numbers"):
        evaluate.main()
    assert check_checkpoint.main([str(run)]) == 0  # its files are as the manifest records them
    capsys.readouterr()
    assert not (run / "executed").exists()


@pytest.mark.parametrize("damaged", [f"{TAGS[LAST]}/{MODEL_FILE}", "model/tokenizer.json"])
def test_tools_refuse_a_damaged_checkpoint(root, damaged, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(root / "code at another stage" / "checkpoints", run / "checkpoints")
    flip_a_bit(run / "checkpoints" / damaged)
    expected = f"is damaged: {Path(damaged).name} has changed"
    with pytest.raises(CheckpointError, match=expected):
        export_checkpoint(run, tmp_path / "out", None)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(run), "--val-data", "none.tar"])
    with pytest.raises(CheckpointError, match=expected):
        evaluate.main()


def test_a_damaged_export_is_refused(root, tmp_path, monkeypatch):
    exported = tmp_path / "exported"
    export_checkpoint(root / "whole", exported, None)
    assert {path.stat().st_mode & 0o777 for path in exported.iterdir()} == {0o666 & ~current_umask()}
    assert check_checkpoint.main([str(exported)]) == 0
    flip_a_bit(exported / "open_clip_model.safetensors")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(exported), "--val-data", "none.tar"])
    with pytest.raises(CheckpointError, match=r"is damaged: open_clip_model\.safetensors has changed"):
        evaluate.main()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_export_refuses_folders_of_the_run(root):
    run = root / "whole"
    for out_dir in (run, run / "checkpoints", run / "checkpoints" / "model", run / "checkpoints" / "new"):
        with pytest.raises(CheckpointError, match=r"belongs to .*, or holds a run; choose another directory"):
            export_checkpoint(run, out_dir, None, overwrite=True)
