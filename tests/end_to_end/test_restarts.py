"""launch/multi_node.sh --restarts on two hosts: one host disappears and returns, and the run continues by itself."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.training_runs import DS_CONFIG, ROOT, flags, scalars
from tests.end_to_end.two_hosts import Host, TwoHosts, environment, reason_to_skip, two_hosts
from tests.tolerances import RUN, assert_close

MULTI_NODE = ROOT / "launch" / "multi_node.sh"
LIMIT_S = 600
RESTART_LIMIT_S = 120
"""Time limit of a restart in seconds. A restart takes 14 to 29 s, mostly fixed waits."""
NAME = "restarted"

if _reason := reason_to_skip():
    pytest.skip(_reason, allow_module_level=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as pair:
        yield pair


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a ds_config with the batch of `DS_CONFIG`, for any number of ranks that divides this batch."""
    settings: dict[str, Any] = DS_CONFIG | {"zero_optimization": {"stage": 1}}
    del settings["gradient_accumulation_steps"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path / "config.json"


def training(tiny_run: Path, config: Path, logs: Path, **changes: Any) -> list[str]:
    shared = {"train_steps": 100_000, "save_every_steps": 4, "keep_last": 1_000, "resume": "auto", "name": NAME}
    return flags(tiny_run, config, logs, **{**shared, **changes})


def start(hosts: TwoHosts, host: Host, log: Path, *arguments: str) -> subprocess.Popen:
    launch = host.command(MULTI_NODE, "--hostfile", hosts.hostfile, *arguments, folder=log.parent)
    with open(log, "w") as output:
        return subprocess.Popen(launch, env=environment(hosts), stdout=output, stderr=subprocess.STDOUT)


@contextmanager
def started(hosts: TwoHosts, log: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Start multi_node.sh on the first host. Afterwards, end all its processes on both hosts."""
    launcher = start(hosts, hosts.first, log, *arguments)
    try:
        yield launcher
    finally:
        for host in (hosts.first, hosts.second):
            subprocess.run(host.command("pkill", "-KILL", "-f", "multi_node.sh|supervise|deepspeed|train.py"))
        launcher.wait()


def attempts(log: Path) -> list[tuple[int, int]]:
    """Return (first step, number of ranks) of each attempt."""
    found = re.findall(r"attempt \d+ from step (\d+): (\d+) ranks on", log.read_text())
    return [(int(step), int(ranks)) for step, ranks in found]


def steps_of_attempt(log: Path, number: int) -> list[int]:
    """Return the steps that attempt `number` has logged. The first attempt is number 1."""
    part = re.split(r"attempt \d+ from step", log.read_text())[number:]
    return [int(step) for step in re.findall(r"step (\d+)/", part[0])] if part else []


def wait_until(condition: Callable[[], object], launcher: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.long
def test_a_run_survives_the_loss_of_a_host_and_uses_it_when_it_returns(
    hosts: TwoHosts,
    tiny_run: Path,
    config: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    logs, log = tmp_path / "logs", tmp_path / "log"
    arguments = training(tiny_run, config, logs)
    with started(hosts, log, "--restarts", "3", *arguments) as launcher:
        wait_until(lambda: max(steps_of_attempt(log, 1), default=0) >= 6, launcher, log)
        hosts.end_second()
        lost_at = time.monotonic()
        wait_until(lambda: len(attempts(log)) == 2, launcher, log)
        restarted_after_s = time.monotonic() - lost_at
        wait_until(lambda: steps_of_attempt(log, 2), launcher, log)
        record_property("from the lost host to the restart, in seconds", restarted_after_s)
        record_property("from the lost host to the next step, in seconds", time.monotonic() - lost_at)
        assert restarted_after_s < RESTART_LIMIT_S
        hosts.start_second()
        wait_until(lambda: len(attempts(log)) == 3, launcher, log)
        third = attempts(log)[2][0]
        wait_until(lambda: max(steps_of_attempt(log, 3), default=0) >= third + 3, launcher, log)
        subprocess.run(hosts.first.command("pkill", "-USR1", "-f", "megaclip supervise"), check=True)
        assert launcher.wait(LIMIT_S) == 128 + signal.SIGUSR1, log.read_text()
    (_, ranks_1), (second, ranks_2), (third, ranks_3) = attempts(log)
    assert (ranks_1, ranks_2, ranks_3) == (2, 1, 2)
    losses = scalars(logs / NAME)["train/loss"]
    # Reference: resume by hand from the checkpoint of each restart, on the same number of hosts.
    for first, last, count in ((second, min(third, second + 10), 1), (third, third + 3, 2)):
        by_hand = tmp_path / f"by hand {first}"
        run = by_hand / NAME
        shutil.copytree(logs / NAME / "checkpoints" / f"step_{first:08d}", run / "checkpoints" / f"step_{first:08d}")
        (run / "checkpoints" / "latest").write_text(f"step_{first:08d}")
        hosts.hostfile.write_text("".join(f"{h.address} slots=1\n" for h in (hosts.first, hosts.second)[:count]))
        arguments = training(tiny_run, config, by_hand, stop_after_steps=last)
        with started(hosts, tmp_path / "log by hand", *arguments) as launcher:
            assert launcher.wait(LIMIT_S) == 0, (tmp_path / "log by hand").read_text()
        again = scalars(run)["train/loss"]
        assert sorted(again) == list(range(first + 1, last + 1))
        if count == 1:
            assert [losses[step] for step in again] == list(again.values())
        assert_close([losses[step] for step in again], list(again.values()), RUN["loss"])


@pytest.mark.long
def test_hosts_without_ssh_continue_and_meet_again(
    hosts: TwoHosts,
    tiny_run: Path,
    config: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Every host runs its own command. The second host disappears and is started again."""
    log, second_log = tmp_path / "log", tmp_path / "second log"
    arguments = ("--restarts", "3", "--no_ssh", *training(tiny_run, config, tmp_path / "logs"))

    def options(node_rank: int) -> tuple[str, ...]:
        return ("--node_rank", str(node_rank), *arguments)

    with started(hosts, log, *options(0)) as launcher:
        start(hosts, hosts.second, second_log, *options(1))
        wait_until(lambda: max(steps_of_attempt(log, 1), default=0) >= 6, launcher, log)
        hosts.end_second()
        lost_at = time.monotonic()
        wait_until(lambda: len(attempts(log)) == 2, launcher, log)
        restarted_after_s = time.monotonic() - lost_at
        record_property("from the lost host to the restart, in seconds", restarted_after_s)
        assert restarted_after_s < RESTART_LIMIT_S
        wait_until(lambda: steps_of_attempt(log, 2), launcher, log)
        record_property("from the lost host to the next step, in seconds", time.monotonic() - lost_at)
        hosts.start_second()
        second = start(hosts, hosts.second, second_log, *options(1))
        wait_until(lambda: len(attempts(log)) == 3, launcher, log)
        third = attempts(log)[2][0]
        wait_until(lambda: max(steps_of_attempt(log, 3), default=0) >= third + 3, launcher, log)
        subprocess.run(hosts.first.command("pkill", "-USR1", "-f", "megaclip supervise"), check=True)
        assert launcher.wait(LIMIT_S) == 128 + signal.SIGUSR1, log.read_text()
        assert second.wait(LIMIT_S) == 128 + signal.SIGUSR1, second_log.read_text()
    assert [ranks for _, ranks in attempts(log)] == [2, 1, 2]
    assert [ranks for _, ranks in attempts(second_log)] == [2]
    losses = scalars(tmp_path / "logs" / NAME)["train/loss"]
    assert sorted(losses) == list(range(1, max(losses) + 1))
