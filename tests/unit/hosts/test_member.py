"""Restarts without ssh: members meet in a folder. Stand-ins replace the script that starts the ranks."""

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megaclip.errors import ConfigError, MegaclipError
from megaclip.hosts import heartbeats
from megaclip.hosts.heartbeats import Heartbeats
from megaclip.hosts.hostfile import Host
from megaclip.hosts.member import Member, Times, attempt_code, own_host

HOSTS = [Host("a", 1), Host("b", 1), Host("c", 2)]
# Long limits: a paused process must not count as a lost host, and no run must be given up.
TIMES = Times(beat_s=0.05, silence_s=600.0, first_wait_s=600.0, gather_s=1.0, give_up_s=600.0)
WATCHED = replace(TIMES, silence_s=6.0)
"""Times for tests in which a host is lost, or in which attempts are watched."""
LIMIT_S = 300.0
FORK = multiprocessing.get_context("fork")
# As ranks do, all scripts of an attempt end when one of them receives SIGUSR1.
ENDLESS = "trap 'touch saved-$HOSTS' USR1; trap 'exit 143' TERM; "
ENDLESS += "while [[ ! -e saved-$HOSTS && ! -e stop ]]; do sleep 0.03; done; exit 138"


class EndingAttempt:
    """Member whose attempt 1 ends after a number of reads of its fields."""

    def __init__(self, reads: int) -> None:
        self._reads = reads

    def _read(self, before: Any, after: Any) -> Any:
        self._reads -= 1
        return before if self._reads >= 0 else after

    _attempt = property(lambda self: self._read(1, 2))
    _last = property(lambda self: self._read(None, (1, 0, False)))
    _stop = property(lambda self: self._read(None, None))


@pytest.mark.parametrize("reads", range(4))
def test_a_heartbeat_with_a_new_number_has_the_end_of_the_attempt_before(reads: int) -> None:
    """The heartbeat must contain the exit code of the previous attempt.

    Without it the other hosts would consider the host lost. A thread writes heartbeats while attempts end.
    """
    beat = Member._state(EndingAttempt(reads))  # type: ignore[arg-type]  # it replaces a member
    assert beat["attempt"] == 1 or beat["last"] is not None


class Meeting:
    """Members in separate processes. Each attempt appends "HOST PLACE HOSTS" to the file `starts`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = folder / "step"
        self.step.write_text("0")
        self.members: dict[str, multiprocessing.process.BaseProcess] = {}

    def start(
        self,
        host: Host,
        script: str,
        restarts: int = 3,
        fits: Callable[[int], bool] = lambda ranks: 4 % ranks == 0,
        times: Times = TIMES,
    ) -> None:
        def start_command(hostfile: Path, chosen: Sequence[Host], place: int) -> list[str]:
            names = "+".join(one.name for one in chosen)
            return [
                "bash",
                "-c",
                f"cd {self.folder}; echo {host.name} {place} {names} >>starts; HOSTS={names}; {script}",
            ]

        def run() -> None:
            member = Member(
                self.folder / "meeting",
                HOSTS,
                host,
                fits,
                restarts,
                start_command,
                lambda: int(self.step.read_text()),
                times,
            )
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda received, _: member.stop(received))
            os._exit(member.run())

        self.members[host.name] = FORK.Process(target=run)
        self.members[host.name].start()

    def beat(self, name: str) -> dict[str, Any]:
        """Return the last heartbeat of a host, or an empty one if the file is being written."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "meeting" / f"beat_{name}.json").read_text())
        return {}

    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def vanish(self, name: str) -> None:
        """End a member with its script, as a power cut does."""
        process = psutil.Process(self.members.pop(name).pid)
        process.suspend()  # a suspended process starts nothing while its children are listed
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a `sleep` of the script that has just ended
                one.kill()

    def send(self, number: signal.Signals, *names: str) -> None:
        for name in names:
            os.kill(self.members[name].pid, number)

    def codes(self) -> dict[str, int | None]:
        for process in self.members.values():
            process.join(LIMIT_S)
        return {name: process.exitcode for name, process in self.members.items()}


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    made = Meeting(tmp_path)
    yield made
    for name in list(made.members):
        if made.members[name].is_alive():
            made.vanish(name)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_hosts_start_together_and_end_with_the_run(meeting: Meeting) -> None:
    for host in HOSTS:
        meeting.start(host, "exit 0")
    assert meeting.codes() == {"a": 0, "b": 0, "c": 0}
    assert meeting.starts() == ["a 0 a+b+c", "b 1 a+b+c", "c 2 a+b+c"]


@pytest.mark.parametrize("gone", ["a", "c"])
def test_the_others_continue_without_a_host_and_use_it_when_it_returns(meeting: Meeting, gone: str) -> None:
    """The lost host may be the first one, which decides. The script of the others does not end by itself."""
    for host in HOSTS:
        meeting.start(host, ENDLESS, times=WATCHED)
    wait_until(lambda: len(meeting.starts()) == 3)
    meeting.step.write_text("10")
    meeting.vanish(gone)
    left = {"a": "b+c", "c": "a+b"}[gone]
    wait_until(lambda: sum(line.endswith(f" {left}") for line in meeting.starts()) == 2)
    meeting.step.write_text("20")
    meeting.start(next(host for host in HOSTS if host.name == gone), ENDLESS, times=WATCHED)
    wait_until(lambda: len([line for line in meeting.starts() if line.endswith(" a+b+c")]) == 6)
    (meeting.folder / "stop").touch()
    assert meeting.codes() == {"a": 138, "b": 138, "c": 138}


def test_a_host_that_runs_fewer_ranks_than_it_has_slots_uses_hosts_that_return(meeting: Meeting) -> None:
    """Host c alone has 2 slots, and the batch can be divided among 1 or 4 ranks."""
    for host in HOSTS:
        meeting.start(host, ENDLESS, fits=lambda ranks: ranks in (1, 4), times=WATCHED)
    wait_until(lambda: len(meeting.starts()) == 3)
    meeting.step.write_text("10")
    for name in "ab":
        meeting.vanish(name)
    wait_until(lambda: "c 0 c" in meeting.starts())
    meeting.step.write_text("20")
    for host in HOSTS[:2]:
        meeting.start(host, ENDLESS, fits=lambda ranks: ranks in (1, 4), times=WATCHED)
    wait_until(lambda: sum(line.endswith(" a+b+c") for line in meeting.starts()) == 6)
    (meeting.folder / "stop").touch()
    assert meeting.codes() == {"a": 138, "b": 138, "c": 138}


def test_a_heartbeat_that_cannot_be_read_for_a_moment_ends_nothing(meeting: Meeting) -> None:
    for host in HOSTS:
        meeting.start(host, ENDLESS, times=WATCHED)
    wait_until(lambda: len(meeting.starts()) == 3)
    time.sleep(WATCHED.silence_s)  # attempts are watched only after this time
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        (meeting.folder / "meeting" / "beat_b.json").write_text("{")
    time.sleep(TIMES.gather_s + 0.5)
    assert len(meeting.starts()) == 3
    (meeting.folder / "stop").touch()
    assert meeting.codes() == {"a": 138, "b": 138, "c": 138}


def test_a_pause_of_a_member_does_not_count_as_silence_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns))
    one = Heartbeats(tmp_path, HOSTS[:2], HOSTS[0], beat_s=1.0, silence_s=15.0)

    def alive_after(seconds: float, beats: int) -> list[str]:
        nonlocal now_s
        now_s += seconds
        (tmp_path / "beat_b.json").write_text(json.dumps({"id": "b", "beats": beats}))
        return list(one.alive())

    assert [alive_after(0.5, beats) for beats in (1, 2)] == [[], ["b"]]
    assert alive_after(3600.0, beats=2) == ["b"]
    seen = [alive_after(0.5, beats=2) for _ in range(40)]
    assert seen[:25] == [["b"]] * 25 and seen[-1] == []


def test_a_heartbeat_takes_no_new_space_on_the_disk(meeting: Meeting) -> None:
    meeting.start(HOSTS[0], "exit 0")
    file = meeting.folder / "meeting" / "beat_a.json"
    wait_until(lambda: meeting.beat("a"))
    before = file.stat()
    wait_until(lambda: meeting.beat("a").get("beats", 0) > 3)
    assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)


class FullDisk(Member):
    """Member whose first plans cannot be written."""

    failures = 0

    def _write_plan(self, *arguments: Any, **named: Any) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._write_plan(*arguments, **named)


def full_disk(folder: Path, failures: int, give_up_s: float = LIMIT_S) -> FullDisk:
    host = Host("a", 1)
    times = Times(beat_s=0.02, silence_s=1.0, first_wait_s=1.0, gather_s=0.1, give_up_s=give_up_s)
    member = FullDisk(folder, [host], host, lambda ranks: True, 1, lambda *_: ["true"], lambda: 0, times)
    member.failures = failures
    return member


def test_a_disk_that_is_full_for_a_while_delays_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    member = full_disk(tmp_path / "meeting", failures=5)
    assert member.run() == 0
    assert caplog.text.count("No space left on device") == 1


def test_a_disk_that_stays_full_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(MegaclipError, match=r"cannot write to '.*meeting' \(No space left on device\); free space"):
        full_disk(tmp_path / "meeting", failures=10**6, give_up_s=0.5).run()


def test_a_folder_that_cannot_be_created_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MegaclipError, match=r"file/meeting: Not a directory\); free space.* choose another --logs$"):
        full_disk(tmp_path / "file" / "meeting", failures=0).run()


def test_a_place_that_the_hostfile_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--node_rank 3: expected the index of this host in the hostfile, 0 to 2$"):
        own_host(HOSTS, 3)


@pytest.mark.parametrize(("code", "attempts"), [(78, 1), (143, 1), (1, 2)])
def test_what_ends_a_run_ends_it_on_all_hosts(meeting: Meeting, code: int, attempts: int) -> None:
    for host in HOSTS:
        meeting.start(host, f"exit {code}")
    assert meeting.codes() == {"a": code, "b": code, "c": code}
    assert len(meeting.starts()) == 3 * attempts


def test_a_host_whose_ranks_the_kernel_ends_twice_is_left_out(meeting: Meeting) -> None:
    """The script ends with 1 on every host. It writes the ranks' exit code to the file that it is given."""
    for host in HOSTS:
        killed = 'echo "b 247" >$MEGACLIP_HOST_CODES; ' if host.name == "b" else ""
        saves = "wc -l <starts >step.new; mv step.new step; " if host.name == "a" else ""
        meeting.start(host, f"{saves}{killed}[[ $HOSTS != *b* ]]")
    assert meeting.codes() == {"a": 0, "b": 0, "c": 0}
    with_b = ["a 0 a+b+c", "b 1 a+b+c", "c 2 a+b+c"]
    assert meeting.starts() == sorted([*with_b, *with_b, "a 0 a+c", "c 1 a+c"])


def test_a_stop_while_members_wait_for_a_lost_host_ends_the_run(meeting: Meeting) -> None:
    """The batch requires all ranks. One of the remaining hosts receives a stop signal."""
    for host in HOSTS:
        meeting.start(host, ENDLESS, fits=lambda ranks: ranks == 4, times=WATCHED)
    wait_until(lambda: len(meeting.starts()) == 3)
    meeting.vanish("c")
    wait_until(lambda: all(meeting.beat(name).get("attempt") == 2 for name in "ab"))
    meeting.send(signal.SIGTERM, "b")
    assert meeting.codes() == {"a": 143, "b": 143}
    assert len(meeting.starts()) == 3


def test_a_stop_while_the_ranks_save_for_more_hosts_lets_them_save(meeting: Meeting) -> None:
    """A second signal would end the ranks at once, because the script has already received one."""
    saving = "touch saving; until [[ -e sent ]]; do sleep 0.05; done; for _ in {1..10}; do sleep 0.1; done; "
    saving += "touch saved-$HOSTS; exit 138"
    script = f"trap '{saving}' USR1; trap 'exit 1' TERM; while [[ ! -e saved-$HOSTS ]]; do sleep 0.03; done; exit 138"
    for host in HOSTS[:2]:
        meeting.start(host, script, fits=lambda ranks: ranks in (2, 4), times=replace(WATCHED, first_wait_s=0.5))
    wait_until(lambda: len(meeting.starts()) == 2)
    meeting.step.write_text("10")
    meeting.start(HOSTS[2], script, fits=lambda ranks: ranks in (2, 4), times=WATCHED)
    wait_until((meeting.folder / "saving").exists)
    meeting.send(signal.SIGTERM, "a")
    (meeting.folder / "sent").touch()
    assert {name: code for name, code in meeting.codes().items() if name != "c"} == {"a": 143, "b": 143}
    assert (meeting.folder / "saved-a+b").exists()
    assert len(meeting.starts()) == 2


def test_a_stop_between_two_attempts_starts_no_further_one(meeting: Meeting) -> None:
    for host in HOSTS:
        meeting.start(host, ENDLESS, times=WATCHED)
    wait_until(lambda: len(meeting.starts()) == 3)
    # stopped processes notice neither the lost host nor the signal before both have happened
    meeting.send(signal.SIGSTOP, "a", "b")
    meeting.vanish("c")
    meeting.send(signal.SIGTERM, "a", "b")
    meeting.send(signal.SIGCONT, "a", "b")
    assert meeting.codes() == {"a": 143, "b": 143}
    assert len(meeting.starts()) == 3


def test_a_stop_before_the_ranks_of_one_host_start_ends_the_run(meeting: Meeting) -> None:
    """The script of that host ends at once, while the ranks of the other hosts wait for its ranks."""
    for host in HOSTS:
        meeting.start(host, "trap 'exit 143' TERM; while [[ ! -e stop ]]; do sleep 0.03; done; exit 1", times=WATCHED)
    wait_until(lambda: len(meeting.starts()) == 3)
    meeting.send(signal.SIGTERM, "b")
    assert meeting.codes() == {"a": 143, "b": 143, "c": 143}
    assert len(meeting.starts()) == 3


def test_a_host_that_is_left_out_stops_without_the_others(meeting: Meeting) -> None:
    for host in HOSTS:
        killed = 'echo "b 247" >$MEGACLIP_HOST_CODES; ' if host.name == "b" else ""
        saves = "wc -l <starts >step.new; mv step.new step; " if host.name == "a" else ""
        meeting.start(host, f"{saves}{killed}[[ $HOSTS == *b* ]] && exit 1; {ENDLESS}")
    wait_until(lambda: sum(line.endswith(" a+c") for line in meeting.starts()) == 2)
    meeting.send(signal.SIGTERM, "b")
    meeting.members["b"].join(LIMIT_S)
    assert meeting.members.pop("b").exitcode == 143
    assert all(process.is_alive() for process in meeting.members.values())
    (meeting.folder / "stop").touch()
    assert meeting.codes() == {"a": 138, "c": 138}


def test_a_job_whose_hosts_were_all_killed_can_be_started_again(meeting: Meeting) -> None:
    """This happens at the time limit of a job, and may happen more often than the limit of failures and restarts."""
    for _ in range(3):
        begun = len(meeting.starts())
        for host in HOSTS:
            meeting.start(host, ENDLESS, restarts=1)
        wait_until(lambda begun=begun: len(meeting.starts()) == begun + 3)
        for name in list(meeting.members):
            meeting.vanish(name)
    for host in HOSTS:
        meeting.start(host, ENDLESS, restarts=1)
    wait_until(lambda: len(meeting.starts()) == 12)
    (meeting.folder / "stop").touch()
    assert meeting.codes() == {"a": 138, "b": 138, "c": 138}


def test_a_run_that_was_given_up_can_be_started_again(meeting: Meeting) -> None:
    for script, code in (("exit 78", 78), ("exit 0", 0)):
        for host in HOSTS:
            meeting.start(host, script)
        assert meeting.codes() == {"a": code, "b": code, "c": code}


@pytest.mark.parametrize(
    ("codes", "lost", "expected"),
    [
        ([0, 0], False, 0),
        ([0], True, 1),
        ([138, 138], False, 138),
        ([1, 138], False, 1),
        ([1, 78], True, 78),
        ([], False, 1),
        ([], True, 1),
    ],
)
def test_the_code_of_an_attempt(codes: list[int], lost: bool, expected: int) -> None:
    assert attempt_code(codes, lost) == expected
