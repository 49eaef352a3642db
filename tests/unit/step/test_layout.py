"""A run and its plan make the same decisions."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaclip.comm.machine import Machine
from megaclip.config import load_training_config, parse_arguments
from megaclip.config.ds_config import count_kept
from megaclip.config.training import TextChunks
from megaclip.data import ImageTransform
from megaclip.engine import preflight
from megaclip.models import ModelConfig, build_model, load_model_config
from megaclip.planner import Cluster, MemoryPlan, describe, plan_memory
from megaclip.planner.memory import place_images
from megaclip.planner.step_time import plan_time
from megaclip.planner.text_chunks import text_chunks_for
from megaclip.planner.tower_costs import tower_costs
from megaclip.planner.towers import tower_work
from megaclip.step.batch import DeviceFeed
from megaclip.step.gradient_cache import RandomState, accumulate_gradients
from tests.distributed.memory_batch import MemoryBatch, PlainEngine, cross_entropy
from tests.unit.planner.planner_cases import workload

SMALL = ModelConfig.from_dict(
    {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 8, "layers": 2, "width": 16, "head_width": 8, "patch_size": 4},
        "text_cfg": {"context_length": 6, "vocab_size": 32, "width": 16, "heads": 2, "layers": 2},
    }
)


# unlocked groups of each tower (None: not locked), chunks of each tower, kept graphs: every pair of values occurs.
STEPS = [
    (None, None, 1, 1, 0),
    (None, None, 4, 4, 5),
    (None, 0, 1, 4, 8),
    (None, 0, 4, 1, 0),
    (None, 1, 4, 1, 8),
    (None, 1, 1, 4, 5),
    (0, None, 4, 1, 5),
    (0, None, 1, 4, 0),
    (0, 0, 4, 4, 0),
    (0, 0, 1, 1, 8),
    (0, 1, 1, 1, 5),
    (0, 1, 4, 4, 8),
    (1, None, 4, 1, 8),
    (1, 0, 4, 1, 5),
    (1, 0, 1, 4, 0),
    (1, 1, 4, 4, 0),
    (1, 1, 1, 1, 0),
]


def test_towers_run_as_often_as_planned(tmp_path: Path) -> None:
    rows, planned = 8, set()
    pixels = torch.randint(256, (rows, 3, 8, 8), dtype=torch.uint8)
    feed = DeviceFeed(torch.device("cpu"), torch.float32, ImageTransform(8).normalise)
    plain = replace(workload(tmp_path, ranks=1), model=SMALL)
    for image_unlocked, text_unlocked, image_chunks, text_chunks, keep in STEPS:
        model = build_model(SMALL)
        if image_unlocked is not None:
            model.lock_tower("image", image_unlocked)
        if text_unlocked is not None:
            model.lock_tower("text", text_unlocked)
        job = replace(plain, image_unlocked=image_unlocked, text_unlocked=text_unlocked).with_megaclip(keep_graphs=keep)
        job = job.with_batch(rows, micro_batch=rows // image_chunks, text_micro_batch=rows // text_chunks)
        tokens = torch.randint(1, 32, (rows, 6))
        batch = MemoryBatch(pixels.chunk(image_chunks), tokens, feed, text_chunks=text_chunks)
        engine, seeds = PlainEngine(model), RandomState(seed=0, step=0, replica=0)
        accumulate_gradients(
            engine, cross_entropy, batch, lambda: [torch.zeros(1)], seeds, coalesce=False, kept=job.kept
        )
        works = tower_work(job)
        graphs = sum(work.chunks for work in works if work.trained)
        again = 0 if job.one_chunk_each else max(0, graphs - keep)
        assert sum(job.encoded_again) == again
        for work in works:
            assert engine.rows["text" if work.is_text else "image"] == rows + work.encoded_again * rows / work.chunks
        assert engine.rows["image"] == rows * job.image_readings
        phases = plan_memory(job, describe(gpus=1)).gpu_phases
        for work, phase in zip(works, (phases.image_tower_backward, phases.text_tower_backward), strict=True):
            assert (phase is not None) == (work.trained > 0)
        planned.add((sum(work.trained > 0 for work in works), again > 0))
    assert planned == {(0, False), (1, False), (1, True), (2, False), (2, True)}


@pytest.mark.parametrize(("chunks", "first"), [(1, "image"), (2, "text")])
def test_the_tower_that_is_back_propagated_first_is_planned_beside_all_graphs(tmp_path: Path, chunks, first) -> None:
    job = replace(workload(tmp_path, ranks=1), model=SMALL).at_stage(1).with_megaclip(keep_graphs=2 * chunks)
    job = job.with_batch(8, micro_batch=8 // chunks, text_micro_batch=8 // chunks)
    model, order = build_model(SMALL), []
    for name, tower in (("image", model.visual), ("text", model.text)):
        next(tower.parameters()).register_hook(lambda _, name=name: order.append(name))
    pixels, tokens = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.ones(8, 6, dtype=torch.int64)
    feed = DeviceFeed(torch.device("cpu"), torch.float32, ImageTransform(8).normalise)
    batch = MemoryBatch(pixels.chunk(chunks), tokens, feed, text_chunks=chunks)
    arguments = PlainEngine(model), cross_entropy, batch, lambda: [torch.zeros(1)], RandomState(0, 0, 0)
    accumulate_gradients(*arguments, coalesce=job.coalesces, kept=job.kept)
    assert order[0] == order[chunks - 1] == first and len(order) == 2 * chunks
    phases = plan_memory(job, describe(gpus=1)).gpu_phases
    towers = {"image": phases.image_tower_backward, "text": phases.text_tower_backward}
    beside = towers.pop(first)
    (after,) = towers.values()
    assert beside.kept_graphs == phases.loss.kept_graphs > after.kept_graphs
    assert beside.gradients < after.gradients


@pytest.fixture
def plan_of_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that returns two plans: that of a ViT-B-32 run on a machine, and that of the planner alone."""

    def plans(machine: Cluster, others: Sequence[Cluster] = (), lock_image: bool = False, **section):
        job = workload(tmp_path, ranks=machine.gpus, megaclip=section)
        job = replace(job, image_unlocked=0 if lock_image else None)
        inputs = SimpleNamespace(
            objective=None,
            config=load_training_config(tmp_path / "ds.json"),
            model_config=load_model_config("ViT-B-32"),
            train=range(100_000),
            validation=None,
            labelled=None,
            suite=(),
        )
        monkeypatch.setattr(preflight.dist, "get_world_size", lambda: machine.gpus)
        monkeypatch.setattr(preflight, "this_machine", lambda world_size, folder: machine)
        figures = machine.measured or Machine(machine.slowest_link, machine.rates.product_flops, 0.0)
        monkeypatch.setattr(preflight, "machine_of", lambda ranks, device: figures)
        monkeypatch.setattr(preflight, "gather_objects", lambda own: [own, *others])
        flags = ["--deepspeed_config", "x", "--model", "x", "--train-data", "x", "--no-plan"]
        arguments = parse_arguments([*flags, *(["--lock-image"] if lock_image else [])])
        return preflight.check_fit(arguments, inputs), plan_memory(job, machine)

    return plans


def way(plan: MemoryPlan) -> tuple[str, str]:
    return plan.workload.megaclip.exchange, plan.workload.megaclip.reduction


def test_the_loss_exchanges_features_as_the_plan_of_its_run(plan_of_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a run has the links that its ranks have measured. The run logs the choice with the figures."""
    lines: list[str] = []
    monkeypatch.setattr(preflight.logger, "info", lambda text, *values: lines.append(text % values))
    machine = describe(gpus=4, hosts=2, link="25GB", network="25GB")
    run, planned = plan_of_run(machine)
    assert [line.partition(" (")[0] for line in lines if line.startswith("loss: ")] == ["loss: all_gather + scalar"]
    assert any("estimates: ring + feature " in line and "links 25 GB/s, products 730 TFLOP/s" in line for line in lines)
    # Another rule than that of the losses might give ring + feature here.
    assert way(run) == way(planned) == ("all_gather", "scalar")
    slow = replace(machine, measured=Machine(1e6, 1e18, 0.0))  # products cost nothing
    fast = replace(machine, measured=Machine(1e15, 1e12, 0.0))  # links cost nothing
    assert way(plan_of_run(slow)[0]) == ("all_gather", "scalar") and way(plan_of_run(fast)[0]) == (
        "all_gather",
        "feature",
    )
    assert way(plan_of_run(fast, exchange="ring")[0]) == ("ring", "feature")
    # A rank that has no memory to gather features makes all ranks exchange them in a ring.
    full = replace(fast, gpu_memory=1e9)
    assert way(plan_of_run(fast, others=[full])[0]) == ("ring", "feature")


@pytest.mark.parametrize("lock_image", [False, True])
def test_images_are_kept_where_the_plan_puts_them(plan_of_run, lock_image: bool) -> None:
    """A locked tower reads each image once."""
    found = []
    for host_memory, disk in (("100GiB", "1GiB"), ("57GiB", "1TiB"), ("57GiB", "1GiB")):
        machine = describe(gpus=8, host_memory=host_memory, disk=disk)
        run, planned = plan_of_run(machine, lock_image=lock_image)
        assert run.image_place == planned.image_place
        found.append((run.image_place, run.refusals == []))
    expected = [("cpu", True), ("disk", True), ("disk", False)]
    assert found == ([("once", True)] * 3 if lock_image else expected)


def test_all_ranks_keep_images_on_disk_if_one_host_requires_it(plan_of_run) -> None:
    small = describe(gpus=8, host_memory="57GiB")
    run, planned = plan_of_run(describe(gpus=8), others=[small])
    assert (run.image_place, planned.image_place) == ("disk", "cpu")
    assert "step store" in run.disk and "step store" not in run.cpu
    assert plan_of_run(small, others=[describe(gpus=8)])[0].image_place == "disk"


def test_all_ranks_recompute_if_one_rank_requires_it(plan_of_run) -> None:
    small = describe(gpus=8, gpu_memory="32GB")
    run, planned = plan_of_run(describe(gpus=8), others=[small], compile=True, keep_graphs="auto")
    assert run.workload.megaclip.selective_recompute is True
    assert planned.workload.megaclip.selective_recompute is False
    assert sum(run.workload.kept) < sum(planned.workload.kept)


def test_embeddings_are_kept_where_the_plan_puts_them(plan_of_run) -> None:
    """The limit is a tenth of the GPU's whole memory, not of the memory that is free when the run starts."""
    nbytes = 2 * 2 * 4096 * 512 * 2  # towers, features and gradients, (b, D), bf16
    for gpu_memory, setting in itertools.product((9 * nbytes, 11 * nbytes), ("auto", True, False)):
        for free in (gpu_memory, gpu_memory / 2):
            machine = replace(describe(gpus=8), gpu_memory=free, gpu_total_memory=gpu_memory)
            run, planned = plan_of_run(machine, embeddings_offload=setting)
            expected = gpu_memory < 10 * nbytes if setting == "auto" else setting
            assert run.workload.megaclip.embeddings_offload == planned.workload.megaclip.embeddings_offload == expected
    run, planned = plan_of_run(describe(gpu="cpu", gpus=8))
    assert not run.workload.megaclip.embeddings_offload and not planned.workload.megaclip.embeddings_offload


def test_images_are_placed_by_the_bytes_that_are_left() -> None:
    for setting, memory, encoded_again, place in (
        ("auto", 800, 3, "cpu"),
        ("auto", 799, 3, "disk"),
        ("auto", 0, 0, "once"),
        ("cpu", 799, 3, "cpu"),
        ("cpu", 800, 0, "cpu"),
        ("disk", 5000, 3, "disk"),
        ("reread", 0, 3, "reread"),
        ("reread", 0, 0, "once"),
    ):
        placed = place_images(setting, encoded_again=encoded_again, nbytes=800, host_memory=memory)
        assert placed == place, (setting, memory, encoded_again)


def test_captions_of_a_text_chunk_take_the_memory_of_an_image_chunk(tmp_path: Path) -> None:
    """Bytes per sample are computed by the formulas that other tests compare with autograd."""
    for model, number in (("ViT-B-32", 1), ("ViT-L-14", 9)):
        job = workload(tmp_path, 1, model)
        image, text = (work.costs.graph for work in tower_work(job))
        assert text_chunks_for(job.model, 2, True) == TextChunks(number)
        assert image / text == pytest.approx(number, rel=0.15)
    # Also for open_clip's modules, whose captions are cut or keep their padding (SigLIP).
    for model, chunks in (("ViT-B-32", TextChunks(1, 8)), ("ViT-B-32-SigLIP2-256", TextChunks(1))):
        description = load_model_config(model, "open_clip")
        assert text_chunks_for(description, 2, "auto") == chunks
        image, text = (tower_costs(description, tower, 2).graph for tower in ("image", "text"))
        assert image / text == pytest.approx(chunks.captions_per_image, rel=0.15)
    assert text_chunks_for(load_model_config("ViT-B-32", "open_clip"), 2, False) == TextChunks(1)
    assert workload(tmp_path, 1, "ViT-B-16").chunks == (8, 2)


@pytest.mark.parametrize(
    ("gpu_memory", "chunks", "changes", "expected"),
    [
        ("141GB", 8, {}, True),  # four graphs without recomputation, six with it
        ("141GB", 128, {}, False),  # two more graphs of 128 would save less time than the recomputation takes
        ("141GB", 8, {"compile": False}, False),
        ("141GB", 8, {"selective_recompute": False}, False),
        ("141GB", 128, {"selective_recompute": True}, True),
        ("141GB", 8, {"keep_graphs": 2}, False),
        ("300GB", 8, {}, False),  # all graphs fit
        ("32GB", 8, {}, True),  # does not fit otherwise
        ("32GB", 8, {"keep_graphs": 0}, True),
    ],
)
def test_compiled_towers_recompute_where_it_pays(
    tmp_path: Path, gpu_memory: str, chunks: int, changes: dict, expected: bool
) -> None:
    megaclip = {"compile": True, "keep_graphs": "auto", **changes}
    job = workload(tmp_path, 1, "ViT-B-16", megaclip=megaclip).with_batch(512 * chunks)
    cluster = describe(gpus=1, gpu_memory=gpu_memory)
    plan = plan_memory(job, cluster)
    assert plan.workload.megaclip.selective_recompute == expected
    if megaclip["compile"] and megaclip["keep_graphs"] == "auto" and "selective_recompute" not in changes:
        other = plan_memory(job.with_megaclip(selective_recompute=not expected), cluster)
        chosen, otherwise = (plan_time(each.workload, cluster).total for each in (plan, other))
        assert chosen <= 1.001 * otherwise or other.refusals


def test_open_clips_towers_in_a_plan_compile_on_request_and_their_captions_are_cut(tmp_path: Path) -> None:
    job = replace(workload(tmp_path, 1), model=load_model_config("ViT-B-32", "open_clip"))
    machine = describe(gpus=1)
    padded = job.with_megaclip(cut_captions=False)
    short, long = (tower_work(each)[1].seconds(machine) for each in (job, padded))
    share = job.text_positions / 77
    assert 0.2 < share < 0.8
    assert share * long.forward < short.forward < 1.2 * share * long.forward and short.backward < long.backward
    peaks = [plan_memory(each, machine).gpu_phases for each in (job, padded)]
    assert peaks[0] == peaks[1]  # a chunk may contain a caption of full length
    for setting, compiles in ((True, True), (False, False), ("auto", False)):
        planned = plan_memory(job.with_megaclip(compile=setting), machine).workload.megaclip
        assert (planned.compile, planned.selective_recompute) == (compiles, False)


@pytest.mark.parametrize(
    ("reuse", "live", "prefetched", "offloads", "kept"),
    [
        (10**9, 10**9, 5 * 10**7, False, 10),
        (10**9, 3 * 10**8, 5 * 10**7, False, 5),  # with those fetched ahead, at most max_live_parameters
        (10**9, 10**7, 5 * 10**7, False, 0),
        (10**9, 10**9, 5 * 10**7, True, 0),
    ],
)
def test_the_settings_of_zero_3_limit_what_stays_gathered(
    reuse: int, live: int, prefetched: int, offloads: bool, kept: int
) -> None:
    for more in (0, 1):
        sizes = [10**9, *[5 * 10**7 + more] * 20]
        assert count_kept(sizes, reuse, live, prefetched, offloads=offloads) == max(0, kept - more)
