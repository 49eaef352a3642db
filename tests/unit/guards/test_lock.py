"""The lock on a run's folder: its holder, and when it is free again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megaclip.errors import ConfigError
from megaclip.guards import lock as run_lock
from megaclip.guards.lock import LOCK, RunLock

ROOT = Path(__file__).resolve().parents[3]
# A process that holds the lock of the folder argv[1] until it is killed. A second argument simulates another host. A
# busy machine may delay the heartbeats for seconds.
HOLDER = """
import socket, sys, time
from pathlib import Path
from megaclip.guards import lock as run_lock

run_lock.HEARTBEAT_S, run_lock.SILENCE_S = 0.2, 3.0 if len(sys.argv) == 2 else 8.0
if len(sys.argv) > 2:
    socket.gethostname = lambda: "another-host"
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
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(run_lock, "SILENCE_S", 3.0)


def test_a_second_run_is_refused_with_host_process_and_start_until_the_first_is_killed(tmp_path, monkeypatch):
    with holder(tmp_path) as first:
        record = json.loads((tmp_path / LOCK).read_text())
        first.send_signal(signal.SIGSTOP)  # a stopped run still holds its folder
        time.sleep(run_lock.SILENCE_S + 1)
        with pytest.raises(ConfigError) as refused:
            RunLock(tmp_path).take()
        for fact in (str(tmp_path), f"host {record['host']}", f"process {first.pid}", f"since {record['since']}"):
            assert fact in str(refused.value)
        first.kill()
        first.wait()
        monkeypatch.setattr(run_lock, "SILENCE_S", 600.0)  # a busy machine may take seconds
        second = RunLock(tmp_path)
        began = time.monotonic()
        second.take()
        assert time.monotonic() - began < 300
        second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_another_host_holds_its_folder_while_its_heart_beats_and_ends_when_it_has_lost_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_lock, "SILENCE_S", 8.0)
    with holder(tmp_path, "on another host") as first:
        with pytest.raises(ConfigError, match=f"host another-host, process {first.pid}"):
            RunLock(tmp_path).take()
        first.send_signal(signal.SIGSTOP)  # this host can no longer see its heartbeat
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)  # returns when all of its threads are stopped
        second = RunLock(tmp_path)
        began = time.monotonic()
        second.take()
        assert time.monotonic() - began > 0.9 * run_lock.SILENCE_S
        first.send_signal(signal.SIGCONT)
        assert first.wait(120) == 1
        assert first.stderr is not None and "is in use by another run" in first.stderr.read()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        second.release()


def test_a_zombie_does_not_hold_a_folder(tmp_path):
    """Its parent has not waited for it. It can no longer write."""
    with holder(tmp_path) as first:
        first.kill()
        assert os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT) is not None
        second = RunLock(tmp_path)
        second.take()
        second.release()


def test_damaged_files_do_not_block_their_folder(tmp_path):
    def take(content: str) -> None:
        folder = tmp_path / str(len(content))
        folder.mkdir()
        (folder / LOCK).write_text(content)
        (folder / ".lock").write_text(content)
        os.utime(folder / ".lock", (0, 0))
        lock = RunLock(folder)
        lock.take()
        lock.release()

    with ThreadPoolExecutor() as threads:
        list(threads.map(take, ("", "{", "[]", '{"id": 3}')))


def test_an_empty_lock_is_deleted_only_when_it_has_not_changed_for_a_heartbeat(tmp_path, monkeypatch):
    """It is empty after a power cut, and also for the moment in which another run creates it, by its own clock."""
    (tmp_path / ".lock").touch()
    os.utime(tmp_path / ".lock", (0, 0))
    began = time.monotonic()
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 1.5)
    monkeypatch.setattr(run_lock, "SILENCE_S", 600.0)
    lock = RunLock(tmp_path)
    lock.take()
    assert 1.4 < time.monotonic() - began < 300
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


def test_a_run_whose_lock_was_deleted_continues_until_another_run_takes_it(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    lock, other = RunLock(tmp_path), RunLock(tmp_path)
    lock.take()
    for path in tmp_path.iterdir():
        path.unlink()
    time.sleep(1.0)
    assert not ended.is_set()
    other.take()
    assert ended.wait(60)
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text())["id"] == other._record["id"]
    other.release()
