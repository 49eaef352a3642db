"""launch/multi_node.sh and launch/slurm.sbatch with stub programs for deepspeed, pdsh and Slurm."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
# A stub program that writes its arguments, one per line, to a file named after itself.
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$@" >"$RECORDS/${0##*/}"\nenv >"$RECORDS/environment"\n'
RECORDER += '[[ -z ${MEGACLIP_COMPLETED_FILE-} ]] || echo 0 >"$MEGACLIP_COMPLETED_FILE"\n'  # as a complete run does
TRAINING = ["--deepspeed_config", "zero3.json", "--model", "ViT-B-32"]
# Of launchers that the script can find. Another run of these tests on this machine must not find them.
ADDRESS = f"node-{os.getpid()}"


class Bench:
    """A folder with a hostfile of two hosts, and the stub programs on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = folder / "records"
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("# two hosts\n\nme@node-0 slots=2\nnode-1   slots=2 # and a note\n")
        self.bin = folder / "bin"
        self.environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(folder),
            "RECORDS": str(self.records),
        }
        for path in (self.records, self.bin):
            path.mkdir()
        for name in ("deepspeed", "pdsh"):
            self.stub(name, RECORDER)

    def stub(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *arguments: object) -> subprocess.CompletedProcess:
        command = [str(LAUNCH / script), *map(str, arguments)]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )

    def multi_node(self, *arguments: object) -> list[str]:
        """Run multi_node.sh with the hostfile of this folder. Return the arguments that deepspeed receives."""
        done = self.run("multi_node.sh", "--hostfile", self.hostfile, *arguments)
        assert done.returncode == 0, done.stderr
        return (self.records / "deepspeed").read_text().splitlines()

    def start(self, *options: str, stderr: int | IO[str] | None = None) -> subprocess.Popen:
        """Start multi_node.sh with the hostfile of this folder, without waiting for it."""
        return subprocess.Popen(
            [str(LAUNCH / "multi_node.sh"), "--hostfile", str(self.hostfile), *options, *TRAINING],
            cwd=self.folder,
            env=self.environment,
            stderr=stderr,
            text=True,
            # bash cannot trap a signal that the test process ignores
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def launcher(self) -> str:
        """Return the command line by which the script finds a launcher of DeepSpeed."""
        return f"{self.folder}/python -u -m deepspeed.launcher.launch --master_addr={ADDRESS} --master_port=29500 -"

    def pause_before_the_launcher_is_noted(self, command: str) -> None:
        """Make the script pause between the start of `deepspeed` and its next command."""
        pause = self.folder / "pause.sh"
        pause.write_text(f"set -T\ntrap 'case $BASH_COMMAND in launcher=*) {command} ;; esac' DEBUG\n")
        self.environment |= {"BASH_ENV": str(pause)}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def after_script(arguments: list[str]) -> list[str]:
    script = next(place for place, argument in enumerate(arguments) if argument.endswith("/launch/train.py"))
    return arguments[script + 1 :]


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_arguments_survive_the_remote_shell(bench: Bench) -> None:
    """bash parses the command line as DeepSpeed quotes it, after pdsh's replacements."""
    expected = ["--train-data", "s/{0..3}.tar", "*", "a b", 'echo "$HOME" `id` \\', "it's", "", "100%n", "a;b&c|d", "~"]
    sent = after_script(bench.multi_node(*expected))
    quoted_by_deepspeed = ['"{}"'.format(text.replace('"', '\\"')) if " " in text else text for text in sent]
    line = re.sub("%([hun%])", lambda found: found[1].replace("n", "0"), " ".join(quoted_by_deepspeed))
    arrived = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, cwd=bench.folder)
    assert arrived.stdout.split("\n")[:-1] == expected


def test_the_master_address_is_the_first_host(bench: Bench) -> None:
    arguments = bench.multi_node("--master_port=29512", *TRAINING)
    assert option(arguments, "--master_addr") == "node-0"
    assert option(arguments, "--master_port") == "29512"
    assert after_script(arguments) == TRAINING
    assert option(bench.multi_node("--master_addr", "10.0.0.1", *TRAINING), "--master_addr") == "10.0.0.1"


def test_no_ssh_exports_the_variables_and_quotes_nothing(bench: Bench) -> None:
    (bench.folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\nNOTE=a b = $c\n")
    arguments = bench.multi_node("--no_ssh", "--node_rank", 1, "--train-data", "{0..3}.tar")
    assert option(arguments, "--node_rank") == "1"
    assert after_script(arguments) == ["--train-data", "{0..3}.tar"]
    environment = (bench.records / "environment").read_text().splitlines()
    assert {"GLOO_SOCKET_IFNAME=eth0", "NOTE=a b = $c"} <= set(environment)


def test_a_failed_run_ends_its_ranks_and_reports_the_failure(bench: Bench) -> None:
    bench.stub("deepspeed", "#!/bin/bash\nexit 3\n")
    done = bench.run("multi_node.sh", "--hostfile", bench.hostfile, *TRAINING)
    assert done.returncode == 1
    assert "a rank failed" in done.stderr
    ended = (bench.records / "pdsh").read_text().splitlines()
    assert option(ended, "-w") == "me@node-0,node-1"
    assert "--master_addr=node-0 --master_port=29500 " in ended[-1]


def test_without_ssh_an_exit_code_of_0_counts_only_if_the_ranks_report_a_complete_run(bench: Bench) -> None:
    """`deepspeed` exits with 0 if the launcher of its ranks is killed."""
    arguments = ("--hostfile", bench.hostfile, "--no_ssh", "--node_rank", 0, *TRAINING)
    assert bench.run("multi_node.sh", *arguments).returncode == 0
    bench.stub("deepspeed", "#!/bin/bash\nexit 0\n")
    done = bench.run("multi_node.sh", *arguments)
    assert done.returncode == 1
    assert "the launcher of the ranks was killed" in done.stderr


@pytest.mark.parametrize("code", [0, 3, 143])
def test_no_temporary_file_is_left(bench: Bench, code: int) -> None:
    temporary = bench.folder / "temporary"
    temporary.mkdir()
    bench.environment["TMPDIR"] = str(temporary)
    bench.stub("deepspeed", f"#!/bin/bash\nexit {code}\n")
    for without_ssh in ([], ["--no_ssh", "--node_rank", 0]):
        bench.run("multi_node.sh", "--hostfile", bench.hostfile, *without_ssh, *TRAINING)
    assert list(temporary.iterdir()) == []


INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("sent", "forwarded", "ranks_code", "expected"),
    [
        ([USR1], "USR1", 138, 138),
        ([USR1], "USR1", 0, 0),  # the run was complete
        ([USR1], "USR1 KILL KILL", 1, 1),  # the save failed
        ([USR1, USR1], "USR1 USR1", 138, 138),
        ([TERM], "TERM", 143, 143),
        ([INT], "TERM", 143, 143),
        ([TERM, USR1], "TERM USR1", 143, 143),
        ([TERM], "TERM KILL KILL", 241, 1),  # 256 - SIGTERM: the signal killed a rank that had not started to train
        ([TERM, TERM], "TERM KILL KILL", None, 1),
        ([USR1, TERM], "USR1 KILL KILL", None, 1),
    ],
)
def test_exit_code_after_a_signal_follows_the_ranks(
    bench: Bench, sent: list[signal.Signals], forwarded: str, ranks_code: int | None, expected: int
) -> None:
    """Check the exit code of the script after a signal.

    forwarded: signals that the script sends to the ranks. ranks_code: their exit code, or None if they must be killed.
    """
    started, arrived, leave = (bench.records / name for name in ("started", "arrived", "leave"))
    bench.stub("pdsh", f'#!/bin/bash\necho "${{@: -1}}" >>{arrived}\n')
    bench.stub(
        "deepspeed",
        f"#!/bin/bash\necho >{started}\nfor _ in {{1..6000}}; do\n  sleep 0.05\n"
        f"  [[ -e {leave} ]] && exit {ranks_code}\n  grep -qs KILL {arrived} && exit 1\ndone\n",
    )
    with bench.start(stderr=subprocess.PIPE) as script:
        wait_for_lines(started, 1)
        for count, number in enumerate(sent, start=1):
            script.send_signal(number)
            wait_for_lines(arrived, count)
        if ranks_code is not None:
            leave.touch()
        _, errors = script.communicate(timeout=600)
    assert script.returncode == expected
    assert ("a rank failed" in errors) == (ranks_code in (1, 241))
    assert re.findall("sh -c 'pkill -([A-Z0-9]+) ", arrived.read_text()) == forwarded.split()


# A deepspeed with one launcher, which is still importing and has no child process. `exec -a` sets its name.
LAUNCHER = """#!/bin/bash
{before}
setsid bash -c 'exec -a "{name}" bash -c "exec 3<>{folder}/fifo; echo >{folder}/launched; read -t 600 -u 3"' \
  &>/dev/null &
{after}
wait
"""


@pytest.mark.parametrize(
    ("sent", "fails", "expected"),
    [
        (["launched"], False, 0),
        pytest.param(["begun"], False, 0, marks=pytest.mark.long),  # nothing had started when the signal arrived
        pytest.param(["launched", "launched"], False, 1, marks=pytest.mark.long),
        ([], True, 1),
    ],
    ids=["stopped", "stopped before the launcher", "stopped twice", "another host fails"],
)
def test_no_rank_starts_after_the_end(bench: Bench, sent: list[str], fails: bool, expected: int) -> None:
    """After the script has ended, no launcher may be left that could start a rank.

    The launchers have no ranks yet. sent: the files after which a SIGTERM is sent.
    """
    os.mkfifo(bench.folder / "fifo")
    asked, answered = bench.folder / "asked", bench.folder / "answered"
    # One command, as each host receives it.
    bench.stub("pdsh", f'#!/bin/bash\necho >>{asked}\nbash -c "${{@: -1}}"\necho >>{answered}\n')
    before, after = f"echo >{bench.folder}/begun", ""
    if sent == ["begun"]:
        before += f"; until [[ -e {answered} ]]; do sleep 0.05; done"
    if fails:
        after = f"until [[ -e {bench.folder}/launched ]]; do sleep 0.05; done\n"
        after += "echo 'pdsh@here: node-1: ssh exited with exit code 255' >&2"
    stub = LAUNCHER.format(folder=bench.folder, name=bench.launcher(), before=before, after=after)
    bench.stub("deepspeed", stub)
    with bench.start("--master_addr", ADDRESS, stderr=subprocess.PIPE) as script:
        for count, file in enumerate(sent, start=1):
            wait_for_lines(bench.folder / file, 1)
            script.send_signal(TERM)
            wait_for_lines(asked, count)
        _, errors = script.communicate(timeout=300)
    assert script.returncode == expected, errors
    assert subprocess.run(["pgrep", "-f", f"^{bench.launcher()}"]).returncode == 1, "a launcher is left"


def test_a_launcher_whose_ranks_have_just_ended_keeps_their_exit_code(bench: Bench) -> None:
    """The signal arrives when the launcher has read its rank's exit code but has not ended.

    The launcher ends within the time that the script allows it.
    """
    launched, fifo = bench.folder / "launched", bench.folder / "fifo"
    os.mkfifo(fifo)
    bench.stub("pdsh", '#!/bin/bash\nbash -c "${@: -1}"\n')
    bench.stub(
        "sleep",
        f'#!/bin/bash\n[[ $1 == 3 ]] || exec /bin/sleep "$@"\necho >{fifo}\n'
        f"while pgrep -f '^{bench.launcher()}' >/dev/null; do /bin/sleep 0.02; done\n",
    )
    bench.stub(
        "deepspeed",
        f'#!/bin/bash\nexec -a "{bench.launcher()}" '
        f'bash -c "exec 3<>{fifo}; echo >{launched}; read -t 600 -u 3; exit 138"\n',
    )
    with bench.start("--master_addr", ADDRESS) as script:
        wait_for_lines(launched, 1)
        script.send_signal(USR1)
        assert script.wait(300) == 138


def test_a_signal_right_after_the_start_reaches_the_ranks(bench: Bench) -> None:
    """The signal arrives before the script has noted the launcher's process."""
    started, sent, arrived = (bench.records / name for name in ("started", "sent", "arrived"))
    bench.pause_before_the_launcher_is_noted(f"until [[ -e {sent} ]]; do sleep 0.05; done")
    bench.stub("pdsh", f"#!/bin/bash\necho >>{arrived}\n")
    bench.stub(
        "deepspeed",
        f"#!/bin/bash\necho >{started}\nfor _ in {{1..6000}}; do\n"
        f"  sleep 0.05\n  [[ -e {arrived} ]] && exit 138\ndone\n",
    )
    with bench.start() as script:
        wait_for_lines(started, 1)
        script.send_signal(USR1)
        sent.touch()
        assert script.wait(300) == 138


@pytest.mark.parametrize(("ranks_code", "expected"), [(0, 0), (1, 1), (138, 138)])
def test_ranks_that_end_while_the_signal_is_sent(bench: Bench, ranks_code: int, expected: int) -> None:
    """Sending takes longer than saving, so bash handles the signal before it knows the launcher's exit code."""
    arrived, pid = bench.records / "arrived", bench.records / "pid"
    bench.stub("pdsh", f"#!/bin/bash\necho >{arrived}\nwhile kill -0 $(<{pid}) 2>/dev/null; do sleep 0.02; done\n")
    bench.stub(
        "deepspeed",
        f"#!/bin/bash\necho $$ >{pid}\nfor _ in {{1..6000}}; do\n"
        f"  sleep 0.05\n  [[ -e {arrived} ]] && exit {ranks_code}\ndone\n",
    )
    with bench.start() as script:
        wait_for_lines(pid, 1)
        script.send_signal(USR1)
        assert script.wait(300) == expected


@pytest.mark.parametrize("code", [138, 3])
def test_the_script_ends_after_all_output_is_written(bench: Bench, code: int) -> None:
    """The log is complete when the script ends."""
    bench.stub("deepspeed", f"#!/bin/bash\nseq 2000 >&2\necho last line >&2\nexit {code}\n")
    log = bench.folder / "log"
    with open(log, "w") as output, bench.start(stderr=output) as script:
        script.wait(600)
    assert "last line" in log.read_text()


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < deadline, f"{path} has too few lines"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hostfile", "nowhere"], "no hostfile nowhere"),
        (["--hostfile", "bad"], "bad, line 2:node-1: expected HOST slots=RANKS"),
        (["--hostfile", "empty"], "empty lists no host"),
        (["--hostfile", "hostfile", "--no_ssh"], "--node_rank 0 to 1"),
        (["--hostfile", "hostfile", "--no_ssh", "--node_rank", "2"], "--node_rank 0 to 1"),
        (["--hostfile", "hostfile", "--node_rank", "0"], "--node_rank 0 requires --no_ssh"),
        (["--hostfile", "hostfile", "--restarts", "x"], "--restarts 'x': expected a number"),
        (["--hostfile", "hostfile", "--no_ssh", "--node_rank", "0", "--check_hosts"], "does not work with --no_ssh"),
        (
            ["--hostfile", "hostfile", "--master_addr", "localhost"],
            "localhost: the other hosts cannot reach it",
        ),
    ],
)
def test_mistakes_are_refused(bench: Bench, arguments: list[str], message: str) -> None:
    (bench.folder / "bad").write_text("node-0 slots=1\nnode-1\n")
    (bench.folder / "empty").write_text("# no host\n")
    done = bench.run("multi_node.sh", *arguments, *TRAINING)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (bench.records / "deepspeed").exists()


@pytest.mark.parametrize("line", ["", "# note", "A = b", "export A=b"])
def test_variables_that_deepspeed_cannot_read_are_refused(bench: Bench, line: str) -> None:
    (bench.folder / ".deepspeed_env").write_text(f"A=b\n{line}\nC=d\n")
    done = bench.run("multi_node.sh", "--hostfile", bench.hostfile, *TRAINING)
    assert done.returncode == 2
    assert ".deepspeed_env, line 2:" in done.stderr


SRUN_ON_LAST_NODE = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\ncat "$HOSTFILE"\nSLURM_NODEID=1 "$@"\n'


def run_slurm_job(bench: Bench, *arguments: str, srun: str = SRUN_ON_LAST_NODE) -> subprocess.CompletedProcess:
    """Run slurm.sbatch on two nodes, with a stub of `srun`."""
    hosts = "[[ $* == 'show hostnames node-[7-8]' ]] && printf 'node-7\\nnode-8\\n'"
    bench.stub("scontrol", f"#!/bin/bash\n{hosts} || echo $* >$RECORDS/scontrol\n")
    bench.stub("srun", srun)
    (bench.folder / "launch").symlink_to(LAUNCH)
    bench.environment |= {
        "SLURM_SUBMIT_DIR": str(bench.folder),
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_JOB_ID": "31234567",
        "SLURM_GPUS_ON_NODE": "4",
    }
    return subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", *arguments],
        cwd="/",
        env=bench.environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("code", "flags", "requeued"),
    [
        (138, ["--resume", "auto"], True),
        (138, ["--resume=auto"], True),
        (138, [], False),  # the next start would not resume the run
        (143, ["--resume", "auto"], False),  # scancel
    ],
)
def test_slurm_requeues_a_run_that_saved_before_the_time_limit(
    bench: Bench, code: int, flags: list[str], requeued: bool
) -> None:
    bench.stub("deepspeed", f"#!/bin/bash\nexit {code}\n")
    done = run_slurm_job(bench, *TRAINING, *flags)
    assert done.returncode == code and "a rank failed" not in done.stderr
    requeue = bench.records / "scontrol"
    assert (requeue.exists() and requeue.read_text() == "requeue 31234567\n") == requeued


def test_slurm_starts_one_launcher_per_node(bench: Bench) -> None:
    done = run_slurm_job(bench, "--train-data", "{0..3}.tar", "--name", "a b")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "node-7 slots=4\nnode-8 slots=4\n"
    arguments = (bench.records / "deepspeed").read_text().splitlines()
    assert option(arguments, "--master_addr") == "node-7"
    assert option(arguments, "--master_port") == "24567"
    assert option(arguments, "--node_rank") == "1"
    assert after_script(arguments) == ["--train-data", "{0..3}.tar", "--name", "a b"]
    assert not list(bench.folder.glob("hostfile-*"))


# A deepspeed that fails on the host RECORDS/failing once, and then on no host.
FAILS_ONCE = """#!/bin/bash
hostfile=${2}; while [[ $1 != --node_rank ]]; do shift; done
echo "$(awk '{ print $1 ":" substr($2, 7) }' "$hostfile" | paste -sd' ')" >>"$RECORDS/starts"
[[ ! -e $RECORDS/failing ]] || { mv "$RECORDS/failing" "$RECORDS/down"; exit 1; }
echo 0 >"$MEGACLIP_COMPLETED_FILE"
"""
# An srun that starts the command on the first node of --nodelist, unless that node is down.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 != --nodelist=* ]] || nodes=${1#*=}; shift; done
[[ ! -e $RECORDS/down || $nodes != "$(cat "$RECORDS/down")" ]] || exit 1
SLURM_NODEID=0 "$@"
"""


def resumable(bench: Bench) -> list[str]:
    """Return arguments of a run that can be restarted, on one to four ranks."""
    settings = json.loads((LAUNCH.parent / "ds_configs" / "zero1.json").read_text())
    settings |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    settings.pop("gradient_accumulation_steps", None)
    config = bench.folder / "config.json"
    config.write_text(json.dumps(settings))
    where = ["--logs", str(bench.folder / "runs"), "--name", "run", "--resume", "auto"]
    return ["--deepspeed_config", str(config), "--model", "ViT-B-32", "--train-data", "x.tar", *where]


def test_slurm_continues_on_the_nodes_that_answer(bench: Bench) -> None:
    (bench.records / "failing").write_text("node-8\n")
    bench.stub("deepspeed", FAILS_ONCE)
    bench.environment |= {"RESTARTS": "2", "PYTHONPATH": str(LAUNCH.parent), "RANKS_PER_NODE": "2"}
    done = run_slurm_job(bench, *resumable(bench), srun=SRUN)
    assert done.returncode == 0, done.stderr
    assert (bench.records / "starts").read_text() == "node-7:2 node-8:2\nnode-7:2\n"
    assert "host node-8 does not answer" in done.stderr
    assert not list(bench.folder.glob("*hostfile-*")) and not list(bench.folder.glob(".megaclip-*"))


@pytest.mark.long
def test_restarts_through_ssh_leave_out_a_host_that_does_not_answer(bench: Bench) -> None:
    """The options and arguments are unchanged at the second start, which uses only the hosts that answer."""
    script = "#!/bin/bash\n[[ $1 == -S ]] || exit 0\n[[ $3 != node-1 || ! -e $RECORDS/down ]]\n"
    bench.stub("pdsh", script)
    bench.stub(
        "deepspeed",
        f'{RECORDER}cat "$2" >>"$RECORDS/starts"\n[[ -e $RECORDS/down ]] || {{ >$RECORDS/down; exit 1; }}\n',
    )
    bench.environment |= {"PYTHONPATH": str(LAUNCH.parent)}
    arguments = [*resumable(bench), "--tokenizer", "a b"]
    done = bench.run("multi_node.sh", "--restarts=2", "--hostfile", bench.hostfile, *arguments)
    assert done.returncode == 0, done.stderr
    starts = (bench.records / "starts").read_text().splitlines()
    assert starts == ["me@node-0 slots=2", "node-1 slots=2", "me@node-0 slots=2"]
    assert option((bench.records / "deepspeed").read_text().splitlines(), "--master_addr") == "node-0"
    assert after_script((bench.records / "deepspeed").read_text().splitlines())[-1] == "a b"


def test_a_failure_right_after_the_start_is_reported(bench: Bench) -> None:
    """The failure happens before the script has stored the launcher's process id: bash pauses for a second."""
    bench.pause_before_the_launcher_is_noted("sleep 1")
    bench.stub("deepspeed", "#!/bin/bash\necho 'pdsh@here: node-1: ssh exited with exit code 78' >&2\nsleep 20\n")
    done = bench.run("multi_node.sh", "--hostfile", bench.hostfile, *TRAINING)
    assert done.returncode == 78 and "a rank failed" in done.stderr and "unbound" not in done.stderr


def test_refused_settings_are_reported_by_the_exit_code(bench: Bench) -> None:
    """pdsh reports the exit code of the first host. The ranks of the other hosts are ended."""
    bench.stub("deepspeed", "#!/bin/bash\necho 'pdsh@here: node-1: ssh exited with exit code 78' >&2\nsleep 20\n")
    done = bench.run("multi_node.sh", "--hostfile", bench.hostfile, *TRAINING)
    assert done.returncode == 78 and "a rank failed" in done.stderr
    bench.stub("deepspeed", "#!/bin/bash\nexit 78\n")
    done = bench.run("multi_node.sh", "--no_ssh", "--node_rank", "1", "--hostfile", bench.hostfile, *TRAINING)
    assert done.returncode == 78


def test_a_failure_is_noticed_after_temporary_files_were_cleaned_up(bench: Bench) -> None:
    """Systems delete temporary files that are older than ten days, but a run may take longer."""
    bench.environment["MEGACLIP_HOST_CODES"] = str(bench.folder / "deleted" / "codes")
    bench.stub("deepspeed", "#!/bin/bash\necho 'pdsh@here: node-1: ssh exited with exit code 1' >&2\nsleep 20\n")
    done = bench.run("multi_node.sh", "--hostfile", bench.hostfile, *TRAINING)
    assert done.returncode == 1 and "a rank failed" in done.stderr and "deleted" not in done.stderr
    assert (bench.records / "pdsh").read_text().splitlines(), "no rank was ended"


@pytest.mark.parametrize("code", [0, 1])
def test_hosts_are_checked_before_the_start(bench: Bench, code: int) -> None:
    bench.stub("python", f"{RECORDER}exit {code}\n")
    done = bench.run("multi_node.sh", "--check_hosts", "--hostfile", bench.hostfile, *TRAINING)
    asked = (bench.records / "python").read_text().splitlines()
    assert asked[:3] == ["-m", "megaclip", "check-hosts"] and option(asked, "--hostfile") == str(bench.hostfile)
    assert asked[asked.index("--") + 1 :] == TRAINING
    assert (bench.records / "deepspeed").exists() == (code == 0)
    assert done.returncode == 2 * code


# ------------------------------------------------------------------------------------------------ hostile input

PAYLOADS = {
    "semicolon": "x;touch EVIDENCE",
    "substitution": "$(touch EVIDENCE)",
    "backtick": "`touch EVIDENCE`",
    "pipe": "x|touch EVIDENCE",
    "and": "x&touch EVIDENCE",
    "quotes": "x';touch EVIDENCE;'",
    "double quotes": 'x";touch EVIDENCE;"',
    "newline": "x\ntouch EVIDENCE\n",
    "variable": "${IFS}touch${IFS}EVIDENCE",
    "option": "-oProxyCommand=touch${IFS}EVIDENCE",
    "backslash": "x\\",
}
"""Texts that create the file EVIDENCE if a shell parses them without quotes, in '...' or in "..."."""
# A pdsh that runs the command as the shell of a host does, and a deepspeed that forwards what PDSHRunner forwards.
REMOTE_PDSH = '#!/bin/bash\n[[ $1 == -w ]] || exit 1\nshift 2\nbash -c "$*"\n'
REMOTE_DEEPSPEED = """#!/bin/bash
touch "$RECORDS/started"
exports=""
for file in "$HOME/.deepspeed_env"; do
  while IFS= read -r line || [[ $line ]]; do exports+="export ${line%%=*}=\\"${line#*=}\\"; "; done <"$file"
done
while IFS= read -r -d '' line; do exports+="export ${line%%=*}=\\"${line#*=}\\"; "; done < <(env -0 | grep -z ^PYTHON)
pdsh -w hosts "$exports cd $PWD; echo $*"
exit 1
"""


@pytest.fixture
def remote(bench: Bench) -> Bench:
    """Return a bench whose pdsh runs commands in a shell, in the folder in which EVIDENCE would be created."""
    bench.stub("pdsh", REMOTE_PDSH)
    bench.stub("deepspeed", REMOTE_DEEPSPEED)
    (bench.folder / ".deepspeed_env").write_text("A=b c\n")
    return bench


def evidence(bench: Bench) -> bool:
    return any(bench.folder.rglob("EVIDENCE*")) or any(Path.cwd().glob("EVIDENCE*"))


@pytest.mark.parametrize("where", ["hostfile", "slots", "--master_addr", "--master_port", ".deepspeed_env", "PYTHONX"])
@pytest.mark.parametrize("name", PAYLOADS)
def test_text_for_the_remote_shell_is_refused_before_anything_starts(remote: Bench, where: str, name: str) -> None:
    payload, arguments = PAYLOADS[name], ["--hostfile", remote.hostfile]
    if where == "hostfile":
        remote.hostfile.write_text(f"node-0 slots=1\n{payload.replace(' ', '${IFS}')} slots=1\n")
    elif where == "slots":
        remote.hostfile.write_text(f"node-0 slots=1{payload}\n")
    elif where == ".deepspeed_env":
        (remote.folder / ".deepspeed_env").write_text(f"A=b\nC={payload}\n")
    elif where == "PYTHONX":
        remote.environment["PYTHONX"] = payload
    else:
        arguments += [where, payload]
    done = remote.run("multi_node.sh", *arguments, *TRAINING)
    quoted = where in (".deepspeed_env", "PYTHONX") and name in ("semicolon", "pipe", "and", "quotes")
    assert not evidence(remote)
    assert (remote.records / "started").exists() == quoted  # inside "..." these texts have no effect
    if not quoted:
        assert done.returncode == 2 and "multi_node.sh: " in done.stderr and "expected" in done.stderr


def test_a_folder_with_characters_of_the_shell_is_refused(remote: Bench) -> None:
    odd = remote.folder / "a;touch EVIDENCE"
    odd.mkdir()
    command = [str(LAUNCH / "multi_node.sh"), "--hostfile", str(remote.hostfile), *TRAINING]
    done = subprocess.run(command, cwd=odd, env=remote.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "characters of the shell: " in done.stderr and not evidence(remote)


@pytest.mark.parametrize("text", ["A=b\r\nC=d\r\n", "A=b\0c\n", "A=\x1b[2Jb\n"])
def test_control_characters_in_the_environment_file_are_refused(remote: Bench, text: str) -> None:
    (remote.folder / ".deepspeed_env").write_text(text)
    for arguments in ([], ["--no_ssh", "--node_rank", "0"]):
        done = remote.run("multi_node.sh", "--hostfile", remote.hostfile, *arguments, *TRAINING)
        assert done.returncode == 2 and ".deepspeed_env, line 1: expected text without control" in done.stderr


def test_without_ssh_values_are_passed_on_and_nothing_is_run(bench: Bench) -> None:
    lines = [f"V{number}={text}" for number, text in enumerate(PAYLOADS.values()) if "\n" not in text]
    (bench.folder / ".deepspeed_env").write_text("\n".join(lines))
    bench.multi_node("--no_ssh", "--node_rank", "00", *TRAINING)
    assert set(lines) <= set((bench.records / "environment").read_text().splitlines())
    assert not evidence(bench)


@pytest.mark.parametrize(
    "line", ["user@gpu-01.example.org slots=8", "10.0.0.1 slots=4 # rack 2", "\tnode_1  slots=16\t"]
)
def test_ordinary_hosts_are_accepted(bench: Bench, line: str) -> None:
    bench.hostfile.write_text(f"{line}\r\n")
    assert option(bench.multi_node(*TRAINING), "--master_addr") == line.split()[0].rpartition("@")[2]
