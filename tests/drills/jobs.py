"""Start a run of two ranks in half a second by forking this process, and follow its steps.

The drills' own process has imported torch, DeepSpeed and megaclip, and has one thread. A job is a launcher, forked from
this process, and two ranks, forked from the launcher. Like DeepSpeed's launcher, it forwards SIGTERM, and ends the
other rank when one has failed.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megaclip.checkpoint import store
from megaclip.engine.metrics import Metrics
from megaclip.engine.run import main
from tests.end_to_end.training_runs import free_port

WORLD_SIZE = 2
LIMIT_S = 240.0
"""Seconds after which a run counts as hanging. Far above its duration on a busy machine."""
_GRACE_S = 30.0
"""Seconds between the launcher's SIGTERM and its SIGKILL, as in DeepSpeed's launcher."""

Prepare = Callable[[int], None]
"""Function that changes a rank before it trains. Its argument is the rank."""


@dataclass
class Job:
    """A started run."""

    launcher: int
    """Process of the launcher."""
    folder: Path
    """Records of this job: pids, steps_RANK, published, output."""
    limit_s: float = LIMIT_S
    began: float = field(default_factory=time.monotonic)
    exit_code: int | None = None

    @property
    def output(self) -> str:
        """Standard output and standard error of the launcher and its ranks."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def ranks(self) -> list[int]:
        """Processes of the ranks that have been started."""
        path = self.folder / "pids"
        while not path.exists():
            time.sleep(0.01)
        return [int(pid) for pid in path.read_text().split()]

    def losses(self, rank: int = 0) -> dict[int, float]:
        """Return the loss of each step that a rank has finished."""
        lines = _complete_lines(self.folder / f"steps_{rank}")
        return {int(step): float.fromhex(loss) for step, loss in map(str.split, lines)}

    def last_step(self) -> int:
        return max(self.losses(), default=0)

    def published(self) -> list[int]:
        """Return the steps whose checkpoints are complete, in order."""
        return [int(line) for line in _complete_lines(self.folder / "published")]

    def wait_for_step(self, step: int) -> None:
        """Wait until the first rank has finished a step, or the job has ended."""
        while self.last_step() < step and not self.has_ended() and not self.hangs():
            time.sleep(0.002)

    def hangs(self) -> bool:
        return time.monotonic() - self.began > self.limit_s

    def has_ended(self) -> bool:
        """Return whether the launcher has ended. If so, `exit_code` is set."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.launcher, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None

    def wait(self) -> bool:
        """Wait until the launcher and all ranks have ended. If they hang, kill them and return False."""
        while not (self.has_ended() and not self._processes()) and not self.hangs():
            time.sleep(0.03)
        hangs = not self.has_ended() or bool(self._processes())
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        while not self.has_ended():
            time.sleep(0.03)
        return not hangs

    def _processes(self) -> list[psutil.Process]:
        """Return the running processes of the job's session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.launcher and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def start(command: list[str], folder: Path, prepare: Prepare | None = None, limit_s: float = LIMIT_S) -> Job:
    """Start a run. folder: a new folder for the job's records."""
    folder.mkdir(parents=True)
    port = free_port()
    pid = os.fork()
    if pid == 0:
        _never_returns(lambda: _launch(command, folder, port, prepare))
    return Job(pid, folder, limit_s)


def in_child(function: Callable[[], Any]) -> None:
    """Call a function that may start threads in a separate process."""
    pid = os.fork()
    if pid == 0:
        _never_returns(lambda: (function() and 0) or 0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"{function} has failed"


def _never_returns(function: Callable[[], int]) -> None:
    code = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _launch(command: list[str], folder: Path, port: int, prepare: Prepare | None) -> int:
    os.setsid()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ranks: list[int] = []
    ending: list[float] = []

    def end(*_: object) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGTERM)
        ending.append(time.monotonic())

    signal.signal(signal.SIGTERM, end)
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            # mypy cannot infer the type of a lambda with a default value
            _never_returns(lambda rank=rank: _train(command, folder, port, rank, prepare))  # type: ignore[misc]
        ranks.append(pid)
    (folder / "pids.tmp").write_text(" ".join(map(str, ranks)))
    (folder / "pids.tmp").rename(folder / "pids")
    first_failure, running = 0, set(ranks)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            running.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not first_failure:
                first_failure = code if code > 0 else 128 - code
                end()
        if ending and time.monotonic() - ending[0] > _GRACE_S:
            for rank in running:
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.01)
    return first_failure


def _train(command: list[str], folder: Path, port: int, rank: int, prepare: Prepare | None) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    from tests.distributed.preload import log_as_rank  # here, because tests of the counts do not need it

    log_as_rank()
    steps = os.open(folder / f"steps_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    published = os.open(folder / "published", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    record, publish = Metrics.record_step, store.publish

    def recording(metrics: Metrics, step: int, values: Any) -> None:
        os.write(steps, f"{step} {values.loss.hex()}\n".encode())
        record(metrics, step, values)

    def publishing(target: store.Target, files: Any) -> None:
        publish(target, files)
        os.write(published, f"{target.step}\n".encode())

    Metrics.record_step = recording  # type: ignore[method-assign]
    store.publish = publishing
    if prepare is not None:
        prepare(rank)
    return main(command, other_ranks_delay_s=0.5)


def _complete_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
