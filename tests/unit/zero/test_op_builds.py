"""Builds of DeepSpeed's ops are waited for, unless they were killed, and reported."""

import contextlib
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from megaclip.config import MegaclipSection, TrainingConfig
from megaclip.errors import MegaclipError
from megaclip.zero import build, op_builds

# Two builds, each of which lasts until the process is killed or reads a line.
BUILDER = """
import sys
from megaclip.zero.op_builds import _Lock
lock = _Lock(sys.argv[1])
for _ in range(2):
    assert lock.try_acquire()
    print("building", flush=True)
    sys.stdin.readline()
    lock.release()
    sys.stdin.readline()
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


def test_a_build_is_waited_for_until_it_ends_or_is_killed(lock: Path) -> None:
    """PyTorch before 2.14 would wait for the lock of a killed build for ever."""
    command = [sys.executable, "-c", BUILDER, lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        send_line = partial(print, file=process.stdin, flush=True)
        for stop in (send_line, process.kill):
            assert process.stdout is not None and process.stdout.readline() == "building\n"
            own = op_builds._Lock(str(lock))
            assert not own.try_acquire()
            threading.Timer(0.5, stop).start()
            began = time.monotonic()
            own.wait()
            assert time.monotonic() - began > 0.4
            send_line() if stop is send_line else process.wait()
    assert FileBaton(str(lock)).try_acquire()  # a program with PyTorch's own lock does not wait
    assert own.try_acquire()  # the file of a build of such a program that was killed


@pytest.mark.parametrize("torch_has_its_own_lock", [False, True])
def test_loading_an_op_reports_the_compilation(
    lock: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, torch_has_its_own_lock: bool
) -> None:
    """PyTorch from 2.14 on has a lock that ends with its process."""
    monkeypatch.setattr(op_builds, "_REPORT_S", 0.2)
    monkeypatch.setattr(op_builds, "_jit_load", lambda builder, verbose: time.sleep(0.5) or "module")
    if torch_has_its_own_lock:
        monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    else:
        monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton, raising=False)
    assert op_builds._load_and_report(SimpleNamespace(name="fused_adam"), False) == "module"
    assert hasattr(cpp_extension, "FileBaton") != torch_has_its_own_lock
    assert torch_has_its_own_lock or cpp_extension.FileBaton is op_builds._Lock
    assert [line.split(" by ")[0].split(" in ")[0] for line in lines[:: len(lines) - 1]] == [
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
