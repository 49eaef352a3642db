"""The formulas of one tower compared with the tensors that autograd saves on the CPU, and with torch's operations."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megaclip.models import ModelConfig, build_model, compilation
from megaclip.planner.towers import image_tower, text_tower

SAMPLES = 6


def model_config(**vision) -> ModelConfig:
    """Return sizes that do not divide each other, with many tokens and few channels, so that saved tensors dominate."""
    return ModelConfig.from_dict(
        {
            "embed_dim": 24,
            "quick_gelu": vision.pop("quick_gelu", False),
            "vision_cfg": {"image_size": 56, "layers": 5, "width": 48, "head_width": 16, "patch_size": 4, **vision},
            "text_cfg": {
                "context_length": 77,
                "vocab_size": 50,
                "width": 40,
                "heads": 5,
                "layers": 4,
                "mlp_ratio": 3.0,
            },
        }
    )


def bytes_saved_for_backward(model: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Return the bytes of distinct storages that autograd keeps for `model(inputs)`, without parameters and inputs."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), inputs)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs).sum()
    return sum(storage.nbytes() for storage in kept.values())


CASES = {
    "plain": {},
    "quick_gelu": {"quick_gelu": True},
    "layer_scale": {"ls_init_value": 0.1},
    "mean_pool": {"pool_type": "avg"},
    "no_ln_pre": {"no_ln_pre": True},
    "patch_dropout": {"patch_dropout": 0.5},
    "one_layer": {"layers": 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_saved_bytes_are_what_autograd_saves(case: str, dtype: torch.dtype) -> None:
    config = model_config(**CASES[case])
    model = build_model(config).to(dtype)
    images = torch.randn(SAMPLES, 3, 56, 56).to(dtype)
    tokens = torch.randint(0, 50, (SAMPLES, 77))
    for tower, module, inputs in (
        (image_tower(config), model.visual, images),
        (text_tower(config), model.text, tokens),
    ):
        measured = bytes_saved_for_backward(module, inputs)
        assert tower.saved_bytes(SAMPLES, dtype.itemsize) == pytest.approx(measured, rel=0.03), tower.name


@pytest.mark.parametrize(
    ("case", "whole", "recomputes"),
    [
        ("quick_gelu", False, False),
        ("quick_gelu", False, True),
        ("plain", True, True),
        pytest.param("quick_gelu", True, False, marks=pytest.mark.long),
        *(pytest.param(case, True, False, marks=pytest.mark.long) for case in CASES if case != "quick_gelu"),
        *(pytest.param(case, True, True, marks=pytest.mark.long) for case in CASES if case != "plain"),
    ],
)
def test_compiled_towers_save_no_more_than_planned(
    case: str, whole: bool, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler divides a graph into forward and backward pass, and so decides which tensors are saved."""
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager_decomp_partition")
    config = model_config(**CASES[case])
    model = build_model(config).to(torch.bfloat16)
    images = torch.randn(SAMPLES, 3, 56, 56).to(torch.bfloat16)
    tokens = torch.randint(0, 50, (SAMPLES, 77))
    for tower, module, inputs in (
        (image_tower(config), model.visual, images),
        (text_tower(config), model.text, tokens),
    ):
        if whole:
            module.use_compiled(compilation.compiled_body(type(module), recomputes=recomputes))
        else:
            module.transformer.compile_blocks(recomputes=recomputes)
        measured = bytes_saved_for_backward(module, inputs)
        compiled = replace(tower, quick_gelu=False, recomputes=recomputes)  # as `towers` describes compiled towers
        planned = compiled.saved_bytes(SAMPLES, 2)
        # The plan assumes that stem and last block keep the outputs of their norms, as they do if blocks are compiled.
        norms = 2 * SAMPLES * tower.tokens * tower.width * 2 if recomputes else 0
        assert 0.8 * planned - norms < measured < 1.03 * planned, tower.name


def test_operations_of_products_are_what_torch_counts() -> None:
    config = model_config()
    with torch.device("meta"):
        model = build_model(config)
        images, tokens = torch.empty(SAMPLES, 3, 56, 56), torch.zeros(SAMPLES, 77, dtype=torch.int64)
    for tower, module, inputs in (
        (image_tower(config), model.visual, images),
        (text_tower(config), model.text, tokens),
    ):
        with (
            FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            module(inputs)
        counts = counter.get_flop_counts()["Global"]
        products = counts[torch.ops.aten.addmm] + counts[torch.ops.aten.mm]  # attention's products are bmm
        assert SAMPLES * tower.product_operations() == pytest.approx(products, rel=0.01), tower.name


@pytest.mark.parametrize("case", ["plain", "quick_gelu", "mean_pool"])
def test_the_backward_peak_lies_above_what_is_saved_and_grows_with_samples(case: str) -> None:
    for tower in (image_tower(model_config(**CASES[case])), text_tower(model_config(**CASES[case]))):
        saved, peak = tower.saved_bytes(SAMPLES, 2), tower.backward_peak(SAMPLES, 2, "")
        assert saved < peak < 1.5 * saved
        assert tower.backward_peak(SAMPLES, 2, "gpu") < 0.7 * peak
        assert tower.backward_peak(SAMPLES, 2, "cpu") < tower.backward_peak(SAMPLES, 2, "gpu")
        assert tower.backward_peak(2 * SAMPLES, 2, "") == 2 * peak
