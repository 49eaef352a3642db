"""Locks of killed builds of DeepSpeed's ops are deleted. Running builds are waited for."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(op_builds.logger, "warning", lambda text, *values: lines.append(text % values))
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


class Clock:
    """Replaces the module `time`. Time passes only during `sleep`.

    sleeps: function that is called after each sleep.
    """

    def __init__(self, sleeps: Callable[[], None]) -> None:
        self.now = time.time()
        self.sleeps = sleeps

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps()


def old(*paths: Path) -> None:
    """Set the times of the paths that exist to an hour ago."""
    hour_ago = time.time() - 3600
    for path in paths:
        if path.exists():
            os.utime(path, (hour_ago, hour_ago))


def test_the_lock_of_a_killed_build_is_deleted_and_named(
    lock: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would wait for this lock for ever."""
    monkeypatch.setattr(op_builds, "_QUIET_S", 600.0)
    with builder(lock) as process:
        process.kill()
        process.wait()
    assert lock.exists()
    op_builds.delete_abandoned_locks(patience_s=0.5)
    assert FileBaton(lock).try_acquire()
    (line,) = warnings
    assert line.startswith(f"deleted {lock}: a killed build left it")


def test_a_build_on_this_host_is_waited_for(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_builds, "_QUIET_S", 0.0)
    warnings: list[str] = []
    with builder(lock) as process:

        def end_build(text: str, *values: object) -> None:
            warnings.append(text % values)
            process.stdin.write("\n")
            process.stdin.flush()

        monkeypatch.setattr(op_builds.logger, "warning", end_build)
        op_builds.delete_abandoned_locks(patience_s=0.0)
        assert process.wait(120) == 0  # fails if another process deletes its lock
    (line,) = warnings
    assert line.startswith(f"waiting for {lock}: another program compiles this op")


def test_a_build_that_ends_while_processes_are_listed_does_not_lose_the_next_lock(
    lock: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next build may have acquired the lock meanwhile. Its lock must not be deleted."""
    looks = []

    def look(_: Path) -> bool:
        looks.append(lock.stat().st_ino)
        if len(looks) == 1:
            lock.unlink()  # the first build ends
            lock.touch()
        else:
            lock.unlink()  # the second build ends
        return False

    lock.touch()
    old(lock, lock.parent)
    monkeypatch.setattr(op_builds, "_is_open_here", look)
    monkeypatch.setattr(op_builds, "time", Clock(lambda: old(lock, lock.parent)))
    op_builds.delete_abandoned_locks()
    assert len(looks) == 2 and not warnings


def test_a_build_on_another_host_is_waited_for_while_it_writes_files(
    lock: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def build() -> None:
        written.append(lock.parent / f"{len(written)}.o")
        written[-1].touch()
        for path in (written[-1], lock.parent):
            os.utime(path, (clock.now, clock.now))
        if len(written) == 20:
            lock.unlink()

    lock.touch()  # no process of this host has it open
    clock = Clock(build)
    monkeypatch.setattr(op_builds, "time", clock)
    op_builds.delete_abandoned_locks(patience_s=1.0)
    assert len(written) == 20 and 20 * op_builds._POLL_S > 1.0
    assert not warnings


def test_an_old_lock_is_deleted_at_once_also_in_pytorchs_default_folder(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(op_builds, "get_default_build_root", lambda: str(tmp_path))
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    old(lock, lock.parent)
    started = time.monotonic()
    op_builds.delete_abandoned_locks()
    assert not lock.exists() and time.monotonic() - started < op_builds.PATIENCE_S / 2
    assert len(warnings) == 1


def test_the_engine_deletes_locks_before_it_loads_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def deletion() -> None:
        raise MegaclipError("locks are deleted here")

    monkeypatch.setattr(build, "raise_on_all_ranks", contextlib.nullcontext)
    monkeypatch.setattr(build, "delete_abandoned_locks", deletion)
    monkeypatch.setattr(build.deepspeed, "initialize", lambda **_: pytest.fail("DeepSpeed loads ops"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    settings = {"gradient_clipping": 0.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    config = TrainingConfig(Path("ds.json"), settings, MegaclipSection())
    with pytest.raises(MegaclipError, match="locks are deleted here"):
        build.build_engine(config, arguments=None, model_config=None)
