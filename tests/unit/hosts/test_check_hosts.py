"""`megaclip check-hosts`: every fault is reported with its host, and equal hosts have no problem."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megaclip.commands import check_hosts
from megaclip.hosts import facts as facts_module
from megaclip.hosts import network
from megaclip.hosts.compare import Report, find_problems, table
from megaclip.hosts.facts import Facts, collect
from megaclip.hosts.hostfile import Host
from megaclip.hosts.network import NetworkResult
from megaclip.hosts.remote import environment_of_ranks, run_on_host
from tests.distributed.harness import run_ranks
from tests.end_to_end.training_runs import free_port

HEALTHY = Facts(
    python="3.11.2",
    packages={"torch": "2.13.0", "deepspeed": "0.19.8", "timm": "missing"},
    commit="0123456789",
    accelerator="8 x NVIDIA H200",
    accelerators=8,
    driver="580.1",
    ops={"cpu_adam": True},
    can_compile=True,
    time_s=1000.0,
    ran_s=10.0,
    free_gib={"/logs": 500.0, "/tmp": 3.0},
    token="secret",
    data={"shards/*.tar": "332 files"},
    matmul_ms=[1.6] * 8,
    matmul_is_right=True,
)


def reports(changes: dict[str, Any] | None = None, **own: Any) -> list[Report]:
    """Return the reports of four hosts. changes: facts of the third host. own: other fields of its report."""
    found = [Report(Host(f"node-{number}", 8), HEALTHY, mib_per_s=900.0 if number else None) for number in range(4)]
    report = {"facts": HEALTHY.model_copy(update=changes or {}), "mib_per_s": 900.0, **own}
    found[2] = Report(Host("node-2", 8), **report)
    return found


def problems(found: list[Report]) -> list[tuple[str, str]]:
    return [(one.host, one.text) for one in find_problems(found, token="secret", needed_gib={"/logs": 10.0})]


def test_equal_hosts_have_no_problem() -> None:
    assert problems(reports()) == []
    # Small differences are accepted.
    assert problems(reports({"matmul_ms": [1.6] * 7 + [2.0]}, clock_s=1.5, mib_per_s=600.0)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.12.1"}, ["Python: 3.12.1, most hosts have 3.11.2", "install the same version"]),
        ({"packages": {"torch": "2.12.0", "deepspeed": "0.19.8", "timm": "missing"}}, ["torch: 2.12.0", "2.13.0"]),
        ({"packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "timm": "1.0"}}, ["timm: 1.0, most hosts have mis"]),
        ({"commit": "0123456789 + changes"}, ["commit: 0123456789 + changes", "check out the same commit"]),
        ({"accelerator": "8 x NVIDIA A100"}, ["accelerators: 8 x NVIDIA A100", "nvidia-smi"]),
        ({"driver": ""}, ["driver: none, most hosts have 580.1"]),
        ({"accelerators": 7}, ["7 GPUs for slots=8", "hostfile"]),
        ({"ops": {"cpu_adam": False}}, ["cpu_adam not compiled", "megaclip build-ops"]),
        ({"ops": {"cpu_adam": False}, "can_compile": False}, ["g++ or ninja is not on PATH"]),
        ({"free_gib": {"/logs": 9.0}}, ["9 GiB free in /logs, 10 needed"]),
        ({"token": ""}, ["does not see a file", "mount the same file system"]),
        ({"data": {"shards/*.tar": "data 'shards/*.tar' matches no file"}}, ["matches no file; mount the data"]),
        ({"data": {"shards/*.tar": "331 files"}}, ["sees 331 files of the data, and most hosts see 332 files"]),
        ({"matmul_ms": [1.6] * 5 + [2.5, 1.6, 1.6]}, ["slow: GPU 5: a matrix product takes 2.5 ms", "1.6 ms"]),
        ({"matmul_is_right": False}, ["a matrix product is wrong", "leave out the host"]),
    ],
)
def test_a_fault_is_named_with_its_host_and_advice(changes: dict[str, Any], words: list[str]) -> None:
    ((host, text),) = problems(reports(changes))
    assert host == "node-2"
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("own", "word"),
    [
        ({"facts": None, "failure": "connect: No route to host", "mib_per_s": None}, "cannot be asked: connect: No ro"),
        ({"clock_s": -9.0, "clock_error_s": 1.0}, "its clock differs by -9.0 s; synchronise it"),
        ({"network": "cannot reach node-0 at port 29500", "mib_per_s": None}, "cannot reach node-0 at port 29500"),
        ({"mib_per_s": 400.0}, "slow network: 400 MiB/s, most hosts 900"),
    ],
)
def test_a_fault_outside_of_the_facts_is_named(own: dict[str, Any], word: str) -> None:
    ((host, text),) = problems(reports(**own))
    assert host == "node-2" and word in text


@pytest.mark.parametrize(("wrong_by_s", "found"), [(0.0, []), (-9.0, ["its clock differs by -9.0 s"])])
def test_an_answer_that_arrives_late_is_no_wrong_clock(
    wrong_by_s: float, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def ask(host: Host, *_: object) -> tuple[Facts, str]:
        """Delay the answer of one host by 5 s after it has read its clock."""
        nonlocal now_s
        now_s += HEALTHY.ran_s
        time_s = now_s + (wrong_by_s if host.name == "node-1" else 0.0)
        now_s += 5.0 if host.name == "node-3" else 0.0
        return HEALTHY.model_copy(update={"time_s": time_s}), ""

    monkeypatch.setattr(check_hosts, "ask", ask)
    monkeypatch.setattr(check_hosts, "time", SimpleNamespace(time=lambda: now_s, monotonic=lambda: now_s))
    answers = [check_hosts.ask_for_facts([Host(f"node-{number}", 8)], {})[0] for number in range(5)]
    assert [text.partition(";")[0] for _, text in problems(answers)] == found


def test_of_two_hosts_the_slower_one_is_named() -> None:
    slow = HEALTHY.model_copy(update={"matmul_ms": [1.6] * 7 + [9.9]})
    pair = [Report(Host("node-0", 8), slow), Report(Host("node-1", 8), HEALTHY)]
    ((host, text),) = problems(pair)
    assert host == "node-0" and "GPU 7" in text


def test_the_table_has_a_line_per_host_and_per_problem() -> None:
    found = reports({"python": "3.12.1"})
    found[1] = Report(Host("node-1", 8), failure="no route")
    listed = find_problems(found, token="secret", needed_gib={})
    header, *lines = table(found, listed).splitlines()
    assert header.split()[:2] == ["host", "slots"]
    assert [line.split()[0] for line in lines] == ["node-0", "node-1", "node-2", "node-3", "node-1:", "node-2:"]
    assert [line.split()[-1] for line in lines[:4]] == ["ok", "problem", "problem", "ok"]


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret")
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).touch()
    extensions = tmp_path / "extensions" / "cpu_adam"
    extensions.mkdir(parents=True)
    (extensions / "cpu_adam.so").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    found = collect(shared=tmp_path, token="token", data=[f"{tmp_path}/*.tar", f"{tmp_path}/*.zip"])
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.token == "secret" and found.matmul_is_right and 0 < found.matmul_ms[0] < 60_000
    assert abs(found.time_s - time.time()) < 60
    assert abs(found.ran_s - (time.time() - psutil.Process().create_time())) < 60
    assert found.free_gib[str(tmp_path)] > 0
    assert found.data[f"{tmp_path}/*.tar"] == "2 files" and "*.zip" in found.data[f"{tmp_path}/*.zip"]
    assert found.ops == {"cpu_adam": True, "fused_adam": False}
    root = Path(__file__).parents[3]
    head = subprocess.run(["git", "-C", root, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    assert head.returncode or found.commit.split()[0] == head.stdout.strip()
    assert Facts.model_validate_json(found.model_dump_json()) == found


def test_a_broken_processor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = facts_module.torch.Tensor.__matmul__
    monkeypatch.setattr(facts_module.torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype.itemsize == 4))
    assert not collect(shared=None, token="", data=[]).matmul_is_right


def measure_here(port: int, hosts: int) -> NetworkResult:
    """Measure the network between the ranks. A third host is absent, and the ranks wait one second for it."""
    import datetime
    import os

    import torch

    from megaclip.hosts import network

    class ShortWait(torch.distributed.TCPStore):
        def wait(self, keys: list[str], limit: datetime.timedelta) -> None:
            super().wait(["joined/0", "joined/1"], limit)
            super().wait(keys, datetime.timedelta(seconds=1))

    if hosts > 2:
        network.TCPStore = ShortWait
    torch.distributed.destroy_process_group()
    return network.measure(int(os.environ["RANK"]), hosts, "127.0.0.1", port)


def test_the_network_is_measured_between_two_processes() -> None:
    first, second = run_ranks(measure_here, 2, free_port(), 2)
    assert first == NetworkResult()
    assert second.problem == "" and second.mib_per_s is not None and second.mib_per_s > 1


def test_a_host_that_does_not_connect_is_named() -> None:
    first, second = run_ranks(measure_here, 2, free_port(), 3)
    assert first == NetworkResult(absent=[2]) and second == NetworkResult()
    pair = [Report(Host(f"node-{number}", 1), HEALTHY) for number in range(3)]
    names = [report.host.name for report in pair]
    merged = check_hosts.merge_network(pair, names, [(first, ""), (second, ""), (None, "killed")])
    assert [report.network for report in merged] == ["", "", "the network test failed: killed"]
    merged = check_hosts.merge_network(pair, names, [(first, ""), (second, ""), (second, "")])
    assert [report.network for report in merged] == ["", "", "did not connect to the first host"]


def test_a_host_whose_connection_closes_just_after_the_first_hosts_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host reports this host as absent."""

    class Closed:
        def set(self, *_: str) -> None:
            raise RuntimeError("connection reset")

    monkeypatch.setattr(network, "TCPStore", lambda *_, **__: Closed())
    assert network.measure(1, 2, "node-0", 29500) == NetworkResult()


@pytest.fixture
def pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a pdsh that runs the command in a shell without the environment, as ssh does. Return the home folder."""
    stub = tmp_path / "bin" / "pdsh"
    stub.parent.mkdir()
    script = '#!/bin/bash\n[[ $4 != gone ]] || { echo "$4: no route" >&2; exit 255; }\n'
    stub.write_text(script + 'env -i PATH=/usr/bin:/bin bash -c "${5//%%/%}"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_that_a_user_gives_reaches_the_remote_shell(pdsh: Path) -> None:
    """The variables and arguments arrive unchanged, and no payload is executed."""
    payload = "a b;touch EVIDENCE $(touch EVIDENCE) `touch EVIDENCE` 'x' \"y\" 100%n"
    (pdsh / ".deepspeed_env").write_text(f"NOTE={payload}\n")
    program = "import os, sys; print(os.environ['NOTE'], sys.argv[3:])"
    python = pdsh / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} -c "{program}" "$@"\n')
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        output, problem = run_on_host(Host("node-0", 1), ["check-hosts", payload], limit_s=60)
    assert problem == ""
    assert output == f"{payload} {['check-hosts', payload]}\n"
    assert not (pdsh / "EVIDENCE").exists()


def test_a_host_that_cannot_be_reached_has_the_reason(pdsh: Path) -> None:
    assert run_on_host(Host("gone", 1), ["check-hosts"], limit_s=60) == ("", "gone: no route")


def test_a_command_that_hangs_is_ended_on_its_host(pdsh: Path) -> None:
    """A command that is left running would keep its port, and the next check would find the port in use."""
    python = pdsh / "python"
    python.write_text('#!/bin/bash\nexec -a "$0" sleep 600\n')
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        assert run_on_host(Host("node-0", 1), [], limit_s=1) == ("", "no answer within 1 s")
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", str(python)]).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_bad_variables_are_refused(pdsh: Path) -> None:
    (pdsh / ".deepspeed_env").write_text("A=b\n\nC=d\n")
    with pytest.raises(check_hosts.ConfigError, match="line 2: expected NAME=VALUE"):
        environment_of_ranks()


def test_an_answer_of_another_version_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    line = check_hosts.MARK + json.dumps({"python": 3})
    monkeypatch.setattr(check_hosts, "run_on_host", lambda *_, **__: (f"welcome\n{line}\n", ""))
    assert check_hosts.ask(Host("a", 1), {}, Facts, 1.0)[1].startswith(
        "its answer cannot be read, because it runs another version"
    )
    monkeypatch.setattr(check_hosts, "run_on_host", lambda *_, **__: ("welcome\n", "no route"))
    assert check_hosts.ask(Host("a", 1), {}, Facts, 1.0) == (None, "no route")
