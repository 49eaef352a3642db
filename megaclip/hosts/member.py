"""Restart a run on several hosts without ssh. One process per host communicates through a folder that all hosts share.

Each host runs a `Member`, which shows by its heartbeats (`megaclip.hosts.heartbeats`) that it is alive. Before each
attempt, the first host of the hostfile that is alive writes `plan_N.json`: the hosts of attempt N, or the exit code
with which all members end. The rules are those of `megaclip.hosts.policy`. A member starts its own ranks only. It ends
them if another host of the attempt has failed, was stopped or is gone.

A plan is created with a hard link, so if two members write it at the same time, only one succeeds.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaclip.errors import ConfigError, MegaclipError, os_reason
from megaclip.hosts import policy
from megaclip.hosts.attempt_files import HOST_CODES_FILE, attempt_files, read_codes
from megaclip.hosts.heartbeats import Heartbeats, read_record
from megaclip.hosts.hostfile import Host
from megaclip.hosts.policy import End
from megaclip.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Times:
    """Seconds between events."""

    beat_s: float = 1.0
    """Seconds between two heartbeats."""
    silence_s: float = 15.0
    """Seconds without a heartbeat after which a host counts as lost."""
    first_wait_s: float = 600.0
    """Seconds for which the first attempt waits for all hosts."""
    gather_s: float = 20.0
    """Seconds for which later attempts wait for all hosts, and for which ranks may still report their errors."""
    give_up_s: float = 600.0
    """Seconds after which the run is given up if too few hosts are alive."""


@dataclass
class Member:
    """One host's part of a run that is restarted without ssh. `run` returns the exit code."""

    folder: Path
    """Folder of heartbeats and plans, shared by all hosts."""
    hosts: Sequence[Host]
    """All hosts of the hostfile."""
    own: Host
    """This host."""
    fits: Callable[[int], bool]
    """Returns whether the batch can be divided among a number of ranks."""
    restarts: int
    """Largest number of restarts after failures."""
    start_command: Callable[[Path, Sequence[Host], int], list[str]]
    """Returns the command that starts this host's ranks: for a hostfile, its hosts, and this host's place."""
    newest_step: Callable[[], int]
    """Returns the step of the newest complete checkpoint."""
    times: Times = field(default_factory=Times)
    _attempt: int = 1
    """Attempt that this member runs or is ready for."""
    _last: tuple[int, int, bool] | None = None
    """Number and exit code of this member's last attempt, and whether it ended because more hosts can be used."""
    _stop: signal.Signals | None = None
    _grows: bool = False
    """True if this member has asked its script to end because more hosts can be used."""
    _script: subprocess.Popen | None = None
    _heartbeats: Heartbeats = field(init=False)

    def __post_init__(self) -> None:
        self._heartbeats = Heartbeats(
            self.folder, self.hosts, self.own, beat_s=self.times.beat_s, silence_s=self.times.silence_s
        )

    def run(self) -> int:
        """Take part until the run is complete, stopped, or given up; return the exit code of `Supervisor.run`.

        Raises:
            MegaclipError: the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        self._attempt = max(self._plans(), default=0) + 1
        with self._heartbeats.beating(self._state):
            while True:
                plan = self._wait_for_plan()
                if plan is None:
                    assert self._stop is not None
                    return 128 + self._stop
                if plan["exit"] is not None:
                    log = logger.info if plan["exit"] in (0, *policy.STOP_CODES) else logger.error
                    log("the run ends with exit code %d: %s", plan["exit"], plan["reason"])
                    return int(plan["exit"])
                self._take_part([Host(**host) for host in plan["hosts"]])

    def _state(self) -> dict[str, Any]:
        """Return what the heartbeats contain. The number is read first, because `_take_part` writes it last."""
        return {"attempt": self._attempt, "last": self._last, "stop": self._stop}

    def stop(self, number: int) -> None:
        """Pass a signal on to the ranks of this host, and do not restart.

        The first signal is not passed on to ranks that save for more hosts: `Supervisor` documents why.
        """
        saves_already = self._grows and self._stop is None
        self._stop = self._stop or signal.Signals(number)
        if self._script is not None and self._script.poll() is None and not saves_already:
            self._script.send_signal(number)

    # ------------------------------------------------------------------------------------------------ plans

    def _plans(self) -> list[int]:
        names = (path.stem.removeprefix("plan_") for path in self.folder.glob("plan_*.json"))
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def _plan(self, number: int) -> dict[str, Any] | None:
        return read_record(self.folder / f"plan_{number:06d}.json")

    def _wait_for_plan(self) -> dict[str, Any] | None:
        """Return the plan of the next attempt, which this member writes if it is the first one alive; None: stopped.

        Raises:
            MegaclipError: the plan cannot be written for `Times.give_up_s`, or when the run is to stop.
        """
        ready_at, has_failed = time.monotonic(), False
        while True:
            if (plan := self._plan(self._attempt)) is not None:
                return plan
            alive = self._heartbeats.alive()
            waited_s = time.monotonic() - ready_at
            decides = next((host.name for host in self.hosts if host.name in alive), None) == self.own.name
            # A heartbeat that was written before the last attempt has an earlier number.
            if decides and all(beat["attempt"] >= self._attempt for beat in alive.values()):
                try:
                    self._decide(alive, waited_s)
                except OSError as error:
                    if self._stop is not None or waited_s > self.times.give_up_s:
                        raise _cannot_write(self.folder, error) from None
                    if not has_failed:
                        logger.warning("trying again: %s", _cannot_write(self.folder, error))
                    has_failed = True
            elif self._stop is not None and self.own.name not in _names(self._before(alive)):
                return None  # a spare host, or one that is left out
            time.sleep(self.times.beat_s / 2)

    def _before(self, alive: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the plan of the last attempt, or `_NO_ATTEMPT` if no member that is alive was there when it began.

        Members that were killed together, as at the time limit of a job, leave a plan without a recorded end. This does
        not count as a failure of a host.
        """
        plan = self._plan(self._attempt - 1) or _NO_ATTEMPT
        ids = {self._heartbeats.id, *(str(beat.get("id")) for beat in alive.values())}
        return plan if plan["exit"] is not None or ids & set(plan["members"]) else _NO_ATTEMPT

    def _decide(self, alive: dict[str, dict[str, Any]], waited_s: float) -> None:
        """Write the plan of the next attempt, unless it is too early. Raises OSError if it cannot be written."""
        before = self._before(alive)
        ends = [_end_of(one) for one in before["ends"]]
        took_part = _names(before)
        stops = [self._stop] if not took_part or self.own.name in took_part else []
        stops += [beat["stop"] for name, beat in alive.items() if name in took_part]
        stop = next((number for number in stops if number), None)
        if before["exit"] is None:
            ends.append(self._end([Host(**host) for host in before["hosts"]], alive))
            verdict = policy.decide(ends, self.restarts)
            if not verdict.restarts:
                self._write_plan([], [], verdict.exit_code, verdict.reason)
                return
        if stop is not None:
            self._write_plan([], [], 128 + stop, "the run was stopped on request")
            return
        usable = policy.usable(self.hosts, ends)
        present = [host for host in usable if host.name in alive]
        limit_s = self.times.gather_s if ends else self.times.first_wait_s
        if len(present) < len(usable) and waited_s < limit_s:
            return
        chosen = policy.choose_hosts(present, self.fits)
        if chosen:
            if ends and ends[-1].failed_hosts:
                logger.warning("attempt %d: failure of %s", len(ends), " ".join(sorted(ends[-1].failed_hosts)))
            members = [str(beat["id"]) for beat in alive.values()]
            self._write_plan(chosen, ends, None, "", members)
        elif waited_s > self.times.give_up_s:
            reason = f"{len(present)} of {len(usable)} usable hosts are alive, too few for the batch"
            if left_out := [host.name for host in self.hosts if host not in usable]:
                reason += f"; left out after {policy.FAILURES_OF_A_HOST} failures each: {' '.join(left_out)}"
            self._write_plan([], [], 1, reason)

    def _end(self, hosts: Sequence[Host], alive: dict[str, dict[str, Any]]) -> End:
        """Return how the last attempt has ended on `hosts`."""
        number = self._attempt - 1
        last = {host.name: (alive.get(host.name) or {}).get("last") for host in hosts}
        reported = {name: own for name, own in last.items() if own is not None and own[0] == number}
        lost = frozenset(last.keys() - reported.keys())
        codes = {name: own[1] for name, own in reported.items() if own[1] != _ENDED}
        grows = any(own[2] for own in reported.values())
        code = attempt_code(codes.values(), bool(lost))
        step = self.newest_step()
        if code in (0, *policy.STOP_CODES, *policy.REFUSED_CODES):
            return End(code, step, for_more_hosts=grows)
        return End(code, step, policy.hosts_to_blame(codes, lost), lost)

    def _write_plan(
        self,
        hosts: Sequence[Host],
        ends: Iterable[End],
        exit_code: int | None,
        reason: str,
        members: Sequence[str] = (),
    ) -> None:
        """Write the plan of the next attempt. members: ids of the members that are alive."""
        content = {
            "members": list(members),
            "hosts": [asdict(host) for host in hosts],
            "ends": [
                {**asdict(end), "failed_hosts": sorted(end.failed_hosts), "lost_hosts": sorted(end.lost_hosts)}
                for end in ends
            ],
            "exit": exit_code,
            "reason": reason,
        }
        temporary = self.folder / f".plan.{self.own.name}.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            with contextlib.suppress(FileExistsError):  # another member has written it first
                os.link(temporary, self.folder / f"plan_{self._attempt:06d}.json")
        finally:
            temporary.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------ attempts

    def _take_part(self, chosen: Sequence[Host]) -> None:
        """Run this host's ranks of an attempt to their end, if it has any; then be ready for the next attempt."""
        names = [host.name for host in chosen]
        ranks = sum(host.slots for host in chosen)
        if self.own.name not in names:
            logger.info("attempt %d: %d ranks on %s; this is a spare host", self._attempt, ranks, " ".join(names))
            self._attempt += 1
            return
        if self._stop is not None:
            self._last = (self._attempt, 128 + self._stop, False)
            self._attempt += 1
            return
        step = self.newest_step()
        logger.info("attempt %d from step %d: %d ranks on %s", self._attempt, step, ranks, " ".join(names))
        place = names.index(self.own.name)
        # Not on the shared disk, which may be full.
        with attempt_files(chosen) as (hostfile, codes):
            environment = {**os.environ, HOST_CODES_FILE: str(codes)}
            command, self._grows = self.start_command(hostfile, chosen, place), False
            self._script = subprocess.Popen(command, env=environment, start_new_session=True)
            if self._stop is not None:  # the signal came before there was a script
                self._script.send_signal(self._stop)
            code = self._wait_for_script(self._script, chosen, step)
            self._script = None
            if self._stop is not None and code == -self._stop:
                code = 128 + self._stop  # it had no handler yet, and no ranks
            if code != _ENDED:  # the script's own code is 1, however a rank has ended
                code = read_codes(codes, chosen).get(self.own.name, code)
        # In this order, so that a reader of the new number finds the end of the attempt.
        self._last = (self._attempt, code, self._grows)
        self._attempt += 1

    def _wait_for_script(self, script: subprocess.Popen, chosen: Sequence[Host], first_step: int) -> int:
        """Wait until the script has ended; return its exit code. The first host asks it to end for more hosts.

        The code is `_ENDED` if this member has ended its ranks, because another host has failed, was stopped or is
        gone.
        """
        left_at, ended = None, False
        started = time.monotonic()
        while script.poll() is None:
            time.sleep(self.times.beat_s / 2)
            alive = self._heartbeats.alive()
            if time.monotonic() - started < self.times.silence_s:
                continue
            if left_at is None and any(self._has_left(alive.get(host.name)) for host in chosen):
                left_at = time.monotonic()
            # The ranks here notice it too, and their own errors explain more.
            if left_at is not None and not ended and time.monotonic() - left_at > self.times.gather_s:
                logger.warning("another host of the run has failed or was stopped; the ranks of this host are ended")
                ended = True
                self._end_ranks(script)
            decides = chosen[0].name == self.own.name and not self._grows
            if decides and self._could_grow(chosen, alive, first_step):
                self._grows = self._stop is None  # a run that was asked to stop is already saving
                if self._grows:
                    logger.info("more hosts can be used: the ranks save, end, and start again")
                    script.send_signal(signal.SIGUSR1)
        return _ENDED if ended else script.returncode

    def _has_left(self, beat: dict[str, Any] | None) -> bool:
        """Return whether a host of this attempt is gone, has failed, or was stopped.

        The ranks of all hosts save and end together. But a host that is stopped before its ranks start ends alone, and
        the ranks of the other hosts wait for its ranks.
        """
        if beat is None:
            return True
        last = beat["last"]
        return last is not None and last[0] == self._attempt and last[1] != 0

    def _end_ranks(self, script: subprocess.Popen) -> None:
        for _ in range(2):  # the second one ends them at once
            with contextlib.suppress(ProcessLookupError):
                script.send_signal(signal.SIGTERM)
            time.sleep(self.times.beat_s)

    def _could_grow(self, chosen: Sequence[Host], alive: dict[str, dict[str, Any]], first_step: int) -> bool:
        """Return whether hosts that are alive would allow more ranks, after a new checkpoint."""
        plan = self._plan(self._attempt) or {"ends": []}
        usable = policy.usable(self.hosts, [_end_of(end) for end in plan["ends"]])
        present = [host for host in usable if host.name in alive or host.name == self.own.name]
        more = sum(host.slots for host in policy.choose_hosts(present, self.fits))
        return more > sum(host.slots for host in chosen) and self.newest_step() > first_step


_NO_ATTEMPT: dict[str, Any] = {"exit": 0, "hosts": [], "ends": [], "members": []}
"""Plan that is used if there was no attempt before."""
_ENDED = -1
"""Exit code of ranks that their member has ended."""


def attempt_code(codes: Iterable[int], host_is_lost: bool) -> int:
    """Return the exit code of an attempt from those of its hosts' launchers."""
    known = set(codes)
    if known & policy.REFUSED_CODES:
        return max(known & policy.REFUSED_CODES)
    if not known or host_is_lost or known - {0, *policy.STOP_CODES}:
        return 1
    return max(known)


def own_host(hosts: Sequence[Host], node_rank: int) -> Host:
    """Return this host.

    Raises:
        ConfigError: there is no such line in the hostfile.
    """
    if not 0 <= node_rank < len(hosts):
        raise ConfigError(
            f"--node_rank {node_rank}: expected the index of this host in the hostfile, 0 to {len(hosts) - 1}"
        )
    return hosts[node_rank]


def _names(plan: dict[str, Any]) -> set[str]:
    """Return the names of the hosts of a plan."""
    return {host["name"] for host in plan["hosts"]}


def _end_of(content: dict[str, Any]) -> End:
    sets = {name: frozenset(content[name]) for name in ("failed_hosts", "lost_hosts")}
    return End(**{**content, **sets})


def _cannot_write(folder: Path, error: OSError) -> MegaclipError:
    return MegaclipError(
        f"cannot write to {str(folder)!r} ({os_reason(error)}); free space, fix permissions, or choose another --logs"
    )
