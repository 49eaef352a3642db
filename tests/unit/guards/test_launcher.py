"""A rank whose launcher is killed saves and ends. tests/end_to_end/test_process_faults.py kills the real launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaclip.guards import launcher as launched

ROOT = Path(__file__).resolve().parents[3]
# A launcher with one rank. The rank trains, has not started to train, or lacks the launcher's environment variables.
LAUNCHER = """
import os, sys, time

kind = sys.argv[1]
from megaclip.guards import launcher as launched
from megaclip.guards import signals as stop

launched._POLL_S = 0.05
reader, writer = os.pipe()
if os.fork() == 0:
    launched.end_with_launcher()
    stop.gather_integers = lambda own: [own]
    if kind == "trains":
        with stop.StopSignals() as signals:
            os.write(writer, b"1")
            while (received := signals.received_by_any_rank()) is None:
                time.sleep(0.01)
            print("saved", flush=True)
        os._exit(128 + received)
    os.write(writer, b"1")
    time.sleep(2 if kind == "no launcher" else 3600)
    print("slept", flush=True)
    os._exit(0)
os.read(reader, 1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("kind", "output"), [("trains", "saved\n"), ("starts", ""), ("no launcher", "slept\n")])
def test_a_rank_ends_with_its_launcher(kind: str, output: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")}
    # LOCAL_SIZE claims a second rank. A rank that receives SIGTERM while another is missing ends at once, but not here.
    environment |= {} if kind == "no launcher" else {"LOCAL_SIZE": "2"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, kind],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    assert launcher.stdout.readline() == "ready\n"
    launcher.kill()
    rest, errors = launcher.communicate(timeout=300)  # until the rank has closed its copies of the pipes
    assert rest == output
    assert ("has ended; this rank saves" in errors) == (kind != "no launcher")


def test_a_launcher_that_ends_while_it_is_looked_at_causes_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal, SIGUSR1, would mean that `deepspeed` has ended, and would change the exit code of the run."""
    parents, sent = iter([5, 1]), []
    monkeypatch.setattr(launched.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(launched, "_parent_of", lambda _: None)
    monkeypatch.setattr(launched, "_POLL_S", 0.0)
    monkeypatch.setattr(launched.os, "kill", lambda _, number: sent.append(number))
    launched._watch(5, 4)
    assert sent == [signal.SIGTERM]
