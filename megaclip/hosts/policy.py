"""Decide what to do when an attempt has ended: restart on some hosts, or stop.

The functions depend only on the observations of `megaclip.hosts.supervisor`. An *attempt* is one start of the ranks on
all chosen hosts, up to their end.
"""

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megaclip.config import TrainingConfig
from megaclip.errors import REFUSED_EXIT_CODE, STOP_SIGNALS, ConfigError
from megaclip.hosts.hostfile import Host

STOP_CODES = frozenset(128 + number for number in STOP_SIGNALS)
"""Exit codes of a run that was stopped on request."""
REFUSED_CODES = frozenset({2, REFUSED_EXIT_CODE})
"""Exit codes of a run whose settings were refused: by a command line's parser, and by the run itself."""
FAILURES_OF_A_HOST = 2
"""Number of failures after which a host is left out."""
_SIGNALS_OF_A_BROKEN_HOST = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
# A shell reports 128 + the signal, DeepSpeed's launcher 256 - the signal. Not SIGABRT: NCCL aborts the ranks of whole
# hosts when another host has failed.
_BROKEN_HOST_CODES = {code for number in _SIGNALS_OF_A_BROKEN_HOST for code in (128 + number, 256 - number)}


@dataclass(frozen=True)
class End:
    """How an attempt has ended."""

    code: int
    """Exit code of the attempt."""
    step: int
    """Step of the newest complete checkpoint afterwards, 0 without one."""
    failed_hosts: frozenset[str] = frozenset()
    """Names of the hosts that caused the failure, if they are known."""
    lost_hosts: frozenset[str] = frozenset()
    """Those of them that did not answer after the failure."""
    for_more_hosts: bool = False
    """True if the supervisor has asked the ranks to save and end, because more hosts can be used."""


@dataclass(frozen=True)
class Verdict:
    """The decision after an attempt."""

    restarts: bool
    reason: str
    exit_code: int = 0
    """Exit code of the supervisor, if it does not restart."""


def decide(ends: Sequence[End], restarts: int) -> Verdict:
    """Return the decision after the attempts `ends`, in their order.

    restarts: largest number of restarts after failures.
    """
    last = ends[-1]
    if last.code == 0:
        return Verdict(False, "the run is complete")
    if last.for_more_hosts and last.code in STOP_CODES:
        return Verdict(True, "it has saved and continues on more hosts")
    if last.code in STOP_CODES:
        return Verdict(False, "the run was stopped on request", last.code)
    if last.code in REFUSED_CODES:
        return Verdict(False, "its settings were refused, and a restart would be refused too", last.code)
    failures = [end for end in ends if not end.for_more_hosts or end.code not in STOP_CODES]
    same_step = [end for end in failures if end.step == last.step and not end.lost_hosts]
    if not last.lost_hosts and len(same_step) > 1:
        return Verdict(
            False,
            f"it has failed twice without a checkpoint after step {last.step}; see the first error of each "
            "attempt, and remove its cause",
            1,
        )
    if len(failures) > restarts:
        return Verdict(False, f"--restarts {restarts}: this was failure {len(failures)}", 1)
    return Verdict(True, f"failure {len(failures)} of at most {restarts + 1}")


def failures_by_host(ends: Iterable[End]) -> Counter[str]:
    """Return how often each host has failed."""
    return Counter(host for end in ends for host in end.failed_hosts)


def usable(hosts: Iterable[Host], ends: Iterable[End]) -> list[Host]:
    """Return `hosts` without those that have failed twice."""
    failures = failures_by_host(ends)
    return [host for host in hosts if failures[host.name] < FAILURES_OF_A_HOST]


def hosts_to_blame(codes: Mapping[str, int], lost: Iterable[str]) -> frozenset[str]:
    """Return the hosts that have caused a failure, or none if that is unknown.

    A host that does not answer has caused the failure. If all hosts answer, a host has caused it if only this host had
    a rank that the kernel ended (out of memory, a memory error). Other exit codes do not show which host failed first:
    the ranks of all hosts fail when one host is gone.

    Args:
        codes: exit code by host, of the hosts that reported one.
        lost: hosts of the attempt that do not answer.
    """
    if gone := frozenset(lost):
        return gone
    broken = frozenset(host for host, code in codes.items() if code in _BROKEN_HOST_CODES)
    return broken if len(broken) == 1 else frozenset()


def choose_hosts(hosts: Sequence[Host], fits: Callable[[int], bool]) -> list[Host]:
    """Return hosts with the largest total number of ranks among which the batch can be divided, or an empty list.

    The hosts keep their order, and those at the end are left out or run fewer ranks than they have slots.

    fits: returns whether the batch can be divided among a number of ranks.
    """
    for ranks in range(sum(host.slots for host in hosts), 0, -1):
        if fits(ranks):
            return _fill(hosts, ranks)
    return []


def _fill(hosts: Sequence[Host], ranks: int) -> list[Host]:
    chosen = []
    for host in hosts:
        if ranks > 0:
            chosen.append(Host(host.name, min(host.slots, ranks)))
            ranks -= host.slots
    return chosen


def batch_fits(config: TrainingConfig) -> Callable[[int], bool]:
    """Return the function that returns whether ds_config.json is accepted for a number of ranks.

    Raises:
        ConfigError: the config does not fix the contrastive batch, which would change with the number of ranks.
    """
    if config.deepspeed.get("train_batch_size") is None:
        raise ConfigError(
            f"{config.path}: --restarts requires train_batch_size, so that the batch stays the same on another number "
            "of ranks; set it, and leave out gradient_accumulation_steps"
        )

    def fits(ranks: int) -> bool:
        try:
            config.batch_layout(ranks)
        except ConfigError:
            return False
        return True

    return fits
