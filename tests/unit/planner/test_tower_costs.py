"""The traced costs of towers compared with what autograd saves, with the work of a block by hand and with an H200."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megaclip.comm.groups import RankGroup
from megaclip.models import DualEncoder, ModelConfig, build_model, compilation, layers, load_model_config
from megaclip.models.layers import LayerFactory
from megaclip.models.text import TextTower
from megaclip.models.vision import VisionTower
from megaclip.planner.tower_costs import _traced, attention_operations, tower_costs
from megaclip.planner.towers import tower_work
from tests.unit.planner.planner_cases import H200, workload

SAMPLES = 6
TOWERS = ("image", "text")
CASES = {
    "plain": {},
    "quick_gelu": {"quick_gelu": True},
    "mean_pool": {"pool_type": "avg", "no_ln_pre": True},
    "norm_after_pool": {"pool_type": "avg", "final_ln_after_pool": True, "ls_init_value": 0.1},
    "most_patches_dropped": {"patch_dropout": 0.9, "layers": 1},
}
LOCKS = {"plain": 1, "quick_gelu": 5, "norm_after_pool": 2}
"""Number of trained groups of a case that is also tested with locked towers."""


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


def locked_model(config: ModelConfig, unlocked: int | None) -> DualEncoder:
    """Return a model in training mode with both towers locked except for the last groups. None: nothing is locked."""
    model = build_model(config)
    if unlocked is not None:
        model.lock_tower("image", unlocked)
        model.lock_tower("text", unlocked)
    return model.train()


def inputs(samples: int = SAMPLES, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, 56, 56).to(dtype), torch.randint(0, 50, (samples, 77))


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
    for unlocked in (None, LOCKS[case]) if case in LOCKS else (None,):
        model = locked_model(config, unlocked)
        for name, module, rows in zip(TOWERS, (model.visual, model.text), inputs(), strict=True):
            traced = tower_costs(config, name, 4, unlocked_groups=unlocked)
            # A trace also has the features, and a CPU keeps masks of attention.
            saved = bytes_saved_for_backward(module, rows) / SAMPLES
            assert saved <= traced.graph + 24 * 77 and traced.graph - 4 * 24 * 2 <= 1.04 * saved, (unlocked, name)
            assert traced.graph < traced.backward_peak >= traced.forward_peak


def test_a_graph_in_bfloat16_takes_what_autograd_saves() -> None:
    config = model_config(quick_gelu=True, ls_init_value=0.1)
    model = build_model(config).bfloat16()
    rows = inputs(dtype=torch.bfloat16)
    for name, module, own_rows in zip(TOWERS, (model.visual, model.text), rows, strict=True):
        measured = bytes_saved_for_backward(module, own_rows)
        assert SAMPLES * tower_costs(config, name, 2).graph == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("case", "unlocked", "whole", "recomputes"),
    [
        ("quick_gelu", None, False, True),
        ("plain", None, True, True),
        ("quick_gelu", 3, False, False),
        pytest.param("norm_after_pool", None, True, False, marks=pytest.mark.long),
    ],
)
def test_compiled_towers_save_no_more_than_planned(
    case: str, unlocked: int | None, whole: bool, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler divides a graph into forward and backward pass, and so decides which tensors are saved."""
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager_decomp_partition")
    config = model_config(layers=2, **CASES[case]).replace(text_cfg={"layers": 2})
    model = locked_model(config, unlocked).bfloat16()
    images, tokens = inputs(dtype=torch.bfloat16)
    compiled = config.replace(quick_gelu=False)  # as `TowerWork` describes compiled towers
    towers = [("image", model.visual, images), ("text", model.text, tokens)]
    for name, module, rows in towers if unlocked is None else towers[:1]:
        parts = [module] if whole else model.blocks_to_compile(module)
        kind = compilation.compiled_class(type(parts[0]), recomputes=recomputes)
        for part in parts:
            part.__class__ = kind
        measured = bytes_saved_for_backward(module, rows)
        planned = (
            SAMPLES
            * tower_costs(compiled, name, 2, unlocked_groups=unlocked, compiled=True, recomputes=recomputes).graph
        )
        # The plan assumes that stem and last block keep the outputs of their norms, as they do if blocks are compiled.
        width = config.vision_cfg.width if name == "image" else config.text_cfg.width
        norms = 3 * SAMPLES * (197 if name == "image" else 77) * width * 2 if recomputes else 0
        assert 0.8 * planned - norms < measured < 1.03 * planned, case


def test_compiled_gated_blocks_keep_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code keeps neither SwiGLU's activation nor its product."""
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager_decomp_partition")
    config = load_model_config("EVA02-B-16").replace(vision_cfg={"timm_model_kwargs": {"depth": 2}})
    model = build_model(config).bfloat16().train()
    kind = compilation.compiled_class(type(model.blocks_to_compile(model.visual)[0]), recomputes=True)
    for block in model.blocks_to_compile(model.visual):
        block.__class__ = kind
    measured = bytes_saved_for_backward(model.visual, torch.randn(2, 3, 224, 224).bfloat16())
    planned = 2 * tower_costs(config, "image", 2, compiled=True, recomputes=True).graph
    assert 0.95 * planned < measured < 1.03 * planned


def test_checkpointing_lowers_the_backward_peak() -> None:
    config = model_config(quick_gelu=True)
    for name in TOWERS:
        none, gpu, cpu = (tower_costs(config, name, 2, checkpointing=kind) for kind in ("", "gpu", "cpu"))
        assert none.graph < none.backward_peak < 1.5 * none.graph
        assert cpu.backward_peak < gpu.backward_peak < 0.7 * none.backward_peak
        assert cpu.graph == gpu.graph - gpu.backward.block_inputs
        assert none.forward == gpu.forward and none.backward == gpu.backward


class _Part(nn.Linear):
    """One rank's part of a layer, without communication."""


def split_towers(
    config: ModelConfig, tensor_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[nn.Module, nn.Module]:
    """Return one rank's part of both towers. Their forward pass sums nothing, which changes values but no sizes."""
    parts = (
        lambda inputs, outputs, group, disable_grad_reduce, bias: _Part(inputs, outputs // group.size, bias),
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


@pytest.mark.parametrize(("case", "tensor_ranks"), [("quick_gelu", 4), ("mean_pool", 2)])
def test_a_graph_of_split_towers_takes_what_autograd_saves(
    case: str, tensor_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(**{"head_width": 12, **CASES[case]}).replace(text_cfg={"heads": 4})
    modules = split_towers(config, tensor_ranks, monkeypatch)
    rows = inputs(SAMPLES * tensor_ranks)  # the rows of all ranks of a replica
    for name, module, own_rows in zip(TOWERS, modules, rows, strict=True):
        planned, alone = (tower_costs(config, name, 4, tensor_ranks=ranks) for ranks in (tensor_ranks, 1))
        assert SAMPLES * planned.graph == pytest.approx(bytes_saved_for_backward(module, own_rows), rel=0.03)
        assert planned.graph < tensor_ranks * alone.graph
        assert planned.backward.block_inputs == tensor_ranks * alone.backward.block_inputs


def block_numbers(tensor_ranks: int = 1, **vision) -> list[float]:
    """Return the numbers that a block of the image tower moves in a forward and a backward pass, per token and in units
    of the width: the difference between towers of three and four layers."""
    config = model_config(head_width=12, **vision).replace(text_cfg={"heads": 4})
    costs = [
        tower_costs(config.replace(vision_cfg={"layers": count}), "image", 4, tensor_ranks=tensor_ranks)
        for count in (3, 4)
    ]
    passes = zip(*((cost.forward, cost.backward) for cost in costs), strict=True)
    return [(longer.moved - shorter.moved) / (4 * 197 * 48) for shorter, longer in passes]


def test_a_block_moves_numbers_by_hand() -> None:
    """Forward: two norms 4, two residual sums 6, GELU 2 r. Backward: two norms 6, two sums of residual gradients 6,
    sums of the gradients of queries, keys and values 6, GELU 3 r, gradients of the biases 5 + r. r is 4."""
    assert block_numbers() == pytest.approx([10 + 8, 18 + 12 + 9], rel=0.03)
    # QuickGELU takes 7 r and 14 r, LayerScale 4 and 12 more.
    assert block_numbers(quick_gelu=True) == pytest.approx([10 + 28, 18 + 9 + 56], rel=0.06)
    assert block_numbers(ls_init_value=0.1) == pytest.approx([10 + 8 + 4, 18 + 12 + 9 + 12], rel=0.06)
    # With two ranks, each rank has all rows of both and half of the parameters that are split.
    assert block_numbers(2) == pytest.approx([2 * (10 + 4) + 8 + 6 + 8, 2 * (20 + 2) + 3 + 16], rel=0.06)


def test_products_of_a_block_by_hand() -> None:
    """A block has 12 C^2 weights; the last one computes keys and values, 2 C^2, of all tokens."""
    config = load_model_config("ViT-bigG-14")
    vision = config.vision_cfg
    alone, split = (tower_costs(config, "image", 2, tensor_ranks=ranks) for ranks in (1, 4))
    weights = 4 * vision.width**2 + 2 * vision.width * int(vision.width * vision.mlp_ratio)
    outside = 2 * 256 * 3 * 14**2 * vision.width + 2 * vision.width * config.embed_dim
    blocks = 2 * (47 * 257 + 1) * weights + 2 * 256 * 2 * vision.width**2
    assert alone.forward.products == pytest.approx(blocks + outside, rel=1e-3)
    assert alone.backward.products == pytest.approx(2 * alone.forward.products, rel=0.01)
    assert split.forward.products - alone.forward.products == pytest.approx(3 * outside, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tower", "six_layers", "checkpointing"),
    [
        ("ViT-B-32", "text", {"text_cfg": {"layers": 6}}, ""),
        ("PE-Core-T-16-384", "image", {"vision_cfg": {"timm_model_kwargs": {"depth": 6}}}, "gpu"),
    ],
)
def test_costs_extrapolated_from_four_blocks_are_those_of_all_blocks(
    name: str, tower: str, six_layers: dict, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model_config(name).replace(**six_layers)
    extrapolated = tower_costs(model, tower, 2, checkpointing=checkpointing)
    assert extrapolated.forward.layers == 6
    monkeypatch.setattr("megaclip.planner.tower_costs._BLOCKS", 6)
    _traced.cache_clear()
    assert tower_costs(model, tower, 2, checkpointing=checkpointing) == extrapolated


def test_attention_is_counted_in_whole_tiles() -> None:
    assert attention_operations(197, 197, 12, 64) == 4 * 256 * 256 * 768
    assert attention_operations(1, 197, 12, 64) == 4 * 128 * 256 * 768  # one tile of queries
    assert attention_operations(257, 257, 8, 96) == 4 * 384 * 384 * 8 * 128  # 96 channels take 128
    costs = tower_costs(load_model_config("ViT-B-16"), "image", 2)
    assert costs.forward.attention == 11 * 4 * 256 * 256 * 768 + 4 * 128 * 256 * 768
    assert costs.backward.attention == 2 * costs.forward.attention


def test_seconds_are_those_of_products_attention_and_memory(tmp_path: Path) -> None:
    job = workload(tmp_path, ranks=1, megaclip={"cut_captions": False})
    rates = replace(H200.rates, product_flops=1e13, attention_flops=1e30, memory=1e30)
    for work, factor in zip(tower_work(job), (1, 1.35), strict=True):
        fast, slow = (work.seconds(replace(H200, rates=each))[:2] for each in (rates, replace(rates, memory=1e12)))
        assert fast == pytest.approx([factor * each.products / 0.94e13 for each in work.passes])
        added = [b - a for a, b in zip(fast, slow, strict=True)]
        assert added == pytest.approx([factor * each.moved / 1e12 for each in work.passes])


def test_the_towers_of_vit_b_16_take_the_measured_seconds(tmp_path: Path) -> None:
    """512 images take 126 ms and 512 captions 34 ms on an H200, forward and backward; one layer's attention 1.82 ms."""
    job = workload(tmp_path, 1, "ViT-B-16", megaclip={"cut_captions": False})
    image, text = (work.seconds(H200) for work in tower_work(job))
    assert 512 * (image.forward + image.backward) == pytest.approx(0.1265, rel=0.03)
    assert 512 * (text.forward + text.backward) == pytest.approx(0.034, rel=0.03)
    layer = attention_operations(197, 197, 12, 64)
    assert 3 * 512 * layer / H200.rates.attention_flops == pytest.approx(1.82e-3, rel=0.03)
