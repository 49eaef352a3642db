"""`megaclip check-hosts`: every fault is reported with its host, and equal hosts have no problem."""

import io
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megaclip.config import load_training_config
from megaclip.hosts import check
from megaclip.hosts.check import Report, find_problems, report, table
from megaclip.zero.optimizers import needed_ops
from tests.distributed.harness import run_ranks
from tests.end_to_end.training_runs import ROOT, free_port

PROPERTIES = {"accelerators": "2 x NVIDIA H200", "Python": "3.11.2", "commit": "0123456789", "driver": "580.1"}
PROPERTIES |= {"torch": "2.13.0", "timm": "missing", "data shards/*.tar": "332 files"}


def reports(properties: dict[str, str] | None = None, **rank: Any) -> list[Report]:
    """Return the reports of four hosts with two ranks each. properties, rank: what the third host reports differently:
    its first rank, or its second one if `rank` has a measurement of every rank."""
    found = []
    for number in range(8):
        host, local_rank = divmod(number, 2)
        is_first = local_rank == 0
        own = {"properties": PROPERTIES if is_first else {}, "mib_per_s": 900.0 if host and is_first else None}
        if host == 2 and is_first == (not rank.keys() & {"product_ms", "problems"}):
            own |= {"properties": PROPERTIES | (properties or {})} | rank if is_first else rank
        found.append(
            Report(**{"host": f"node-{host}", "local_rank": local_rank, "time_s": 1e3, "product_ms": 1.6, **own})
        )
    return found


def test_equal_hosts_have_no_problem() -> None:
    for change in ({}, {"product_ms": 2.0}, {"time_s": 1001.5}, {"mib_per_s": 600.0}):  # small differences are accepted
        assert find_problems(reports(**change)) == []


@pytest.mark.parametrize(
    ("properties", "rank", "words"),
    [
        ({"Python": "3.12.1"}, {}, ["Python: 3.12.1, most hosts have 3.11.2", "install the same version"]),
        ({"timm": "1.0"}, {}, ["timm: 1.0, most hosts have missing", "install the same version"]),
        ({"commit": "0123456789-dirty"}, {}, ["commit: 0123456789-dirty", "check out the same commit"]),
        ({"accelerators": "1 x NVIDIA H200"}, {}, ["accelerators: 1 x NVIDIA H200", "nvidia-smi"]),
        ({"driver": "570.1"}, {}, ["driver: 570.1, most hosts have 580.1"]),
        ({"data shards/*.tar": "331 files"}, {}, ["331 files, most hosts have 332 files; mount the same data there"]),
        ({}, {"problems": ["does not see a file"]}, ["does not see a file"]),
        ({}, {"product_ms": 2.5}, ["slow: a matrix product of local rank 1 takes 2.5 ms", "1.6 ms"]),
        ({}, {"time_s": 991.0}, ["its clock differs by -9.0 s; synchronise it"]),
        ({}, {"mib_per_s": 400.0}, ["slow network: 400 MiB/s, most hosts 900"]),
    ],
)
def test_a_fault_is_named_with_its_host_and_advice(
    properties: dict[str, str], rank: dict[str, Any], words: list[str]
) -> None:
    found = reports(properties, **rank)
    ((host, text),) = find_problems(found)
    assert host == "node-2" and all(word in text for word in words), text
    header, *lines = table(found, [(host, text)]).splitlines()
    assert header.split()[:2] == ["host", "ranks"]
    assert [line.split()[0] for line in lines] == ["node-0", "node-1", "node-2", "node-3", "node-2:"]
    assert [line.split()[-1] for line in lines[:4]] == ["ok", "ok", "problem", "ok"]


def test_the_report_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sign", "a.tar", "b.tar", "extensions/fused_adam/fused_adam.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    inputs = {"shared": tmp_path, "sign": "sign", "min_free_gib": 0.0, "data": [f"{tmp_path}/*.tar"]}
    found = report(**inputs, ops=["cpu_adam", "fused_adam"])  # a host that can compile has no problem
    assert found.problems == [] and abs(found.time_s - time.time()) < 60
    assert found.product_ms is not None and 0 < found.product_ms < 60_000
    assert found.properties["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert found.properties[f"data {tmp_path}/*.tar"] == "2 files"
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    assert head.returncode or found.properties["commit"].startswith(head.stdout.strip())
    assert Report.model_validate_json(found.model_dump_json()) == found

    monkeypatch.setattr(check.shutil, "which", lambda program: None if program == "ninja" else program)
    right = check.torch.Tensor.__matmul__  # a broken processor
    monkeypatch.setattr(check.torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype.itemsize == 4))
    inputs |= {"sign": "absent", "data": [f"{tmp_path}/*.zip", "hf:any/name"]}
    wrong, ops, folder, data = report(**inputs, ops=["cpu_adam", "fused_adam"]).problems
    assert "a matrix product of local rank 0 is wrong" in wrong
    assert "cpu_adam not compiled, and ninja not found; install" in ops and "fused" not in ops
    assert "does not see a file" in folder and "no file matches" in data and "mount the data" in data
    monkeypatch.setattr(check, "CUDA_HOME", None)
    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(check, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
        assert "cpu_adam not compiled, and ninja, nvcc not found" in report(**inputs, ops=["cpu_adam"]).problems[1]
    monkeypatch.setattr(check.torch.Tensor, "__matmul__", Mock(side_effect=RuntimeError("CUDA error: ECC\nadvice")))
    (failing,) = report(shared=None, sign="", min_free_gib=0.0, data=[], ops=[]).problems
    assert failing == "a matrix product of local rank 0 fails: CUDA error: ECC; leave out the host"
    (full,) = report(shared=tmp_path, sign="sign", min_free_gib=1e9, data=[], ops=[]).problems[1:]
    assert "GiB free in --logs, 1e+09 needed" in full


def test_only_ops_of_the_configured_optimizer_are_needed(tmp_path: Path) -> None:
    assert needed_ops(load_training_config("zero3_offload")) == ["cpu_adam"]
    own = tmp_path / "ds_config.json"
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    own.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": optimizer}))
    assert needed_ops(load_training_config(own)) == []


def check_own(folder: Path, port: int) -> tuple[int, str]:
    """Run this rank's part of the command, in a process group of its own; return the exit code and the output."""
    from megaclip.commands import check_hosts

    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    output = io.StringIO()
    with redirect_stdout(output):
        code = check_hosts.main(["--logs", str(folder / "logs"), "--train-data", str(folder / "*.tar")])
    return code, output.getvalue()


def test_two_ranks_check_each_other(tmp_path: Path) -> None:
    (code, output), (code_of_other, nothing) = run_ranks(check_own, 2, tmp_path, free_port())
    host, *found = output[output.index("host ") :].splitlines()[1:]
    assert host.split()[1] == "2" and (code, code_of_other, nothing) == (1, 1, ""), output
    assert any("matches no file" in line or "no file" in line for line in found), found
    assert not any("does not see" in line or "network" in line or "clock" in line for line in found), found
    assert list((tmp_path / "logs").iterdir()) == []  # the token file has been deleted
