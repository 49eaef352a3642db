"""`megaclip check-hosts` on two hosts: equal hosts, and faults of the second host."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.training_runs import ROOT, flags, free_port
from tests.end_to_end.two_hosts import ADDRESSES, TwoHosts, environment, reason_to_skip, two_hosts

if _reason := reason_to_skip():
    pytest.skip(_reason, allow_module_level=True)

pytestmark = pytest.mark.long
FIRST, SECOND = ADDRESSES


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as pair:
        yield pair


def run(hosts: TwoHosts, *command: str | Path, folder: Path) -> subprocess.CompletedProcess:
    inside = hosts.first.command(*command, folder=folder)
    return subprocess.run(inside, env=environment(hosts), capture_output=True, text=True, timeout=600)


def check(hosts: TwoHosts, *arguments: str | Path, folder: Path) -> tuple[int, dict[str, str], list[str]]:
    """Return exit code, line of each host, and problems except those of speed, because this machine is busy."""
    options = ("--hostfile", hosts.hostfile, "--master_port", str(free_port()), *arguments)
    done = run(hosts, sys.executable, "-m", "megaclip", "check-hosts", *options, folder=folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("198.18.")]
    rows = {line.split()[0]: line for line in lines if not line.split()[0].endswith(":")}
    problems = [line for line in lines if line.split()[0].endswith(":") and ": slow" not in line]
    assert rows, done.stdout + done.stderr
    return done.returncode, rows, problems


def test_equal_hosts_and_each_fault_of_the_second(hosts: TwoHosts, tiny_run: Path, tmp_path: Path) -> None:
    logs, data = tmp_path / "logs", tiny_run / "train"
    arguments = ("--min-free-gib", "0", "--logs", logs, "--train-data", f"{data}/*.tar")
    _, rows, problems = check(hosts, *arguments, folder=tiny_run)
    assert problems == [] and list(rows) == [FIRST, SECOND]
    assert float(rows[SECOND].split()[-2]) > 1  # MiB per s
    assert list(logs.iterdir()) == []  # the token file has been deleted

    for folder in (logs, data):  # on the second host these folders are empty
        subprocess.run(hosts.second.command("mount", "-t", "tmpfs", "none", folder), check=True)
    with open(hosts.hostfile, "a") as hostfile:
        hostfile.write("198.18.0.9 slots=1\n")
    code, rows, problems = check(hosts, *arguments, folder=tiny_run)
    assert code == 1
    assert [line.split()[-1] for line in list(rows.values())[1:]] == ["problem", "problem"]
    assert len(problems) == 3, problems
    assert problems[0].startswith(f"{SECOND}: does not see a file that this machine has written to --logs")
    assert problems[1].startswith(f"{SECOND}: ") and "mount the data under the same path" in problems[1]
    assert problems[2].startswith("198.18.0.9: cannot be asked: ")


def test_the_launcher_starts_nothing_on_hosts_with_a_problem(hosts: TwoHosts, tiny_run: Path, tmp_path: Path) -> None:
    subprocess.run(hosts.second.command("mount", "-t", "tmpfs", "none", tiny_run / "train"), check=True)
    training = flags(tiny_run, tiny_run / "zero1.json", tmp_path / "logs")
    launch = (ROOT / "launch" / "multi_node.sh", "--check_hosts", "--hostfile", hosts.hostfile, *training)
    done = run(hosts, *launch, folder=tiny_run)
    assert done.returncode == 2, done.stderr
    assert f"{SECOND}: " in done.stdout and "mount the data" in done.stdout
    assert "the hosts have the problems above" in done.stderr
    assert not (tmp_path / "logs" / "run").exists()
