"""tools/headlines.py: rows are kept as they are measured, GPUs are shared, and plans are those of the measured rows."""

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import headlines
import pytest
from headlines import Command

# A tool that writes a row, waits for its GPUs' numbers in FILE.go, and writes another.
TOOL = """
import json, os, sys, time
file, row = sys.argv[sys.argv.index("--json") + 1], {"method": "tool", "gpus_seen": os.environ["CUDA_VISIBLE_DEVICES"]}
record = {"device": "GPU", "torch": "2", "results": [row], "failed": []}
json.dump(record, open(file, "w"))
if "hang" in sys.argv:
    time.sleep(600)
record["failed"] = [{"method": "other", "status": "out of memory"}]
json.dump(record, open(file, "w"))
sys.exit("bad" in sys.argv)
"""


def options(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    flags = ("gpu_memory", "host_memory", "disk", "link", "network", "rates")
    own = {"gpus": 3, "limit": 60.0, "json": tmp_path / "rows.jsonl", "gpu": "h200", "tiny": False}
    return argparse.Namespace(**{**dict.fromkeys(flags), **own, "open_clip_source": None, **changes})


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_commands_share_the_gpus_and_keep_their_rows_when_they_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit passes when all commands except the one that hangs have ended."""

    def clock() -> float:
        found = rows(tmp_path) if (tmp_path / "rows.jsonl").exists() else []
        ended = {row["row"] for row in found if row.get("status") in ("ok", "exit code 1")}
        return 100.0 * (ended == {"good", "bad", "last"} and "hang" in {row["row"] for row in found})

    own_time = SimpleNamespace(monotonic=clock, sleep=time.sleep, strftime=time.strftime)
    monkeypatch.setattr(headlines, "time", own_time)
    tool = tmp_path / "tool.py"
    tool.write_text(TOOL)
    commands = [Command("part", name, 1, (str(tool), name)) for name in ("good", "bad", "hang", "last")]
    assert headlines.run(commands, options(tmp_path, limit=60.0), tmp_path)
    kept = {name: [row for row in rows(tmp_path) if row["row"] == name] for name in ("good", "bad", "hang", "last")}
    assert [row["status"] for row in kept["good"][1:]] == ["out of memory", "ok"]
    assert kept["bad"][-1]["status"] == "exit code 1" and kept["hang"][-1]["status"] == "ended by --limit"
    seen = [kept[name][0]["gpus_seen"] for name in kept]
    assert seen[:3] == ["0", "1", "2"] and seen[3] in ("0", "1")  # the last command starts when a GPU is free


def test_results_of_tests_are_rows(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_a(record_property): record_property('s', 3)\ndef test_b(): assert 0\n"
    )
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert headlines.run([Command("part", "tests", 1, words)], options(tmp_path), tmp_path)
    found = [(row.get("test"), row["status"], row.get("properties")) for row in rows(tmp_path)]
    assert found == [("test_a", "ok", {"s": "3"}), ("test_b", "failure", {}), (None, "exit code 1", None)]


# B = 131,072, D = 512. Milliseconds on four H200s (docs/performance.md), MiB on four H100s (docs/headlines.md).
MEASURED = {
    "megaclip ring feature": (36.1, 449),
    "megaclip all_gather feature": (33.6, 577),
    "open_clip": (None, 33088),
    "Inf-CL": (None, 1089),
}


@pytest.mark.parametrize("method", MEASURED)
def test_plans_of_losses_are_those_that_were_measured(tmp_path: Path, method: str) -> None:
    sizes = {"ranks": 4, "gpus": 4, "batch": 131072, "embedding": 512, "milliseconds": 1.0}
    plan = headlines.planned({"method": method, **sizes}, options(tmp_path))
    milliseconds, size = MEASURED[method]
    assert plan["planned_mib"] == pytest.approx(size, rel=0.1)
    if milliseconds:
        assert 1e3 * plan["planned_s"] == pytest.approx(milliseconds, rel=0.1)


def test_commands_of_all_parts_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["headlines", "--gpus", "4", "--part", *headlines.PARTS, "--list"])
    assert headlines.main() == 0
    listed = capsys.readouterr().out
    assert "scaling: MegaCLIP on 2: " in listed and "tensor-parallel: ViT-bigG-14 T=4: " in listed
    assert "LOCAL_WORLD_SIZE=2 NCCL_HOSTID=half$((2 * RANK / 4))" in listed
