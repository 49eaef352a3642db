"""Compiled towers on a GPU equal plain PyTorch: features of both passes, and gradients."""

import pytest
import torch

from megaclip.models import ClipModel, build_model, load_model_config
from megaclip.models.compilation import compiled_class
from tests.tolerances import COMPILED, assert_close

pytestmark = pytest.mark.gpu


def compile_all(model: ClipModel, whole: bool, recomputes: bool) -> None:
    for tower in (model.visual, model.text):
        modules = [tower] if whole else model.blocks_to_compile(tower)
        kind = compiled_class(type(modules[0]), recomputes=recomputes)
        for module in modules:
            module.__class__ = kind


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_towers_equal_plain_ones(whole: bool, recomputes: bool) -> None:
    torch.compiler.reset()
    config = load_model_config("demo-tiny").replace(vision_cfg={"patch_dropout": 0.5})
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 24, 24, generator=generator).cuda()
    tokens = torch.randint(3, 512, (32, 24), generator=generator).cuda()
    weights = torch.randn(2, 32, config.embed_dim, generator=generator).cuda()
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_model(config).cuda()
        if compiled:
            compile_all(model, whole, recomputes)
        passes = []
        for with_graph in (False, True):
            torch.manual_seed(1)  # as the gradient cache does before each pass
            with torch.set_grad_enabled(with_graph):
                image_features, text_features, _ = model(images, tokens)
            passes.append(torch.cat([image_features, text_features]))
        assert_close(passes[0], passes[1], COMPILED, "features of the two passes")
        (image_features * weights[0] + text_features * weights[1]).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, got = gradients
    assert plain.keys() == got.keys()
    largest = max(gradient.norm().item() for gradient in plain.values())
    for name, gradient in plain.items():
        assert_close(got[name], gradient, COMPILED, name, size=max(gradient.norm().item(), 1e-3 * largest))
