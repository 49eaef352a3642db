"""The formulas of MegaCLIP's towers compared with what autograd saves, with traces and with PyTorch's operations."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megaclip.comm.groups import RankGroup
from megaclip.models import DualEncoder, ModelConfig, build_model, compilation, layers, load_model_config, meta_model
from megaclip.models.layers import LayerFactory
from megaclip.models.text import TextTower
from megaclip.models.vision import VisionTower
from megaclip.planner.own_towers import (
    TowerSizes,
    attention_operations,
    image_sizes,
    pass_costs,
    text_sizes,
    tower_memory,
)
from megaclip.planner.tower_costs import TowerMemory
from megaclip.planner.towers import tower_work
from megaclip.planner.traced_towers import Traced, trace_tower
from tests.tolerances import TRACED, assert_close
from tests.unit.planner.planner_cases import H200, workload

SAMPLES = 6
CASES = {
    "plain": {},
    "quick_gelu": {"quick_gelu": True},
    "layer_scale": {"ls_init_value": 0.1},
    "mean_pool": {"pool_type": "avg"},
    "norm_after_pool": {"pool_type": "avg", "final_ln_after_pool": True},
    "no_ln_pre": {"no_ln_pre": True},
    "patch_dropout": {"patch_dropout": 0.5},
    "most_patches_dropped": {"patch_dropout": 0.9},
    "one_layer": {"layers": 1},
}


def model_config(**vision) -> ModelConfig:
    """Return sizes that do not divide each other, with many tokens and few channels, so that saved tensors dominate."""
    text = {"context_length": 77, "vocab_size": 50, "width": 40, "heads": 5, "layers": 4, "mlp_ratio": 3.0}
    return ModelConfig.from_dict(
        {
            "embed_dim": 24,
            "quick_gelu": vision.pop("quick_gelu", False),
            "vision_cfg": {"image_size": 56, "layers": 5, "width": 48, "head_width": 16, "patch_size": 4, **vision},
            "text_cfg": text,
        }
    )


def locked_model(config: ModelConfig, unlocked: int | None, device: str = "cpu") -> DualEncoder:
    """Return a model in training mode with both towers locked except for the last groups. None: nothing is locked."""
    model = meta_model(config) if device == "meta" else build_model(config)
    if unlocked is not None:
        model.lock_image_tower(unlocked)
        model.lock_text_tower(unlocked)
    return model.train()


def inputs(samples: int = SAMPLES, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, 56, 56).to(dtype), torch.randint(0, 50, (samples, 77))


def memory(sizes: TowerSizes, unlocked: int | None = None, width: int = 4, checkpointing: str = "") -> TowerMemory:
    return tower_memory(sizes, sizes if unlocked is None else sizes.part(unlocked), width, checkpointing)


def bytes_saved_for_backward(model: nn.Module, rows: torch.Tensor) -> int:
    """Return the bytes of distinct storages that autograd keeps for `model(rows)`, without parameters and inputs."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), rows)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(rows).sum()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("case", CASES)
def test_a_graph_takes_what_autograd_saves(case: str) -> None:
    """Whole towers, and the parts of locked ones: of 6 groups of the text tower, and 7 of the image tower."""
    config = model_config(**CASES[case])
    for unlocked in (None,) if case == "one_layer" else (None, 1, 2, 3, 5):
        model = locked_model(config, unlocked)
        towers = zip((image_sizes(config), text_sizes(config)), (model.visual, model.text), inputs(), strict=True)
        for sizes, module, rows in towers:
            measured = bytes_saved_for_backward(module, rows)
            planned = memory(sizes, unlocked).graph
            bounds = (0.97, 1.03) if unlocked is None else (0.99, 1.06)
            assert bounds[0] * measured < SAMPLES * planned < bounds[1] * measured, (unlocked, sizes)


def test_a_graph_in_bfloat16_takes_what_autograd_saves() -> None:
    config = model_config(quick_gelu=True, ls_init_value=0.1)
    model = build_model(config).bfloat16()
    images, tokens = inputs(dtype=torch.bfloat16)
    for sizes, module, rows in ((image_sizes(config), model.visual, images), (text_sizes(config), model.text, tokens)):
        measured = bytes_saved_for_backward(module, rows)
        assert SAMPLES * memory(sizes, width=2).graph == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("case", "unlocked", "checkpointing"),
    [
        ("plain", 1, ""),
        ("plain", 3, "gpu"),
        ("quick_gelu", 2, "gpu"),
        ("quick_gelu", 5, ""),
        ("layer_scale", 3, ""),
        ("mean_pool", 1, "gpu"),
        ("mean_pool", 5, ""),
        ("norm_after_pool", 2, ""),
        ("norm_after_pool", 3, "gpu"),
        ("no_ln_pre", 2, ""),
        ("no_ln_pre", 5, "gpu"),
        ("patch_dropout", 3, ""),
        ("most_patches_dropped", 5, ""),
        ("most_patches_dropped", 2, "gpu"),
    ],
)
def test_the_peak_of_a_partly_locked_tower_is_not_below_a_trace(case: str, unlocked: int, checkpointing: str) -> None:
    """A trace follows every storage of a forward and backward pass from its allocation to its release."""
    config = model_config(**CASES[case])
    model = locked_model(config, unlocked, "meta")
    if checkpointing:
        model.set_activation_checkpointing(functools.partial(checkpoint, use_reentrant=False))
    towers = {"image": image_sizes(config)}
    if case in ("plain", "quick_gelu"):  # the other cases have the same text tower
        towers["text"] = text_sizes(config)
    for name, sizes in towers.items():
        few, many = (trace_tower(model, name, samples) for samples in (512, 1024))
        traced = Traced(*((large - small) / 512 for small, large in zip(few, many, strict=True)))
        kept = traced.kept - 4 * config.embed_dim  # the features, which the plan counts elsewhere
        planned = memory(sizes, unlocked, checkpointing=checkpointing)
        assert 0.98 * traced.forward_peak < planned.forward_peak < 1.02 * traced.forward_peak
        assert 0.97 * kept < planned.graph < 1.06 * kept
        assert planned.block_inputs == traced.block_inputs
        highest = max(planned.forward_peak_with_graph, planned.backward_peak)
        assert 0.98 * traced.backward_peak < highest < 1.12 * traced.backward_peak, name


@pytest.mark.parametrize("width", [4, 2])
def test_a_trace_of_whole_towers_reproduces_the_formulas(width: int) -> None:
    config = load_model_config("ViT-B-32")
    assert isinstance(config, ModelConfig)
    model = meta_model(config).train()
    if width == 2:
        model.bfloat16()
    for name, sizes in (("image", image_sizes(config)), ("text", text_sizes(config))):
        few, many = (trace_tower(model, name, samples) for samples in (256, 512))
        traced = Traced(*((large - small) / 256 for small, large in zip(few, many, strict=True)))
        planned = memory(sizes, width=width)
        formulas = torch.tensor([planned.graph, planned.backward_peak, planned.block_inputs], dtype=torch.float64)
        measured = torch.tensor([traced.kept, traced.backward_peak, traced.block_inputs], dtype=torch.float64)
        assert_close(measured / formulas, torch.ones(3, dtype=torch.float64), TRACED, name)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("case", "unlocked", "whole", "recomputes"),
    [
        ("quick_gelu", None, False, False),
        ("quick_gelu", None, False, True),
        ("plain", None, True, True),
        ("quick_gelu", 3, False, False),
        pytest.param("quick_gelu", 3, True, False, marks=LONG),
        pytest.param("layer_scale", None, True, False, marks=LONG),
        pytest.param("mean_pool", None, True, True, marks=LONG),
        pytest.param("patch_dropout", None, True, False, marks=LONG),
        pytest.param("no_ln_pre", None, True, True, marks=LONG),
    ],
)
def test_compiled_towers_save_no_more_than_planned(
    case: str, unlocked: int | None, whole: bool, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler divides a graph into forward and backward pass, and so decides which tensors are saved."""
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager_decomp_partition")
    config = model_config(**CASES[case])
    model = locked_model(config, unlocked).bfloat16()
    images, tokens = inputs(dtype=torch.bfloat16)
    towers = [(image_sizes(config), model.visual, images), (text_sizes(config), model.text, tokens)]
    for sizes, module, rows in towers if unlocked is None else towers[:1]:
        if whole:
            module.use_compiled(compilation.compiled_body(type(module), recomputes=recomputes))
        else:
            module.transformer.compile_blocks(recomputes=recomputes)
        measured = bytes_saved_for_backward(module, rows)
        compiled = replace(sizes, quick_gelu=False, recomputes=recomputes)  # as `TowerWork` describes compiled towers
        planned = SAMPLES * memory(compiled, unlocked, width=2).graph
        # The plan assumes that stem and last block keep the outputs of their norms, as they do if blocks are compiled.
        norms = 2 * SAMPLES * sizes.tokens * sizes.width * 2 if recomputes else 0
        assert 0.8 * planned - norms < measured < 1.03 * planned, case


@pytest.mark.parametrize("case", ["plain", "quick_gelu", "mean_pool"])
def test_checkpointing_lowers_the_backward_peak(case: str) -> None:
    config = model_config(**CASES[case])
    for sizes in (image_sizes(config), text_sizes(config)):
        none, gpu, cpu = (memory(sizes, width=2, checkpointing=kind) for kind in ("", "gpu", "cpu"))
        assert none.graph < none.backward_peak < 1.5 * none.graph
        assert cpu.backward_peak < gpu.backward_peak < 0.7 * none.backward_peak
        assert cpu.graph == gpu.graph - gpu.block_inputs


class _Part(nn.Linear):
    """One rank's part of a layer, without communication."""


def split_towers(
    config: ModelConfig, tensor_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[nn.Module, nn.Module]:
    """Return one rank's part of both towers. Their forward pass sums nothing, which changes values but no sizes."""
    parts = (
        lambda inputs, outputs, group, shares_input: _Part(inputs, outputs // group.size),
        lambda inputs, outputs, group: _Part(inputs // group.size, outputs),
    )
    monkeypatch.setattr(layers, "_megatron_layers", lambda: parts)
    factory = LayerFactory(RankGroup(handle=None, rank=0, size=tensor_ranks))
    towers = (
        VisionTower(config.vision_cfg, config.embed_dim, config.quick_gelu, factory),
        TextTower(config.text_cfg, config.embed_dim, config.quick_gelu, factory),
    )
    for tower in towers:
        for parameter in tower.parameters():
            nn.init.normal_(parameter, std=0.02)
    return towers


@pytest.mark.parametrize(
    ("case", "tensor_ranks"), [("plain", 2), ("quick_gelu", 4), ("layer_scale", 2), ("mean_pool", 4)]
)
def test_a_graph_of_split_towers_takes_what_autograd_saves(
    case: str, tensor_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(**{"head_width": 12, **CASES[case]}).replace(text_cfg={"heads": 4})
    modules = split_towers(config, tensor_ranks, monkeypatch)
    rows = inputs(SAMPLES * tensor_ranks)  # the rows of all ranks of a replica
    for sizes_of, module, own_rows in zip((image_sizes, text_sizes), modules, rows, strict=True):
        planned, alone = (memory(sizes_of(config, ranks)).graph for ranks in (tensor_ranks, 1))
        assert SAMPLES * planned == pytest.approx(bytes_saved_for_backward(module, own_rows), rel=0.03)
        assert planned < tensor_ranks * alone


def test_a_split_tower_holds_whole_inputs_of_blocks_and_the_images_of_both_ranks() -> None:
    model = load_model_config("ViT-bigG-14")
    for sizes_of in (image_sizes, text_sizes):
        split, alone = sizes_of(model, 2), sizes_of(model)
        none, gpu, cpu = (memory(split, width=2, checkpointing=kind) for kind in ("", "gpu", "cpu"))
        assert none.graph < none.backward_peak < 1.1 * none.graph
        assert none.forward_peak < cpu.backward_peak < gpu.backward_peak < none.backward_peak
        assert none.block_inputs == 2 * memory(alone, width=2).block_inputs
        without_images = memory(replace(split, pixels=0), width=2)
        assert none.forward_peak - without_images.forward_peak == 3 * split.pixels * 2  # its own, and those of both


def test_operations_of_products_are_what_torch_counts() -> None:
    """A forward pass of the whole tower, and a backward pass of the trained part."""
    config = model_config()
    rows = [each.to("meta") for each in inputs()]
    for unlocked in (None, 2, 3, 5):
        model = locked_model(config, unlocked, "meta")
        for sizes_of, module, own_rows in zip((image_sizes, text_sizes), (model.visual, model.text), rows, strict=True):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                with FlopCounterMode(display=False) as forward:
                    features = module(own_rows).sum()
                with FlopCounterMode(display=False) as backward:
                    features.backward()
            whole = sizes_of(config)
            part = whole if unlocked is None else whole.part(unlocked)
            assert SAMPLES * pass_costs(whole, 2).products == pytest.approx(products(forward), rel=0.01)
            if unlocked is not None:  # images have no gradient
                assert 2 * SAMPLES * pass_costs(part, 2).products == pytest.approx(products(backward), rel=0.01)


def products(counter: FlopCounterMode) -> int:
    """Return the operations of a tower's products; those of attention are batched."""
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(product, 0) for product in (torch.ops.aten.addmm, torch.ops.aten.mm))


def test_a_rank_has_its_share_of_the_blocks_products_and_all_rows_outside_of_them() -> None:
    for sizes_of in (image_sizes, text_sizes):
        alone, split = (sizes_of(load_model_config("ViT-bigG-14"), ranks) for ranks in (1, 4))
        outside = alone.embedding_operations + alone.projection_operations
        assert pass_costs(split, 2).products - pass_costs(alone, 2).products == 3 * outside


class _NumbersMoved(TorchDispatchMode):
    """Records the numbers that operations read and write while it is active, by operation, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operation = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if not function.is_view:
            tensors = [one for one in tree_leaves((args, kwargs, made)) if isinstance(one, torch.Tensor)]
            self.by_operation[str(function)] += sum(tensor.numel() for tensor in tensors)
        return made

    @property
    def total(self) -> int:
        """Return the numbers of all operations except matrix products and attention."""
        left_out = ("aten.addmm", "aten.mm", "aten._scaled_dot_product")
        return sum(count for name, count in self.by_operation.items() if not name.startswith(left_out))


def numbers_of_image_tower(config: ModelConfig) -> tuple[int, int]:
    tower, (images, _) = build_model(config).visual, inputs()
    with _NumbersMoved() as forward:
        features = tower(images).sum()
    with _NumbersMoved() as backward:
        features.backward()
    return forward.total, backward.total


def moved(sizes: TowerSizes) -> tuple[float, float]:
    costs = pass_costs(sizes, 1)
    return costs.forward_bytes, costs.backward_bytes


@pytest.mark.parametrize("case", ["plain", "quick_gelu", "layer_scale", "patch_dropout"])
def test_a_block_moves_the_numbers_of_pytorchs_operations(case: str) -> None:
    """The difference between towers of four and five layers is one whole block."""
    shorter, longer = (model_config(**CASES[case], layers=count) for count in (4, 5))
    counted = [b - a for a, b in zip(numbers_of_image_tower(shorter), numbers_of_image_tower(longer), strict=True)]
    planned = [b - a for a, b in zip(*(moved(image_sizes(one)) for one in (shorter, longer)), strict=True)]
    # Left out: a norm's weight, mean and deviation, and the biases. The rest is 2 + 2 + 5 + r numbers per sample of C x
    # L.
    assert [SAMPLES * number for number in planned] == pytest.approx(counted, rel=0.03)


def test_split_and_pooled_towers_move_by_hand() -> None:
    """With two ranks, each rank has all rows of both and half of the parameters that are split."""
    whole = replace(image_sizes(load_model_config("ViT-5B-14")), pooled=False)  # r = 4
    numbers = whole.layers * whole.tokens * whole.width
    assert moved(whole) == pytest.approx((18 * numbers, (20 + 3 + 16) * numbers))
    forward, backward = moved(replace(whole, tensor_ranks=2))
    assert forward == pytest.approx((2 * (10 + 4) + 8 + 6 + 8) * numbers)
    assert backward == pytest.approx((2 * (20 + 2) + 3 + 16) * numbers)
    pooled, every = (image_sizes(model_config(pool_type=pool)) for pool in ("tok", "avg"))
    assert all(
        4 / 5 * all_blocks < part < all_blocks for part, all_blocks in zip(moved(pooled), moved(every), strict=True)
    )


def test_attention_is_counted_in_whole_tiles() -> None:
    tower = replace(image_sizes(load_model_config("ViT-B-16")), layers=1, pooled=False)  # 197 tokens, 12 heads of 64
    assert attention_operations(tower) == 4 * 256 * 256 * 768
    assert attention_operations(replace(tower, pooled=True)) == 4 * 128 * 256 * 768  # one tile of queries
    assert attention_operations(replace(tower, tokens=257)) == 4 * 384 * 384 * 768
    assert attention_operations(replace(tower, heads=8)) == 4 * 256 * 256 * 8 * 128  # 96 channels take 128


def test_seconds_are_those_of_products_attention_and_memory(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=1, megaclip={"cut_captions": False})
    rates = replace(H200.rates, product_flops=1e13, attention_flops=1e30, memory=1e30)
    for work, factor in zip(tower_work(job), (1, 1.35), strict=True):
        costs, fast = work.passes[0], work.seconds(rates)[0]
        assert fast == pytest.approx((factor * costs.products / 0.94e13, factor * 2 * costs.products / 0.94e13))
        slow = work.seconds(replace(rates, memory=1e12))[0]
        added = [b - a for a, b in zip(fast, slow, strict=True)]
        assert added == pytest.approx([factor * costs.forward_bytes / 1e12, factor * costs.backward_bytes / 1e12])


def test_the_towers_of_vit_b_16_take_the_measured_seconds(tmp_path: Path) -> None:
    """512 images take 126 ms and 512 captions 34 ms on an H200, forward and backward; one layer's attention 1.82 ms."""
    job = workload(tmp_path, 1, "ViT-B-16", megaclip={"cut_captions": False})
    image, text = (work.seconds(H200.rates)[0] for work in tower_work(job))
    assert 512 * sum(image) == pytest.approx(0.1265, rel=0.03)
    assert 512 * sum(text) == pytest.approx(0.034, rel=0.03)
    layer = replace(image_sizes(job.model), layers=1, pooled=False)
    assert 3 * 512 * attention_operations(layer) / H200.rates.attention_flops == pytest.approx(1.82e-3, rel=0.03)
