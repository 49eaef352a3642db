"""Stop signals and a killed launcher, in one rank. tests/end_to_end/test_resume.py tests them in a run."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from megaclip.guards import signals as stop
from megaclip.guards.signals import StopSignals

ROOT = Path(__file__).resolve().parents[3]
# A rank whose main thread is in a C call that does not return, as in a collective with a rank that has died.
STUCK = """
import ctypes, os
from megaclip.guards.signals import StopSignals

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
        # For Ctrl-C the terminal sends SIGINT and the launcher SIGTERM. Slurm may send SIGUSR1 twice.
        ([signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], 128 + signal.SIGINT),
    ],
)
def test_a_second_signal_of_the_same_kind_ends_a_stuck_rank(signals: list[signal.Signals], expected: int) -> None:
    with stuck_rank() as rank:
        rank.send_signal(signals[0])
        assert rank.stderr is not None
        said = f"{signals[0].name}: saving and stopping after this step"
        assert any(said in line for line in iter(rank.stderr.readline, ""))
        for number in signals[1:]:
            rank.send_signal(number)
        assert rank.wait(300) == expected
        assert rank.stdout is not None and rank.stdout.read() == ""


def test_sigterm_ends_a_stuck_rank_if_another_rank_of_its_host_is_missing() -> None:
    """LOCAL_SIZE claims more ranks than the parent, this process, has children."""
    with stuck_rank(LOCAL_SIZE="9999") as rank:
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(300) == 128 + signal.SIGTERM


@pytest.mark.parametrize("answer", [psutil.NoSuchProcess(5), []])
def test_no_rank_is_missing_if_the_launcher_ends_while_its_children_are_counted(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks must save in this case."""
    parents = iter([5, 1])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(stop.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(stop.psutil, "Process", Mock(return_value=Mock(children=Mock(side_effect=[answer]))))
    assert not stop._is_a_local_rank_missing(5)


# One rank per argument LATE+PEER. The rank stops because a peer has received PEER, or it trains to its end. Then it
# receives the signal LATE itself. All ranks are forks of one process, because importing megaclip takes seconds.
LATE_SIGNALS = """
import os, signal, sys
from megaclip.guards import signals as stop

for case in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        late, of_peer = (getattr(signal, name, None) for name in case.split("+"))
        stop.gather_integers = lambda own: [own, [of_peer or 0]]
        with stop.StopSignals() as signals:
            assert signals.received_by_any_rank() == of_peer
        os.kill(os.getpid(), late)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
LATE_CASES = ("SIGUSR1+SIGUSR1", "SIGTERM+SIGUSR1", "SIGINT+SIGUSR1", "SIGUSR1+none")


@pytest.fixture(scope="module")
def exit_codes() -> dict[str, int]:
    """Return the exit code of each rank of LATE_SIGNALS, by its argument."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, "-c", LATE_SIGNALS, *LATE_CASES],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return dict(zip(LATE_CASES, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("case", LATE_CASES)
def test_a_late_signal_does_not_change_how_a_rank_ends(exit_codes: dict[str, int], case: str) -> None:
    assert exit_codes[case] == 7


def test_the_signal_handlers_are_restored_when_an_error_ends_the_run() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with pytest.raises(KeyError), StopSignals() as signals:
        assert signals.received_by_any_rank() is None
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        raise KeyError
    assert {number: signal.getsignal(number) for number in before} == before


# A launcher with one rank. The rank trains, has not started to train, or lacks the launcher's environment variables.
LAUNCHER = """
import os, sys, time

kind = sys.argv[1]
from megaclip.guards import signals as stop

stop._POLL_S = 0.05
reader, writer = os.pipe()
if os.fork() == 0:
    stop.end_with_launcher()
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
    monkeypatch.setattr(stop.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(stop, "_parent_of", lambda _: None)
    monkeypatch.setattr(stop, "_POLL_S", 0.0)
    monkeypatch.setattr(stop.os, "kill", lambda _, number: sent.append(number))
    stop._watch(5, 4)
    assert sent == [signal.SIGTERM]
