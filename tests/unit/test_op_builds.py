"""Locks of killed builds of DeepSpeed's ops are deleted, those of running builds are waited for."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from megaclip.config import MegaclipSection, TrainingConfig
from megaclip.engine import build
from megaclip.errors import MegaclipError
from megaclip.hosts import op_builds

BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("building", flush=True)
time.sleep(float(sys.argv[2]))
baton.release()
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


def start_builder(lock: Path, seconds: float) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", BUILDER, lock, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "building\n"
    return process


def test_the_lock_of_a_killed_build_is_deleted_and_named(lock: Path, warnings: list[str]) -> None:
    """PyTorch waited for it for ever."""
    builder = start_builder(lock, 600)
    builder.kill()
    builder.wait()
    assert lock.exists()
    op_builds.delete_abandoned_locks(patience_s=0.5)
    assert FileBaton(lock).try_acquire()
    (line,) = warnings
    assert line.startswith(f"deleted {lock}: a killed build left it")


def test_a_build_on_this_host_is_waited_for(lock: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_builds, "_QUIET_S", 0.0)
    builder = start_builder(lock, 3)
    op_builds.delete_abandoned_locks(patience_s=0.1)
    assert builder.wait(5) == 0  # it fails if somebody else deletes its lock
    (line,) = warnings
    assert line.startswith(f"waiting for {lock}: another program compiles this op")


def test_a_build_on_another_host_is_waited_for_while_it_writes_files(lock: Path, warnings: list[str]) -> None:
    def build() -> None:
        for number in range(20):
            (lock.parent / f"{number}.o").touch()
            time.sleep(0.1)
        lock.unlink()

    lock.touch()  # no process of this host has it open
    builder = threading.Thread(target=build)
    builder.start()
    op_builds.delete_abandoned_locks(patience_s=1.0)
    assert (lock.parent / "19.o").exists()
    assert not warnings
    builder.join()


def test_an_old_lock_is_deleted_at_once_also_in_pytorchs_default_folder(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(op_builds, "get_default_build_root", lambda: str(tmp_path))
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    hour_ago = time.time() - 3600
    for path in (lock, lock.parent):
        os.utime(path, (hour_ago, hour_ago))
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
