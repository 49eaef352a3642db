"""Stop signals and a killed launcher, in one rank. tests/end_to_end/test_resume.py tests them in a run."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from megaclip.engine.run import Run
from megaclip.guards import signals as stop
from megaclip.guards.signals import StopSignals

ROOT = Path(__file__).resolve().parents[3]
# One rank per argument, its LOCAL_SIZE, "none" for no such variable. The main thread of a rank is in a C call that does
# not return, as in a collective with a rank that has died. Ranks are forks, because importing megaclip takes seconds.
STUCK = """
import ctypes, os, sys
from megaclip.guards.signals import StopSignals

for local_size in sys.argv[1:]:
    if os.fork() == 0:
        if local_size != "none":
            os.environ["LOCAL_SIZE"] = local_size
        with StopSignals():
            reader, writer = os.pipe()
            print(local_size, os.getpid(), flush=True)
            ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
            print("interrupted", flush=True)
        os._exit(0)
for _ in sys.argv[1:]:
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def start(program: str, *arguments: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_signals_that_end_a_stuck_rank() -> None:
    """A second signal of the same kind, except SIGUSR1. For Ctrl-C the terminal sends SIGINT and the launcher SIGTERM.

    SIGTERM alone, if another rank of the host is missing: LOCAL_SIZE claims more ranks than there are.
    """
    ranks = start(STUCK, "none", "none", "9999")
    assert ranks.stdout is not None and ranks.stderr is not None
    lines = sorted(ranks.stdout.readline() for _ in range(3))  # they come in any order
    processes = [int(line.split()[1]) for line in lines]
    try:
        for process, first, *others in (
            (processes[0], signal.SIGTERM),
            (processes[1], signal.SIGTERM, signal.SIGTERM),
            (processes[2], signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT),
        ):
            os.kill(process, first)
            if others:
                said = f"{first.name}: saving and stopping after this step"
                assert any(said in line for line in iter(ranks.stderr.readline, ""))
            for number in others:
                time.sleep(0.1)  # equal signals that are pending are one
                os.kill(process, number)
            assert ranks.stdout.readline() == f"{128 + first}\n"
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        ranks.communicate()


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


def test_a_late_signal_does_not_change_how_a_rank_ends() -> None:
    output, _ = start(LATE_SIGNALS, *LATE_CASES).communicate(timeout=600)
    assert output.split() == ["7"] * len(LATE_CASES)


@pytest.mark.parametrize("step", [2, 3])
def test_a_first_signal_in_the_last_save_or_evaluation_is_late(step: int) -> None:
    """A resumed run at its last step only evaluates."""
    run, signals, late = Mock(step=step, last_step=3), StopSignals(), list[bool]()

    def train_step(_: object) -> Mock:
        run.step = 3
        return Mock()

    run.trainer.train_step = train_step
    run._save = run._evaluate = lambda *_, **__: late.append(signals.run_is_ending)
    assert Run._train_steps(run, Mock(bad_counts={}), Mock(), signals) is None
    assert late == [True] * (4 - step)


def test_the_signal_handlers_are_restored_when_an_error_ends_the_run() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with pytest.raises(KeyError), StopSignals() as signals:
        assert signals.received_by_any_rank() is None
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        raise KeyError
    assert {number: signal.getsignal(number) for number in before} == before


# One launcher per argument, each with one rank. The rank trains, has not started to train, or lacks the launcher's
# environment variables. LOCAL_SIZE claims a second rank: a rank that receives SIGTERM while another is missing ends at
# once, but not here.
LAUNCHERS = """
import os, sys, time
from megaclip.guards import signals as stop

stop._POLL_S = 0.05

def run_rank(kind, writer):
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

for kind in sys.argv[1:]:
    if os.fork() == 0:
        reader, writer = os.pipe()
        if kind != "no launcher":
            os.environ["LOCAL_SIZE"] = "2"
        if os.fork() == 0:
            run_rank(kind, writer)
        os.read(reader, 1)
        os.write(1, f"{os.getpid()}\\n".encode())  # at once: print may write the end of the line later
        time.sleep(600)
"""


def test_a_rank_ends_with_its_launcher() -> None:
    launchers = start(LAUNCHERS, "trains", "starts", "no launcher")
    assert launchers.stdout is not None
    for process in [int(launchers.stdout.readline()) for _ in range(3)]:
        os.kill(process, signal.SIGKILL)
    rest, errors = launchers.communicate(timeout=300)  # until the ranks have closed their copies of the pipes
    assert sorted(rest.split()) == ["saved", "slept"]
    assert errors.count("has ended; this rank saves") == 2


def test_a_launcher_that_ends_while_it_is_looked_at_causes_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal, SIGUSR1, would mean that `deepspeed` has ended, and would change the exit code of the run."""
    parents, sent = iter([5, 1]), []
    monkeypatch.setattr(stop.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(stop, "_parent_of", lambda _: None)
    monkeypatch.setattr(stop, "_POLL_S", 0.0)
    monkeypatch.setattr(stop.os, "kill", lambda _, number: sent.append(number))
    stop._watch(5, 4)
    assert sent == [signal.SIGTERM]
