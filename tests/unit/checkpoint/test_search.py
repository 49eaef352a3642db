"""The checkpoint that is resumed, the checkpoints that are deleted, and the output of `megaclip check`."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megaclip.checkpoint import search, store
from megaclip.checkpoint.manifest import MANIFEST, find_damage
from megaclip.commands import check_checkpoint
from megaclip.engine import resume
from megaclip.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.saved_checkpoints import save

TAGS = {step: f"step_{step:08d}" for step in (1, 2, 3, 4, 5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints folder of a run with steps 1, 2 and 3."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (1, 2, 3):
        save(folder, step, f"step {step}", keep_last=9, run="this run")
    return folder


def damage(folder: Path, step: int) -> None:
    path = folder / TAGS[step] / "model.pt"
    path.write_bytes(path.read_bytes()[:-1])


def test_auto_takes_the_newest_complete_checkpoint_before_a_damaged_one(folder, warnings):
    assert resume._find_checkpoint("auto", folder) == (folder, TAGS[3])
    assert not warnings.records
    damage(folder, 3)
    damage(folder, 2)
    assert resume._find_checkpoint("auto", folder) == (folder, TAGS[1])
    first, second = (record.getMessage() for record in warnings.records)
    assert TAGS[3] in first and "model.pt has" in first and TAGS[2] in second


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [MANIFEST, search.STATE, "model.pt", f"../{search.LATEST}"])
def test_auto_does_not_wait_for_a_named_pipe_in_place_of_a_file(name, folder):
    (folder / TAGS[3] / name).unlink()
    os.mkfifo(folder / TAGS[3] / name)
    whole = TAGS[3 if search.LATEST in name else 2]
    assert resume._find_checkpoint("auto", folder) == (folder, whole)


def test_auto_does_not_take_a_later_checkpoint_of_an_abandoned_branch(folder):
    (folder / search.LATEST).write_text(TAGS[2])
    damage(folder, 2)
    assert resume._find_checkpoint("auto", folder) == (folder, TAGS[1])


def test_after_damage_auto_stays_in_its_branch(folder):
    """The run has gone back to step 1 and saved step 4. Steps 2 and 3 belong to the earlier run, not to this branch."""
    run = resume._run_after(folder, TAGS[1], folder, str(folder / TAGS[1]))
    save(folder, 4, keep_last=9, run=run)
    save(folder, 5, keep_last=9, run=run)
    damage(folder, 5)
    assert resume._find_checkpoint("auto", folder) == (folder, TAGS[4])
    assert resume._run_after(folder, TAGS[4], folder, "auto") == run
    damage(folder, 4)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint of this run .*--resume the folder of another one"):
        resume._find_checkpoint("auto", folder)


def test_a_run_after_a_checkpoint_whose_manifest_is_lost_deletes_none_of_the_others(folder):
    (folder / TAGS[3] / MANIFEST).write_text("{")
    assert resume._find_checkpoint("auto", folder) == (folder, TAGS[2])
    assert resume._run_after(folder, TAGS[2], folder, "auto") not in ("this run", "")


@pytest.mark.parametrize("content", [None, "", "\0" * 13, "../elsewhere"])
def test_auto_without_a_readable_latest_takes_the_one_that_was_saved_last(folder, warnings, content):
    (folder / search.LATEST).unlink()
    if content is not None:
        (folder / search.LATEST).write_text(content)
    save_without_latest(folder, 2)  # from a run that went back to step 1
    assert resume._find_checkpoint("auto", folder) == (folder, TAGS[2])
    assert "latest is missing or damaged" in warnings.records[0].getMessage()


def save_without_latest(folder: Path, step: int) -> None:
    kept = (folder / search.LATEST).read_bytes() if (folder / search.LATEST).exists() else None
    save(folder, step, keep_last=9, run="this run")
    (folder / search.LATEST).unlink()
    if kept is not None:
        (folder / search.LATEST).write_bytes(kept)


def test_auto_never_restarts_at_step_0_if_all_checkpoints_are_damaged(folder):
    for step in (1, 2, 3):
        damage(folder, step)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint .*step_00000003: model\.pt has .*--name"):
        resume._find_checkpoint("auto", folder)


def test_auto_starts_from_the_beginning_after_a_first_save_that_was_cut_off(tmp_path):
    (tmp_path / TAGS[1]).mkdir()
    (tmp_path / TAGS[1] / search.STATE).write_text("{}")
    assert resume._find_checkpoint("auto", tmp_path) is None
    assert resume._find_checkpoint("auto", tmp_path / "nowhere") is None
    assert not search.holds_checkpoints(tmp_path)


def test_damaged_checkpoint_that_was_named_is_refused_with_advice(folder):
    damage(folder, 3)
    for path in (folder, folder / TAGS[3]):
        with pytest.raises(CheckpointError, match=r"step_00000003' is damaged: model\.pt has .*megaclip check"):
            resume._find_checkpoint(str(path), folder)
    assert resume._find_checkpoint(str(folder / TAGS[2]), folder) == (folder, TAGS[2])


def test_lost_manifest_of_the_latest_is_damage(folder, warnings):
    (folder / TAGS[3] / MANIFEST).unlink()
    assert resume._find_checkpoint("auto", folder) == (folder, TAGS[2])
    assert f"{MANIFEST} is missing" in warnings.records[0].getMessage()
    with pytest.raises(CheckpointError, match="is incomplete"):
        resume._find_checkpoint(str(folder), folder)


def left(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sorted(folder.glob("step_*")) if path.suffix == ""]


def test_a_run_deletes_only_its_own_checkpoints(folder):
    """Without the file `latest`, a run must not delete the checkpoints of another run."""
    (folder / search.LATEST).unlink()
    for step in (4, 5, 6, 7):
        save(folder, step, keep_last=1, run="another run")
    assert left(folder) == [1, 2, 3, 7]
    assert all(find_damage(folder / TAGS[step]) == [] for step in (1, 2, 3))


def test_a_checkpoint_of_another_run_at_the_same_step_is_renamed(folder, warnings):
    for number in (1, 2):
        save(folder, 2, f"branch {number}", keep_last=1, run=f"branch {number}")
        kept = folder / f"{TAGS[2]}.old{number}"
        state = json.loads((kept / search.STATE).read_text())
        assert state["label"] == ("step 2" if number == 1 else "branch 1")
        assert (kept / MANIFEST).is_file() and "renamed it" in warnings.records[-1].getMessage()
    save(folder, 2, "branch 2 again", keep_last=1, run="branch 2")
    assert not (folder / f"{TAGS[2]}.old3").exists()


def test_keep_every_keeps_the_first_checkpoint_at_or_after_each_multiple(tmp_path):
    for step in range(4, 44, 4):  # 4, 8, ..., 40
        save(tmp_path, step, keep_last=2, keep_every=10)
    assert left(tmp_path) == [12, 20, 32, 36, 40]


def test_run_id_is_kept_by_auto_and_new_after_going_back(folder, warnings):
    elsewhere = folder.parent.parent / "other" / "checkpoints"
    assert resume._run_after(folder, TAGS[2], folder, "auto") == "this run"
    assert resume._run_after(folder, TAGS[3], folder, str(folder)) == "this run"
    assert resume._run_after(folder, TAGS[3], elsewhere, str(folder)) not in ("this run", "")
    assert resume._run_after(folder, TAGS[2], folder, str(folder / TAGS[2])) not in ("this run", "")
    assert "are kept until you delete them" in warnings.records[-1].getMessage()


def test_folder_of_another_run_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other / "checkpoints")
    (folder / search.LATEST).unlink()  # a missing file must not hide the checkpoints
    for wanted in (None, str(other), str(other / "checkpoints" / TAGS[1])):
        with pytest.raises(ConfigError, match="holds a run already; use --resume auto"):
            resume.require_own_folder(folder.parent, wanted)
    resume.require_own_folder(folder.parent, "auto")
    resume.require_own_folder(folder.parent, str(folder / TAGS[1]))
    resume.require_own_folder(tmp_path / "new", None)


def checked(path: Path, capsys) -> tuple[int, str]:
    code = check_checkpoint.main([str(path)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_tool_shows_a_table_and_fails_on_damage(folder, capsys):
    code, text = checked(folder.parent, capsys)
    lines = text.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[1:]] == list(TAGS.values())[:3]
    assert all(line.endswith(" whole") for line in lines[1:])
    (folder / TAGS[1] / MANIFEST).unlink()  # incomplete: no error, because others are complete
    assert checked(folder, capsys)[0] == 0
    damage(folder, 2)
    code, text = checked(folder, capsys)
    assert code == 1 and "step_00000002" in text and "model.pt has" in text and "incomplete" in text
    assert checked(folder / TAGS[2], capsys)[0] == 1 and checked(folder / TAGS[3], capsys)[0] == 0
    (folder / search.LATEST).unlink()
    assert "latest is missing" in checked(folder, capsys)[1]
    code, text = checked(folder / "nowhere", capsys)
    assert code == 1 and text.startswith("error: ") and "holds no checkpoint" in text


def test_the_tool_fails_if_no_checkpoint_is_complete(tmp_path, capsys):
    (tmp_path / TAGS[1]).mkdir()
    code, text = checked(tmp_path, capsys)
    assert code == 1 and "incomplete" in text
    save(tmp_path, 2)
    assert checked(tmp_path, capsys)[0] == 0
    store._delete(tmp_path / TAGS[2])
    assert checked(tmp_path, capsys)[0] == 1
