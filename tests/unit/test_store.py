"""Checkpoints on disk: whatever a save was doing when it was cut off, `latest` names a checkpoint that is whole."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaclip.checkpoint import store
from megaclip.errors import CheckpointError


class Killed(BaseException):
    """Stands for the end of the process: nothing in the store may catch it."""


class Engine:
    """Writes two files as DeepSpeed would; `label` tells checkpoints apart."""

    def __init__(self, label: str, dies: bool = False) -> None:
        self.label = label
        self.dies = dies
        self.checkpoint_engine = SimpleNamespace(save=None)

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        assert not save_latest, "DeepSpeed's own `latest` is not atomic"
        (Path(folder) / tag).mkdir(parents=True, exist_ok=True)
        (Path(folder) / tag / "model").write_text(self.label)
        if self.dies:
            raise Killed
        (Path(folder) / tag / "optimizer").write_text(self.label)


@pytest.fixture(autouse=True)
def _first_rank(monkeypatch):
    monkeypatch.setattr(store, "dist", SimpleNamespace(get_rank=lambda: 0))


def save(folder: Path, step: int, label: str = "", *, dies: bool = False, keep_last: int = 2) -> str:
    engine: Any = Engine(label, dies)
    return store.save(engine, folder, step, {"step": step, "label": label}, keep_last)


def assert_whole(folder: Path, tag: str | None, label: str) -> None:
    assert tag is not None
    assert (folder / tag / "model").read_text() == (folder / tag / "optimizer").read_text() == label
    assert store.read_state(folder, tag)["label"] == label


def file_operations(monkeypatch, limit: float) -> list[str]:
    """Count what changes the disk from now on, and die instead of number `limit` (from 0)."""
    done: list[str] = []

    def counted(module, name):
        original = getattr(module, name)

        def operation(*arguments, **keywords):
            if len(done) == limit:
                raise Killed
            done.append(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, name, operation)

    for module, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "open")):
        counted(module, name)
    return done


def test_a_save_cut_off_anywhere_leaves_a_whole_latest(tmp_path, monkeypatch):
    """Every point between two operations on files, in a save that replaces a half-written folder and deletes one."""

    def prepared(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save(folder, 1, "one")
        save(folder, 2, "two")
        (folder / "step_00000003").mkdir()
        (folder / "step_00000003" / "model").write_text("half")
        return folder

    folder = prepared("whole")
    with monkeypatch.context() as patch:
        operations = file_operations(patch, limit=float("inf"))
        save(folder, 3, "three")
    assert {"replace", "fsync", "rmtree", "open"} <= set(operations) and len(operations) >= 8

    seen = []
    for limit in range(len(operations)):
        folder = prepared(f"cut_{limit}")
        with monkeypatch.context() as patch:
            file_operations(patch, limit)
            with pytest.raises(Killed):
                save(folder, 3, "three")
        tag = store.find_latest(folder)
        assert_whole(folder, tag, {"step_00000002": "two", "step_00000003": "three"}[str(tag)])
        seen.append(tag)
        save(folder, 3, "again")  # the run goes on and saves over what is left
        assert_whole(folder, store.find_latest(folder), "again")
    assert set(seen) == {"step_00000002", "step_00000003"}


def test_a_crash_inside_deepspeeds_part_leaves_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1, "one")
    with pytest.raises(Killed):
        save(tmp_path, 2, "two", dies=True)
    assert_whole(tmp_path, store.find_latest(tmp_path), "one")
    with pytest.raises(CheckpointError, match="not written to the end"):
        store.locate(tmp_path / "step_00000002")


def test_only_the_last_k_are_kept(tmp_path):
    (tmp_path / store.MODEL_CARD).mkdir()
    for step in (1, 2, 30):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "model", "step_00000002", "step_00000030"]
    save(tmp_path, 31, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "model", "step_00000031"]


def test_what_a_run_that_went_back_left_behind_goes_before_its_own(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step, keep_last=3)
    (tmp_path / "step_00000400").mkdir()  # cut off while it was written
    left = {}
    for step in (130, 160, 190):
        save(tmp_path, step, keep_last=3)
        left[step] = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*"))
    assert left == {130: [100, 130, 300], 160: [100, 130, 160], 190: [130, 160, 190]}


def test_a_run_that_went_back_keeps_what_it_wrote(tmp_path):
    """After --resume from an earlier step, the newest checkpoint is not the one with the largest number."""
    for step in (1, 2, 3):
        save(tmp_path, step, "first", keep_last=3)
    save(tmp_path, 2, "second", keep_last=1)
    assert store.find_latest(tmp_path) == "step_00000002"
    assert_whole(tmp_path, "step_00000002", "second")


def test_saving_again_over_the_latest_falls_back_on_an_earlier_one(tmp_path):
    """After --resume from an earlier step, a run writes again what `latest` names."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step, f"first {step}", keep_last=9)
    (tmp_path / store.LATEST).write_text("step_00000003")  # 4 is left from a run that had gone further
    (tmp_path / "step_00000002" / store.STATE).unlink()
    with pytest.raises(Killed):
        save(tmp_path, 3, "second 3", dies=True)
    assert_whole(tmp_path, store.find_latest(tmp_path), "first 1")


def test_a_disk_that_cannot_be_written_is_a_readable_error(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; free space at .* or fix permissions"):
        save(tmp_path, 1)
    assert store.find_latest(tmp_path) is None


def test_locate_takes_a_step_a_checkpoints_folder_or_a_run(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (1, 2):
        save(checkpoints, step)
    assert store.locate(checkpoints / "step_00000001") == (checkpoints, "step_00000001")
    assert store.locate(checkpoints) == (checkpoints, "step_00000002")
    assert store.locate(tmp_path / "run") == (checkpoints, "step_00000002")
    for nothing in (tmp_path, tmp_path / "nowhere", checkpoints / "step_00000009"):
        with pytest.raises(CheckpointError, match=r"no checkpoint at .*expected a step_N folder"):
            store.locate(nothing)


def test_a_tag_picks_a_checkpoint_whatever_folder_of_the_run_is_named(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (1, 2):
        save(checkpoints, step)
    first = (checkpoints, "step_00000001")
    for path in (tmp_path / "run", checkpoints, checkpoints / first[1]):
        assert store.locate(path, first[1]) == first
    (checkpoints / "latest").write_text("step_00000003")  # which is not there, and is not asked for
    assert store.locate(tmp_path / "run", first[1]) == first
    with pytest.raises(CheckpointError, match="it has step_00000001, step_00000002"):
        store.locate(tmp_path / "run", "step_00000009")
    with pytest.raises(CheckpointError, match="is one checkpoint"):
        store.locate(checkpoints / first[1], "step_00000002")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        store.locate(tmp_path / "nowhere", first[1])
    (checkpoints / first[1] / store.STATE).unlink()
    with pytest.raises(CheckpointError, match="not written to the end"):
        store.locate(tmp_path / "run", first[1])


def test_incomplete_and_damaged_checkpoints_are_refused(tmp_path):
    assert store.find_latest(tmp_path) is None
    tag = save(tmp_path, 7)
    state = tmp_path / tag / store.STATE
    for text, message in (("{", "cannot read"), ("[1]", "does not hold a JSON object")):
        state.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            store.read_state(tmp_path, tag)
    state.unlink()
    for names in (tag, "step_00000008", "../elsewhere", ""):
        (tmp_path / store.LATEST).write_text(names)
        with pytest.raises(CheckpointError, match="is missing or was not written to the end"):
            store.find_latest(tmp_path)


def test_readers_see_the_old_text_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    store.write_atomically(path, "old")
    seen = []
    original = os.replace

    def replace(*arguments):
        seen.append(path.read_text())
        original(*arguments)

    monkeypatch.setattr(os, "replace", replace)
    store.write_atomically(path, json.dumps({"n": 1}))
    assert seen == ["old"] and json.loads(path.read_text()) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_damaged_loss_state_is_named(tmp_path):
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    torch.save({"variant": "fastclip_v3"}, folder / "loss_rank_00000.pt")
    assert list(store.read_loss_states(tmp_path, folder.name)) == [{"variant": "fastclip_v3"}]
    (folder / "loss_rank_00001.pt").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"cannot read .*loss_rank_00001\.pt"):
        list(store.read_loss_states(tmp_path, folder.name))
    assert list(store.read_loss_states(tmp_path, "step_00000002")) == []
