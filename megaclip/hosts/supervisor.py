"""Start a run on several hosts, and restart it from its newest checkpoint after a failure.

The supervisor starts a script (launch/multi_node.sh) with the hosts that answer and waits for its end.
`megaclip.hosts.policy` then decides what to do. The supervisor does not train and needs no GPU. If the run uses fewer
hosts than possible, the supervisor checks whether missing hosts answer again. After the run's next checkpoint the ranks
then save, end, and restart on more hosts.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megaclip.checkpoint import search
from megaclip.errors import STOP_SIGNALS, MegaclipError
from megaclip.hosts import policy
from megaclip.hosts.attempt_files import HOST_CODES_FILE, attempt_files, read_codes
from megaclip.hosts.hostfile import Host
from megaclip.hosts.policy import End
from megaclip.logging import get_logger

logger = get_logger(__name__)

PROBE_LIMIT_S = 30.0
"""Seconds after which a host that has not answered counts as lost."""
ABSENT_PROBE_S = 30.0
"""Seconds between two checks for hosts that answer again."""
HOST_WAIT_S = 600.0
"""Seconds to wait for hosts if too few hosts answer for the batch."""
_POLL_S = 0.2


class TooFewHostsError(MegaclipError):
    """The hosts that answer cannot run the batch."""


@dataclass
class Supervisor:
    """Starts and restarts one run. `run` returns the exit code."""

    hosts: Sequence[Host]
    """All hosts of the hostfile, spare ones included."""
    fits: Callable[[int], bool]
    """Returns whether the batch can be divided among a number of ranks."""
    restarts: int
    """Largest number of restarts after failures."""
    start_command: Callable[[Path, Sequence[Host]], list[str]]
    """Returns the command that starts the ranks, for the hostfile of an attempt and its hosts."""
    probe_command: Callable[[Host], list[str]]
    """Returns the command that succeeds if a host answers. It ends ranks that an earlier attempt has left there."""
    checkpoints: Path
    """Folder of the run's checkpoints."""
    folder: Path | None = None
    """Folder for the hostfile of an attempt. None: the system's folder for temporary files."""
    absent_probe_s: float = ABSENT_PROBE_S
    host_wait_s: float = HOST_WAIT_S
    ends: list[End] = field(default_factory=list)
    """How the attempts so far have ended."""
    _script: subprocess.Popen | None = None
    _stop: signal.Signals | None = None
    """First signal that has asked the supervisor to stop."""
    _grows: bool = False
    """True if the script was asked to end because more hosts can be used."""

    def run(self) -> int:
        """Start the run and restart it until it is complete, stopped, or given up; return the exit code.

        0: complete. 130, 138, 143: stopped on request. 2, 78: settings refused. 1: given up; the log shows the reason.
        """
        with forwarded_signals(self._forward):
            while True:
                try:
                    chosen = self._wait_for_hosts()
                except TooFewHostsError as error:
                    logger.error("%s", error)
                    return TooFewHostsError.exit_code
                if self._stop is not None:
                    return 128 + self._stop
                self.ends.append(self._attempt(chosen))
                verdict = policy.decide(self.ends, self.restarts)
                if self._stop is not None and self.ends[-1].code != 0:
                    return self.ends[-1].code
                log = logger.info if verdict.exit_code in (0, *policy.STOP_CODES) else logger.error
                log("attempt %d: %s", len(self.ends), verdict.reason)
                if not verdict.restarts:
                    return verdict.exit_code

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Handle a signal: pass it on to the script, which lets the ranks save, and do not restart.

        Ranks that save for more hosts already save; the script would take the first signal for a second one, and end
        them at once.
        """
        saves_already = self._grows and self._stop is None
        self._stop = self._stop or signal.Signals(number)
        if self._script is not None and self._script.poll() is None and not saves_already:
            self._script.send_signal(number)

    def _attempt(self, chosen: Sequence[Host]) -> End:
        """Run the script on the `chosen` hosts to its end."""
        first_step = newest_step(self.checkpoints)
        logger.info(
            "attempt %d from step %d: %d ranks on %s",
            len(self.ends) + 1,
            first_step,
            sum(host.slots for host in chosen),
            " ".join(host.name for host in chosen),
        )
        with attempt_files(chosen, self.folder) as (hostfile, codes):
            code = self._run_script(self.start_command(hostfile, chosen), codes, chosen, first_step)
            by_host = read_codes(codes, chosen)
        if self._stop is not None and (code == -self._stop or (self._grows and code in policy.STOP_CODES)):
            code = 128 + self._stop  # it had no handler yet, and no ranks; or it did not get this signal
        if policy.REFUSED_CODES & set(by_host.values()):
            code = policy.REFUSED_EXIT_CODE  # srun returns the code of the launchers that it has ended
        if code in (0, *policy.STOP_CODES, *policy.REFUSED_CODES):
            return End(code, newest_step(self.checkpoints), for_more_hosts=self._grows)
        answering = self._answering(chosen)
        lost = frozenset(host.name for host in chosen if host not in answering)
        failed = policy.hosts_to_blame(by_host, lost)
        for name in sorted(failed):
            logger.warning("host %s %s", name, "does not answer" if name in lost else "has ended a rank by a signal")
        return End(code, newest_step(self.checkpoints), failed_hosts=failed, lost_hosts=lost)

    def _run_script(self, command: list[str], codes: Path, chosen: Sequence[Host], first_step: int) -> int:
        """Run `command`, which writes the exit codes of its hosts to `codes`; return its own exit code."""
        # In a separate session: Ctrl-C in a terminal must not reach the script twice.
        environment, self._grows = {**os.environ, HOST_CODES_FILE: str(codes)}, False
        self._script = subprocess.Popen(command, env=environment, start_new_session=True)
        if self._stop is not None:  # the signal came before there was a script
            self._script.send_signal(self._stop)
        self._wait_for_script(chosen, first_step)
        code, self._script = self._script.returncode, None
        return code

    def _wait_for_script(self, chosen: Sequence[Host], first_step: int) -> None:
        """Wait until the script has ended. Ask it to end when more hosts can be used."""
        assert self._script is not None
        next_look = time.monotonic() + self.absent_probe_s
        while self._script.poll() is None:
            time.sleep(_POLL_S)
            if self._grows or self._stop is not None or time.monotonic() < next_look:
                continue
            # Only after a checkpoint of this attempt: hosts that come and go then cannot stop the progress.
            if newest_step(self.checkpoints) > first_step and self._could_grow(chosen):
                self._grows = self._stop is None  # a signal may have arrived during the check
                if self._grows and self._script.poll() is None:
                    logger.info("more hosts can be used: the ranks save, end, and start again")
                    self._script.send_signal(signal.SIGUSR1)
            next_look = time.monotonic() + self.absent_probe_s

    def _could_grow(self, chosen: Sequence[Host]) -> bool:
        """Return whether hosts that are not `chosen` answer and would allow more ranks."""
        names = {host.name for host in chosen}
        usable = policy.usable(self.hosts, self.ends)
        now = sum(host.slots for host in chosen)
        if sum(host.slots for host in policy.choose_hosts(usable, self.fits)) <= now:
            return False
        answering = self._answering([host for host in usable if host.name not in names])
        present = [host for host in usable if host.name in names or host in answering]
        return sum(host.slots for host in policy.choose_hosts(present, self.fits)) > now

    def _wait_for_hosts(self) -> list[Host]:
        """Return the hosts of the next attempt; wait for them if those that answer are too few.

        Raises:
            TooFewHostsError: they remain too few.
        """
        usable = policy.usable(self.hosts, self.ends)
        left_out = [host.name for host in self.hosts if host not in usable]
        if left_out:
            logger.warning("left out after %d failures each: %s", policy.FAILURES_OF_A_HOST, " ".join(left_out))
        deadline = time.monotonic() + self.host_wait_s
        while True:
            present = self._answering(usable)
            if chosen := policy.choose_hosts(present, self.fits):
                names = {host.name for host in chosen}
                if spare := [host.name for host in present if host.name not in names]:
                    logger.info("spare hosts: %s", " ".join(spare))
                return chosen
            if self._stop is not None:
                return []
            if time.monotonic() >= deadline or not policy.choose_hosts(usable, self.fits):
                raise TooFewHostsError(
                    f"{len(present)} of {len(self.hosts)} hosts answer and have not failed twice, and the batch cannot "
                    "be divided among any number of their ranks; repair the others, or change "
                    "train_micro_batch_size_per_gpu and leave out gradient_accumulation_steps"
                )
            logger.warning("%d of %d hosts answer, which are too few; waiting for more", len(present), len(usable))
            time.sleep(min(10.0, self.host_wait_s))

    def _answering(self, hosts: Sequence[Host]) -> list[Host]:
        if not hosts:
            return []
        with ThreadPoolExecutor(min(64, len(hosts))) as pool:
            answers = list(pool.map(self._answers, hosts))
        return [host for host, answers_now in zip(hosts, answers, strict=True) if answers_now]

    def _answers(self, host: Host) -> bool:
        try:
            done = subprocess.run(
                self.probe_command(host),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=PROBE_LIMIT_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 if there is none or the folder cannot be read.

    It is the one that `latest` names: a run that went back to an earlier checkpoint keeps those of later steps.
    """
    with contextlib.suppress(OSError):
        complete, latest = search.newest_first(checkpoints), search.latest_tag(checkpoints)
        if complete:
            return search.step_of(latest if latest in complete else complete[0])
    return 0


@contextlib.contextmanager
def forwarded_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the stop signals with `handler` in the body of a `with` statement."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
