"""Patch embeddings run as matrix products with the results of the convolutions; layer norms run on rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megaclip.models import build_model
from megaclip.models.open_clip_model import _embeds_patches, _PatchConvolution
from tests.open_clip_families import IMAGE_SIZE, family
from tests.tolerances import FEATURES, assert_close


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel", [(4, 4), (8, 8), (14, 9)])
def test_equals_the_convolution(kernel: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 10, kernel, stride=kernel, bias=bias, dtype=torch.float64)
    assert _embeds_patches(module)
    module.__class__ = _PatchConvolution
    images = torch.randn(4, 3, 31, 43, dtype=torch.float64, requires_grad=True)  # with partial patches
    expected = F.conv2d(images, module.weight, module.bias, stride=kernel)
    found = module(images)
    assert found.shape == expected.shape
    leaves = [images, *module.parameters()]
    factors = torch.randn_like(expected)
    gradients = (torch.autograd.grad((factors * value).sum(), leaves) for value in (found, expected))
    assert_close(found, expected, FEATURES["float64"])
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, FEATURES["float64"])
    tokens = found.flatten(2).transpose(1, 2)
    assert tokens.is_contiguous()  # so the tower does not copy the result


@pytest.mark.parametrize(
    "changed",
    [
        {"in_channels": 4},
        {"stride": 2, "kernel_size": 2},
        {"stride": 8},
        {"padding": 1},
        {"padding": "same", "stride": 1, "kernel_size": 1},
        {"dilation": 2},
        {"groups": 3, "out_channels": 9},
    ],
    ids=str,
)
def test_other_convolutions_stay(changed: dict[str, int]) -> None:
    arguments = {"in_channels": 3, "out_channels": 10, "kernel_size": 16, "stride": 16} | changed
    assert not _embeds_patches(nn.Conv2d(**arguments))


def test_towers_of_open_clip(tmp_path: Path) -> None:
    """Patch embeddings are replaced; their weights keep their names."""
    replaced = {}
    for name in ("eva", "convnext", "resnet"):
        tower = build_model(family(name, tmp_path)).visual
        replaced[name] = [key for key, module in tower.named_modules() if isinstance(module, _PatchConvolution)]
    assert replaced == {"eva": ["trunk.patch_embed.proj"], "convnext": ["trunk.stem.0"], "resnet": []}


class NormShapes(TorchDispatchMode):
    """Records the number of dimensions of every input of a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.dimensions: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.native_layer_norm.default:
            self.dimensions.append(args[0].dim())
        return function(*args, **(kwargs or {}))


def test_layer_norms_take_positions_as_rows(tmp_path: Path) -> None:
    model = build_model(family("convnext", tmp_path))
    with NormShapes() as norms:
        model.visual(torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE))
    assert norms.dimensions and set(norms.dimensions) == {2}
