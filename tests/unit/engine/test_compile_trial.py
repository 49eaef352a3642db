"""The measurement that decides whether towers are compiled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from megaclip.engine import compile_trial
from megaclip.engine.compile_trial import compiled_is_faster
from megaclip.models import compilation
from megaclip.planner import Workload
from tests.open_clip_families import family
from tests.unit.planner.planner_cases import workload

CPU = torch.device("cpu")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workload:
    """A run of a small ResNet in chunks of four, of which this process is the only rank."""
    torch.compiler.reset()
    monkeypatch.setattr(compile_trial, "gather_objects", lambda own: [own])
    plain = workload(tmp_path, ranks=1, megaclip={"coalesce_gradient_reduction": True})
    batch = replace(plain.batch, micro_batch=4, text_micro_batch=4)
    return replace(plain, model=family("resnet", tmp_path), batch=batch)


def test_every_trained_tower_is_measured_plain_and_compiled(job: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(compilation, "BACKEND", counter)
    graphs: list[int] = []

    def seconds(run: Any) -> list[float]:
        run()
        graphs.append(counter.frame_count)
        return [2.0 ** len(graphs)]

    monkeypatch.setattr(compile_trial, "seconds", seconds)
    before = torch.get_rng_state()
    reason = compiled_is_faster(job, CPU)[1]
    assert reason == "a chunk takes 6000.0 ms as plain PyTorch and 24000.0 ms compiled, as measured now"
    assert graphs[:2] == [0, 0] and 0 < graphs[2] < graphs[3]
    assert torch.equal(torch.get_rng_state(), before)
    graphs.clear()
    assert "2000.0 ms as plain PyTorch and 4000.0 ms" in compiled_is_faster(replace(job, text_unlocked=0), CPU)[1]


def test_the_slowest_rank_decides(job: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trial, "_measured", lambda *_: (0.9, 0.5))
    for other_rank, expected in (((1.0, 0.9), True), ((1.0, 0.99), False), ((1.0, 1.1), False), ("no memory", False)):
        monkeypatch.setattr(compile_trial, "gather_objects", lambda own, other_rank=other_rank: [own, other_rank])
        compiles, reason = compiled_is_faster(job, CPU)
        assert compiles is expected and reason.endswith("no memory") == (other_rank == "no memory")


def _broken(*_: Any) -> Any:
    raise OSError("no C compiler")


@pytest.mark.parametrize("backend", [_broken, lambda graph, inputs: _broken], ids=["compilation", "launch of a kernel"])
def test_a_failed_compilation_leaves_the_towers_plain(
    backend: Any, job: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "BACKEND", backend)
    compiles, reason = compiled_is_faster(job, CPU)
    assert not compiles and reason.startswith("the gain could not be measured: ") and "no C compiler" in reason
