"""tools/bench_update.py: all ways to update have equal gradient norms, and the grouped way has fewer operations."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.test_bench_train import MODEL, TOOLS
from tests.tolerances import RUN, assert_close


def bench(folder: Path) -> str:
    """Run the command on this rank. Return its output."""
    sys.path.insert(0, str(TOOLS))
    import bench_update

    out = str(folder / "rows.json")
    flags = ["--model", str(folder / "model.json"), "--batch", "4", "--steps", "1", "--fp32", "--json", out]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert bench_update.main([*flags, "--stages", "0", "1"]) == 0
    return printed.getvalue()


@pytest.mark.long
def test_all_ways_to_update_are_compared_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    printed, nothing = run_ranks(bench, 2, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["zero_stage"], row["way"]) for row in rows] == [
        (0, "deepspeed"),
        (0, "megaclip"),
        *((1, way) for way in ("deepspeed", "unchecked", "megaclip")),
    ]
    for row in rows:
        assert_close(row["gradient_norms"], rows[0]["gradient_norms"], RUN["gradient_norm"])
        assert row["update_ms"] > 0 and row["waits"] > 0 and row["world_size"] == 2
        assert row["launches"] == sum(kernel["count"] for kernel in row["kernels"])
    for stage in (0, 1):
        launches = [row["launches"] for row in rows if row["zero_stage"] == stage]
        assert launches[-1] < min(launches[:-1])
    assert nothing == "" and "other kernels" in printed and all(f"{row['update_ms']:.2f}" in printed for row in rows)
