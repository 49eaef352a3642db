"""The rules of `megaclip launch`, on torch's elastic agent. One agent per host starts and restarts the host's ranks.

torch.distributed.elastic decides which hosts take part: its agents meet in a store, and meet again when ranks have
failed or hosts come. `Agent` decides when the run ends instead, and leaves notes in the store for the other agents.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from megaclip.errors import REFUSED_EXIT_CODE, STOP_SIGNALS
from megaclip.hosts import pulse
from megaclip.hosts.pulse import Pulse
from megaclip.logging import get_logger

logger = get_logger(__name__)

STOP_CODES = frozenset(128 + number for number in STOP_SIGNALS)
"""Exit codes of ranks that have saved because of a signal."""
_FAILED_LIMIT_S = 8
"""Seconds for which ranks may report their errors when other ranks have failed. They cannot save."""

_POLL_S = 2.0
"""Seconds within which a spare host reads the end of the run."""


class RunEnded(Exception):
    """The run ends. Arguments: the exit code of the launcher, and the reason for the log."""


def _raise_signal(number: int, _: Any) -> NoReturn:
    raise SignalException(f"{signal.Signals(number).name} received", sigval=signal.Signals(number))


class Agent(LocalElasticAgent):
    """The agent of this host. Call `run_to_end`.

    Args:
        store: the store in which the agents meet.
        newest_step: returns the step of the newest complete checkpoint, or None for a program without checkpoints.
        save_limit_s: seconds that ranks have to save before they are killed, when hosts come or a signal stops the run.
    """

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, store: Any, newest_step: Callable[[], int | None], save_limit_s: int
    ) -> None:
        super().__init__(spec, logs)
        prefix = f"megaclip.{self._rdzv_handler.get_run_id()}"
        self._notes, self._newest_step, self._save_limit_s = PrefixStore(prefix, store), newest_step, save_limit_s
        self._pulse = Pulse(store, self._rdzv_handler.get_run_id(), self._start_anew)
        self._ending = threading.Lock()

    def run_to_end(self) -> int:
        """Run the ranks, with restarts; return the exit code. Raises RendezvousError if the hosts do not meet."""
        for number in STOP_SIGNALS:
            signal.signal(number, _raise_signal)
        result, code = None, 0
        try:
            with suppress(RendezvousClosedError):
                result = self.run()
            if result is None:  # another host has ended the run
                self._read_end()
                raise RunEnded(1, "the rendezvous is closed; start all hosts with another --rdzv-id")
            if result.is_failed():
                self._end(1, f"--max-restarts {self._worker_group.spec.max_restarts} allows no further restart")
        except (RunEnded, SignalException) as error:
            code = self._exit_code(error)
        except (DistError, RendezvousConnectionError):
            if not self._pulse.hosts:
                raise
            self._start_anew()
        self._pulse.end()
        with suppress(DistError):
            if code == 0:  # all hosts with ranks have ended; this note is for spare hosts
                self._notes.set("end", json.dumps([0, "the run is complete"]))
            if self._note("end"):
                self._rdzv_handler.shutdown()
                self._notes.add("farewell", 1)
                deadline = time.monotonic() + 2 * _FAILED_LIMIT_S  # the store may be in this process
                while self._notes.add("farewell", 0) < len(self._pulse.hosts) and time.monotonic() < deadline:
                    time.sleep(0.2)
                time.sleep(_POLL_S)
        return code

    def _exit_code(self, end: RunEnded | SignalException) -> int:
        """Log the end of the run, and return the exit code of the launcher.

        A stop signal, which torch's agent has passed on to the ranks, ends the run on all hosts, except if this host
        has only waited.
        """
        if isinstance(end, SignalException):
            code = 128 + end.sigval if self._newest_step() else 1
            end = RunEnded(code, f"stopped by {end.sigval.name}" + ", without a checkpoint" * (code == 1))
            if self._pulse.hosts:
                with suppress(RunEnded):
                    self._end(*end.args)
        code, reason = end.args
        (logger.info if code in {0, *STOP_CODES} else logger.error)("exit code %d: %s", code, reason)
        return code

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this host when the hosts of the attempt are known."""
        own, count, store = worker_group.group_rank, worker_group.group_world_size, worker_group.store
        assert store is not None and count is not None
        self._pulse.meet(store, own, count)
        if own == 0:
            self._judge_last_failure()
            ranks, names = worker_group.workers[0].world_size, " ".join(self._pulse.hosts.values())
            logger.info("attempt from step %d: %d ranks on %s", self._newest_step() or 0, ranks, names)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks of this host. Raises RunEnded if they must not be started again."""
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            return self._after_exit({rank: failure.exitcode for rank, failure in result.failures.items()}) or result
        if result.state is WorkerState.HEALTHY:
            self._read_end()
            if lost := self._pulse.lost_hosts():
                self._note_failure(f"host {' '.join(lost)} is lost")
                return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks of this host. They save if hosts come; after a failure they cannot."""
        failure = self._note("failure")
        if failure and worker_group.state is WorkerState.HEALTHY:
            logger.error("%s", failure[0])
        self._shutdown(None if failure else signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = _FAILED_LIMIT_S) -> None:
        """End the ranks of this host. With a signal they have the time to save; without one they are soon killed."""
        with self._ending:  # a second signal would end ranks that save
            if self._pcontext is not None:
                self._pcontext.close(death_sig or signal.SIGTERM, self._save_limit_s if death_sig else timeout)

    def _after_exit(self, codes: dict[int, int]) -> RunResult | None:
        """Return HEALTHY if ranks of this host have ended because hosts come, None after a failure."""
        host, saved = socket.gethostname(), STOP_CODES & set(codes.values())
        # torch has sent SIGTERM to the other ranks of this host.
        failed = {rank: code for rank, code in codes.items() if code not in {*STOP_CODES, -signal.SIGTERM}}
        if REFUSED_EXIT_CODE in codes.values():
            self._end(REFUSED_EXIT_CODE, f"host {host} has refused a setting; see the error of its ranks")
        deadline = time.monotonic() + pulse.SILENCE_S + 5
        while not failed and not self._pulse.lost_hosts():
            if self._rdzv_handler.num_nodes_waiting():
                return RunResult(state=WorkerState.HEALTHY)  # torch's agent sees the waiting hosts itself
            if time.monotonic() > deadline:
                self._end(min(saved, default=1), f"a signal to a rank of host {host} has stopped the run")
            time.sleep(0.5)
            self._read_end()
        for rank, code in failed.items():
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._note_failure(f"host {host}: rank {rank} {ended}")
        if not failed:
            self._note_failure(f"host {' '.join(self._pulse.lost_hosts())} is lost")
        return None

    def _note_failure(self, text: str) -> None:
        """Note why this attempt has failed, unless another host has done so, and log the note."""
        note = json.dumps([text, self._newest_step(), self._pulse.hosts])
        logger.error("%s", json.loads(self._notes.compare_set("failure", "", note))[0])

    def _judge_last_failure(self) -> None:
        """End the run if two attempts have failed without a new checkpoint in between. Lost hosts do not count."""
        if not (failure := self._note("failure")):
            return
        text, step, hosts = failure
        self._notes.delete_key("failure")
        if lost := [name for key, name in hosts.items() if key not in self._pulse.hosts]:
            logger.error("host %s is lost, which explains the failure", " ".join(lost))
        elif step is not None:
            if self._note("failed_at") == step:
                self._end(1, f"it has failed twice without a checkpoint after step {step}; the last time: {text}")
            self._notes.set("failed_at", json.dumps(step))

    def _note(self, key: str) -> Any:
        """Return the note, or None if there is none."""
        return json.loads(self._notes.get(key)) if self._notes.check([key]) else None

    def _read_end(self) -> None:
        """Raise RunEnded if another host has ended the run."""
        if end := self._note("end"):
            self._shutdown(signal.SIGTERM if end[0] in STOP_CODES else None)
            raise RunEnded(*end)

    def _end(self, code: int, reason: str) -> NoReturn:
        """End the run on all hosts."""
        note = json.dumps([code, reason])
        with suppress(DistError):
            note = self._notes.compare_set("end", "", note).decode()
        raise RunEnded(*json.loads(note))

    def _start_anew(self) -> NoReturn:
        """End the ranks of this host, and replace this process by a new launcher, which waits for the store."""
        logger.error("the store of the launchers does not answer: the ranks of this host end, and its launcher waits")
        self._shutdown()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
