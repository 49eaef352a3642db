"""Faults of processes during training: a rank hangs, is suspended or is slow, a data worker is killed.

The ranks of the harness end themselves, and the report of the harness shows how. test_launcher_exit_codes.py and
test_starters.py end launchers.
"""

import errno
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaclip.data import workers
from megaclip.engine import run_folder
from megaclip.engine.checkpoints import Checkpoints
from megaclip.engine.metrics import Metrics
from megaclip.engine.run import main
from megaclip.engine.trainer import Trainer
from megaclip.files import write_atomically
from megaclip.guards import watchdog
from megaclip.guards.watchdog import HANG_EXIT_CODE, Watchdog
from tests.distributed import harness
from tests.distributed.harness import RankFailure, run_ranks
from tests.end_to_end.training_runs import WORLD_SIZE, Finished, allow_data_workers, data_workers, flags, run_by_name

FAULT_AFTER = 6
MISSED_HEARTBEATS = 20
"""A rank of these tests may be paused for seconds, although heartbeats are short."""
RECORDS = {"TORCH_FR_BUFFER_SIZE": "100"}  # a run sets this variable, but the harness has joined the ranks before


def faulty(command: list[str], log: str, faults: dict[int, Callable[[], Any]]) -> Finished:
    """Call `main(command)` in this rank. Its fault, if any, happens after step FAULT_AFTER was logged.

    --hang-timeout applies from that step on. A rank that is paused in an earlier step does not count as hanging.

    log: file for a rank's standard error, because a rank that ends itself returns nothing.
    """
    allow_data_workers()
    rank, record = int(os.environ["RANK"]), Metrics.record_step
    os.dup2(os.open(f"{log}_{rank}", os.O_WRONLY | os.O_CREAT), 2)

    def recording(metrics: Metrics, step: int, *arguments: Any) -> None:
        record(metrics, step, *arguments)
        if step == FAULT_AFTER and rank in faults:
            faults[rank]()

    limit_s = Watchdog._limit_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "record_step", recording)
        patch.setattr(Watchdog, "_limit_s", lambda dog: limit_s(dog) if dog._last_step >= FAULT_AFTER else 600.0)
        patch.setattr(watchdog, "_MISSED_HEARTBEATS", MISSED_HEARTBEATS)
        patch.setattr(workers, "_STACKS_WAIT_S", 5.0)
        exit_code = main(command)
    sys.stderr.flush()
    return Finished(exit_code, Path(f"{log}_{rank}").read_text())


def stop_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stand_still() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("stands", "fault"), [(1, stop_this_rank), pytest.param(0, stand_still, marks=pytest.mark.long)]
)
def test_a_hang_ends_with_stacks_and_the_name_of_the_rank_that_hangs(tiny_run, tmp_path, monkeypatch, stands, fault):
    if fault is stop_this_rank:
        monkeypatch.setattr(harness, "_GRACE_S", 1.0)  # the rank never ends
    command = flags(tiny_run, tiny_run / "zero1.json", tmp_path, workers=1, train_steps=500, hang_timeout=3)
    log = str(tmp_path / "log")
    with pytest.raises(RankFailure) as failure:
        run_ranks(faulty, WORLD_SIZE, command, log, {stands: fault}, environment=RECORDS)
    answers = [0, 1] if fault is stand_still else [1 - stands]
    for rank in answers:
        assert f"--- rank {rank} ---\nended without a report, exit code {HANG_EXIT_CODE}" in str(failure.value)
    stacks = {rank: tmp_path / "run" / "stacks" / f"rank_{rank}.txt" for rank in (0, 1)}
    assert [rank for rank, path in stacks.items() if path.exists()] == answers
    waits = stacks[1 - stands].read_text()
    assert f"after step {FAULT_AFTER}" in waits
    # threads of the data, of the watchdog, and the main thread
    for thread in ("in _fill", "in _watch", "in _train_steps"):
        assert thread in waits, waits
    assert "data worker 0, process" in waits and "in _work" in waits
    assert "the newest last:" in waits and "gloo:" in waits
    time_outs = {int(seconds) for seconds in re.findall(r"time-out (\d+) s", waits)}
    assert min(time_outs) > watchdog.SHORTEST_DEFAULT_S, "a collective would end before the watchdog"
    logged = "".join((tmp_path / f"log_{rank}").read_text() for rank in answers)
    verdict = re.findall(r"rank (\d) has not arrived: (.*)", logged)
    reason = "it has entered" if fault is stand_still else "it does not answer"
    assert [(int(rank), text.startswith(reason)) for rank, text in verdict] == [(stands, True)], logged
    assert "--hang-timeout" in logged and f"exit code {HANG_EXIT_CODE}" in logged


SLOW_TIMEOUT_S = 3
SLOW_S = SLOW_TIMEOUT_S + MISSED_HEARTBEATS * SLOW_TIMEOUT_S / 10 + 1.5


def slow_everything(patch: pytest.MonkeyPatch, _: str) -> None:
    """Make a first step, an evaluation and a checkpoint slower than the hang time-out.

    Only rank 0 is slow in the first evaluation. The other rank waits for it in the next step.
    """
    rank, first, evaluate, save = os.environ["RANK"], Trainer._accumulate, Trainer.evaluate, Checkpoints.save

    def slow_first_step(trainer: Trainer, *arguments: Any) -> Any:
        time.sleep(SLOW_S if trainer.step == 0 else 0.0)
        return first(trainer, *arguments)

    def slow_evaluation(trainer: Trainer, *arguments: Any) -> dict[str, float]:
        scores = evaluate(trainer, *arguments)
        time.sleep(SLOW_S if rank == "0" and trainer.step < trainer.length.total_steps else 0.0)
        return scores

    def slow_checkpoint(checkpoints: Checkpoints, *, training_continues: bool) -> None:
        time.sleep(SLOW_S)
        save(checkpoints, training_continues=training_continues)

    patch.setattr(Trainer, "_accumulate", slow_first_step)
    patch.setattr(Trainer, "evaluate", slow_evaluation)
    patch.setattr(Checkpoints, "save", slow_checkpoint)
    patch.setattr(watchdog, "_MISSED_HEARTBEATS", MISSED_HEARTBEATS)


def no_more_processes_or_disk(patch: pytest.MonkeyPatch, name: str) -> None:
    """The system refuses to start the data workers of rank 1, or the disk is full when the run writes metrics.json."""
    fork = os.fork

    def refused() -> int:
        if threading.current_thread() is threading.main_thread():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    def write(path: Path, text: str) -> None:
        if path.name == "metrics.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, text)

    if name == "no processes" and os.environ["RANK"] == "1":
        patch.setattr(os, "fork", refused)
    if name == "full disk":
        patch.setattr(run_folder, "write_atomically", write)


def test_a_rank_that_finds_no_processes_or_disk_ends_all_ranks_with_one_error(tiny_run, tmp_path):
    """After exit code 78, `megaclip launch` does not start the run again, so a full disk has another one."""

    def command(name: str, **changes: Any) -> list[str]:
        return flags(tiny_run, tiny_run / "zero1.json", tmp_path, name=name, train_steps=1, warmup=0, **changes)

    commands = {"no processes": command("no processes", workers=1), "full disk": command("full disk")}
    ends = run_by_name(commands, no_more_processes_or_disk)
    for run in ends.values():
        assert [end.exit_code for end in run] == [1] * WORLD_SIZE, run[0].output
        assert not any("Traceback" in end.output for end in run)
    ((processes,), (disk,)) = (ends[name][0].errors for name in commands)
    assert "--workers 1: cannot start the data workers" in processes and "ulimit" in processes
    assert "No space left on device; free space" in disk and "--resume auto" in disk


@pytest.mark.long
def test_a_slow_first_step_evaluation_and_checkpoint_are_no_hang(tiny_run, tmp_path):
    evaluation = {"val_data": tiny_run / "held_out" / "*.tar", "eval_batch_size": 16, "eval_every_steps": 5}
    command = flags(
        tiny_run, tiny_run / "zero1.json", tmp_path, train_steps=6, hang_timeout=SLOW_TIMEOUT_S, **evaluation
    )
    ends = run_by_name({"slow": command}, slow_everything)["slow"]
    assert [end.exit_code for end in ends] == [0] * WORLD_SIZE, ends[0].output
    assert not (tmp_path / "run" / "stacks").exists()


def suspend_this_rank(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    stop_this_rank()


def continue_all(folder: Path) -> None:
    """Continue the ranks 12 s after all of them were stopped, as a scheduler does that suspends a job."""
    ranks: list[int] = []
    while len(ranks) < WORLD_SIZE or any(psutil.Process(rank).status() != psutil.STATUS_STOPPED for rank in ranks):
        time.sleep(0.05)
        ranks = [int(path.name) for path in folder.iterdir()]
    time.sleep(12)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)


@pytest.mark.long
def test_a_job_that_is_suspended_continues(tiny_run, tmp_path):
    command = flags(tiny_run, tiny_run / "zero1.json", tmp_path, train_steps=60, hang_timeout=3)
    suspended = tmp_path / "suspended"
    suspended.mkdir()
    threading.Thread(target=continue_all, args=(suspended,), daemon=True).start()
    faults = dict.fromkeys(range(WORLD_SIZE), partial(suspend_this_rank, suspended))
    ends = run_ranks(faulty, WORLD_SIZE, command, str(tmp_path / "log"), faults)
    assert [end.exit_code for end in ends] == [0] * WORLD_SIZE, ends[0].output


def kill_a_worker() -> None:
    """Kill a data worker, and no other child process."""
    random.choice(data_workers(os.getpid())).kill()


def test_a_killed_data_worker_ends_all_ranks_with_one_error_and_a_checkpoint(tiny_run, tmp_path):
    command = flags(tiny_run, tiny_run / "zero1.json", tmp_path, workers=1, train_steps=500)
    ends = run_ranks(faulty, WORLD_SIZE, command, str(tmp_path / "log"), {1: kill_a_worker})
    assert [end.exit_code for end in ends] == [1] * WORLD_SIZE, ends[0].output
    assert len(ends[0].errors) == 1 and "a data worker died" in ends[0].errors[0], ends[0].output
    assert re.search(r"reading sample \d+ of .*\.tar", ends[0].errors[0])
    saved = int((tmp_path / "run" / "checkpoints" / "latest").read_text().removeprefix("step_"))
    # Batches that were read before the worker died are still used.
    assert FAULT_AFTER <= saved <= FAULT_AFTER + 5
