"""launch/multi_node.sh on two hosts: losses as on one host; the end of a rank or launcher ends all other processes."""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.training_runs import ROOT, flags, launcher_command, scalars
from tests.end_to_end.two_hosts import TwoHosts, reason_to_skip, two_hosts
from tests.end_to_end.two_hosts import environment as environment_of_a_user
from tests.tolerances import RUN, assert_close

MULTI_NODE = ROOT / "launch" / "multi_node.sh"
STEPS = 3
LIMIT_S = 600
END_LIMIT_S = 120
"""Time limit for processes to end. They take 3 to 5 s. gloo waits half an hour for a rank that does not answer."""
RANK = r"train\.py --local_rank"
"""Pattern of the command lines of ranks. It does not match their launcher."""

if _reason := reason_to_skip():
    pytest.skip(_reason, allow_module_level=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("two_hosts")) as pair:
        yield pair


@pytest.fixture(scope="module")
def environment(hosts: TwoHosts) -> dict[str, str]:
    return environment_of_a_user(hosts)


@pytest.fixture(scope="module")
def losses_of_one_host(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    logs = tmp_path_factory.mktemp("one_host")
    subprocess.run(launcher_command(training(tiny_run, logs)), cwd=tiny_run, check=True, timeout=LIMIT_S)
    return losses(logs)


def training(tiny_run: Path, logs: Path, steps: int = STEPS) -> list[str]:
    """Return arguments of launch/train.py that a remote shell would change if it expanded or split them.

    The path of the data is relative, so the ranks must run in the folder of the launcher.
    """
    data = "train/{00000..00003}.tar"
    return flags(tiny_run, tiny_run / "zero3.json", logs, train_data=data, train_steps=steps, name="a run")


def losses(logs: Path) -> list[float]:
    """Return the loss of every step."""
    return list(scalars(logs / "a run")["train/loss"].values())


def test_losses_through_pdsh_equal_those_of_one_host(
    hosts: TwoHosts, environment: dict[str, str], tiny_run: Path, tmp_path: Path, losses_of_one_host: list[float]
) -> None:
    launch = hosts.first.command(
        MULTI_NODE, "--hostfile", hosts.hostfile, *training(tiny_run, tmp_path), folder=tiny_run
    )
    output = finished(launch, environment)
    for host in (hosts.first, hosts.second):
        assert re.search(rf"^{host.address}: .*process \d+ spawned", output, re.MULTILINE), output
    assert len(losses_of_one_host) == STEPS
    # Ranks that share memory add the same numbers in another order.
    assert_close(losses(tmp_path), losses_of_one_host, RUN["loss"])


@pytest.mark.long
def test_losses_without_ssh_equal_those_of_one_host(
    hosts: TwoHosts, environment: dict[str, str], tiny_run: Path, tmp_path: Path, losses_of_one_host: list[float]
) -> None:
    environment = environment | {"PDSH_SSH_ARGS_APPEND": "-F /nowhere"}
    options = ("--no_ssh", "--hostfile", hosts.hostfile, "--node_rank")
    launches = [
        host.command(MULTI_NODE, *options, str(node_rank), *training(tiny_run, tmp_path), folder=tiny_run)
        for node_rank, host in enumerate((hosts.first, hosts.second))
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(finished, launches, [environment] * 2))
    # Ranks that share memory add the same numbers in another order.
    assert_close(losses(tmp_path), losses_of_one_host, RUN["loss"])


def finished(launch: list[str], environment: dict[str, str]) -> str:
    """Run a launch that must succeed, and return its output."""
    done = subprocess.run(
        launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def endless_run(
    hosts: TwoHosts, environment: dict[str, str], tiny_run: Path, logs: Path
) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Start a launch through pdsh that would train for hours. Yield the launch and the file with its output."""
    arguments = training(tiny_run, logs, steps=1_000_000)
    launch = hosts.first.command(MULTI_NODE, "--hostfile", hosts.hostfile, *arguments, folder=tiny_run)
    log = logs / "log"
    with open(log, "w") as output:
        launcher = subprocess.Popen(launch, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield launcher, log
    finally:
        for host in (hosts.first, hosts.second):
            subprocess.run(host.command("pkill", "-KILL", "-f", "multi_node.sh|deepspeed|train.py"))
        launcher.wait()


@pytest.mark.long
def test_a_dead_rank_ends_the_others(
    hosts: TwoHosts, environment: dict[str, str], tiny_run: Path, tmp_path: Path
) -> None:
    """The other rank is stopped by SIGSTOP, like a rank that waits in a collective for the dead one."""
    with endless_run(hosts, environment, tiny_run, tmp_path) as (launcher, log):
        wait_until(lambda: "step 2/" in log.read_text(), LIMIT_S)
        subprocess.run(hosts.first.command("pkill", "-STOP", "-f", RANK), check=True)
        subprocess.run(hosts.second.command("pkill", "-KILL", "-f", RANK), check=True)
        assert launcher.wait(END_LIMIT_S) == 1, log.read_text()
        subprocess.run(hosts.first.command("pkill", "-CONT", "-f", RANK))
        wait_until(lambda: not hosts.first.processes(RANK), END_LIMIT_S)
        assert "a rank failed" in log.read_text()


@pytest.mark.long
def test_ending_the_launcher_ends_the_ranks(
    hosts: TwoHosts, environment: dict[str, str], tiny_run: Path, tmp_path: Path
) -> None:
    with endless_run(hosts, environment, tiny_run, tmp_path) as (launcher, log):
        wait_until(lambda: hosts.first.processes(RANK) and hosts.second.processes(RANK), LIMIT_S)
        send_to_script(launcher, signal.SIGTERM)
        code = launcher.wait(END_LIMIT_S)
        assert code in (1, 128 + signal.SIGTERM), (
            log.read_text()
        )  # 143: training had started, so the ranks saved and exited
        wait_until(lambda: not (hosts.first.processes(RANK) or hosts.second.processes(RANK)), END_LIMIT_S)


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_lets_the_ranks_save(
    hosts: TwoHosts, environment: dict[str, str], tiny_run: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    with endless_run(hosts, environment, tiny_run, tmp_path) as (launcher, log):
        wait_until(lambda: "step 2/" in log.read_text(), LIMIT_S)
        send_to_script(launcher, sent)
        assert launcher.wait(END_LIMIT_S) == 128 + sent, log.read_text()
        stopped = re.search(rf"stopped by {sent.name} after step (\d+);", log.read_text())
        assert stopped, log.read_text()
        latest = tmp_path / "a run" / "checkpoints" / "latest"
        assert latest.read_text() == f"step_{int(stopped[1]):08d}"
        assert "a rank failed" not in log.read_text()
        wait_until(lambda: not (hosts.first.processes(RANK) or hosts.second.processes(RANK)), END_LIMIT_S)


def send_to_script(launcher: subprocess.Popen, number: signal.Signals) -> None:
    """Send a signal to multi_node.sh, the only child of `nsenter`. Its subshells have the same command line."""
    (script,) = psutil.Process(launcher.pid).children()
    script.send_signal(number)


def wait_until(condition: Callable[[], object], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {limit_s} s"
        time.sleep(0.2)
