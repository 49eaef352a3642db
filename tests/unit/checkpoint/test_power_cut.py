"""After a power cut or a kill at any moment of a save, a complete checkpoint exists, and `latest` names it.

`Disk` simulates the disk: it records what each fsync makes permanent. Then it shows the folder as a machine could find
it after a power cut. Two cases are the extremes of what file systems do without fsync: names are lost, or names are
kept and their files are empty, as on ext4. The save itself runs in a real folder.
"""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from megaclip import files
from megaclip.checkpoint import durable, manifest, search, store
from tests.unit.checkpoint.saved_checkpoints import save


class PowerCut(BaseException):
    """Exception that stops the simulated machine. The store must not catch it."""


class Disk:
    """The data that fsync has made permanent: contents of files and names in folders, both by inode."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, cut_at: float = float("inf")) -> None:
        self.root = root
        self.operations = 0
        self.cut_at = cut_at
        self._content: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._is_folder: dict[int, bool] = {}
        self._held: dict[int, int] = {}
        """Descriptors by inode: the number of a deleted file or folder must not be that of a new one."""
        for path in (root, *root.rglob("*")):  # what exists at the start is permanent
            self._keep(path)
        fsync = os.fsync

        def recorded(descriptor: int) -> None:
            self._count()
            fsync(descriptor)
            self._keep(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        patch.setattr(os, "fsync", recorded)
        for module, name in ((os, "replace"), (Path, "open"), (Path, "mkdir"), (shutil, "rmtree"), (Path, "unlink")):
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def __del__(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def _counted(self, original: Any) -> Any:
        def operation(*arguments: Any, **options: Any) -> Any:
            self._count()
            return original(*arguments, **options)

        return operation

    def _count(self) -> None:
        if self.operations >= self.cut_at:
            raise PowerCut
        self.operations += 1

    def _keep(self, path: Path) -> None:
        status = os.stat(path)
        if status.st_ino not in self._held:
            self._held[status.st_ino] = os.open(path, os.O_PATH)
        self._is_folder[status.st_ino] = stat.S_ISDIR(status.st_mode)
        if self._is_folder[status.st_ino]:
            entries = list(os.scandir(path))
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in entries}
            self._is_folder |= {entry.inode(): entry.is_dir() for entry in entries}
        else:
            with open(path, "rb") as stream:
                self._content[status.st_ino] = stream.read()

    def after_power_cut(self, target: Path, *, keeps_names: bool) -> Path:
        """Write the folder to `target` as it is found after the power cut.

        keeps_names: keep the names of all files and folders, including those whose folder was not synchronised by
        fsync.
        """
        if keeps_names:
            shutil.copytree(self.root, target, copy_function=lambda source, copy: self._write(os.stat(source), copy))
        else:
            self._restore(os.stat(self.root).st_ino, target)
        return target

    def _write(self, status: os.stat_result, copy: str) -> None:
        Path(copy).write_bytes(self._content.get(status.st_ino, b""))

    def _restore(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, child in self._names.get(inode, {}).items():
            if self._is_folder.get(child, False):
                self._restore(child, target / name)
            else:
                (target / name).write_bytes(self._content.get(child, b""))


def start(tmp_path: Path) -> Path:
    """Return a folder with two checkpoints, and the rest of a third one."""
    root = tmp_path / "before"
    root.mkdir()
    save(root, 1, "one")
    save(root, 2, "two")
    (root / "step_00000003").mkdir()
    (root / "step_00000003" / "model.pt").write_text("half")
    return root


def assert_survives(folder: Path, allowed: dict[str, str]) -> str:
    """Assert that `latest` names a complete checkpoint of `allowed` (tag -> its content). Return the tag."""
    tag = (folder / search.LATEST).read_text()
    assert manifest.find_damage(folder / tag) == []
    assert torch.load(folder / tag / "model.pt") == torch.load(folder / tag / "optimizer.pt") == {"label": allowed[tag]}
    return tag


def test_power_cut_at_any_moment_of_a_save_leaves_a_whole_latest(tmp_path, monkeypatch):
    before, seen, moment, finished = start(tmp_path), set(), 0, False
    while not finished:
        folder = shutil.copytree(before, tmp_path / f"cut_{moment}")
        with monkeypatch.context() as patch:
            disk = Disk(patch, folder, cut_at=moment)
            try:
                save(folder, 3, "three")
                finished = True
            except PowerCut:
                pass
        found = [disk.after_power_cut(tmp_path / f"{moment}_{keeps}", keeps_names=keeps) for keeps in (False, True)]
        for place in (*found, folder):  # `folder` is what a process finds after the first one was killed
            seen.add(tag := assert_survives(place, {"step_00000002": "two", "step_00000003": "three"}))
            assert tag == "step_00000003" or not finished
            save(place, 3, "again")  # the resumed run replaces what is left
            assert_survives(place, {"step_00000003": "again"})
        moment += 1
    assert seen == {"step_00000002", "step_00000003"} and moment > 20


@pytest.mark.parametrize("forgotten", ["files", "folders"])
def test_the_simulation_finds_a_missing_fsync(tmp_path, monkeypatch, forgotten):
    """Without fsync of files or folders, the simulated machine must find a damaged checkpoint or an old one."""
    folder = start(tmp_path)
    with monkeypatch.context() as patch:
        disk = Disk(patch, folder)
        if forgotten == "folders":
            for module in (files, durable, manifest, store):
                if hasattr(module, "sync_folder"):
                    patch.setattr(module, "sync_folder", lambda _folder: None)
        else:
            fsync = os.fsync
            patch.setattr(os, "fsync", lambda number: fsync(number) if stat.S_ISDIR(os.fstat(number).st_mode) else None)
        save(folder, 3, "three")
    found = disk.after_power_cut(tmp_path / "after", keeps_names=forgotten == "files")
    with pytest.raises((AssertionError, KeyError, FileNotFoundError)):
        assert_survives(found, {"step_00000003": "three"})
