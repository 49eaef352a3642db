"""The number of kept graphs: the rule of megaclip.keep_graphs, its plan, and what a run adds after its first steps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaclip.data import ImageTransform
from megaclip.engine import preflight
from megaclip.models import ModelConfig, build_model
from megaclip.planner import Workload, advice, describe, plan_memory, plan_time
from megaclip.planner.constants import KEPT_GRAPHS_MARGIN
from megaclip.planner.memory import with_kept_graphs
from megaclip.planner.phases import graph_bytes
from megaclip.planner.report import graphs_text, summary
from megaclip.step.batch import DeviceFeed
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from megaclip.step.layout import KeptGraphs, graphs_that_fit, kept_graphs
from megaclip.zero.build import _checkpoint
from tests.distributed.memory_batch import MemoryBatch, PlainEngine, cross_entropy
from tests.unit.planner.planner_cases import GIB, workload
from tests.unit.planner.test_measured import _PeakBytes

BOTH, IMAGE, TEXT, NONE = (True, True), (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("number", "chunks", "trained", "kept"),
    [
        (0, (8, 4), BOTH, (0, 0)),
        (3, (8, 4), BOTH, (3, 0)),  # images first
        (8, (8, 4), BOTH, (8, 0)),
        (10, (8, 4), BOTH, (8, 2)),
        (12, (8, 4), BOTH, (8, 4)),
        (99, (8, 4), BOTH, (8, 4)),  # all
        (6, (8, 4), IMAGE, (6, 0)),
        (6, (8, 4), TEXT, (0, 4)),
        (6, (8, 4), NONE, (0, 0)),
        # With one backward pass per tower, its graph is always kept.
        (0, (1, 1), BOTH, (1, 1)),
        (0, (1, 4), IMAGE, (1, 0)),
        (0, (4, 1), TEXT, (0, 1)),
        (0, (1, 1), NONE, (0, 0)),
        (0, (1, 4), BOTH, (0, 0)),
        (0, (4, 1), BOTH, (0, 0)),
    ],
)
def test_images_are_kept_first_and_the_graphs_of_a_single_pass_always(number, chunks, trained, kept) -> None:
    assert kept_graphs(number, chunks, trained) == KeptGraphs(*kept)


@pytest.mark.parametrize(
    ("kept", "free", "number"),
    [
        (0, 0.9, 0),
        (0, 1.0, 1),
        (0, 2.9, 2),  # the third takes 5
        (0, 6.9, 2),
        (0, 7.0, 3),
        (0, 12.0, 4),
        (0, 1e9, 4),
        (2, 4.9, 2),
        (2, 5.0, 3),
        (4, 1e9, 4),
        (2, -3.0, 2),  # never fewer than now
        (5, 1e9, 5),
    ],
)
def test_graphs_are_added_one_by_one_while_they_fit(kept: int, free: float, number: int) -> None:
    assert graphs_that_fit(kept, [1.0, 1.0, 5.0, 5.0], free) == number


def test_graphs_that_would_save_almost_nothing_are_not_kept() -> None:
    assert [graphs_that_fit(0, [1.0] * 200, free) for free in (1.0, 1.9, 2.0, 50.0)] == [0, 0, 2, 50]
    assert graphs_that_fit(1, [1.0] * 400, 2.5) == 1 and graphs_that_fit(1, [1.0] * 400, 3.0) == 4


def auto(tmp_path: Path, **changes) -> Workload:
    """Return the workload of ViT-B-32 on one GPU in eight chunks of 512, with keep_graphs "auto"."""
    return workload(tmp_path, 1, **changes).with_megaclip(keep_graphs="auto")


@pytest.mark.parametrize(
    ("model", "micro_batch", "memory"), [("ViT-B-32", 512, range(4, 141, 8)), ("ViT-g-14", 128, range(40, 141, 20))]
)
def test_auto_fills_the_gpu_up_to_its_margin_and_never_refuses_what_fits_without(
    tmp_path: Path, model: str, micro_batch: int, memory: range
) -> None:
    changes = {"train_batch_size": 8 * micro_batch, "train_micro_batch_size_per_gpu": micro_batch}
    # whole gradients of the towers whose backward pass is complete
    changes |= {"zero_optimization": {"stage": 1}, "data_types": {}}
    job = workload(tmp_path, 1, model, **changes).with_megaclip(keep_graphs="auto")
    found = []
    for gib in memory:
        cluster = describe(gpus=1, gpu_memory=f"{gib}GiB")
        plan, least = plan_memory(job, cluster), plan_memory(job.with_megaclip(keep_graphs=0), cluster)
        assert (plan.refusals == []) == (least.refusals == [])
        number, limit = sum(plan.workload.kept), (1 - KEPT_GRAPHS_MARGIN) * cluster.usable_gpu_memory
        assert plan.gpu_peak <= max(least.gpu_peak, limit)
        if 0 < number < 16:  # one more must not fit; the bound also adds memory that the phases need at different times
            more = with_kept_graphs(plan, number + 1)
            assert more.gpu_peak > limit - 5 * GIB
        assert number or plan.gpu_peak == least.gpu_peak
        found.append(number)
    assert found == sorted(found) and found[0] == 0
    assert found[-1] == 1 if model == "ViT-g-14" else (found[-1] == 16 and len(set(found)) > 4)


def test_auto_keeps_nothing_where_it_cannot_know_or_would_fill_the_host(tmp_path: Path) -> None:
    job, big = auto(tmp_path), describe(gpus=1)
    for changed, cluster in ((job, describe(gpu="cpu", gpus=1)), (replace(job, checkpointing="cpu"), big)):
        plan = plan_memory(changed, cluster)
        assert plan.workload.kept == (0, 0) and plan.graph_bytes == []
        # An explicit number is kept there too, and is part of the plan.
        asked = plan_memory(changed.with_megaclip(keep_graphs=12), cluster)
        assert asked.workload.kept == (8, 4) and asked.cpu_peak > plan.cpu_peak + GIB
    # Checkpointed graphs are small: all fit.
    assert plan_memory(replace(job, checkpointing="gpu"), big).workload.kept == (8, 8)


def test_a_step_that_keeps_all_graphs_reads_and_encodes_everything_once(tmp_path: Path) -> None:
    job, cluster = auto(tmp_path), describe(gpus=1)
    plan, step = plan_memory(job, cluster), plan_time(job, cluster)
    assert plan.image_place == "once" and "step store" not in plan.cpu
    assert step.forward_again == 0 and "once" in summary(plan, job, cluster)
    assert graphs_text(plan.workload) == "graphs of 8 of 8 image chunks and 8 of 8 text chunks are kept"
    for number, place, images, texts in ((2, "cpu", 6, 8), (10, "once", 0, 6)):
        some = job.with_megaclip(keep_graphs=number)
        assert plan_memory(some, cluster).image_place == place
        seconds = images / 8 * forward_seconds_of(job, "image") + texts / 8 * forward_seconds_of(job, "text")
        assert plan_time(some, cluster).forward_again == pytest.approx(seconds)


def forward_seconds_of(job: Workload, tower: str) -> float:
    """Return the seconds of a tower's forward passes."""
    frozen = {"text_unlocked" if tower == "image" else "image_unlocked": 0}
    return plan_time(replace(job, **frozen).with_megaclip(keep_graphs=0), describe(gpus=1)).forward_again


def test_too_many_graphs_are_refused_with_auto_as_the_advice(tmp_path: Path) -> None:
    job, cluster = auto(tmp_path).with_megaclip(keep_graphs=16), describe(gpus=1, gpu_memory="40GiB")
    plan = plan_memory(job, cluster)
    assert plan.refusals[0].startswith("a GPU would need")
    assert advice(job, cluster)[0] == '"megaclip": {"keep_graphs": "auto"}'


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Figures of a GPU that `keep_more_graphs` reads, in GiB, and the results of the other ranks."""
    figures: dict = {"free": 40.0, "total": 140.0, "reserved": 90.0, "peak": 95.0, "others": []}
    cuda = preflight.torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (int(figures["free"] * GIB), int(figures["total"] * GIB)))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: int(figures["reserved"] * GIB))
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda: int(figures["peak"] * GIB))
    monkeypatch.setattr(preflight, "gather_integers", lambda own: [own, *([other] for other in figures["others"])])
    figures["lines"] = []
    monkeypatch.setattr(preflight.logger, "info", lambda text, *values: figures["lines"].append(text % values))
    yield figures


def test_a_run_keeps_more_graphs_if_its_steps_have_left_room(tmp_path: Path, gpu: dict) -> None:
    plan = plan_memory(auto(tmp_path), describe(gpus=1, gpu_memory="40GiB"))
    number = sum(plan.workload.kept)
    image, text = (size / GIB for size in graph_bytes(plan.workload))
    assert 0 < number < 5 and plan.workload.kept.text == 0
    margin = 0.05 * 140
    for more in (1, 2, 3):
        gpu["free"] = (95.0 - 90.0) + margin + more * image + 0.01  # free at the peak: 5 GiB less than now
        assert sum(preflight.keep_more_graphs(plan).workload.kept) == number + more
        gpu["free"] -= 0.02
        assert sum(preflight.keep_more_graphs(plan).workload.kept) == number + more - 1
    text_gradients = 4 * plan.workload.trained / GIB  # ZeRO-2 has those of both towers
    gpu["free"] = 5 + margin + (8 - number) * image + text + text_gradients + 0.01
    grown = preflight.keep_more_graphs(plan)
    assert grown.workload.kept == (8, 1) and grown.gpu_peak > plan.gpu_peak and grown.image_place == plan.image_place
    assert gpu["lines"][-1].startswith("graphs of 8 of 8 image chunks and 1 of 8 text chunks are kept from now on: ")
    gpu["others"] = [9, number + 1, 16]  # the smallest number of all ranks counts
    assert sum(preflight.keep_more_graphs(plan).workload.kept) == number + 1
    gpu["free"] = 1.0
    assert preflight.keep_more_graphs(plan) is plan


def test_kept_texts_may_have_longer_captions_in_another_step(tmp_path: Path, gpu: dict) -> None:
    """The measured steps may have had short captions, so the largest size of the kept text graphs must stay free."""
    plan = plan_memory(auto(tmp_path), describe(gpus=1, gpu_memory="80GiB"))
    texts = plan.workload.kept.text
    _, text = (size / GIB for size in graph_bytes(plan.workload))
    assert plan.workload.kept.image == 8 and 0 < texts < 7
    gpu["free"] = 5 + 0.05 * 140 + texts * text + text + 0.01
    assert preflight.keep_more_graphs(plan).workload.kept == (8, texts + 1)
    gpu["free"] -= 0.02
    assert preflight.keep_more_graphs(plan) is plan


def test_an_explicit_number_is_never_changed(tmp_path: Path, gpu: dict) -> None:
    gpu["free"] = 1000.0
    for job, cluster in (
        (auto(tmp_path).with_megaclip(keep_graphs=3), describe(gpus=1)),
        (auto(tmp_path), describe(gpu="cpu", gpus=1)),
        (auto(tmp_path).with_batch(512), describe(gpus=1)),  # one chunk
    ):
        plan = plan_memory(job, cluster)
        assert preflight.keep_more_graphs(plan) is plan and gpu["lines"] == []


TOKENS = ModelConfig.from_dict(  # many tokens for few channels, so that saved tensors dominate
    {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 56, "layers": 2, "width": 48, "head_width": 16, "patch_size": 4},
        "text_cfg": {"context_length": 77, "vocab_size": 32, "width": 40, "heads": 5, "layers": 2},
    }
)


def bytes_alive_at_the_loss(job: Workload) -> int:
    """Return the bytes of the tensors that a step has created and still holds when it evaluates the loss."""
    rows = job.local_batch
    model = build_model(TOKENS)
    if job.checkpointing:
        model.set_activation_checkpointing(_checkpoint)
    pixels = torch.randint(256, (rows, 3, 56, 56), dtype=torch.uint8)
    feed = DeviceFeed(torch.device("cpu"), torch.float32, ImageTransform(56).normalise)
    tokens = torch.randint(1, 32, (rows, 77))
    batch = MemoryBatch(pixels.chunk(job.chunks[0]), tokens, feed, text_chunks=job.chunks[1])
    alive: list[int] = []
    with _PeakBytes() as made:

        def loss(images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            alive.append(sum(made._alive.values()))
            return cross_entropy(images, texts, scale)

        seeds = RandomState(seed=0, step=0, replica=0)
        accumulate_gradients(
            PlainEngine(model), loss, batch, lambda: [torch.zeros(1)], seeds, coalesce=False, kept=job.kept
        )
    return alive[0]


@pytest.mark.parametrize("checkpointing", ["", "gpu"])
def test_kept_graphs_take_the_planned_bytes(tmp_path: Path, checkpointing: str) -> None:
    job = workload(tmp_path, 1, bf16={"enabled": False}, data_types={})
    job = replace(job, model=TOKENS, checkpointing=checkpointing).with_batch(32, micro_batch=8, text_micro_batch=16)
    none, planned_none = bytes_alive_at_the_loss(job), plan_memory(job, describe(gpus=1)).gpu_phases.loss
    for number in (1, 5):  # images, then also texts
        keeping = job.with_megaclip(keep_graphs=number)
        planned = plan_memory(keeping, describe(gpus=1)).gpu_phases.loss
        assert planned_none.kept_graphs == 0
        assert bytes_alive_at_the_loss(keeping) - none == pytest.approx(planned.kept_graphs, rel=0.03), number
