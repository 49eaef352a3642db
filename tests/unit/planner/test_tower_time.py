"""The planner's seconds of a tower: numbers moved compared with PyTorch's operations, rates with measured times."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaclip.models import ModelConfig, build_model, load_model_config
from megaclip.planner.tower_time import MovedNumbers, attention_operations, moved_numbers, tower_seconds
from megaclip.planner.towers import Tower, image_tower, text_tower
from tests.unit.planner.planner_cases import H200, workload
from tests.unit.planner.test_towers import CASES, SAMPLES, model_config

_PRODUCTS_AND_ATTENTION = ("aten.addmm", "aten.mm", "aten._scaled_dot_product")


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
        return sum(count for name, count in self.by_operation.items() if not name.startswith(_PRODUCTS_AND_ATTENTION))


def numbers_of_image_tower(config: ModelConfig) -> MovedNumbers:
    tower = build_model(config).visual
    images = torch.randn(SAMPLES, 3, 56, 56)
    with _NumbersMoved() as forward:
        features = tower(images).sum()
    with _NumbersMoved() as backward:
        features.backward()
    return MovedNumbers(forward.total, backward.total)


@pytest.mark.parametrize("case", ["plain", "quick_gelu", "layer_scale", "patch_dropout"])
def test_a_block_moves_the_numbers_of_pytorchs_operations(case: str) -> None:
    """The difference between towers of four and five layers is one whole block."""
    shorter, longer = (model_config(**CASES[case], layers=layers) for layers in (4, 5))
    counted = [b - a for a, b in zip(numbers_of_image_tower(shorter), numbers_of_image_tower(longer), strict=True)]
    planned = [b - a for a, b in zip(*(moved_numbers(image_tower(one)) for one in (shorter, longer)), strict=True)]
    # Left out: a norm's weight, mean and deviation, and the biases. The rest is 2 + 2 + 5 + r numbers per sample of C x
    # L.
    assert [SAMPLES * number for number in planned] == pytest.approx(counted, rel=0.03)


def test_a_pooled_tower_moves_almost_as_many_numbers_as_its_other_blocks() -> None:
    pooled, every = (image_tower(model_config(pool_type=pool)) for pool in ("tok", "avg"))
    for part, whole in zip(moved_numbers(pooled), moved_numbers(every), strict=True):
        assert 4 / 5 * whole < part < whole


def test_split_towers_move_by_hand() -> None:
    """With two ranks, each rank has all rows of both and half of the parameters that are split."""
    whole = replace(image_tower(load_model_config("ViT-5B-14")), pooled=False)  # r = 4
    split = replace(whole, tensor_ranks=2)
    numbers = whole.layers * whole.tokens * whole.width
    assert moved_numbers(whole) == pytest.approx((18 * numbers, (20 + 3 + 16) * numbers))
    forward, backward = moved_numbers(split)
    assert forward == pytest.approx((2 * (10 + 4) + 8 + 6 + 8) * numbers)
    assert backward == pytest.approx((2 * (20 + 2) + 3 + 16) * numbers)


def test_attention_is_counted_in_whole_tiles() -> None:
    tower = replace(image_tower(load_model_config("ViT-B-16")), layers=1, pooled=False)  # 197 tokens, 12 heads of 64
    assert attention_operations(tower) == 4 * 256 * 256 * 768
    assert attention_operations(replace(tower, pooled=True)) == 4 * 128 * 256 * 768  # one tile of queries
    assert attention_operations(replace(tower, tokens=257)) == 4 * 384 * 384 * 768
    assert attention_operations(replace(tower, heads=8)) == 4 * 256 * 256 * 8 * 128  # 96 channels take 128


def test_seconds_are_those_of_products_attention_and_memory(tmp_path) -> None:
    job = workload(tmp_path, ranks=1, megaclip={"cut_captions": False})
    image, text = image_tower(job.model), text_tower(job.model)
    rates = replace(H200.rates, product_flops=1e13, attention_flops=1e30, memory=1e30)
    seconds = [
        [tower.product_operations() / 0.94e13, 2 * tower.product_operations() / 0.94e13] for tower in (image, text)
    ]
    assert [*tower_seconds(job, rates)[0]] == pytest.approx(seconds[0])
    assert [*tower_seconds(job, rates)[1]] == pytest.approx([1.35 * second for second in seconds[1]])
    slow = replace(rates, memory=1e12)
    for tower, fast_pass, slow_pass in zip(
        (image, text), tower_seconds(job, rates), tower_seconds(job, slow), strict=True
    ):
        factor = 1.35 if tower is text else 1
        added = [b - a for a, b in zip(fast_pass, slow_pass, strict=True)]
        assert added == pytest.approx([factor * 2 * number / 1e12 for number in moved_numbers(tower)])  # bfloat16


def test_the_towers_of_vit_b_16_take_the_measured_seconds(tmp_path) -> None:
    """Compare with docs/performance.md: 512 images take 126 ms and 512 captions 34 ms, forward and backward.

    The attention of one layer took 1.82 ms.
    """
    job = workload(tmp_path, 1, "ViT-B-16", megaclip={"cut_captions": False})
    image, text = tower_seconds(job, H200.rates)
    assert 512 * sum(image) == pytest.approx(0.1265, rel=0.03)
    assert 512 * sum(text) == pytest.approx(0.034, rel=0.03)
    layer: Tower = replace(image_tower(job.model), layers=1, pooled=False)
    assert 3 * 512 * attention_operations(layer) / H200.rates.attention_flops == pytest.approx(1.82e-3, rel=0.03)
