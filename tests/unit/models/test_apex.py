"""Detection of NVIDIA apex by its compiled extensions, and towers that use its layer norm.

apex is built from source for CUDA, so stand-in modules replace it here.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from megaclip.errors import ConfigError
from megaclip.models import ModelConfig, build_model
from megaclip.models.layers import require_apex

CONFIG = ModelConfig.from_dict(
    {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 8, "layers": 1, "width": 16, "head_width": 8, "patch_size": 4},
        "text_cfg": {"context_length": 6, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1},
    }
)


class FusedLayerNorm(nn.LayerNorm):
    """Stand-in with the constructor of apex's class."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, *, memory_efficient: bool) -> None:
        super().__init__(normalized_shape, eps=eps)
        self.memory_efficient = memory_efficient


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    normalization = ModuleType("apex.normalization")
    normalization.FusedLayerNorm = FusedLayerNorm  # type: ignore[attr-defined]
    for name in ("amp_C", "fused_layer_norm_cuda", "apex"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "apex.normalization", normalization)


def test_every_norm_of_both_towers_is_the_memory_efficient_one(apex: None) -> None:
    torch.manual_seed(0)
    plain = build_model(CONFIG)
    torch.manual_seed(0)
    fused = build_model(CONFIG, layer_norm="apex")
    norms = [module for module in fused.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == sum(isinstance(module, nn.LayerNorm) for module in plain.modules()) == 7
    assert all(isinstance(module, FusedLayerNorm) and module.memory_efficient for module in norms)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    images, tokens = torch.rand(2, 3, 8, 8), torch.randint(16, (2, 6))
    for ours, theirs in zip(fused(images, tokens)[:2], plain(images, tokens)[:2], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("missing", ["amp_C", "fused_layer_norm_cuda", "apex.normalization"])
def test_a_package_without_the_extensions_is_refused(apex: None, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """PyPI's package "apex" is an unrelated toolkit, without these modules."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ConfigError, match=r"NVIDIA apex with its CUDA extensions cannot be imported .*leave out megaclip.layer_norm"
    ):
        require_apex()
    with pytest.raises(ConfigError, match="NVIDIA apex"):
        build_model(CONFIG, layer_norm="apex")
