"""tools/bench_train.py: both methods have equal losses, and a method that does not fit in memory gets a row."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import run_ranks

TOOLS = Path(__file__).parents[2] / "tools"
MODEL: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
LOSS_TOLERANCE = 2e-5  # float32 losses near 3, after a few updates by both methods


def bench(folder: Path, *flags: str) -> None:
    """Run the command on this rank of the harness. Rank 0 writes the rows; the other ranks do not wait for it."""
    sys.path.insert(0, str(TOOLS))
    import bench_train

    out = folder / "rows.json"
    shared = ["--model", str(folder / "model.json"), "--precision", "fp32", "--workers", "0", "--json", str(out)]
    assert bench_train.main([*shared, *flags]) == 0


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "rows.json").read_text())["results"]


def bench_two_batches(folder: Path) -> None:
    bench(
        folder, "--batch", "24", "8", "--micro-batch", "4", "--steps", "1", "--text-micro-batch", "2", "--checkpointing"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return tmp_path


def test_both_methods_have_equal_losses_on_two_ranks(folder: Path) -> None:
    run_ranks(bench_two_batches, 2, folder)
    rows = rows_in(folder)
    assert [(row["method"], row["batch"]) for row in rows] == [
        (method, batch) for batch in (24, 8) for method in ("megaclip", "open_clip")
    ]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert len(set(ours["losses"])) == 2
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=LOSS_TOLERANCE)
        for row in (ours, theirs):
            assert row["status"] == "ok" and row["steps"] == 1 and row["world_size"] == 2
            assert row["samples_per_s"] == pytest.approx(row["batch"] / row["step_s"])
            parts = [row[f"{part}_share"] for part in ("loss", "data", "update")]
            assert min(parts) > 0 and sum(parts) < 1


class Fits:
    """A method that runs out of memory above a batch of 40."""

    def __init__(self, case: Any, clock: Any) -> None:
        self.batch = json.loads(case.ds_config.read_text())["train_batch_size"]

    def step(self, *, probe: bool = False) -> float:
        if self.batch > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return float(self.batch)

    def close(self) -> None: ...


def rows_of_a_method_that_does_not_fit(folder: Path) -> list[list[dict[str, Any]]]:
    sys.path.insert(0, str(TOOLS))
    import bench_methods
    import bench_train

    bench_methods.METHODS["megaclip"] = Fits  # type: ignore[assignment]
    batches = ["--batch", "48", "16", "20", "--micro-batch", "8", "--methods", "megaclip"]
    bench_train.dist.destroy_process_group = lambda: None  # the process group is kept for three commands
    with pytest.raises(AssertionError):  # 20 is not a multiple of 8, so the command fails
        bench(folder, *batches)
    rows = []
    for flags in (
        [*batches[:3], *batches[4:]],
        ["--largest", "--batch", "8", "--micro-batch", "4", "--methods", "megaclip"],
        ["--largest", "--largest-limit", "32", "--batch", "8", "--methods", "megaclip"],
    ):
        bench(folder, *flags)
        rows.append(rows_in(folder))
    return rows


def test_out_of_memory_is_a_row_and_the_largest_batch_is_found(folder: Path) -> None:
    ((every, (largest,), (limited,)),) = run_ranks(rows_of_a_method_that_does_not_fit, 1, folder)
    assert [row["status"] for row in every] == ["out of memory", "ok"]
    assert (largest["batch"], largest["status"]) == (40, "largest batch that fits (44 does not)")
    assert (limited["batch"], limited["status"]) == (32, "largest batch that fits (the largest tried)")
