"""`megaclip check-hosts`: every fault is reported with its host, and equal hosts have no problem."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megaclip.config import load_training_config
from megaclip.hosts import facts as facts_module
from megaclip.hosts.compare import find_problems, table
from megaclip.hosts.facts import HostFacts, Report, report
from megaclip.zero.optimizers import needed_ops
from tests.end_to_end.training_runs import ROOT, launcher_environment

FACTS = HostFacts(
    python="3.11.2",
    packages={"torch": "2.13.0", "deepspeed": "0.19.8", "timm": "missing"},
    commit="0123456789",
    accelerators="2 x NVIDIA H200",
    driver="580.1",
    ops={"cpu_adam": True},
    can_compile=True,
    free_gib=500.0,
    token="secret",
    data={"shards/*.tar": "332 files"},
)


def reports(facts: dict[str, Any] | None = None, **rank: Any) -> list[Report]:
    """Return the reports of four hosts with two ranks each. facts, rank: what the last rank of the third host reports
    differently, about its host or itself."""
    found = []
    for number in range(8):
        host, local_rank = divmod(number, 2)
        is_other = host == 2
        own = FACTS.model_copy(update=(facts or {}) if is_other else {}) if local_rank == 0 else None
        rate = 900.0 if host and local_rank == 0 else None
        values = {"host": f"node-{host}", "local_rank": local_rank, "matmul_ms": 1.6, "matmul_is_right": True}
        one = Report(**values, time_s=1000.0, facts=own, mib_per_s=rate)
        changes = rank if is_other and local_rank == ("time_s" not in rank and "mib_per_s" not in rank) else {}
        found.append(one.model_copy(update=changes))
    return found


def problems(found: list[Report]) -> list[tuple[str, str]]:
    return find_problems(found, token="secret", min_free_gib=10.0)


def test_equal_hosts_have_no_problem() -> None:
    assert problems(reports()) == []
    # Small differences are accepted.
    for change in ({"matmul_ms": 2.0}, {"time_s": 1001.5}, {"mib_per_s": 600.0}):
        assert problems(reports(**change)) == []


@pytest.mark.parametrize(
    ("facts", "rank", "words"),
    [
        ({"python": "3.12.1"}, {}, ["Python: 3.12.1, most hosts have 3.11.2", "install the same version"]),
        ({"packages": {"torch": "2.12.0", "deepspeed": "0.19.8"}}, {}, ["torch: 2.12.0, most hosts have 2.13.0"]),
        ({"packages": {**FACTS.packages, "timm": "1.0"}}, {}, ["timm: 1.0, most hosts have missing"]),
        ({"commit": "0123456789 + changes"}, {}, ["commit: 0123456789 + changes", "check out the same commit"]),
        ({"accelerators": "1 x NVIDIA H200"}, {}, ["accelerators: 1 x NVIDIA H200", "nvidia-smi"]),
        ({"driver": ""}, {}, ["driver: none, most hosts have 580.1"]),
        ({"ops": {"cpu_adam": False}}, {}, ["cpu_adam not compiled", "megaclip build-ops"]),
        ({"ops": {"cpu_adam": False}, "can_compile": False}, {}, ["g++ or ninja is not on PATH"]),
        ({"free_gib": 9.0}, {}, ["9 GiB free in --logs, 10 needed"]),
        ({"token": ""}, {}, ["does not see a file", "mount the same file system"]),
        ({"data": {"shards/*.tar": "data 'shards/*.tar' matches no file"}}, {}, ["matches no file; mount the data"]),
        ({"data": {"shards/*.tar": "331 files"}}, {}, ["sees 331 files of the data, and most hosts see 332 files"]),
        ({}, {"matmul_ms": 2.5}, ["slow: a matrix product of local rank 1 takes 2.5 ms", "1.6 ms"]),
        ({}, {"matmul_ms": None}, ["no GPU for local rank 1; correct --nproc-per-node"]),
        ({}, {"matmul_is_right": False}, ["a matrix product of local rank 1 is wrong", "leave out the host"]),
        ({}, {"network": "cannot exchange data"}, ["local rank 1: cannot exchange data"]),
        ({}, {"time_s": 991.0}, ["its clock differs by -9.0 s; synchronise it"]),
        ({}, {"mib_per_s": 400.0}, ["slow network: 400 MiB/s, most hosts 900"]),
    ],
)
def test_a_fault_is_named_with_its_host_and_advice(
    facts: dict[str, Any], rank: dict[str, Any], words: list[str]
) -> None:
    found = reports(facts, **rank)
    ((host, text),) = problems(found)
    assert host == "node-2"
    for word in words:
        assert word in text
    header, *lines = table(found, [(host, text)]).splitlines()
    assert header.split()[:2] == ["host", "ranks"]
    assert [line.split()[0] for line in lines] == ["node-0", "node-1", "node-2", "node-3", "node-2:"]
    assert [line.split()[-1] for line in lines[:4]] == ["ok", "ok", "problem", "ok"]


def test_the_report_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret")
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).touch()
    extensions = tmp_path / "extensions" / "cpu_adam"
    extensions.mkdir(parents=True)
    (extensions / "cpu_adam.so").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    data = [f"{tmp_path}/*.tar", f"{tmp_path}/*.zip"]
    before_s = time.time()
    found = report(shared=tmp_path, token="token", data=data, ops=["cpu_adam", "fused_adam"])
    assert (
        abs(found.time_s - before_s) < 60
        and found.matmul_is_right
        and found.matmul_ms is not None
        and 0 < found.matmul_ms < 60_000
    )
    facts = found.facts
    assert facts is not None and facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.token == "secret" and facts.free_gib is not None and facts.free_gib > 0
    assert facts.data[f"{tmp_path}/*.tar"] == "2 files" and "*.zip" in facts.data[f"{tmp_path}/*.zip"]
    assert facts.ops == {"cpu_adam": True, "fused_adam": False}
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    assert head.returncode or facts.commit.split()[0] == head.stdout.strip()
    assert Report.model_validate_json(found.model_dump_json()) == found
    right = facts_module.torch.Tensor.__matmul__
    monkeypatch.setattr(facts_module.torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype.itemsize == 4))
    assert not report(shared=None, token="", data=[], ops=[]).matmul_is_right  # a broken processor


def test_only_ops_of_the_configured_optimizer_are_needed(tmp_path: Path) -> None:
    assert needed_ops(load_training_config("zero3_offload")) == ["cpu_adam"]
    own = tmp_path / "ds_config.json"
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    own.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": optimizer}))
    assert needed_ops(load_training_config(own)) == []


def test_two_ranks_check_each_other(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "--",
        "megaclip",
    ]
    command += ["check-hosts", "--logs", str(tmp_path / "logs"), "--train-data", str(tmp_path / "*.tar")]
    environment = {key: value for key, value in launcher_environment().items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    host, *found = done.stdout[done.stdout.index("host ") :].splitlines()[1:]
    assert host.split()[1] == "2" and done.returncode == 1, done.stdout + done.stderr
    assert any("matches no file" in line or "no file" in line for line in found), found
    assert not any("does not see" in line or "network" in line or "clock" in line for line in found), found
    assert list((tmp_path / "logs").iterdir()) == []  # the token file has been deleted
