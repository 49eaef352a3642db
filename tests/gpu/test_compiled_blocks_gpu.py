"""Compare the gradients of compiled transformer blocks on a GPU with those of plain PyTorch."""

import pytest
import torch

from megaclip.models import build_model, load_model_config

pytestmark = pytest.mark.gpu
# Relative to the norm of a gradient, or to a thousandth of the largest norm. Fused kernels add in another order. The
# test uses float32, because in bfloat16 the gradients of the attention of the first tokens are only rounding errors.
ROUNDING = 1e-3


def test_compiled_blocks_equal_plain_ones() -> None:
    torch.compiler.reset()
    config = load_model_config("demo-tiny")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 24, 24, generator=generator).cuda()
    tokens = torch.randint(3, 512, (32, 24), generator=generator).cuda()
    weights = torch.randn(2, 32, config.embed_dim, generator=generator).cuda()
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_model(config).cuda()
        if compiled:
            for tower in (model.visual, model.text):
                tower.transformer.compile_blocks()
        with torch.no_grad():
            model(images, tokens)
        image_features, text_features, _ = model(images, tokens)
        (image_features * weights[0] + text_features * weights[1]).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, got = gradients
    assert plain.keys() == got.keys()
    largest = max(gradient.norm() for gradient in plain.values())
    for name, gradient in plain.items():
        assert (got[name] - gradient).norm() <= ROUNDING * max(gradient.norm(), 1e-3 * largest), name
