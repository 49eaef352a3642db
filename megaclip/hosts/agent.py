"""The rules of `megaclip launch`, on torch's elastic agent. One agent per host starts and restarts the host's ranks.

torch.distributed.elastic decides which hosts take part: its agents meet in a store, keep heartbeats there, and meet
again when ranks have failed or hosts come. `Agent` decides when the run ends instead, and leaves notes in the store for
the other agents. It also watches the heartbeats, which torch's agents read only when they meet.
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.utils.store import barrier

from megaclip.errors import REFUSED_EXIT_CODE, STOP_SIGNALS
from megaclip.logging import format_count, get_logger
from megaclip.threads import in_thread

logger = get_logger(__name__)

STOP_CODES = frozenset(128 + number for number in STOP_SIGNALS)
"""Exit codes of ranks that have saved because of a signal."""
_FAILED_LIMIT_S = 8
"""Seconds for which ranks may report their errors when other ranks have failed. They cannot save."""
_POLL_S = 2.0
"""Seconds within which a spare host reads the end of the run."""


def _raise_signal(number: int, _: Any) -> NoReturn:
    raise SignalException(f"{signal.Signals(number).name} received", sigval=signal.Signals(number))


class Agent(LocalElasticAgent):
    """The agent of this host. Call `run_to_end`.

    Args:
        store: the store in which the agents meet.
        silence_s: seconds without a heartbeat after which another host, or the store, is lost.
        newest_step: returns the step of the newest complete checkpoint, or None for a program without checkpoints.
        save_limit_s: seconds that ranks have to save before they are killed, when hosts come or a signal stops the run.
    """

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, store: Any, silence_s: int, newest_step: Callable, save_limit_s: int
    ) -> None:
        super().__init__(spec, logs)
        self._rendezvous_handler, run_id = spec.rdzv_handler, spec.rdzv_handler.get_run_id()
        self._notes, self._newest_step = PrefixStore(f"megaclip.{run_id}", store), newest_step
        self._backend = C10dRendezvousBackend(store.clone(), run_id)  # other threads do not block a clone
        self._silence_s, self._save_limit_s = silence_s, save_limit_s
        self._hosts: dict[str, str] = {}
        """Addresses of the hosts that run ranks, by torch's names of them. Empty before the first attempt."""
        self._beats: dict[str, tuple[object, int]] = {}
        """Last heartbeat of each host, and for how many looks, one per second, it has not changed."""
        self._ending, self._ended = threading.Lock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="heartbeats", daemon=True)

    def run_to_end(self) -> NoReturn:
        """Run the ranks, with restarts, and exit. Raises RendezvousError if the hosts do not meet."""
        for number in STOP_SIGNALS:
            signal.signal(number, _raise_signal)
        try:
            with suppress(RendezvousClosedError):
                if result := self.run():
                    limit = f"--max-restarts {self._worker_group.spec.max_restarts} allows no further restart"
                    self._end(*((1, limit) if result.is_failed() else (0, "the run is complete")))
            self._read_end()  # of the host that has closed the rendezvous
            self._leave(1, "the rendezvous is closed; start all hosts with another --rdzv-id")
        except SignalException as stop:  # torch's agent has passed it on to the ranks, and they have ended
            code = 128 + stop.sigval if self._newest_step() else 1
            reason = f"stopped by {stop.sigval.name}" + ", without a checkpoint" * (code == 1)
            (self._end if self._hosts else self._leave)(code, reason)
        except (DistError, RendezvousConnectionError):
            if not self._hosts:
                raise
        self._start_anew()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this host when the hosts of the attempt are known."""
        participants = sorted(self._read_state().participants)
        self._hosts, self._beats = {str(node): node.addr for node in participants}, {}
        if self._watcher.ident is None:
            self._watcher.start()
        if worker_group.group_rank == 0:
            self._judge_last_failure()
            ranks, hosts = worker_group.workers[0].world_size, " ".join(self._hosts.values())
            logger.info("attempt from step %d: %s on %s", self._newest_step() or 0, format_count(ranks, "rank"), hosts)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks of this host. Exit if they must not be started again."""
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            return self._after_exit({rank: failure.exitcode for rank, failure in result.failures.items()}) or result
        if result.state is WorkerState.HEALTHY:
            self._read_end()
            if lost := self._lost_hosts():
                self._note_failure(f"host {lost} is lost")
                return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks of this host. They save if hosts come; after a failure they cannot."""
        failure = self._note("failure")
        if failure:
            logger.error("%s", failure[0])
        self._shutdown(None if failure else signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = _FAILED_LIMIT_S) -> None:
        """End the ranks of this host. With a signal they have the time to save; without one they are soon killed."""
        with self._ending:  # a second signal would end ranks that save
            if self._pcontext is not None:
                self._pcontext.close(death_sig or signal.SIGTERM, self._save_limit_s if death_sig else timeout)

    def _after_exit(self, codes: dict[int, int]) -> RunResult | None:
        """Return HEALTHY if ranks of this host have ended because hosts come, None after a failure."""
        saved, host = STOP_CODES & set(codes.values()), list(self._hosts.values())[self._worker_group.group_rank or 0]
        if REFUSED_EXIT_CODE in codes.values():
            self._end(REFUSED_EXIT_CODE, f"host {host} has refused a setting; see the error of its ranks")
        # torch has sent SIGTERM to the other ranks of this host.
        failed = {rank: code for rank, code in codes.items() if code not in {*STOP_CODES, -signal.SIGTERM}}
        deadline, before = time.monotonic() + self._silence_s + 5, self._heartbeats()
        while not failed and not self._lost_hosts():
            if self._rendezvous_handler.num_nodes_waiting():
                return RunResult(state=WorkerState.HEALTHY)  # torch's agent sees the waiting hosts itself
            # A host without a heartbeat after that exit may be lost: ranks also save when their launcher has died.
            if time.monotonic() > deadline and self._have_beaten_since(before):
                self._end(min(saved, default=1), f"a signal to a rank of host {host} has stopped the run")
            time.sleep(0.5)
            self._read_end()
        for rank, code in failed.items():
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._note_failure(f"host {host}: rank {rank} {ended}")
        self._note_failure(f"host {self._lost_hosts()} is lost")  # without effect if a rank has failed
        return None

    def _note_failure(self, text: str) -> None:
        """Note why this attempt has failed, unless another host has done so."""
        self._notes.compare_set("failure", "", json.dumps([text, self._newest_step(), self._hosts]))

    def _judge_last_failure(self) -> None:
        """End the run if two attempts have failed without a new checkpoint in between. Lost hosts do not count."""
        if not (failure := self._note("failure")):
            return
        text, step, hosts = failure
        self._notes.delete_key("failure")
        if lost := [address for name, address in hosts.items() if name not in self._hosts]:
            logger.error("host %s is lost, which explains the failure", " ".join(lost))
        elif step is not None:
            if self._note("failed_at") == step:
                self._end(1, f"it has failed twice without a checkpoint after step {step}; the last time: {text}")
            self._notes.set("failed_at", json.dumps(step))

    def _note(self, key: str) -> Any:
        """Return the note, or None if there is none."""
        return json.loads(self._notes.get(key)) if self._notes.check([key]) else None

    def _read_end(self) -> None:
        """Exit if another host has ended the run."""
        if end := self._note("end"):
            self._leave(*end)

    def _end(self, code: int, reason: str) -> NoReturn:
        """End the run on all hosts, as the first host that ends it requests."""
        with suppress(DistError):
            code, reason = json.loads(self._notes.compare_set("end", "", json.dumps([code, reason])))
        self._leave(code, reason)

    def _leave(self, code: int, reason: str) -> NoReturn:
        """End the ranks of this host, and exit when the other hosts have read the end, for the store may be here."""
        (logger.info if code in {0, *STOP_CODES} else logger.error)("exit code %d: %s", code, reason)
        self._shutdown(signal.SIGTERM if code in STOP_CODES else None)
        self._ended.set()
        with suppress(DistError):
            if self._hosts:
                self._rendezvous_handler.shutdown()
                barrier(self._notes, len(self._hosts), "farewell", 2 * _FAILED_LIMIT_S)
                time.sleep(_POLL_S)
        raise SystemExit(code)

    def _watch(self) -> None:
        """Look at the heartbeats once per second. A thread, because the main thread may wait for a lost store."""
        while not self._ended.wait(1.0):
            look = in_thread(self._look, "heartbeats-store")
            if not wait([look], self._silence_s).done or look.exception() is not None:
                self._start_anew()

    def _look(self) -> None:
        """Count for how long each host is silent. Time in which this process is suspended does not count."""
        heartbeats = self._heartbeats()
        for name in self._hosts:
            beat, (last, looks) = heartbeats.get(name), self._beats.get(name, (None, 0))
            self._beats[name] = (beat, looks + 1 if beat in (last, None) else 0)  # None: torch has removed the host

    def _heartbeats(self) -> dict[str, object]:
        """Return the last heartbeat of each host, by torch's names of them."""
        return {str(node): beat for node, beat in self._read_state().last_heartbeats.items()}

    def _have_beaten_since(self, before: dict[str, object]) -> bool:
        """Return whether all hosts have sent a heartbeat since the heartbeats `before`."""
        now = self._heartbeats()
        return all(now.get(name, before.get(name)) != before.get(name) for name in self._hosts)

    def _lost_hosts(self) -> str:
        """Return the addresses of the hosts that are silent."""
        silent = [name for name, (_, looks) in self._beats.copy().items() if looks >= self._silence_s]
        return " ".join(self._hosts[name] for name in silent if name in self._hosts)

    def _read_state(self) -> Any:
        """Return the state of the rendezvous, as torch's agents store it."""
        state = self._backend.get_state()
        assert state is not None  # this host has met others
        return pickle.loads(state[0])

    def _start_anew(self) -> NoReturn:
        """End the ranks of this host, and replace this process by a new launcher, which waits for the store."""
        logger.error("the store of the launchers does not answer: the ranks of this host end, and its launcher waits")
        self._shutdown()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
