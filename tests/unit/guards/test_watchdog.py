"""The watchdog: limits, verdicts and the store. tests/end_to_end/test_process_faults.py tests it in runs that hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megaclip import threads
from megaclip.data import workers
from megaclip.guards import watchdog


@pytest.fixture(autouse=True)
def worker_timeout_kept(monkeypatch) -> None:
    """Restore the time-out of this process's data workers, which a watchdog changes."""
    monkeypatch.setattr(workers, "_timeout_s", workers.WORKER_TIMEOUT_S)


@pytest.fixture
def without_ranks(monkeypatch) -> None:
    monkeypatch.setattr(watchdog.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 3)


@pytest.mark.parametrize("hang_timeout_s", [None, 3.0, 5000.0])
def test_data_workers_time_out_before_the_watchdog(hang_timeout_s, without_ranks):
    watched = watchdog.Watchdog(Path("nowhere"), hang_timeout_s)
    assert workers._timeout_s < watched.step_limit_s()
    assert workers._timeout_s <= workers.WORKER_TIMEOUT_S


def test_the_default_limit_follows_the_median_step(without_ranks, monkeypatch):
    watched, now = watchdog.Watchdog(Path("nowhere"), None), [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    assert watched.step_limit_s() == watchdog.SHORTEST_DEFAULT_S
    for step in range(1, 10):
        now[0] += 500.0 if step in (3, 6) else 60.0  # the third step includes a compilation, the sixth was slow
        watched.step_done(step)
    assert watched.step_limit_s() == watchdog.STEPS_OF_DEFAULT * 60.0


def test_work_without_steps_may_take_longer_than_a_step(without_ranks, monkeypatch):
    watched, now = watchdog.Watchdog(Path("nowhere"), 100.0), [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    for step in range(1, 5):
        watched.step_done(step)
    now[0] += 101.0
    assert watched._state()["late"]
    with watched.phase("an evaluation"):
        now[0] += 3599.0
        assert not watched._state()["late"]
        now[0] += 2.0
        assert watched._state()["late"]


def watch_with(answers: dict[int, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> dict[int, str] | None:
    """Return the verdict of rank 0, which hangs, given the heartbeats of several ranks before and after its wait."""
    monkeypatch.setattr(watchdog.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: len(answers))
    dog = watchdog.Watchdog(Path("nowhere"), 0.01)
    dog._set_timer = lambda: None  # type: ignore[method-assign]
    dog._beat = lambda: False  # type: ignore[method-assign]
    moments = iter([0, 1])

    def heartbeats() -> dict[int, dict[str, Any]]:
        moment = next(moments)
        return {rank: states[moment] for rank, states in answers.items() if moment < len(states)}

    dog._heartbeats = heartbeats  # type: ignore[method-assign]
    return dog._verdict(True)


def states(beats: tuple[int, int] = (1, 4), collectives: int = 9, phase: str = "a step", late: bool = True) -> list:
    return [{"beats": beat, "step": 5, "phase": phase, "collectives": collectives, "late": late} for beat in beats]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({0: states(), 1: states(collectives=8)}, {1: "it has entered 8 collectives since the start, others 9"}),
        ({0: states(), 1: states(), 2: states((3, 3))}, {2: watchdog.SILENT}),
        ({0: states(), 1: states(), 2: []}, {2: watchdog.SILENT}),
        ({0: states()[:1], 1: states()[:1]}, {0: watchdog.SILENT}),  # the store has stopped
        ({0: states(), 1: states(phase="an evaluation", late=False)}, None),
        ({0: states(), 1: states((3, 3), phase="an evaluation", late=False)}, {1: watchdog.SILENT}),
        ({0: states(), 1: states(collectives=8, phase="an evaluation")}, {1: "it has entered 8"}),
        ({0: states(), 1: states()}, {0: "all have entered the same", 1: "all have entered the same"}),
    ],
)
def test_the_verdict_on_a_hang(answers, expected, monkeypatch):
    verdict = watch_with(answers, monkeypatch)
    assert (verdict is None) == (expected is None)
    for rank, text in (expected or {}).items():
        assert verdict is not None and verdict.keys() == expected.keys() and verdict[rank].startswith(text)


def test_a_hanging_run_ends_although_its_stacks_cannot_be_written(without_ranks, monkeypatch):
    dog, end = watchdog.Watchdog(Path("nowhere"), 0.01), Mock()
    monkeypatch.setattr(watchdog, "write_stacks", Mock(side_effect=ValueError("no such shard")))
    monkeypatch.setattr(watchdog, "kill_workers", Mock())
    monkeypatch.setattr(watchdog, "logging", Mock())
    monkeypatch.setattr(watchdog.os, "_exit", end)
    dog._ask = Mock(return_value=1)  # type: ignore[method-assign]
    dog._report(None)
    end.assert_called_once_with(watchdog.HANG_EXIT_CODE)


def test_stacks_name_shards_in_any_encoding(tmp_path):
    assert "a\\udcff.tar" in watchdog.write_stacks(tmp_path, 0, "last row: a\udcff.tar").read_text()


class PausedFuture(threads.Future):
    """Future that simulates a pause of this process in the first wait for a result.

    The time-out has passed, and the result is not available yet.
    """

    waits = 0

    def result(self, timeout: float | None = None) -> Any:
        self.waits += 1
        if self.waits == 1:
            raise watchdog.TimeoutError
        return super().result(60.0)


def test_a_store_that_answers_is_recognised_although_this_process_was_paused(without_ranks, monkeypatch):
    monkeypatch.setattr(watchdog.distributed_c10d, "_get_default_store", torch.distributed.HashStore)
    monkeypatch.setattr(threads, "Future", PausedFuture)
    assert watchdog.Watchdog(Path("nowhere"), 1.0)._ask(lambda store: "an answer") == "an answer"


SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_whose_process_is_stopped_does_not_block_the_watchdog(without_ranks, monkeypatch):
    """The first rank's process holds the store. torch's time-outs do not work while that process is stopped."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        store = torch.distributed.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        monkeypatch.setattr(watchdog.distributed_c10d, "_get_default_store", lambda: store)
        watched = watchdog.Watchdog(Path("nowhere"), 1.0)
        watched._heartbeat_s = 60.0  # while the store answers, the questions wait for this time
        assert [watched._beat(), watched._beat()] == [False, False]
        watched._heartbeat_s = 0.1
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # returns when all of its threads are stopped
        began = time.monotonic()
        assert [watched._beat() for _ in range(3)] == [None] * 3
        assert watched._heartbeats() == {}
        assert time.monotonic() - began < 60
        watched._heartbeat_s = 60.0
        server.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 120
        while watched._beat() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert watched._heartbeats()[0]["beats"] == watched._beats
        store.add("watchdog/hang", 1)
        assert watched._beat() is True
    finally:
        server.kill()
        server.communicate()
