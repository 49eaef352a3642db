"""Two hosts: losses as on one host, hosts that disappear and return under each launcher, and `megaclip check-hosts`."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.training_runs import ROOT, flags, launcher_command, run_in_ranks, scalars, write_config
from tests.end_to_end.two_hosts import ADDRESSES, Host, TwoHosts, environment, reason_to_skip, set_cable, two_hosts
from tests.tolerances import RUN, assert_close

LIMIT_S = 600
RESTART_LIMIT_S = 120
"""Time limit of a restart in seconds. docs/multi_node.md has measured times."""
RANK, LAUNCHER = "-m megaclip train", "-m (megaclip launch|torch.distributed.run)"
"""Patterns of command lines."""

if _reason := reason_to_skip():
    pytest.skip(_reason, allow_module_level=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as pair:
        yield pair


def test_losses_through_pdsh_equal_those_of_one_host(hosts: TwoHosts, tiny_run: Path, tmp_path: Path) -> None:
    """A remote shell would change the arguments if it expanded or split them. The path of the data is relative."""
    (ends,) = run_in_ranks([flags(tiny_run, tiny_run / "zero3.json", tmp_path / "one", name="a run")])
    assert [end.exit_code for end in ends] == [0, 0], ends[0].output
    run = {"train_data": "train/{00000..00003}.tar", "name": "a run"}
    words = [ROOT / "launch/multi_node.sh", "--hostfile", hosts.hostfile]
    words += flags(tiny_run, tiny_run / "zero3.json", tmp_path / "two", **run)
    command, own = hosts.first.command(*words, folder=tiny_run), environment(hosts)
    done = subprocess.run(command, cwd=tiny_run, env=own, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [list(scalars(tmp_path / logs / "a run")["train/loss"].values()) for logs in ("one", "two")]
    for address in ADDRESSES:
        assert re.search(rf"^{address}: .*process \d+ spawned", done.stdout + done.stderr, re.MULTILINE)
    assert len(losses[0]) == 2
    # Ranks that share memory add the same numbers in another order.
    assert_close(losses[1], losses[0], RUN["loss"])


class Launch:
    """Launchers on two hosts, which start ranks of the same training. Each appends to its own log."""

    def __init__(self, hosts: TwoHosts, launcher: list[str], command: list[str], folder: Path) -> None:
        self.hosts, self.words, self.command, self.folder = hosts, launcher, command, folder
        self.processes: list[subprocess.Popen] = []
        self.logs: list[Path] = []

    def start(self, host: Host) -> None:
        is_host = int(host.address == ADDRESSES[0])
        own = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", host.address]
        own += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-conf", f"is_host={is_host},last_call_timeout=5"]
        variables = environment(self.hosts) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        variables |= dict(line.split("=", 1) for line in Path(variables["DS_ENV_FILE"]).read_text().splitlines())
        self.logs.append(self.folder / f"log {len(self.logs)}")
        with open(self.logs[-1], "w") as log:
            words = host.command(sys.executable, "-m", *self.words, *own, *self.command, folder=self.folder)
            self.processes.append(subprocess.Popen(words, env=variables, stdout=log, stderr=log))

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def starts(self) -> list[tuple[int, int]]:
        """Return (first step, number of ranks) of each start of the training, by their time."""
        found = re.findall(r"(\d\d:\d\d:\d\d) INFO training steps (\d+) to.* = (\d+) ranks?", self.text())
        return [(int(step), int(ranks)) for _, step, ranks in sorted(found)]

    def attempt_steps(self, number: int) -> list[int]:
        """Return the steps that start `number`, from 1, has logged. The first rank is always on the first host."""
        log = self.logs[0].read_text().split("INFO training steps")[number]
        return [int(step) for step in re.findall(r" step (\d+)/", log)]

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def wait_for_start(self, number: int, steps: int, limit_s: float = LIMIT_S) -> None:
        """Wait until start `number` of the training, from 1, has taken some steps."""
        self.wait(lambda: len(self.starts()) >= number, limit_s)
        self.wait(lambda: len(self.attempt_steps(number)) >= steps)

    def end(self) -> None:
        for host in (self.hosts.first, self.hosts.second):
            subprocess.run(host.command("pkill", "-KILL", "-f", "--", f"{RANK}|{LAUNCHER}"))


@pytest.fixture
def started(hosts: TwoHosts, tiny_run: Path, tmp_path: Path) -> Iterator[Callable[[list[str]], Launch]]:
    """Return a function that starts a training under a launcher on both hosts, and waits until it has saved."""
    launches = []

    def start(launcher: list[str]) -> Launch:
        write_config(tmp_path / "config.json", gradient_accumulation_steps=None)
        launch = Launch(hosts, launcher, ["train", *training(tiny_run, tmp_path, "logs")], tmp_path)
        if launcher[0] != "megaclip":
            launch.command[:0] = ["-m", "--", "megaclip"]
        launches.append(launch)
        for host in (hosts.first, hosts.second):
            launch.start(host)
        launch.wait_for_start(1, steps=6)
        return launch

    yield start
    for launch in launches:
        launch.end()


def training(tiny_run: Path, folder: Path, logs: str, **changes: Any) -> list[str]:
    run = {"train_steps": 100_000, "save_every_steps": 4, "keep_last": 1_000, "resume": "auto", "name": "run"}
    return flags(tiny_run, folder / "config.json", folder / logs, **{**run, **changes})


@pytest.mark.long
@pytest.mark.parametrize("launcher", [["megaclip", "launch"], ["torch.distributed.run", "--rdzv-backend", "c10d"]])
def test_a_host_disappears_and_returns(
    started: Callable[[list[str]], Launch],
    launcher: list[str],
    hosts: TwoHosts,
    tiny_run: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    launch = started(launcher)
    hosts.end_second()
    lost_at = time.monotonic()
    launch.wait_for_start(2, steps=1, limit_s=RESTART_LIMIT_S)
    record_property("from the lost host to the next step, in seconds", time.monotonic() - lost_at)
    hosts.start_second()
    launch.start(hosts.second)
    launch.wait_for_start(3, steps=3)
    (_, ranks_1), (second, ranks_2), (third, ranks_3) = launch.starts()
    assert (ranks_1, ranks_2, ranks_3) == (2, 1, 2)
    if launcher[0] == "megaclip":
        assert f"host {ADDRESSES[1]} is lost" in launch.logs[0].read_text()
        subprocess.run(hosts.second.command("pkill", "-USR1", "-f", "--", LAUNCHER), check=True)
        assert [launch.processes[number].wait(LIMIT_S) for number in (0, 2)] == [138, 138], launch.text()
    else:
        subprocess.run(hosts.second.command("pkill", "-TERM", "-f", "--", RANK), check=True)
        launch.wait_for_start(4, steps=1)  # torchrun restarts a run that was stopped
    launch.end()
    losses = scalars(tmp_path / "logs" / "run")["train/loss"]
    assert sorted(losses) == list(range(1, max(losses) + 1))
    # Reference: resume by hand from the checkpoint of each restart, on the same number of ranks.
    for first, last, ranks in ((second, min(third, second + 10), 1), (third, third + 3, 2)):
        run = tmp_path / f"by hand {first}" / "run"
        shutil.copytree(tmp_path / "logs/run/checkpoints" / f"step_{first:08d}", run / f"checkpoints/step_{first:08d}")
        (run / "checkpoints" / "latest").write_text(f"step_{first:08d}")
        words = training(tiny_run, tmp_path, run.parent.name, stop_after_steps=last)
        subprocess.run(launcher_command(words, ranks), cwd=tiny_run, check=True, timeout=LIMIT_S)
        again = scalars(run)["train/loss"]
        assert sorted(again) == list(range(first + 1, last + 1))
        if ranks == 1:
            assert [losses[step] for step in again] == list(again.values())
        assert_close([losses[step] for step in again], list(again.values()), RUN["loss"])


@pytest.mark.long
def test_a_pulled_cable_and_a_killed_launcher(started: Callable[[list[str]], Launch], hosts: TwoHosts) -> None:
    """The first host resumes alone both times. After the cable the second launcher comes back by itself."""
    launch = started(["megaclip", "launch"])
    set_cable(hosts.first, "down")
    launch.wait_for_start(2, steps=6, limit_s=RESTART_LIMIT_S)
    launch.wait(lambda: not hosts.second.processes(RANK))  # ranks that wait for the others were ended
    set_cable(hosts.first, "up")
    launch.wait_for_start(3, steps=6)
    subprocess.run(hosts.second.command("pkill", "-KILL", "-f", "--", LAUNCHER), check=True)
    launch.wait_for_start(4, steps=1, limit_s=RESTART_LIMIT_S)
    launch.start(hosts.second)
    launch.wait_for_start(5, steps=1)
    assert [ranks for _, ranks in launch.starts()] == [2, 1, 2, 1, 2]
    # The ranks have saved before they have ended without their launcher.
    assert launch.attempt_steps(3)[-1] == launch.starts()[3][0]


@pytest.mark.long
def test_faults_of_the_second_host_are_found(hosts: TwoHosts, tiny_run: Path, tmp_path: Path) -> None:
    logs, data = tmp_path / "logs", tiny_run / "train"
    check = ["check-hosts", "--min-free-gib", "0", "--logs", str(logs), "--train-data", f"{data}/*.tar"]

    def found() -> tuple[list[int | None], list[str]]:
        """Return the exit codes of the launchers, and the problems except those of speed: this machine is busy."""
        launch = Launch(hosts, ["megaclip", "launch", "--nnodes", "2"], check, tmp_path)
        for host in (hosts.first, hosts.second):
            launch.start(host)
        codes = [process.wait(LIMIT_S) for process in launch.processes]
        lines = launch.text().splitlines()
        assert any(line.startswith("host-2 ") for line in lines), launch.text()
        return codes, [line for line in lines if re.match(r"host-\d: (?!slow)", line)]

    assert found()[1] == []
    assert list(logs.iterdir()) == []  # the token file has been deleted
    for folder in (logs, data):  # on the second host these folders are empty
        subprocess.run(hosts.second.command("mount", "-t", "tmpfs", "none", folder), check=True)
    codes, problems = found()
    assert codes == [1, 1] and len(problems) == 2, problems
    assert problems[0].startswith("host-2: does not see a file that the first host has written to --logs")
    assert problems[1].startswith("host-2: ") and "mount the data under the same path" in problems[1]
