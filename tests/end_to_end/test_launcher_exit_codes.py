"""Exit codes of the deepspeed launcher after a signal, as in docs/training.md. All runs save before they end."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.training_runs import flags, launcher_command, launcher_environment


@pytest.mark.long
@pytest.mark.parametrize(
    ("receiver", "ignores_sigint", "code"),
    [
        ("all", False, -signal.SIGINT),  # Ctrl-C in a terminal; a shell reports 130
        ("all", True, 1),  # Ctrl-C, with the launcher in the background of a script
        ("rank", False, 128 + signal.SIGUSR1),
        ("deepspeed", False, -signal.SIGTERM),  # it has no handler; launch.py and the ranks continue
    ],
)
def test_exit_code_of_the_launcher(
    tiny_run: Path, tmp_path: Path, receiver: str, ignores_sigint: bool, code: int
) -> None:
    command = launcher_command(flags(tiny_run, tiny_run / "zero1.json", tmp_path, train_steps=100_000))
    launcher = subprocess.Popen(
        command,
        env=launcher_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignores_sigint else signal.SIG_DFL),
    )
    assert launcher.stdout is not None
    try:
        output = ""
        while " step 3/" not in output:
            line = launcher.stdout.readline()
            assert line, output
            output += line
        if receiver == "all":
            os.killpg(launcher.pid, signal.SIGINT)
        elif receiver == "deepspeed":
            launcher.terminate()
        else:
            os.kill(rank_of(tmp_path), signal.SIGUSR1)
        output += launcher.stdout.read()  # ends when all processes of the run have ended
        assert launcher.wait(60) == code, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert "stopped by" in output and (tmp_path / "run" / "checkpoints" / "latest").exists()


def rank_of(logs: Path) -> int:
    """Return the process id of a rank of the run in `logs`."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    ranks = [line for line in listed.splitlines() if "train.py --local_rank=" in line and str(logs) in line]
    return int(ranks[0].split()[0])
