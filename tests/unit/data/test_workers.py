"""Killed workers: always one DataError, which names the row. Hanging workers: their stacks."""

import contextlib
import ctypes
import multiprocessing
import os
import random
import re
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megaclip.data import EvaluationLoader, ImageTransform, TrainLoader, forking, open_pairs, workers
from megaclip.data.batch import BadSample
from megaclip.data.reading import TrainReader
from megaclip.data.sources import PairDataset
from megaclip.data.workers import WORKER_TIMEOUT_S, WorkerResults, note_row, set_worker_timeout, worker_stacks
from megaclip.errors import DataError
from tests.unit.data.data_samples import CountingTokenizer, write_shards


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> PairDataset:
    folder = tmp_path_factory.mktemp("pairs")
    write_shards(folder, [7, 20, 3, 30])
    return open_pairs([str(folder / "*.tar")])


class Breaking:
    """Result that breaks the connection when it is received, as if its worker was killed while sending it."""

    def __init__(self, kills: bool) -> None:
        self._kills = kills

    def __reduce__(self) -> tuple[Any, ...]:
        return _break_connection, (os.getpid() if self._kills else 0,)


def _break_connection(process: int) -> None:
    if process:
        os.kill(process, signal.SIGKILL)
    raise ConnectionResetError(104, "Connection reset by peer")


@pytest.mark.parametrize("kills", [True, False])
def test_a_broken_connection_to_a_worker_is_a_data_error_that_names_the_row(kills):
    def read(item: int) -> Any:
        note_row(item)
        return Breaking(kills)

    results = WorkerResults(read, [17], num_workers=1, describe_row=lambda row: f"sample {row} of 3.tar")
    with pytest.raises(DataError, match=r"data worker died or hangs.*reading sample 17 of 3\.tar; if memory"):
        next(results)


def patch_fork(monkeypatch, in_child=lambda number: None, in_parent=lambda number, child: None):
    """Let processes that are forked from now on call a function first. Return the list of their ids.

    number: of the process, from 0.
    """
    fork, children = os.fork, []

    def patched() -> int:
        number = len(children)
        if (child := fork()) == 0:
            in_child(number)
        else:
            in_parent(number, child)
            children.append(child)
        return child

    monkeypatch.setattr(os, "fork", patched)
    return children


def sleep_if_first(number: int) -> None:
    """Sleep inside `os.fork`, like a process that has inherited a locked lock of the interpreter."""
    if number == 0:
        time.sleep(600)


def test_a_worker_that_hangs_while_it_is_forked_is_forked_again(monkeypatch):
    def wait(number: int, child: int) -> None:
        monkeypatch.setattr(forking, "START_WAIT_S", 60.0 if number else 0.5)

    children = patch_fork(monkeypatch, sleep_if_first, wait)
    assert list(WorkerResults(lambda item: item + 1, [1, 2, 3, 4], num_workers=2)) == [2, 3, 4, 5]
    assert len(children) == 3
    with pytest.raises(ChildProcessError):  # the first process has been waited for
        os.waitpid(children[0], os.WNOHANG)


@pytest.mark.timeout(300)
def test_a_forked_process_that_was_given_up_does_not_begin_afterwards(monkeypatch):
    """A forked process that was replaced must not start its work later, beside the process that replaces it."""
    kill, (reader, writer) = forking.Popen.kill, os.pipe()

    def be_late(number: int) -> None:
        if number == 0:
            os.read(reader, 1)

    def wait(number: int, child: int) -> None:
        monkeypatch.setattr(forking, "START_WAIT_S", 60.0 if number else 0.1)

    def kill_late(process: Any) -> None:
        os.write(writer, b".")
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it ends by itself
        kill(process)

    children = patch_fork(monkeypatch, be_late, wait)
    monkeypatch.setattr(forking.Popen, "kill", kill_late)
    assert list(WorkerResults(lambda item: item + 1, [1, 2, 3], num_workers=1)) == [2, 3, 4]
    assert len(children) == 2


def test_a_signal_to_a_process_that_has_just_been_forked_is_not_its_parents(monkeypatch):
    """A forked process inherits its parent's handlers and wakeup socket. A rank ends at once at a second SIGTERM."""
    reader, writer = socket.socketpair()
    seen = []
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handler = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        try:
            patch_fork(
                monkeypatch, lambda number: time.sleep(0.2), lambda number, child: os.kill(child, signal.SIGTERM)
            )
            process = forking.CheckedForkContext().Process(target=time.sleep, args=(600,), daemon=True)
            process.start()
            monkeypatch.undo()
            process.join(30)
            exitcode = process.exitcode
            process.kill()
            os.kill(os.getpid(), signal.SIGTERM)  # the parent still has its own handler
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.set_wakeup_fd(wakeup)
        assert exitcode == -signal.SIGTERM
        written = [number for number in reader.recv(100) if number != signal.SIGCHLD]
        assert written == seen == [signal.SIGTERM]


def test_workers_that_never_begin_are_a_data_error(monkeypatch):
    patch_fork(monkeypatch, lambda number: time.sleep(600))
    monkeypatch.setattr(forking, "START_WAIT_S", 0.05)
    with pytest.raises(DataError, match=r"5 forked processes did not start to run.*--workers 0"):
        WorkerResults(lambda item: item, [1], num_workers=1)


def test_a_system_that_refuses_processes_is_a_data_error_without_a_traceback(monkeypatch, capfd):
    def refuse_others(number: int, child: int) -> None:
        monkeypatch.setattr(os, "fork", refuse)

    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    children = patch_fork(monkeypatch, in_parent=refuse_others)
    with pytest.raises(DataError, match=r"--workers 2: cannot start .*temporarily unavailable.*; set fewer --workers"):
        WorkerResults(abs, [1], num_workers=2)
    assert "Traceback" not in capfd.readouterr().err
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(children[0]).wait(60)


@pytest.mark.parametrize("has_answered", [True, False])
def test_a_worker_that_dies_before_the_main_thread_waits_is_noticed_at_once(has_answered):
    """The result of another worker, and one that the worker has sent, can still be taken."""
    set_worker_timeout(5.0)
    try:
        results = WorkerResults(lambda item: time.sleep(0 if item else 600), [1, 2, 0], num_workers=2)
    finally:
        set_worker_timeout(WORKER_TIMEOUT_S)
    if has_answered:
        next(results)
    for worker in results.workers[:1]:
        time.sleep(0.2)
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert next(results) is None
    with pytest.raises(DataError, match=r"was killed by signal 9"):
        list(results)


@pytest.mark.timeout(60)
def test_the_death_of_a_worker_is_noticed_if_another_process_holds_its_connection(monkeypatch):
    """Another thread may fork a process while the worker is started."""
    fork, others = os.fork, []

    def fork_another(number: int, child: int) -> None:
        others.append(fork())
        if others[-1] == 0:
            time.sleep(600)
            os._exit(0)

    with monkeypatch.context() as patch:
        patch_fork(patch, in_parent=fork_another)
        results = WorkerResults(lambda item: time.sleep(600 * item), [0, 1], num_workers=1)
    try:
        assert next(results) is None
        os.kill(results.workers[0].pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"was killed by signal 9"):
            next(results)
    finally:
        for other in others:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)


def test_a_killed_worker_of_a_loader_is_named_with_sample_and_shard(pairs, monkeypatch):
    """The worker is killed while it reads; the signal reaches the main thread at once."""

    def dies(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(PairDataset, "read", dies)
    loader = TrainLoader(
        pairs, ImageTransform(8, training=True), CountingTokenizer(), micro_batch_size=6, num_workers=1, seed=5
    )
    sample = int(loader.ids_of_step(0)[0])
    with pytest.raises(DataError, match=f"reading sample {sample} of {pairs.shard_name(sample)}"):
        next(loader)


def test_a_tensor_of_a_dtype_that_numpy_lacks_is_a_result():
    """A field of the samples may be bfloat16."""
    (result,) = WorkerResults(
        lambda item: {"vector": torch.full((2, 3), item, dtype=torch.bfloat16)}, [7], num_workers=1
    )
    assert torch.equal(result["vector"], torch.full((2, 3), 7, dtype=torch.bfloat16))


class Panic(BaseException):
    """Exception of a Rust library."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text"), "UnicodeDecodeError: .*no text"),
        (Panic("no token"), "Panic: no token"),
        (None, "cannot pickle '_thread.lock' object"),  # a result
    ],
)
def test_a_failure_of_a_worker_is_raised_with_its_stack(error, message):
    """It is not reported as the death of the worker."""

    def read(item: int) -> Any:
        if error is not None and item == 1:
            raise error
        return threading.Lock() if item == 1 else item

    results = WorkerResults(read, range(4), num_workers=1)
    assert next(results) == 0
    with pytest.raises(RuntimeError, match=f"a data worker failed:\n(.*\n)*.*in _answer(.*\n)*.*{message}"):
        next(results)
    assert list(results) == [2, 3]


def kill_a_worker_at_random(trial: int) -> str:
    """Return the type of the exception that ends the reading when a worker is killed at a random time."""
    generator = random.Random(trial)
    workers = generator.choice([1, 2, 3])
    results = WorkerResults(lambda item: torch.full((1000,), item), range(10**6), num_workers=workers)
    next(results)
    victim = generator.choice(results.workers)
    kill_after = time.monotonic() + generator.uniform(0, 0.05)
    try:
        while True:
            next(results)
            if victim is not None and time.monotonic() > kill_after:
                os.kill(victim.pid, signal.SIGKILL)
                victim = None
    except Exception as error:
        results.close()
        assert not any(worker.is_alive() for worker in results.workers)
        return type(error).__name__


def test_a_worker_killed_at_a_random_time_is_always_a_data_error():
    assert {trial: kill_a_worker_at_random(trial) for trial in range(6)} == dict.fromkeys(range(6), "DataError")


@pytest.mark.parametrize(
    ("bad", "error", "expected"),
    [
        (-1, OSError(5, "Input/output error"), r"cannot read sample 9 of .*00001.tar: OSError: .*Input/output error"),
        (9, OSError(5, "Input/output error"), r"cannot read sample (?!9 ).* of .*: OSError: .*Input/output error"),
        (-1, DataError("cannot read s3://bucket/1.tar"), r"^sample 9: cannot read s3://bucket/1\.tar$"),
    ],
    ids=["sample", "substitute", "expected error"],
)
def test_an_error_of_a_source_is_a_data_error_that_names_sample_and_shard(pairs, monkeypatch, bad, error, expected):
    def fails(_: Any, sample_id: int) -> None:
        raise BadSample("missing image", "") if sample_id == bad else error

    monkeypatch.setattr(PairDataset, "read", fails)
    loaded = TrainReader(pairs, ImageTransform(8, training=True), CountingTokenizer(), 0).read(
        np.array([9]), np.array([0]), torch.empty(1, 3, 8, 8, dtype=torch.uint8)
    )
    assert loaded.batch is None
    with pytest.raises(DataError, match=expected):
        raise DataError(loaded.fatal)
    evaluation = EvaluationLoader(pairs, ImageTransform(8), None, batch_size=4)
    with pytest.raises(DataError, match=r"^(cannot read sample 0 of .*00000.tar: OSError|sample 0: cannot read s3://)"):
        next(iter(evaluation))


def test_the_stacks_of_workers_show_where_they_hang(monkeypatch):
    """First the workers are in a C call that does not return. Then they are stopped and cannot answer."""

    reader, _ = os.pipe()

    def stands(item: int) -> int:
        note_row(item)
        if item > 1:
            ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
        return item

    results = WorkerResults(stands, range(9), num_workers=2, describe_row=lambda row: f"sample {row} of 3.tar")
    assert [next(results), next(results)] == [0, 1]
    deadline = time.monotonic() + 60
    while min(results._rows) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = [
        f"data worker {number}, process {worker.pid}, last row: sample {number + 2} of 3.tar\n"
        for number, worker in enumerate(results.workers)
    ]
    try:
        for line, stacks in zip(lines, re.split("^(?=data worker)", worker_stacks(), flags=re.M)[1:], strict=True):
            assert stacks.startswith(line) and "in stands" in stacks and "Current thread" in stacks
        monkeypatch.setattr(workers, "_STACKS_WAIT_S", 0.2)
        for worker in results.workers:
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        for line in lines:
            assert f"{line}it does not answer" in worker_stacks()
    finally:
        for worker in results.workers:
            os.kill(worker.pid, signal.SIGKILL)


def test_a_worker_that_hangs_is_a_data_error_after_the_timeout_that_was_set():
    set_worker_timeout(1.0)
    try:
        results = WorkerResults(lambda _: time.sleep(600), [0], num_workers=1)
    finally:
        set_worker_timeout(WORKER_TIMEOUT_S)
    began = time.monotonic()
    with pytest.raises(DataError, match="no result within 1 s"):
        next(results)
    assert time.monotonic() - began < 60


def be_killed(connection: Any, stderr: int) -> None:
    """Be a rank that is killed while its workers have results that nobody receives."""
    os.dup2(stderr, 2)
    results = WorkerResults(lambda _: torch.zeros(2**20), range(100), num_workers=2)
    next(results)
    if (other := os.fork()) == 0:
        os.close(2)
        time.sleep(600)
        os._exit(0)
    connection.send([other, *(worker.pid for worker in results.workers)])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(120)
def test_workers_of_a_killed_rank_end_without_a_traceback(tmp_path) -> None:
    """Another process that the rank has forked does not end."""
    context = multiprocessing.get_context("fork")
    connection, of_rank = context.Pipe()
    with (tmp_path / "stderr").open("w") as stderr:
        rank = context.Process(target=be_killed, args=(of_rank, stderr.fileno()))
        rank.start()
    other, *processes = connection.recv()
    rank.join()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(process).wait(60)
    os.kill(other, signal.SIGKILL)
    assert rank.exitcode == -signal.SIGKILL and (tmp_path / "stderr").read_text() == ""
