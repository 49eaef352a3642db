"""A signal to all processes, to one, or to a launcher: no rank is left, the run has saved, and the exit code."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from megaclip.guards.lock import LOCK
from tests.end_to_end.training_runs import WORLD_SIZE, flags, launcher_command, launcher_environment, wait_for_text


@pytest.mark.long
@pytest.mark.parametrize(
    ("receiver", "number", "code"),
    [
        ("all", signal.SIGINT, -signal.SIGINT),  # Ctrl-C in a terminal; a shell reports 130
        ("rank", signal.SIGUSR1, 128 + signal.SIGUSR1),  # as docs/training.md recommends
        ("deepspeed", signal.SIGTERM, -signal.SIGTERM),  # it has no handler; launch.py and the ranks continue
        ("launch.py", signal.SIGKILL, 0),  # the project cannot change this exit code
    ],
)
def test_ended_launchers_leave_no_rank_and_no_lost_step(
    tiny_run: Path, tmp_path: Path, receiver: str, number: signal.Signals, code: int
) -> None:
    log = tmp_path / "log"  # not a pipe: ranks would block when it is full
    with log.open("w") as output:
        deepspeed = subprocess.Popen(
            launcher_command(flags(tiny_run, tiny_run / "zero1.json", tmp_path, train_steps=100_000)),
            env=launcher_environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
    try:
        wait_for_text(log, " step 3/", deepspeed)
        (launch,) = psutil.Process(deepspeed.pid).children()
        ranks = launch.children()
        assert len(ranks) == WORLD_SIZE
        if receiver == "all":
            os.killpg(deepspeed.pid, number)
        else:
            os.kill({"rank": ranks[0], "deepspeed": deepspeed, "launch.py": launch}[receiver].pid, number)
        assert deepspeed.wait(300) == code, log.read_text()
        _, alive = psutil.wait_procs(ranks, timeout=300)
        assert alive == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(deepspeed.pid, signal.SIGKILL)
        deepspeed.wait()
    stopped = re.search(r"stopped by SIG\w+ after step (\d+)", log.read_text())
    assert stopped is not None, log.read_text()
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step_{int(stopped[1]):08d}"
    assert not (tmp_path / "run" / LOCK).exists()
