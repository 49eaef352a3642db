"""Locks of killed builds of DeepSpeed's ops are deleted. Running builds are waited for and reported."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from megaclip.config import MegaclipSection, TrainingConfig
from megaclip.errors import MegaclipError
from megaclip.zero import build, op_builds

# A build that lasts until it reads a line. It deletes its lock while the file is open. FileBaton.release closes the
# file first. For a moment this looks like the lock of a killed build, except that a real build has just written files.
BUILDER = """
import os, sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("building", flush=True)
sys.stdin.readline()
os.remove(sys.argv[1])
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "fused_adam").mkdir()
    return tmp_path / "fused_adam" / "lock"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the log lines of the module."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(op_builds.logger, level, lambda text, *values: lines.append(text % values))
    return lines


@contextlib.contextmanager
def builder(lock: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", BUILDER, lock]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "building\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def old(*paths: Path) -> None:
    """Set the times of the paths that exist to an hour ago."""
    hour_ago = time.time() - 3600
    for path in paths:
        if path.exists():
            os.utime(path, (hour_ago, hour_ago))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_builds, "PATIENCE_S", 0.0)


def test_the_lock_of_a_killed_build_is_deleted_and_named(lock: Path, lines: list[str], impatient: None) -> None:
    """PyTorch before 2.14 would wait for this lock for ever."""
    with builder(lock) as process:
        process.kill()
        process.wait()
    assert lock.exists()
    op_builds._wait_for_lock("fused_adam")
    assert FileBaton(lock).try_acquire()
    (line,) = lines
    assert line.startswith(f"deleted {lock}: a killed build left it")


def test_a_build_on_this_host_is_waited_for(lock: Path, lines: list[str], impatient: None) -> None:
    with builder(lock) as process:
        threading.Timer(1.0, process.communicate, args=("\n",)).start()
        op_builds._wait_for_lock("fused_adam")
        assert process.wait(120) == 0 and not lines  # the builder fails if another process deletes its lock


def test_a_build_that_ends_while_processes_are_listed_does_not_lose_the_next_lock(
    lock: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next build may have acquired the lock meanwhile. Its lock must not be deleted."""

    def look(_: Path) -> bool:
        lock.unlink()  # the first build ends
        lock.touch()
        return False

    lock.touch()
    old(lock)
    monkeypatch.setattr(op_builds, "_is_open_here", look)
    assert not op_builds._delete_if_abandoned(lock)
    assert lock.exists() and not lines


def test_two_ranks_that_find_an_abandoned_lock_delete_it_once(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has deleted it and started a build under a new lock before this rank can delete the old one."""

    class OtherRank(FileLock):
        def __enter__(self) -> FileLock:
            lock.unlink()
            lock.touch()
            return super().__enter__()

    lock.touch()
    old(lock)
    monkeypatch.setattr(op_builds, "FileLock", OtherRank)
    assert not op_builds._delete_if_abandoned(lock)
    assert lock.exists()


def test_a_build_on_another_host_is_waited_for_while_it_writes_files(lock: Path) -> None:
    """No process of this host has its lock open."""
    lock.touch()
    old(lock)
    (lock.parent / "1.o").touch()
    assert not op_builds._delete_if_abandoned(lock)
    old(lock.parent / "1.o")
    assert op_builds._delete_if_abandoned(lock) and not lock.exists()


def test_locks_of_other_ops_are_not_touched_also_in_pytorchs_default_folder(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    own, other = (tmp_path / "py311_cpu" / name / "lock" for name in ("cpu_adam", "op_of_another_project"))
    for path in (own, other):
        path.parent.mkdir(parents=True)
        path.touch()
        old(path)
    op_builds._wait_for_lock("cpu_adam")
    assert not own.exists() and other.exists() and len(lines) == 1


@pytest.mark.parametrize("torch_has_its_own_lock", [False, True])
def test_loading_an_op_reports_the_compilation(
    lock: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, torch_has_its_own_lock: bool
) -> None:
    """PyTorch from 2.14 on leaves the file for ever, under a lock that ends with the process."""
    monkeypatch.setattr(op_builds, "_REPORT_S", 0.2)
    monkeypatch.setattr(op_builds, "_jit_load", lambda builder, verbose: time.sleep(0.5) or "module")
    if torch_has_its_own_lock:
        monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    else:
        monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton, raising=False)
    lock.touch()
    old(lock)
    assert op_builds._load_and_report(SimpleNamespace(name="fused_adam"), False) == "module"
    assert lock.exists() == torch_has_its_own_lock
    told = lines if torch_has_its_own_lock else lines[1:]
    assert [line.split(" by ")[0].split(" in ")[0] for line in told[:: len(told) - 1]] == [
        "compiling DeepSpeed's op fused_adam,",
        "compiled DeepSpeed's op fused_adam",
    ]


def test_the_engine_prepares_ops_before_it_loads_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> None:
        raise MegaclipError("ops are prepared here")

    monkeypatch.setattr(build, "raise_on_all_ranks", contextlib.nullcontext)
    monkeypatch.setattr(build, "prepare_ops", prepare)
    monkeypatch.setattr(build.deepspeed, "initialize", lambda **_: pytest.fail("DeepSpeed loads ops"))
    settings = {"gradient_clipping": 0.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    config = TrainingConfig(Path("ds.json"), settings, MegaclipSection())
    with pytest.raises(MegaclipError, match="ops are prepared here"):
        build.build_engine(config, arguments=None, model_config=None)
