"""Restarts of a run. A stand-in replaces the script that starts the ranks, and files represent hosts."""

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.search import LATEST
from megaclip.commands import supervise
from megaclip.errors import ConfigError, MegaclipError
from megaclip.hosts.attempt_files import attempt_files, read_codes
from megaclip.hosts.hostfile import Host
from megaclip.hosts.supervisor import Supervisor

HOSTS = [Host("a", 1), Host("b", 1), Host("c", 2)]
TRAPS = "trap 'exit 138' USR1; trap 'exit 143' TERM; "
"""Bash code that precedes a checkpoint. After the checkpoint the script may receive SIGUSR1."""
ENDLESS = f"{TRAPS} echo >started; while :; do sleep 0.05; done"


class Cluster:
    """A folder with a file `up/HOST` for each host that answers, and a script for each attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("up", "attempts", "checkpoints"):
            (folder / name).mkdir()
        for host in HOSTS:
            (folder / "up" / host.name).touch()

    def supervisor(self, *attempts: str, restarts: int = 3) -> Supervisor:
        """Return a supervisor whose attempt number n runs the bash commands `attempts[n]`."""
        for number, commands in enumerate(attempts):
            (self.folder / "attempts" / str(number)).write_text(commands)
        return Supervisor(
            hosts=HOSTS,
            fits=lambda ranks: 4 % ranks == 0,
            restarts=restarts,
            start_command=self._start,
            probe_command=lambda host: ["test", "-e", str(self.folder / "up" / host.name)],
            checkpoints=self.folder / "checkpoints",
            absent_probe_s=0.05,
            host_wait_s=0.2,
        )

    def _start(self, hostfile: Path, chosen: Sequence[Host]) -> list[str]:
        number = len(self.starts())
        with open(self.folder / "starts", "a") as starts:
            starts.write(hostfile.read_text().replace(" slots=", ":").replace("\n", " ").strip() + "\n")
        return ["bash", "-c", f"cd {self.folder}; {(self.folder / 'attempts' / str(number)).read_text()}"]

    def starts(self) -> list[str]:
        """Return the hosts of each attempt, as "a:1 c:2"."""
        path = self.folder / "starts"
        return path.read_text().splitlines() if path.exists() else []


def saved(step: int) -> str:
    folder = f"checkpoints/step_{step:08d}"
    return f"mkdir {folder}; echo >{folder}/{MANIFEST}; "


def latest(step: int) -> str:
    return f"echo step_{step:08d} >checkpoints/{LATEST}; "


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_lost_host_is_replaced_by_those_that_answer(cluster: Cluster) -> None:
    run = cluster.supervisor(f"{saved(10)} rm up/c; exit 1", "exit 0")
    assert run.run() == 0
    assert cluster.starts() == ["a:1 b:1 c:2", "a:1 b:1"]
    assert [(end.step, sorted(end.lost_hosts)) for end in run.ends] == [(10, ["c"]), (10, [])]


def test_a_host_is_left_out_after_two_failures_although_it_answers(cluster: Cluster) -> None:
    def killed(step: int) -> str:
        return f'{saved(step)} printf "b 247\\na 1\\nended\\na 247\\n" >$MEGACLIP_HOST_CODES; exit 1'

    run = cluster.supervisor(killed(1), killed(2), "exit 0")
    assert run.run() == 0
    assert cluster.starts() == ["a:1 b:1 c:2", "a:1 b:1 c:2", "a:1 c:1"]


def test_a_failure_after_temporary_files_were_cleaned_up_is_restarted(cluster: Cluster) -> None:
    run = cluster.supervisor(f"{saved(10)} rm -r $(dirname $MEGACLIP_HOST_CODES); exit 1", "exit 0")
    assert run.run() == 0
    assert len(cluster.starts()) == 2


def test_a_lost_host_that_returns_is_used_after_the_next_checkpoint(cluster: Cluster) -> None:
    again = f"{TRAPS} touch up/c; {saved(20)} {ENDLESS}"
    run = cluster.supervisor(f"{saved(10)} rm up/c; exit 1", again, "exit 0")
    assert run.run() == 0
    assert cluster.starts() == ["a:1 b:1 c:2", "a:1 b:1", "a:1 b:1 c:2"]
    assert run.ends[1].for_more_hosts and run.ends[1].code == 138


def test_a_run_that_went_back_makes_progress_below_its_abandoned_checkpoints(cluster: Cluster) -> None:
    """Step 40 belongs to the abandoned branch. `latest` names the steps of the current one."""
    subprocess.run(["bash", "-c", f"cd {cluster.folder}; {saved(40)} {saved(20)} {latest(20)}"], check=True)
    run = cluster.supervisor("exit 1", f"{saved(30)} {latest(30)} exit 1", "exit 0")
    assert run.run() == 0
    assert [end.step for end in run.ends] == [20, 30, 30]


def test_without_a_new_checkpoint_the_run_is_not_interrupted_for_a_host(cluster: Cluster) -> None:
    run = cluster.supervisor(f"{saved(10)} rm up/c; exit 1", "touch up/c; trap 'exit 138' USR1; sleep 1; exit 0")
    assert run.run() == 0
    assert cluster.starts() == ["a:1 b:1 c:2", "a:1 b:1"]


@pytest.mark.parametrize("code", [0, 2, 78, 130, 138, 143])
def test_no_restart_after_these_exit_codes(cluster: Cluster, code: int) -> None:
    assert cluster.supervisor(f"exit {code}").run() == code
    assert len(cluster.starts()) == 1


def test_a_run_that_fails_twice_without_progress_is_given_up(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert cluster.supervisor(f"{saved(5)} exit 1", "exit 75", restarts=9).run() == 1
    assert len(cluster.starts()) == 2
    assert "failed twice without a checkpoint after step 5" in caplog.text


def test_too_few_hosts_end_the_run(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    run = cluster.supervisor(f"{saved(1)} rm up/*; exit 1")
    assert run.run() == 1
    assert "0 of 3 hosts answer" in caplog.text


def send_when_started(cluster: Cluster, number: signal.Signals) -> None:
    """Send a signal to this process when a script has written the file `started`. Then write the file `sent`."""
    deadline = time.monotonic() + 60
    while not (cluster.folder / "started").exists():
        assert time.monotonic() < deadline  # without a supervisor the signal would end the tests
        time.sleep(0.02)
    os.kill(os.getpid(), number)
    (cluster.folder / "sent").touch()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_reaches_the_ranks_and_is_no_failure(cluster: Cluster, sent: signal.Signals, code: int) -> None:
    thread = threading.Thread(target=send_when_started, args=(cluster, sent))
    thread.start()
    assert cluster.supervisor(ENDLESS).run() == code
    thread.join()
    assert len(cluster.starts()) == 1


def test_a_stop_while_the_ranks_save_for_more_hosts_lets_them_save(cluster: Cluster) -> None:
    """A second signal would end the ranks at once, because the script has already received one."""
    save = "echo >started; until [[ -e sent ]]; do sleep 0.05; done; for _ in {1..10}; do sleep 0.1; done; exit 138"
    again = f"trap '{save}' USR1; trap 'exit 1' TERM; touch up/c; {saved(20)} while :; do sleep 0.05; done"
    run = cluster.supervisor(f"{saved(10)} rm up/c; exit 1", again)
    thread = threading.Thread(target=send_when_started, args=(cluster, signal.SIGTERM))
    thread.start()
    assert run.run() == 143
    thread.join()
    assert len(cluster.starts()) == 2


def test_exit_codes_of_ranks_that_the_script_has_ended_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    path.write_text("node-1 247\nunknown 3\nnode-1 1\ngarbage\nended\nnode-0 247\n")
    assert read_codes(path, [Host("me@node-0", 1), Host("node-1", 1)]) == {"node-1": 247}


def test_the_command_refuses_what_a_restart_cannot_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    options = ["--restarts", "1", "--script", "true", "--hostfile", str(tmp_path / "hostfile"), "--"]
    training = ["--deepspeed_config", "zero1", "--model", "ViT-B-32", "--train-data", "x"]
    assert supervise.main([*options, *training]) == ConfigError.exit_code
    assert "--restarts requires --resume auto and --name" in capsys.readouterr().err


def test_a_probe_ends_ranks_of_earlier_attempts_also_with_an_address_of_its_own(tmp_path: Path) -> None:
    """Attempts with the first host use --master_addr. The others use the name of their first host."""
    (tmp_path / "hostfile").write_text("node-0 slots=1\nnode-1 slots=1\n")
    options = ["--restarts", "1", "--script", "true", "--hostfile", str(tmp_path / "hostfile")]
    options += ["--master_addr", "10.99.0.1", "--master_port", "17", "--probe", "bash -c {clean}"]
    training = ["--deepspeed_config", "zero1", "--model", "ViT-B-32", "--train-data", "x", "--resume", "auto"]
    arguments = supervise.argument_parser().parse_args([*options, "--", *training])
    run = supervise.supervisor(arguments, [*training, "--name", "run"])
    launchers = []
    for address in ("10.99.0.1", "node-1", "other-job"):
        name = f"python -u -m deepspeed.launcher.launch --master_addr={address} --master_port=17 train.py"
        launchers.append(subprocess.Popen(["bash", "-c", f"exec -a '{name}' sleep 600"]))
    try:
        deadline = time.monotonic() + 60
        # A process has no command line for a moment during its exec.
        while any("deepspeed" not in "".join(psutil.Process(one.pid).cmdline()[:1]) for one in launchers):
            assert time.monotonic() < deadline
        assert subprocess.run(run.probe_command(HOSTS[0])).returncode == 0
        assert [one.wait(20) for one in launchers[:2]] == [-signal.SIGKILL] * 2
        assert launchers[2].poll() is None
    finally:
        for one in launchers:
            one.kill()
            one.wait()


def test_a_hostfile_that_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, writing the text of the file fails. In the other case, the folder cannot be created."""

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((Path, "write_text"), (os, "mkdir")):
        monkeypatch.setattr(module, name, no_space)
        with (
            pytest.raises(MegaclipError, match="cannot write the hostfile of an attempt: No space left on device"),
            attempt_files(HOSTS, tmp_path),
        ):
            pass
        monkeypatch.undo()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--script": "missing.sh"}, "--script 'missing.sh' is not an executable file; give the path of one"),
        ({"--folder": "missing"}, "--folder 'missing' is not a folder; create it first"),
        ({"--probe": "missing-command {host}"}, "the command 'missing-command' is not on PATH"),
        ({"--probe": "true {node}"}, "--probe 'true {node}': expected a command with {host} and {clean}"),
        ({"--probe": ""}, "--probe '': expected a command with {host} and {clean}"),
        ({"--script": "missing.sh", "--node_rank": "0"}, "--script 'missing.sh' is not an executable file"),
        ({"--node_rank": "0"}, "choose another --logs"),
    ],
)
def test_a_mistake_in_the_command_is_an_error_of_one_line(
    changes: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\n")
    options = {"--restarts": "1", "--script": "true", "--probe": "true", "--hostfile": str(tmp_path / "hostfile")}
    training = ["--deepspeed_config", "zero1", "--model", "ViT-B-32", "--train-data", "x", "--resume", "auto"]
    training += ["--name", "run", "--logs", str(tmp_path / "hostfile")]
    command = [word for option in (options | changes).items() for word in option]
    assert supervise.main([*command, "--", *training]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
