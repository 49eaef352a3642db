"""The plan of locked towers compared with a model with the same locks: what autograd keeps, computes and copies."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megaclip.models import DualEncoder, ModelConfig, ModelDescription, build_model, compilation, meta_model
from megaclip.planner import describe, plan_memory, plan_time
from megaclip.planner.phases import KEPT, graph_bytes
from megaclip.planner.towers import Tower, towers
from megaclip.planner.traced_towers import TracedTower, trace_tower
from megaclip.planner.traffic import offload_traffic, parameter_traffic, tensor_traffic
from megaclip.planner.workload import Workload
from tests.open_clip_families import CONTEXT_LENGTH, IMAGE_SIZE, VOCAB_SIZE, family
from tests.unit.planner.planner_cases import H200, workload
from tests.unit.planner.test_towers import CASES, SAMPLES, bytes_saved_for_backward, model_config

IMAGE, TEXT = 0, 1
LOCKED_CASES = {
    **{case: settings for case, settings in CASES.items() if case != "one_layer"},
    "norm_after_pool": {"pool_type": "avg", "final_ln_after_pool": True},
    "most_patches_dropped": {"patch_dropout": 0.9},
}


def locked_model(model: ModelDescription, unlocked: int | None, device: str = "cpu") -> DualEncoder:
    """Return a model in training mode with both towers locked except for the last groups. None: nothing is locked."""
    built = meta_model(model) if device == "meta" else build_model(model)
    if unlocked is not None:
        built.lock_image_tower(unlocked)
        built.lock_text_tower(unlocked)
    return built.train()


def locked_job(tmp_path: Path, unlocked: int | None, model: ModelDescription | None = None, **changes: Any) -> Workload:
    job = replace(workload(tmp_path, **changes), image_unlocked=unlocked, text_unlocked=unlocked)
    return job if model is None else replace(job, model=model)


def locked_towers(config: ModelConfig, unlocked: int, tmp_path: Path) -> tuple[Tower, Tower]:
    image, text = towers(locked_job(tmp_path, unlocked, config))
    assert isinstance(image, Tower) and isinstance(text, Tower)
    return image, text


@pytest.mark.parametrize("unlocked", [1, 2, 3, 5])  # of 6 groups of the text tower, and 7 of the image tower
@pytest.mark.parametrize("case", LOCKED_CASES)
def test_saved_bytes_of_a_partly_locked_tower_are_what_autograd_saves(case: str, unlocked: int, tmp_path: Path) -> None:
    config = model_config(**LOCKED_CASES[case])
    model = locked_model(config, unlocked)
    inputs = torch.randn(SAMPLES, 3, 56, 56), torch.randint(0, 50, (SAMPLES, 77))
    for tower, module, rows in zip(
        locked_towers(config, unlocked, tmp_path), (model.visual, model.text), inputs, strict=True
    ):
        measured = bytes_saved_for_backward(module, rows)
        assert 0.99 * measured < tower.saved_bytes(SAMPLES, 4) < 1.06 * measured, tower.name


@pytest.mark.parametrize("checkpointing", ["", "gpu"])
@pytest.mark.parametrize("unlocked", [1, 2, 3, 5])
@pytest.mark.parametrize("case", LOCKED_CASES)
def test_the_peak_of_a_partly_locked_tower_is_not_below_a_trace(
    case: str, unlocked: int, checkpointing: str, tmp_path: Path
) -> None:
    """A trace follows every storage of a forward and backward pass from its allocation to its release."""
    config = model_config(**LOCKED_CASES[case])
    model = locked_model(config, unlocked, "meta")
    if checkpointing:
        model.set_activation_checkpointing(functools.partial(checkpoint, use_reentrant=False))
    for tower in locked_towers(config, unlocked, tmp_path):
        few, many = (trace_tower(model, tower.name, samples) for samples in (512, 1024))
        forward, kept, peak, inputs = (
            (getattr(many, name) - getattr(few, name)) / 512
            for name in ("forward_peak", "kept", "backward_peak", "block_inputs")
        )
        kept -= 4 * config.embed_dim  # the features, which the plan counts elsewhere
        assert 0.98 * forward < tower.forward_peak(1, 4) < 1.02 * forward
        assert 0.97 * kept < tower.graph_bytes(1, 4, checkpointing) < 1.06 * kept
        assert tower.block_input_bytes(1, 4) == inputs
        planned = max(tower.peak_of_forward_with_graph(1, 4, checkpointing), tower.backward_peak(1, 4, checkpointing))
        assert 0.98 * peak < planned < 1.12 * peak, tower.name


@pytest.mark.parametrize("whole", [True, False])
def test_partly_locked_compiled_towers_save_no_more_than_planned(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager_decomp_partition")
    config = model_config(quick_gelu=True)
    model = locked_model(config, 3)
    images = torch.randn(SAMPLES, 3, 56, 56)
    if whole:
        model.visual.use_compiled(compilation.compiled_body(type(model.visual), recomputes=False))
    else:
        model.visual.transformer.compile_blocks(recomputes=False)
    measured = bytes_saved_for_backward(model.visual, images)
    image, _ = towers(locked_job(tmp_path, 3, config).with_megaclip(compile=True))
    assert measured < image.saved_bytes(SAMPLES, 4) < 1.2 * measured


def test_a_backward_pass_has_the_operations_of_the_trained_part(tmp_path: Path) -> None:
    config = model_config()
    inputs = torch.empty(SAMPLES, 3, 56, 56, device="meta"), torch.zeros(SAMPLES, 77, dtype=torch.int64, device="meta")
    for unlocked in (2, 3, 5):
        model = locked_model(config, unlocked, "meta")
        for tower, module, rows in zip(
            locked_towers(config, unlocked, tmp_path), (model.visual, model.text), inputs, strict=True
        ):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                features = module(rows).sum()
                with FlopCounterMode(display=False) as counter:
                    features.backward()
            products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]  # attention's products are bmm
            assert 2 * SAMPLES * tower.part_with_graph.product_operations() == pytest.approx(products, rel=0.01)


@pytest.mark.parametrize("unlocked", [None, 0, 99])
def test_a_tower_that_is_not_partly_locked_is_planned_as_a_whole(tmp_path: Path, unlocked: int | None) -> None:
    for tower in locked_towers(model_config(), unlocked, tmp_path):
        assert tower.part_with_graph is tower
        for checkpointing in ("", "gpu"):
            assert tower.graph_bytes(5, 2, checkpointing) == tower.whole.graph_bytes(5, 2, checkpointing)
            assert tower.backward_peak(5, 2, checkpointing) == tower.whole.backward_peak(5, 2, checkpointing)
    every_group, unlimited = (locked_job(tmp_path, groups) for groups in (99, None))
    assert plan_memory(every_group, H200).gpu_phases == plan_memory(unlimited, H200).gpu_phases
    assert plan_time(every_group, H200) == plan_time(unlimited, H200)


# With 0 unlocked groups only a projection is trained.
@pytest.mark.parametrize(("name", "unlocked"), [("vit", 0), ("vit", 1), ("roberta", 0), ("roberta", 1)])
def test_open_clips_towers_are_traced_with_their_lock(name: str, unlocked: int, tmp_path: Path) -> None:
    """The comparison uses the part of the graph that a lock leaves, on the CPU. Kernels on a GPU differ."""
    model = family(name, tmp_path)
    side = TEXT if name == "roberta" else IMAGE
    images = torch.randn(SAMPLES, 3, IMAGE_SIZE, IMAGE_SIZE)
    inputs = torch.randint(3, VOCAB_SIZE, (SAMPLES, CONTEXT_LENGTH)) if side == TEXT else images
    saved, whole = (
        bytes_saved_for_backward((built.visual, built.text)[side], inputs)
        for built in (locked_model(model, unlocked), locked_model(model, None))
    )
    tower = towers(locked_job(tmp_path, unlocked, model))[side]
    planned = tower.saved_bytes(SAMPLES, 4) / tower.whole.saved_bytes(SAMPLES, 4)
    assert 0 < planned < 0.6 and planned == pytest.approx(saved / whole, rel=0.1, abs=0.01)
    part = tower.part_with_graph
    assert (
        part.layers == unlocked and tower.block_input_bytes(1, 4) == unlocked * tower.whole.block_input_bytes(1, 4) / 2
    )
    assert tower.backward_peak(1, 4, "") >= tower.forward_peak(1, 4)


@pytest.mark.parametrize("name", ["siglip", "roberta", "mt5"])
def test_open_clips_families_are_planned_with_locks(name: str, tmp_path: Path) -> None:
    job = replace(workload(tmp_path), model=family(name, tmp_path))
    whole, part = (plan_time(replace(job, image_unlocked=groups, text_unlocked=groups), H200) for groups in (None, 1))
    assert 0 < part.backward < 0.7 * whole.backward and part.forward == whole.forward


def test_a_trace_counts_the_operations_of_the_trained_part(tmp_path: Path) -> None:
    tower = towers(locked_job(tmp_path, 1, family("vit", tmp_path)))[IMAGE]
    assert isinstance(tower, TracedTower)
    # One of two blocks with 32 x 32 and 32 x 128 weights and 17 tokens. Attention has 2 x 17 x 17.
    block = 2 * 17 * (4 * 32**2 + 2 * 32 * 128) + 2 * 2 * 17 * 17 * 32
    assert tower.graph_operations() == pytest.approx(block, rel=0.02)
    assert tower.whole.graph_operations() == pytest.approx(tower.trace(4).operations, rel=0.25)  # no gradient of pixels


def run_of(groups: int | None, tmp_path: Path, checkpointing: bool = False, **zero: Any) -> Workload:
    section = {"megaclip": {"keep_graphs": "auto"}, "zero_optimization": {"stage": 2, **zero}}
    checkpoints = {"activation_checkpointing": {"cpu_checkpointing": True}} if checkpointing else {}
    job = workload(tmp_path, model="ViT-L-14", **section, **checkpoints)
    return replace(job, image_unlocked=groups, text_unlocked=groups)


def test_a_step_with_a_partly_locked_tower_needs_less_and_keeps_more_graphs(tmp_path: Path) -> None:
    whole, few, one = (run_of(groups, tmp_path) for groups in (None, 3, 1))
    graphs = [graph_bytes(job)[IMAGE] for job in (whole, few, one)]
    assert graphs[1] < 0.06 * graphs[0] and graphs[2] < 0.01 * graphs[0]
    kept = [sum(plan_memory(job, H200).workload.kept) for job in (whole, few, one)]
    assert kept[0] < 2 and kept[1:] == [9, 9]  # all chunks: 8 of images, 1 of captions
    small = describe(gpu="h200", gpus=8, gpu_memory="24GB")
    peaks = [plan_memory(job.with_megaclip(keep_graphs=0), small) for job in (whole, few, one)]
    assert [bool(plan.refusals) for plan in peaks] == [True, False, False]
    times = [plan_time(job.with_megaclip(keep_graphs=0), H200) for job in (whole, few, one)]
    assert times[0].forward == times[1].forward == times[2].forward
    assert times[1].backward == pytest.approx(times[0].backward * 2 / 24, rel=0.5)
    assert times[2].backward < 0.01 * times[0].backward


@pytest.mark.parametrize("kept", [0, 3, 9])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_plan_counts_kept_graphs_and_the_pass_beside_them(tmp_path: Path, groups: int, kept: int) -> None:
    """The expected value sums by hand the bytes that the pass of every chunk of a step holds at its peak."""
    job = run_of(groups, tmp_path).with_megaclip(keep_graphs=kept)
    plan, (image, _) = plan_memory(job, H200), towers(job)
    graph, samples = graph_bytes(job)[IMAGE], job.batch.micro_batch
    kept_images = plan.workload.kept.image
    held = image.peak_of_forward_with_graph(samples, 2, "")
    phase = plan.gpu_phases["image tower forward"]
    activations = phase["activations"] + phase.get(KEPT, 0.0)
    without = image.forward_peak(samples, 2)
    assert activations >= kept_images * graph + (without if kept_images < 8 else 0)
    assert activations <= kept_images * graph + max(without, held - graph) + graph
    assert kept_images == 8 or sum(plan.gpu_phases["image tower backward"].values()) >= without


def test_a_plan_counts_what_the_forward_pass_of_a_wholly_locked_tower_holds(tmp_path: Path) -> None:
    """Such a pass may be the peak of a step, because no backward pass through a large tower follows."""
    job = replace(workload(tmp_path, model="ViT-B-32"), image_unlocked=0)
    model = locked_model(job.model, None, "meta")  # a trace has a backward pass too
    few, many = (trace_tower(model, "image", samples).forward_peak for samples in (512, 1024))
    measured = (many - few) / 512 * job.batch.micro_batch * job.compute_bytes / 4
    planned = plan_memory(job, H200).gpu_phases["image tower forward"]["activations"]
    assert 0.98 * measured < planned < 1.02 * measured


def test_copies_of_block_inputs_are_those_of_save_on_cpu(tmp_path: Path) -> None:
    """Inputs of locked blocks are packed but never unpacked."""
    config = model_config()
    for groups in (None, 1, 3):
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
        job = run_of(groups, tmp_path, checkpointing=True)
        job = replace(job, model=config, bf16=False).with_megaclip(cut_captions=False)
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
