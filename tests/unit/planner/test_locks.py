"""Plans of locked towers: traces of open_clip's modules, and phases, graphs, copies and traffic of a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megaclip.models import ModelDescription, build_model
from megaclip.planner import describe, plan_memory, plan_time
from megaclip.planner.phases import graph_bytes
from megaclip.planner.tower_costs import _Trace
from megaclip.planner.towers import TowerWork, tower_work
from megaclip.planner.traffic import offload_traffic, parameter_traffic, tensor_traffic
from megaclip.planner.workload import Workload
from tests.open_clip_families import CONTEXT_LENGTH, IMAGE_SIZE, VOCAB_SIZE, family
from tests.unit.planner.planner_cases import H200, workload
from tests.unit.planner.test_tower_costs import SAMPLES, bytes_saved_for_backward, locked_model, model_config

IMAGE, TEXT = 0, 1


def locked_job(tmp_path: Path, unlocked: int | None, model: ModelDescription | None = None, **changes: Any) -> Workload:
    job = replace(workload(tmp_path, **changes), image_unlocked=unlocked, text_unlocked=unlocked)
    return job if model is None else replace(job, model=model)


def locked_open_clip(model: ModelDescription, unlocked: int | None) -> torch.nn.Module:
    built = build_model(model)
    if unlocked is not None:
        built.lock_tower("image", unlocked)
        built.lock_tower("text", unlocked)
    return built.train()


def test_a_tower_that_is_not_partly_locked_is_planned_as_a_whole(tmp_path: Path) -> None:
    locked, every_group, whole = (locked_job(tmp_path, groups) for groups in (0, 99, None))
    costs = [[work.costs for work in tower_work(job)] for job in (locked, every_group, whole)]
    assert costs[0] == costs[1] == costs[2]
    assert plan_memory(every_group, H200).gpu_phases == plan_memory(whole, H200).gpu_phases
    assert plan_time(every_group, H200) == plan_time(whole, H200)


# With 0 unlocked groups only a projection is trained.
@pytest.mark.parametrize(("name", "unlocked"), [("vit", 0), ("vit", 1), ("roberta", 0), ("roberta", 1)])
def test_open_clips_towers_are_traced_with_their_lock(name: str, unlocked: int, tmp_path: Path) -> None:
    """The comparison uses the part of the graph that a lock leaves, on the CPU. Kernels on a GPU differ."""
    model = family(name, tmp_path)
    side = TEXT if name == "roberta" else IMAGE
    images = torch.randn(SAMPLES, 3, IMAGE_SIZE, IMAGE_SIZE)
    inputs = torch.randint(3, VOCAB_SIZE, (SAMPLES, CONTEXT_LENGTH)) if side == TEXT else images
    saved, saved_whole = (
        bytes_saved_for_backward((built.visual, built.text)[side], inputs)
        for built in (locked_open_clip(model, unlocked), locked_open_clip(model, None))
    )
    work, whole = (in_float32(tower_work(locked_job(tmp_path, groups, model))[side]) for groups in (unlocked, None))
    planned = work.costs.graph / whole.costs.graph
    assert 0 < planned < 0.6 and planned == pytest.approx(saved / saved_whole, rel=0.1, abs=0.01)
    assert work.passes[1].layers == unlocked and whole.passes[1].layers == work.passes[0].layers == 2
    assert work.costs.backward.block_inputs == unlocked * whole.costs.backward.block_inputs / 2
    assert work.costs.backward_peak >= work.costs.forward_peak


def in_float32(work: TowerWork) -> TowerWork:
    return replace(work, workload=replace(work.workload, bf16=False))


@pytest.mark.parametrize("name", ["siglip", "mt5"])
def test_open_clips_families_are_planned_with_locks(name: str, tmp_path: Path) -> None:
    job = replace(workload(tmp_path), model=family(name, tmp_path))
    whole, part = (plan_time(replace(job, image_unlocked=groups, text_unlocked=groups), H200) for groups in (None, 1))
    assert 0 < part.backward < 0.7 * whole.backward
    assert part.forward == pytest.approx(whole.forward, rel=0.01)


def test_a_trace_counts_the_operations_of_the_trained_part(tmp_path: Path) -> None:
    work = tower_work(locked_job(tmp_path, 1, family("vit", tmp_path)))[IMAGE]
    # One of two blocks with 32 x 32 and 32 x 128 weights and 17 tokens.
    block = 2 * 17 * (4 * 32**2 + 2 * 32 * 128)
    forward, backward = work.passes
    assert backward.products == pytest.approx(2 * block, rel=0.02)
    assert forward.products == pytest.approx(2 * block + 2 * 3 * IMAGE_SIZE**2 * 32, rel=0.02)


def test_traced_attention_keeps_its_output_and_a_log_sum_exp_per_query() -> None:
    queries = torch.empty(2, 3, 5, 8, device="meta", requires_grad=True)
    with _Trace() as live:
        output = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries)
    assert live.now == output.nbytes + 4 * 2 * 3 * 5
    assert live.attention == 2 * 3 * 2 * (128 * 128 * 64) * 2  # scores and their products with the values


def run_of(groups: int | None, tmp_path: Path) -> Workload:
    job = workload(tmp_path, model="ViT-L-14", megaclip={"keep_graphs": "auto"})
    return replace(job, image_unlocked=groups, text_unlocked=groups)


def test_a_step_with_a_partly_locked_tower_needs_less_and_keeps_more_graphs(tmp_path: Path) -> None:
    whole, few = (run_of(groups, tmp_path) for groups in (None, 3))
    graphs = [graph_bytes(job)[IMAGE] for job in (whole, few)]
    assert graphs[1] < 0.06 * graphs[0]
    kept = [sum(plan_memory(job, H200).workload.kept) for job in (whole, few)]
    assert kept[0] < 2 and kept[1] == 9  # all chunks: 8 of images, 1 of captions
    small = describe(gpu="h200", gpus=8, gpu_memory="24GB")
    peaks = [plan_memory(job.with_megaclip(keep_graphs=0), small) for job in (whole, few)]
    assert [bool(plan.refusals) for plan in peaks] == [True, False]
    times = [plan_time(job.with_megaclip(keep_graphs=0), H200) for job in (whole, few)]
    assert times[0].forward == times[1].forward
    assert times[1].backward == pytest.approx(times[0].backward * 2 / 24, rel=0.5)


def test_a_plan_counts_kept_graphs_and_the_pass_beside_them(tmp_path: Path) -> None:
    """The expected value sums by hand the bytes that the pass of every chunk of a step holds at its peak."""
    for kept, kept_images in ((0, 0), (3, 3), (9, 8)):
        job = run_of(3, tmp_path).with_megaclip(keep_graphs=kept)
        plan, (image, _) = plan_memory(job, H200), tower_work(job)
        graph, samples = graph_bytes(job)[IMAGE], job.batch.micro_batch
        assert plan.workload.kept.image == kept_images
        held, without = (samples * size for size in (image.costs.backward_peak, image.costs.forward_peak))
        phase = plan.gpu_phases.image_tower_forward
        activations = phase.activations + phase.kept_graphs
        beside = held - samples * image.costs.graph if kept_images == 8 else without  # the last graph is in its pass
        assert activations == pytest.approx(kept_images * graph + beside)
        assert kept_images == 8 or plan.gpu_phases.image_tower_backward.total >= without


def test_a_plan_counts_what_the_forward_pass_of_a_wholly_locked_tower_holds(tmp_path: Path) -> None:
    """Such a pass may be the peak of a step, because no backward pass through a large tower follows."""
    job = replace(workload(tmp_path, model="ViT-B-32"), image_unlocked=0)
    image, _ = tower_work(job)
    phases = plan_memory(job, H200).gpu_phases
    assert phases.image_tower_forward.activations == job.batch.micro_batch * image.costs.forward_peak
    assert phases.image_tower_backward is None and phases.text_tower_backward is not None


def test_copies_of_block_inputs_are_those_of_save_on_cpu(tmp_path: Path) -> None:
    """Inputs of locked blocks are packed but never unpacked."""
    config = model_config()
    for groups in (None, 3):
        copied = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal copied
            copied += tensor.numel() * tensor.element_size() * (tensor.numel() > 0)
            return tensor

        def counted(function: Any, *arguments: Any, **options: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(count, count):
                return checkpoint(function, *arguments, use_reentrant=False, **options)

        model = locked_model(config, groups)
        model.set_activation_checkpointing(counted)
        model.visual(torch.randn(SAMPLES, 3, 56, 56)).sum().backward()
        model.text(torch.randint(0, 50, (SAMPLES, 77))).sum().backward()
        checkpointing = {"activation_checkpointing": {"cpu_checkpointing": True}}
        job = workload(tmp_path, model=config, megaclip={"cut_captions": False}, **checkpointing)
        job = replace(job, image_unlocked=groups, text_unlocked=groups, bf16=False)
        job = job.with_batch(SAMPLES, micro_batch=SAMPLES)
        assert offload_traffic(job) == pytest.approx(copied, rel=0.01)


def test_traffic_of_the_backward_pass_is_that_of_the_trained_part(tmp_path: Path) -> None:
    few, more = (
        replace(workload(tmp_path, megaclip={"tensor_parallel_size": 2, "cut_captions": False}), image_unlocked=groups)
        for groups in (3, 4)
    )
    tokens, width = 50, 768  # ViT-B-32, where a block sums two gradients
    assert tensor_traffic(more) - tensor_traffic(few) == pytest.approx(
        2 * (2 - 1) / 2 * 2 * few.local_batch * 2 * tokens * width * 2
    )
    few, more = (
        replace(workload(tmp_path, zero_optimization={"stage": 3}), image_unlocked=groups) for groups in (3, 4)
    )
    block = more.trained - few.trained
    # 8 chunks reduce their gradients. Parameters are gathered for their backward passes only if few may stay gathered.
    for reuse, count in ((10**9, 8), (0, 2 * 8)):
        jobs = [job.with_zero(max_reuse_distance=reuse) for job in (more, few)]
        moved = parameter_traffic(jobs[0]) - parameter_traffic(jobs[1])
        assert moved == pytest.approx(2 * 7 / 8 * block * count, rel=0.01)
    host = [plan_time(job, H200).host for job in (few, more, replace(few, image_unlocked=None))]
    assert host[1] - host[0] == pytest.approx((host[2] - host[0]) / 10)  # 2, 3 and 12 blocks
