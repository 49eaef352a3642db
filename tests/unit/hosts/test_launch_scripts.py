"""launch/multi_node.sh and launch/slurm.sbatch with stub programs for deepspeed, pdsh and Slurm."""

import os
import re
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
# A stub program that writes its arguments, one per line, to a file named after itself.
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$@" >"$RECORDS/${0##*/}"\n'
TRAINING = ["--deepspeed_config", "zero3.json", "--model", "ViT-B-32"]


class Bench:
    """A folder with a hostfile of two hosts, and the stub programs on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.records, self.bin = folder, folder / "records", folder / "bin"
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("# two hosts\n\nme@node-0 slots=2\nnode-1   slots=2 # and a note\n")
        path = f"{self.bin}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "HOME": str(folder), "RECORDS": str(self.records)}
        for path in (self.records, self.bin):
            path.mkdir()
        for name in ("deepspeed", "pdsh"):
            self.stub(name, RECORDER)

    def stub(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def run(self, *command: object, folder: Path | None = None) -> subprocess.CompletedProcess:
        words = [str(LAUNCH / "multi_node.sh"), "--hostfile", str(self.hostfile), *map(str, command)]
        return subprocess.run(
            words, cwd=folder or self.folder, env=self.environment, capture_output=True, text=True, timeout=60
        )

    def multi_node(self, *arguments: object) -> list[str]:
        """Run multi_node.sh. Return the arguments that deepspeed receives."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return (self.records / "deepspeed").read_text().splitlines()

    def refused(self, *arguments: object, folder: Path | None = None) -> str:
        """Run multi_node.sh, which must start nothing and run no part of the texts. Return its error."""
        done = self.run(*arguments, folder=folder)
        assert done.returncode == 78 and not (self.records / "deepspeed").exists(), done.stderr
        assert not any(self.folder.rglob("EVIDENCE*"))
        return done.stderr


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


def test_the_options_come_before_the_training(bench: Bench) -> None:
    arguments = bench.multi_node("--master_port=29512", *TRAINING)
    assert option(arguments, "--master_addr") == "node-0"
    assert option(arguments, "--master_port") == "29512"
    assert after_script(arguments) == TRAINING
    assert option(bench.multi_node("--master_addr", "10.0.0.1", *TRAINING), "--master_addr") == "10.0.0.1"


@pytest.mark.parametrize(
    "line", ["user@gpu-01.example.org slots=8", "10.0.0.1 slots=4 # rack 2", "\tnode_1  slots=16\t\r"]
)
def test_ordinary_hosts_are_accepted(bench: Bench, line: str) -> None:
    bench.hostfile.write_text(f"{line}\n")
    assert option(bench.multi_node(*TRAINING), "--master_addr") == line.split()[0].rpartition("@")[2]


# Texts that create the file EVIDENCE if a shell parses them without quotes or in "...".
HOSTILE = ["x;touch EVIDENCE", "$(touch EVIDENCE)", "x`touch EVIDENCE`", 'x";touch EVIDENCE;"', "x\ntouch EVIDENCE\n"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_for_the_remote_shell_is_refused(bench: Bench, text: str) -> None:
    assert "--master_addr" in bench.refused("--master_addr", text, *TRAINING)
    assert "--master_port" in bench.refused("--master_port", text, *TRAINING)
    for line in (f"{text.replace(' ', '${IFS}')} slots=1", f"node-1 slots=1{text}"):
        bench.hostfile.write_text(f"node-0 slots=1\n{line}\n")
        assert f"{bench.hostfile}, line 2:" in bench.refused(*TRAINING)
    bench.hostfile.write_text("node-0 slots=1\n")
    (odd := bench.folder / text.replace("\n", "\t")).mkdir()
    assert "pdsh cannot use the folder" in bench.refused(*TRAINING, folder=odd)
    if not text.startswith("x;"):  # has no effect in "..."
        bench.environment["PYTHONX"] = text
        assert "the environment variable PYTHONX" in bench.refused(*TRAINING)


@pytest.mark.parametrize(
    "line",
    ["", "# note", "A = b", "export A=b", "A=b\r", "A=b\0c", "A=\x1b[2Jb", *(f"A={text}" for text in HOSTILE[1:])],
)
def test_variables_that_deepspeed_cannot_read_or_a_shell_would_expand_are_refused(bench: Bench, line: str) -> None:
    (bench.folder / ".deepspeed_env").write_text("A=b;c 'd'\n")
    bench.multi_node(*TRAINING)
    (bench.records / "deepspeed").unlink()
    (bench.folder / ".deepspeed_env").write_text(f"A=b\n{line}\nC=d\n")
    assert re.search(r"\.deepspeed_env, line [23]:", bench.refused(*TRAINING))


def test_a_missing_or_empty_hostfile_is_refused(bench: Bench) -> None:
    """`deepspeed` would train on this host alone."""
    bench.hostfile.write_text("# no host\n")
    assert "lists no host" in bench.refused(*TRAINING)
    bench.hostfile.unlink()
    assert f"no hostfile {bench.hostfile}" in bench.refused(*TRAINING)


def run_slurm_job(bench: Bench, code: int, *arguments: str) -> int:
    """Run slurm.sbatch on two nodes, with a stub of srun that ends with `code`. Return the exit code."""
    hosts = "[[ $* == 'show hostnames node-[7-8]' ]] && printf 'node-7\\nnode-8\\n'"
    bench.stub("scontrol", f"#!/bin/bash\n{hosts} || echo $* >$RECORDS/scontrol\n")
    bench.stub("srun", f"{RECORDER}exit {code}\n")
    job = {"JOB_NODELIST": "node-[7-8]", "JOB_NUM_NODES": "2", "JOB_ID": "31234567", "GPUS_ON_NODE": "4"}
    job["SUBMIT_DIR"] = str(bench.folder)
    environment = {**bench.environment, **{f"SLURM_{name}": value for name, value in job.items()}, "RESTARTS": "5"}
    command = ["bash", str(LAUNCH / "slurm.sbatch"), *arguments]
    return subprocess.run(command, cwd="/", env=environment, timeout=60).returncode


def test_slurm_starts_one_launcher_per_node(bench: Bench) -> None:
    assert run_slurm_job(bench, 0, "--train-data", "{0..3}.tar", "--name", "a b") == 0
    arguments = (bench.records / "srun").read_text().splitlines()
    values = {"--nnodes": "2", "--nproc-per-node": "4", "--max-restarts": "5", "--rdzv-endpoint": "node-7:24567"}
    assert {name: option(arguments, name) for name in values} == values
    assert arguments[arguments.index("train") :] == ["train", "--train-data", "{0..3}.tar", "--name", "a b"]


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
    assert run_slurm_job(bench, code, *TRAINING, *flags) == code
    requeue = bench.records / "scontrol"
    assert (requeue.exists() and requeue.read_text() == "requeue 31234567\n") == requeued
