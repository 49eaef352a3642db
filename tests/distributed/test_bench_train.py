"""tools/bench_train.py: both methods have equal losses, and a method that does not fit in memory gets a row."""

import functools
import importlib.util
import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.utils import counters

from megaclip.errors import ConfigError
from megaclip.models import build_model
from megaclip.models.open_clip_config import OpenClipConfig
from megaclip.open_clip_package import import_open_clip
from tests.distributed.harness import run_ranks
from tests.tolerances import FEATURES, RUN, assert_close

TOOLS = Path(__file__).parents[2] / "tools"
MODEL: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


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
    methods = ["--methods", "megaclip", "open_clip", "megaclip_deepspeed_update"]
    sizes = ["--batch", "24", "8", "--micro-batch", "4", "--steps", "1", "--text-micro-batch", "2"]
    bench(folder, *methods, *sizes, "--checkpointing", "--keep-graphs", "7")


def bench_compiled(folder: Path) -> None:
    """Measure open_clip's methods on steps of one chunk and of two chunks. The compiler only traces."""
    sys.path.insert(0, str(TOOLS))
    import bench_open_clip

    inductor = torch.compile
    bench_open_clip.torch.compile = functools.partial(inductor, backend="aot_eager")  # type: ignore[attr-defined]
    bench_open_clip.dist.destroy_process_group = lambda: None  # the process group is kept for two commands
    methods = ["open_clip", "open_clip_compiled", "open_clip_compiled_task"]
    shared = ["--micro-batch", "4", "--steps", "1", "--methods", *methods]
    rows = []
    for batch in ("8", "16"):
        bench(folder, "--batch", batch, *shared)
        if bench_open_clip.dist.get_rank() == 0:  # rank 0 writes the file
            rows += rows_in(folder)
            (folder / "all.json").write_text(json.dumps(rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.mark.long
def test_both_methods_have_equal_losses_on_two_ranks(folder: Path) -> None:
    run_ranks(bench_two_batches, 2, folder)
    rows = rows_in(folder)
    methods = ("megaclip", "open_clip", "megaclip_deepspeed_update")
    assert [(row["method"], row["batch"]) for row in rows] == [(name, batch) for batch in (24, 8) for name in methods]
    for ours, theirs, with_its_update in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert len(set(ours["losses"])) == 3
        assert_close(ours["losses"], theirs["losses"], RUN["loss"])
        assert_close(ours["losses"], with_its_update["losses"], RUN["loss"])
        for row in (ours, theirs):
            assert row["status"] == "ok" and row["steps"] == 1 and row["world_size"] == 2
            graphs = {24: [3, 4], 8: [1, 2]}[row["batch"]]  # images first: in three chunks, and in one
            assert row["kept_graphs"] == (graphs if row is ours else [])
            assert row["samples_per_s"] == pytest.approx(row["batch"] / row["step_s"])
            assert row["update_ms"] == pytest.approx(1e3 * row["update_share"] * row["step_s"])
            assert min(row["startup_s"], row["first_step_s"]) > 0
            assert min(row["loss_share"], row["update_share"]) > 0
            assert sum(row[f"{part}_share"] for part in ("loss", "data", "update")) < 1
        assert ours["data_share"] > 0  # open_clip's pixels are on the device before the clock starts
        assert (ours["program"].split()[0], theirs["program"].split()[0]) == ("megaclip", "open_clip")


@pytest.mark.long
def test_compiled_open_clip_has_the_same_losses_with_one_chunk_and_with_two(folder: Path) -> None:
    run_ranks(bench_compiled, 2, folder)
    every = json.loads((folder / "all.json").read_text())
    one_chunk, two_chunks = every[:3], every[3:]
    assert [row["compiled"] for row in one_chunk] == [False, True, True]
    for rows in (one_chunk, two_chunks[:2]):
        assert [row["status"] for row in rows] == ["ok"] * len(rows)
        for row in rows[1:]:
            assert_close(row["losses"][:2], rows[0]["losses"][:2], RUN["loss"], row["method"])
    assert "2 chunks; use the method open_clip_compiled" in two_chunks[2]["status"]


class Steps:
    """Steps of which some compile a graph and take longer. So does the second one, without compilation."""

    kept_graphs: ClassVar[list[int]] = []
    text_positions_saved = 0.0

    def __init__(self, compiling: set[int]) -> None:
        self._compiling, self._number = compiling, 0

    def prepare(self) -> None:
        pass

    def step(self) -> float:
        counters["stats"]["unique_graphs"] += self._number in self._compiling
        if self._number in self._compiling | {1}:
            time.sleep(0.3)
        self._number += 1
        return float(self._number)


def measured_steps(compiling: list[set[int]], folder: Path, limit: float = 60) -> list[tuple[int, int, bool]]:
    """Return, for each set of steps that compile, the numbers of steps and of measured ones, and if these are slow.

    limit: seconds for the steps after the first one."""
    sys.path.insert(0, str(TOOLS))
    from bench_methods import Clock
    from bench_train import DEFAULT_CONFIG, Bench

    sizes = {"batch": 4, "micro_batch": 4, "text_micro_batch": None, "checkpointing": False, "compile": None}
    others = {"precision": "fp32", "deepspeed_config": None, "data_offload": None, "keep_graphs": None}
    options = Namespace(model="x", steps=2, seconds=limit, train_data=[], caption_lengths="full", **sizes, **others)
    bench, found = Bench(options, {"default": DEFAULT_CONFIG}, folder), []
    for numbers in compiling:
        row = bench._describe("megaclip", bench._config(4))
        steps: Any = Steps(numbers)
        row = bench._timed(row, steps, Clock(torch.device("cpu")))
        found.append((len(row.losses or ()), row.steps, row.step_s > 0.3))
    return found


def test_the_warm_up_and_steps_that_compile_are_not_measured(tmp_path: Path) -> None:
    """If every step compiles, the last one is measured."""
    (found,) = run_ranks(measured_steps, 1, [{0}, {0, 1, 3}, set(range(9)), set()], tmp_path)
    assert found == [(4, 2, False), (5, 2, False), (6, 1, True), (4, 2, False)]
    # Step 0 takes 0.3 s, which do not count, and so does step 1.
    assert run_ranks(measured_steps, 1, [{0}], tmp_path, 0.5) == [[(2, 1, True)]]


def test_open_clip_is_imported_from_a_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_open_clip import use_source

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    with pytest.raises(ConfigError, match="contains neither src/open_clip nor open_clip"):
        use_source(tmp_path)
    package = tmp_path / "src" / "open_clip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = 'of the tree'")
    use_source(tmp_path)
    found = importlib.util.find_spec("open_clip")
    assert found is not None and found.origin == str(package / "__init__.py")


@pytest.mark.parametrize("text", [{}, {"custom_text": True, "init_logit_bias": -3.0}])
def test_open_clips_model_starts_with_the_values_of_the_same_seed(
    monkeypatch: pytest.MonkeyPatch, text: dict[str, Any]
) -> None:
    """Test also models in which MegaCLIP runs open_clip's own modules. Here they run for an attentional pooling."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from bench_open_clip import _open_clip_model

    description = {**MODEL, "vision_cfg": {**MODEL["vision_cfg"], "attentional_pool": True, "attn_pooler_heads": 2}}
    config = OpenClipConfig.from_dict({**description, **text})
    package, inputs = import_open_clip(), SimpleNamespace(model_config=config)
    theirs = _open_clip_model(package, inputs, 3, torch.device("cpu")).eval()
    torch.manual_seed(3)
    ours = build_model(config).eval()
    images, tokens = torch.randn(2, 3, 16, 16), torch.randint(1, 400, (2, 24))
    found = theirs(images, tokens)
    expected = ours(images, tokens)
    # Image features are not equal bit by bit: MegaCLIP computes the patch embedding as a matrix product.
    assert_close(found["image_features"], expected[0], FEATURES["float32"])
    assert torch.equal(found["text_features"], expected[1])


class Fits:
    """A method that runs out of memory above a batch of 40."""

    text_positions_saved = 0.0

    def __init__(self, case: Any, clock: Any) -> None:
        self.batch = json.loads(case.ds_config.read_text())["train_batch_size"]

    program = "fits 40"
    compiled = recomputes = False
    text_micro_batch = 0

    def prepare(self) -> None: ...

    def step(self) -> float:
        if self.batch > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return float(self.batch)

    kept_graphs = (1, 1)

    def close(self) -> None: ...


def rows_of_a_method_that_does_not_fit(folder: Path) -> list[dict[str, Any]]:
    sys.path.insert(0, str(TOOLS))
    import bench_train

    bench_train.METHODS["megaclip"] = Fits  # type: ignore[assignment]
    batches = ["--batch", "48", "16", "20", "--micro-batch", "8", "--methods", "megaclip"]
    bench_train.dist.destroy_process_group = lambda: None  # the process group is kept for two commands
    with pytest.raises(AssertionError):  # 20 is not a multiple of 8, so the command fails
        bench(folder, *batches)
    bench(folder, *batches[:3], *batches[4:])
    return rows_in(folder)


def test_out_of_memory_is_a_row(folder: Path) -> None:
    (rows,) = run_ranks(rows_of_a_method_that_does_not_fit, 1, folder)
    assert [row["status"] for row in rows] == ["out of memory", "ok"]
