"""The lock on a run's folder: its holder, and when it is free again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megaclip.errors import ConfigError
from megaclip.guards import lock as run_lock
from megaclip.guards.lock import LOCK, RunLock

ROOT = Path(__file__).resolve().parents[3]
# A process that holds the lock of the folder argv[1] until it is killed. A second argument simulates another host.
HOLDER = """
import sys, time
from pathlib import Path
from megaclip.guards import lock as run_lock

run_lock.HEARTBEAT_S = 0.2
if len(sys.argv) > 2:
    run_lock._machine = lambda: "another machine"
run_lock.RunLock(Path(sys.argv[1])).take()
print("taken", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def times(monkeypatch) -> None:
    """Use short heartbeats and a long time of silence. A wait for a heartbeat ends when one arrives."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(run_lock, "SILENCE_S", 120.0)


@pytest.fixture
def ended(monkeypatch) -> threading.Event:
    """Event that is set when a holder in this process would have ended the process. Its thread ends instead."""
    event = threading.Event()

    def end(_: int) -> None:
        event.set()
        sys.exit()

    monkeypatch.setattr(os, "_exit", end)
    return event


def test_a_second_run_is_refused_with_host_process_and_start_until_the_first_is_killed(tmp_path):
    with holder(tmp_path) as first:
        record = run_lock._read(tmp_path / LOCK)  # read again if it was just being written
        assert record is not None
        with pytest.raises(ConfigError) as refused:
            RunLock(tmp_path).take()
        for fact in (str(tmp_path), f"host {record['host']}", f"process {first.pid}", f"since {record['since']}"):
            assert fact in str(refused.value)
        first.send_signal(signal.SIGSTOP)  # a stopped run still holds its folder
        time.sleep(3 * run_lock.HEARTBEAT_S)
        with pytest.raises(ConfigError):
            RunLock(tmp_path).take()
        first.kill()
        # The process is a zombie until it is waited for. It can no longer write.
        assert os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT) is not None
        second = RunLock(tmp_path)
        second.take()
        second.release()
    assert not (tmp_path / LOCK).exists()


def test_a_run_on_another_host_holds_its_folder_while_its_heartbeat_continues_and_ends_when_it_has_lost_it(
    tmp_path, monkeypatch
):
    with holder(tmp_path, "on another host") as first:
        with pytest.raises(ConfigError, match=f"process {first.pid}"):
            RunLock(tmp_path).take()
        first.send_signal(signal.SIGSTOP)  # this host can no longer see its heartbeat
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)  # returns when all of its threads are stopped
        monkeypatch.setattr(run_lock, "SILENCE_S", 2.0)
        second = RunLock(tmp_path)
        began = time.monotonic()
        second.take()
        assert time.monotonic() - began > 0.9 * run_lock.SILENCE_S
        first.send_signal(signal.SIGCONT)
        assert first.wait(120) == 1
        assert first.stderr is not None and "is in use by another run" in first.stderr.read()
        second.release()


def test_the_lock_of_an_earlier_process_with_the_same_number_does_not_count(tmp_path):
    lock = RunLock(tmp_path)
    lock._record |= {"started": "1"}  # the process exists, but it started later
    lock._create()
    again = RunLock(tmp_path)
    again.take()
    again.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 3}'])
def test_a_damaged_lock_does_not_block_its_folder(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()


def test_of_runs_that_start_at_the_same_moment_one_gets_the_lock(tmp_path):
    locks = [RunLock(tmp_path) for _ in range(8)]
    results: list[Any] = []

    def take(lock: RunLock) -> None:
        try:
            lock.take()
            results.append(lock)
        except ConfigError as error:
            results.append(error)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [result for result in results if isinstance(result, RunLock)]
    assert len(results) == len(locks)
    winner.release()


def test_release_leaves_the_lock_of_another_run(tmp_path, ended):
    lock, other = RunLock(tmp_path), RunLock(tmp_path)
    lock.take()
    other._create()
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text())["id"] == other._record["id"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the holder ends with SystemExit
def test_a_holder_that_was_stopped_before_its_heartbeat_does_not_overwrite_the_next_record(
    tmp_path, ended, monkeypatch
):
    frozen, continues, read = threading.Event(), threading.Event(), run_lock._read

    def read_and_stand_still(path: Path) -> dict[str, Any] | None:
        record = read(path)
        if threading.current_thread() is first._thread and not frozen.is_set():
            frozen.set()
            assert continues.wait(120)
        return record

    first, second = RunLock(tmp_path), RunLock(tmp_path)
    monkeypatch.setattr(run_lock, "_read", read_and_stand_still)
    first.take()
    assert frozen.wait(120)
    second._create()
    continues.set()
    assert ended.wait(120)  # it has written one heartbeat and then found the other record
    assert json.loads((tmp_path / LOCK).read_text())["id"] == second._record["id"]
    first.release()
