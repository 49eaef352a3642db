"""Checkpoints on disk: after a save is interrupted at any point, `latest` names a complete checkpoint."""

import os
from pathlib import Path

import pytest
import torch

from megaclip.checkpoint import search, store
from megaclip.checkpoint.manifest import MANIFEST, find_damage
from megaclip.errors import CheckpointError
from tests.unit.checkpoint.saved_checkpoints import Killed, save


def assert_complete(folder: Path, tag: str | None, label: str) -> None:
    assert tag is not None
    assert find_damage(folder / tag) == []
    assert all(torch.load(folder / tag / name) == {"label": label} for name in ("model.pt", "optimizer.pt"))
    assert store.read_state(folder, tag)["label"] == label


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    (tmp_path / search.MODEL_CARD).mkdir()
    for step in (1, 2, 30):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "model", "step_00000002", "step_00000030"]
    save(tmp_path, 31, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "model", "step_00000031"]


def test_later_checkpoints_of_an_earlier_run_are_deleted_first(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step, keep_last=3)
    (tmp_path / "step_00000400").mkdir()  # an incomplete checkpoint
    left = {}
    for step in (130, 160, 190):
        save(tmp_path, step, keep_last=3)
        left[step] = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*"))
    assert left == {130: [100, 130, 300], 160: [100, 130, 160], 190: [130, 160, 190]}


def test_run_resumed_from_an_earlier_step_keeps_its_own_checkpoint(tmp_path):
    """After --resume from an earlier step, the newest checkpoint does not have the largest step number."""
    for step in (1, 2, 3):
        save(tmp_path, step, "first", keep_last=3)
    save(tmp_path, 2, "second", keep_last=1)
    assert search.find_latest(tmp_path) == "step_00000002"
    assert_complete(tmp_path, "step_00000002", "second")


def test_the_latest_checkpoint_is_found_without_reading_the_manifests_of_the_others(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, keep_last=2)
    monkeypatch.delattr(search.manifest, "read")
    assert search.find_latest(tmp_path) == "step_00000002"


def test_crash_while_the_latest_is_overwritten_keeps_an_earlier_checkpoint(tmp_path):
    """After --resume from an earlier step, a run may save again at the step that `latest` names."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step, f"first {step}", keep_last=9)
    (tmp_path / search.LATEST).write_text("step_00000003")  # step 4 is from an earlier run
    (tmp_path / "step_00000002" / MANIFEST).unlink()
    with pytest.raises(Killed):
        save(tmp_path, 3, "second 3", dies=True)
    assert_complete(tmp_path, search.find_latest(tmp_path), "first 1")


def test_full_disk_raises_a_checkpoint_error(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; free space at .* or fix permissions"):
        save(tmp_path, 1)
    assert search.find_latest(tmp_path) is None


def test_an_export_is_no_checkpoint_whatever_its_name(tmp_path):
    export = tmp_path / "step_00000002"
    save(tmp_path, 2)
    (export / "open_clip_config.json").write_text("{}")
    search.refuse_run(export)
    with pytest.raises(CheckpointError, match=r"holds open_clip weights, not a checkpoint .*with --pretrained"):
        search.locate(export)


def test_a_checkpoint_is_found_in_any_folder_of_the_run_and_selected_by_its_tag(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (1, 2):
        save(checkpoints, step)
    first = (checkpoints, "step_00000001")
    assert search.locate(checkpoints / first[1]) == first
    assert search.locate(checkpoints) == search.locate(tmp_path / "run") == (checkpoints, "step_00000002")
    for nothing in (tmp_path, tmp_path / "nowhere", checkpoints / "step_00000009"):
        with pytest.raises(CheckpointError, match=r"no checkpoint at .*expected a step_N folder"):
            search.locate(nothing)
    for path in (tmp_path / "run", checkpoints, checkpoints / first[1]):
        assert search.locate(path, first[1]) == first
    (checkpoints / "latest").write_text("step_00000003")  # does not exist, and is not requested
    assert search.locate(tmp_path / "run", first[1]) == first
    with pytest.raises(CheckpointError, match="it has step_00000001, step_00000002"):
        search.locate(tmp_path / "run", "step_00000009")
    with pytest.raises(CheckpointError, match="is one checkpoint"):
        search.locate(checkpoints / first[1], "step_00000002")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        search.locate(tmp_path / "nowhere", first[1])
    (checkpoints / first[1] / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="is incomplete"):
        search.locate(tmp_path / "run", first[1])


def test_incomplete_and_damaged_checkpoints_are_refused(tmp_path):
    assert search.find_latest(tmp_path) is None
    tag = save(tmp_path, 7)
    (tmp_path / tag / MANIFEST).unlink()
    for names in (tag, "step_00000008"):
        (tmp_path / search.LATEST).write_text(names)
        with pytest.raises(CheckpointError, match="does not exist or is incomplete"):
            search.find_latest(tmp_path)
    save(tmp_path, 5)
    for names in ("../elsewhere", ""):
        (tmp_path / search.LATEST).write_text(names)
        assert search.find_latest(tmp_path) == "step_00000005"


def test_error_names_the_damaged_loss_state(tmp_path):
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    torch.save({"variant": "fastclip_v3"}, folder / "loss_rank_00000.pt")
    assert list(store.read_loss_states(tmp_path, folder.name)) == [{"variant": "fastclip_v3"}]
    (folder / "loss_rank_00001.pt").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"loss_rank_00001\.pt' .* or is damaged"):
        list(store.read_loss_states(tmp_path, folder.name))
    assert list(store.read_loss_states(tmp_path, "step_00000002")) == []
