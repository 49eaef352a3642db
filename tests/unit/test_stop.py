"""What the signals that end a run do to one process; tests/end_to_end/test_resume.py has the run."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaclip.engine.stop import StopSignals

ROOT = Path(__file__).resolve().parents[2]
# A rank whose main thread is in a library that neither returns nor is interrupted: as in a collective with a dead peer.
STUCK = """
import ctypes, os
from megaclip.engine.stop import StopSignals

with StopSignals():
    reader, writer = os.pipe()
    print("stuck", flush=True)
    ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
    print("interrupted", flush=True)
"""


@contextmanager
def stuck_rank(**variables: str) -> Iterator[subprocess.Popen]:
    rank = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "stuck\n"
        yield rank
    finally:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ([signal.SIGTERM, signal.SIGTERM], 128 + signal.SIGTERM),
        # The terminal's and the launcher's are one wish; Slurm's may come twice.
        ([signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], 128 + signal.SIGINT),
    ],
)
def test_the_same_signal_again_ends_a_rank_that_is_stuck(signals: list[signal.Signals], expected: int) -> None:
    with stuck_rank() as rank:
        rank.send_signal(signals[0])
        assert rank.stderr is not None
        assert f"{signals[0].name}: saving and ending after this step" in rank.stderr.readline()
        for number in signals[1:]:
            rank.send_signal(number)
        assert rank.wait(60) == expected
        assert rank.stdout is not None and rank.stdout.read() == ""


def test_a_stuck_rank_that_misses_one_of_its_hosts_ends_at_once() -> None:
    """Its parent, this process, has fewer children than the launcher started."""
    with stuck_rank(LOCAL_SIZE="9999") as rank:
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(60) == 128 + signal.SIGTERM


# One that is told by its peers to end, or has trained to the end, and gets the signal itself afterwards.
TOLD_LATE = """
import os, signal, sys
from megaclip.engine import stop

told = getattr(signal, sys.argv[2], None)
stop.gather_integers = lambda noted: [noted, [told or 0]]
with stop.StopSignals() as signals:
    assert signals.agreed() == told
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
os._exit(7)
"""


@pytest.mark.parametrize(
    ("late", "told"), [("SIGUSR1", "SIGUSR1"), ("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGUSR1"), ("SIGUSR1", "nothing")]
)
def test_a_signal_that_comes_late_does_not_change_how_a_rank_ends(late: str, told: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    done = subprocess.run([sys.executable, "-c", TOLD_LATE, late, told], cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 7


def test_the_handlers_are_given_back_when_an_error_ends_the_run() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with pytest.raises(KeyError), StopSignals() as signals:
        assert signals.agreed() is None
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        raise KeyError
    assert {number: signal.getsignal(number) for number in before} == before
