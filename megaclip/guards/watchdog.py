"""End a run that hangs, with the stacks that explain the hang. docs/operations.md describes its rules.

A thread of every rank measures the time since the rank's last step, also while the main thread is blocked in a
collective. It sends a heartbeat through the store of the process group: the rank's step, its phase, and the number of
collectives that it has entered. If the rank is late, the thread reads the heartbeats of the others and decides whether
the run hangs, and which ranks the others wait for.

Python code cannot run while another thread is in a C call that does not release the interpreter lock. So the thread
also renews a timer of `faulthandler`, which writes the stacks to standard error if it is not renewed in time.
"""

import contextlib
import datetime
import faulthandler
import json
import logging
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any, TypeVar

import deepspeed.comm as dist
import torch
from torch.distributed import distributed_c10d

from megaclip.data.workers import WORKER_TIMEOUT_S, kill_workers, set_worker_timeout, worker_stacks
from megaclip.logging import get_logger
from megaclip.threads import in_thread

logger = get_logger(__name__)

T = TypeVar("T")

HANG_EXIT_CODE = 75
"""Exit code of a run that the watchdog has ended."""
SHORTEST_DEFAULT_S = 900.0
"""Smallest default of --hang-timeout. It is larger than `WORKER_TIMEOUT_S`."""
STEPS_OF_DEFAULT = 20.0
"""The default of --hang-timeout in median steps."""
_WARM_UP_STEPS = 3
"""Number of first steps of the process that may compile, build and allocate."""
_LONG_FACTOR, _SHORTEST_LONG_S = 4.0, 3600.0
"""Limit of work without steps: four times the limit of a step, at least an hour."""
_HEARTBEAT_S = 5.0
_JOIN_S = 2.0
"""Seconds for which the end of training waits for the watchdog."""
_MISSED_HEARTBEATS = 3
"""A rank is alive if its heartbeat changes within this number of heartbeats."""
_REPORT_S = 10.0
"""Seconds that the other ranks have to write their stacks after one has found the hang."""
_AFTER_WATCHDOG_S = 600.0
"""Seconds by which the time-out of collectives exceeds twice the longest limit of the watchdog."""
_NAMED_RANKS = 16
"""Largest number of ranks that the log names."""
_SHOWN_COLLECTIVES = 20
"""Number of the last collectives of a rank that its file of stacks lists."""
_STEP = "a step"
SILENT = "it does not answer: its process is stopped or gone, or its host cannot be reached"


class Watchdog:
    """Context manager around the training of a run, and the record of its progress.

    Every rank of the job opens it at the same time. The main thread calls `step_done` and `phase`.
    """

    def __init__(self, folder: Path, hang_timeout_s: float | None) -> None:
        """
        Args:
            folder: the run's folder, shared by all hosts; stacks are written to its subfolder `stacks`.
            hang_timeout_s: value of --hang-timeout. None: from the measured duration of the steps. 0: do nothing.
        """
        self._folder = folder / "stacks"
        self._hang_timeout_s = hang_timeout_s
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._heartbeat_s = min(_HEARTBEAT_S, (hang_timeout_s or math.inf) / 10)
        self._durations: deque[float] = deque(maxlen=100)
        self._steps = 0
        self._phase = "the start of training"
        self._last_step = 0
        self._progress_at = time.monotonic()
        self._beats = 0
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._answer: Future[Any] | None = None
        """Result of the last request to the store."""
        set_worker_timeout(min(WORKER_TIMEOUT_S, (hang_timeout_s or math.inf) / 2))

    def __enter__(self) -> "Watchdog":
        if self._hang_timeout_s == 0:
            return self
        self._set_collective_timeout()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)  # the thread may wait for a store whose process is gone

    def step_done(self, step: int) -> None:
        """Record that step number `step` is done."""
        now = time.monotonic()
        self._steps += 1
        if self._steps > 1 and self._phase == _STEP:
            self._durations.append(now - self._progress_at)
        self._phase = _STEP if self._steps >= _WARM_UP_STEPS else "one of the first steps"
        self._last_step, self._progress_at = step, now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the body of a `with` statement as work without steps. name: for the log, such as "an evaluation"."""
        before, self._phase, self._progress_at = self._phase, name, time.monotonic()
        try:
            yield
        finally:
            self._phase, self._progress_at = before, time.monotonic()

    def watched(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a phase. Each batch counts as progress."""
        for batch in batches:
            self._progress_at = time.monotonic()
            yield batch

    def step_limit_s(self) -> float:
        """Return the seconds after which a step counts as hanging."""
        if self._hang_timeout_s:
            return self._hang_timeout_s
        median = statistics.median(list(self._durations)) if self._durations else 0.0
        return max(SHORTEST_DEFAULT_S, STEPS_OF_DEFAULT * median)

    def _longest_s(self) -> float:
        return max(_SHORTEST_LONG_S, _LONG_FACTOR * self.step_limit_s())

    def _state(self) -> dict[str, Any]:
        """Return this rank's heartbeat."""
        return {
            "beats": self._beats,
            "step": self._last_step,
            "phase": self._phase,
            "collectives": collectives_entered(),
            "late": time.monotonic() - self._progress_at > self._limit_s(),
        }

    def _limit_s(self) -> float:
        return self.step_limit_s() if self._phase == _STEP else self._longest_s()

    def _set_collective_timeout(self) -> None:
        """Let collectives wait longer than the watchdog, so that it can report a hang before they fail."""
        limit = datetime.timedelta(seconds=2 * self._longest_s() + _AFTER_WATCHDOG_S)
        # PyTorch before 2.14 lacks the public function, and later versions warn of the other one.
        set_timeout = getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
        for group in list(distributed_c10d._world.pg_map):
            if group is not torch.distributed.GroupMember.NON_GROUP_MEMBER:
                with contextlib.suppress(ValueError):  # a group without this rank
                    set_timeout(limit, group)

    def _run(self) -> None:
        """Run in the thread. A fault of the watchdog itself does not end the run."""
        try:
            self._watch()
        except Exception:
            if not self._ends.is_set():
                logger.exception("the watchdog has failed; the run continues without it")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        last_basis = None
        while not self._wait():
            self._set_timer()
            hang_was_found = self._beat()
            # The time-outs are set again when a loss has created groups, as in the first step. They are also set again
            # when the limit, which depends on the duration of the steps, has changed by about a tenth.
            basis = (len(distributed_c10d._world.pg_map), round(math.log(self._longest_s()), 1))
            if basis != last_basis:
                last_basis = basis
                self._set_collective_timeout()
            if hang_was_found:
                self._report(None)
            elif self._state()["late"] and (verdict := self._verdict(hang_was_found is not None)) is not None:
                self._report(verdict)

    def _ask(self, question: Callable[[Any], T]) -> T:
        """Return `question(store)`, for the store of the process group, which is in the process of rank 0.

        A thread asks it through a connection of its own. The main thread may block the existing one, a store whose
        process is stopped never answers, and connecting to one whose process is gone takes a long time. torch's
        time-out has no effect in these cases.

        Raises:
            RuntimeError: the store does not answer in time, or has not answered the last question yet.
        """
        if self._answer is not None and not self._answer.done():
            raise RuntimeError("the store has not answered the last question")

        def ask() -> T:
            shared: Any = distributed_c10d._get_default_store()
            store = shared.clone()
            store.set_timeout(datetime.timedelta(seconds=_MISSED_HEARTBEATS * self._heartbeat_s))
            return question(store)

        answer = self._answer = in_thread(ask, "watchdog-store")
        for _ in range(_MISSED_HEARTBEATS):  # a pause of this process, however long, ends only one of the waits
            with contextlib.suppress(TimeoutError):  # concurrent.futures' own class before Python 3.11
                return answer.result(self._heartbeat_s)
        raise RuntimeError("the store does not answer")

    def _wait(self) -> bool:
        """Wait for the next heartbeat; return whether the training has ended.

        Time for which this process was stopped does not count, because a scheduler may suspend all ranks of a job. If
        only this rank was stopped, the other ranks have found the hang.
        """
        began = time.monotonic()
        has_ended = self._ends.wait(self._heartbeat_s)
        paused_s = time.monotonic() - began - self._heartbeat_s
        if paused_s > _MISSED_HEARTBEATS * self._heartbeat_s + 1.0:
            self._progress_at += paused_s
        return has_ended

    def _set_timer(self) -> None:
        faulthandler.dump_traceback_later(max(self.step_limit_s(), SHORTEST_DEFAULT_S), file=2)

    def _beat(self) -> bool | None:
        """Send a heartbeat. Return whether another rank has found a hang, or None if the store does not answer."""
        self._beats += 1
        state, key = json.dumps(self._state()), f"watchdog/{self._rank}"

        def send(store: Any) -> bool:
            store.set(key, state)  # does not wait for the store
            return bool(store.check(["watchdog/hang"]))

        with contextlib.suppress(RuntimeError):
            return self._ask(send)
        return None

    def _heartbeats(self) -> dict[int, dict[str, Any]]:
        """Return the newest heartbeat of each rank that has sent one."""
        keys = {rank: f"watchdog/{rank}" for rank in range(self._world_size)}
        with contextlib.suppress(RuntimeError):
            return self._ask(
                lambda store: {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
            )
        return {}

    def _verdict(self, answers: bool) -> dict[int, str] | None:
        """Return the ranks that the other ranks wait for, with the reason. None: the run does not hang."""
        progress_at = self._progress_at
        if not answers:
            return {0: SILENT}
        before = self._heartbeats()
        for _ in range(_MISSED_HEARTBEATS):
            if self._ends.wait(self._heartbeat_s):
                return None
            self._set_timer()
            if self._beat() is None:
                return {0: SILENT}
        now = self._heartbeats()
        if self._progress_at != progress_at:
            return None
        if not now:  # the store has stopped since the last heartbeat
            return {0: SILENT}
        silent = {
            rank: SILENT
            for rank in range(self._world_size)
            if rank != self._rank and now.get(rank, {}).get("beats") == before.get(rank, {}).get("beats")
        }
        if silent:
            return silent
        if any(state["phase"] != _STEP and not state["late"] for state in now.values()):
            return None  # the others wait for a rank that evaluates or saves
        entered = {rank: state["collectives"] for rank, state in now.items()}
        fewest, most = min(entered.values()), max(entered.values())
        if fewest == most:
            return dict.fromkeys(now, "all have entered the same collectives")
        behind = f"it has entered {fewest} collectives since the start, others {most}"
        return {rank: behind for rank, count in entered.items() if count == fewest}

    def _report(self, verdict: dict[int, str] | None) -> None:
        """Write the stacks, log the verdict if this rank has found the hang, and end the process."""
        with contextlib.suppress(RuntimeError):
            if self._ask(lambda store: store.add("watchdog/hang", 1)) > 1:
                verdict = None
        state = self._state()
        standing_s = time.monotonic() - self._progress_at
        header = f"rank {self._rank}: in {state['phase']}, {standing_s:.0f} s after step {state['step']}"
        try:
            write_stacks(self._folder, self._rank, header)
        except Exception as error:  # the run must end without them
            logger.error("the stacks of rank %d cannot be written: %s", self._rank, error)
        if verdict is not None:
            for rank, reason in list(verdict.items())[:_NAMED_RANKS]:
                logger.error("rank %d has not arrived: %s", rank, reason)
            if len(verdict) > _NAMED_RANKS:
                logger.error("number of other ranks that have not arrived: %d", len(verdict) - _NAMED_RANKS)
            logger.error(
                "the run hangs: %s, longer than the limit of %.0f s (--hang-timeout); the stacks of the ranks are in "
                "%s; the run ends with exit code %d without saving: resume it with --resume auto",
                header,
                self._limit_s(),
                self._folder,
                HANG_EXIT_CODE,
            )
        self._wait_for_reports(verdict or {})
        kill_workers()
        logging.shutdown()
        os._exit(HANG_EXIT_CODE)

    def _wait_for_reports(self, verdict: dict[int, str]) -> None:
        """Wait until the other ranks have written their stacks. A launcher ends all ranks when one exits."""
        keys = [f"watchdog/reported/{rank}" for rank in range(self._world_size) if verdict.get(rank) != SILENT]
        deadline = time.monotonic() + _REPORT_S
        with contextlib.suppress(RuntimeError):
            self._ask(lambda store: store.set(f"watchdog/reported/{self._rank}", "1"))
            while time.monotonic() < deadline and not self._ask(lambda store: store.check(keys)):
                time.sleep(0.2)


def collectives_entered() -> int:
    """Return the number of collectives that this rank has entered, over all its process groups."""
    total = 0
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        with contextlib.suppress(RuntimeError, AttributeError):  # no count, or the group has ended
            total += group._get_sequence_number_for_group()
    return total


def write_stacks(folder: Path, rank: int, header: str) -> Path:
    """Write the stacks of this rank and of its data workers, and its last collectives; return the path of the file.

    Raises OSError if the file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"rank_{rank}.txt"
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {header}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write(f"\n{worker_stacks()}\n{_last_collectives()}")
    return path


def _last_collectives() -> str:
    """Return the last collectives of PyTorch's flight recorder, one per line, or "" if it does not record.

    TORCH_FR_BUFFER_SIZE, which `megaclip.engine.process_group` sets, turns it on.
    """
    recorder: Any = torch._C._distributed_c10d
    try:
        recorded = json.loads(recorder._dump_fr_trace_json())
        entries: list[dict[str, Any]] = recorded["entries"][-_SHOWN_COLLECTIVES:]
        lines = [
            f"  group {' '.join(entry['process_group'])}: collective {entry['collective_seq_id']} "
            f"{entry['profiling_name']} {entry['input_sizes']} {entry['input_dtypes']}, {entry['state']}, "
            f"{'retired' if entry['retired'] else 'not retired'}, time-out {entry['timeout_ms'] / 1000:.0f} s"
            for entry in entries
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # another version of PyTorch
        return ""
    return "\n".join(["the last collectives that this rank has entered, the newest last:", *lines, ""])
