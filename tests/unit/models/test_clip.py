"""Model features that comparisons with open_clip do not test: patch dropout, recomputation, seeds, precision."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megaclip.models import build_model, load_model_config
from megaclip.models.build import initialise
from megaclip.models.vision import PatchDropout
from tests.tolerances import FEATURES, assert_close


@pytest.fixture
def config():
    return load_model_config("demo-tiny")


def batch(size=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 24, 24, generator=generator), torch.randint(3, 512, (size, 24), generator=generator)


def test_every_initial_value_is_set_and_depends_only_on_the_seed(config):
    config = config.replace(vision_cfg={"ls_init_value": 0.1}, text_cfg={"ls_init_value": 0.1})
    model, values = build_model(config), []
    for seed in (5, 5, 6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        initialise(model, config, seed)
        values.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert not torch.equal(values[0]["visual.proj"], values[2]["visual.proj"])


def test_tower_without_input_is_skipped(config):
    model = build_model(config)
    images, tokens = batch()
    both = model(images, tokens)
    assert model(images)[1] is None
    assert model(None, tokens)[0] is None
    assert_close(model(images)[0], both[0], FEATURES["float32"])
    assert_close(model(None, tokens)[1], both[1], FEATURES["float32"])
    assert both[2].item() == pytest.approx(config.init_logit_scale)


def test_logit_scale_is_returned_as_a_copy_with_its_gradient(config):
    model = build_model(config)
    log_scale = model()[2]
    assert log_scale.data_ptr() != model.logit_scale.data_ptr()
    (3 * log_scale).sum().backward()
    assert model.logit_scale.grad.tolist() == [3.0]


def test_bfloat16_towers_take_float32_images_and_return_unit_length(config):
    model = build_model(config).bfloat16()
    images, tokens = batch()
    image_features, text_features, log_scale = model(images, tokens)
    assert image_features.dtype == text_features.dtype == torch.bfloat16
    assert log_scale.dtype == torch.float32
    assert_close(image_features.float().norm(dim=1), torch.ones(len(images)), FEATURES["bfloat16"])


def rows_of(x):
    return {tuple(row.tolist()) for row in x}


def test_patch_dropout_keeps_the_class_token_and_distinct_patches_of_the_same_image():
    layer = PatchDropout(0.3)
    x = torch.randn(4, 1 + 20, 6)
    kept = layer(x, layer.draw(4, 20, x.device))
    assert kept.shape == (4, 1 + 14, 6)  # 20 * 0.7 patches
    assert torch.equal(kept[:, 0], x[:, 0])
    for image, survivors in zip(x, kept, strict=True):
        assert len(rows_of(survivors[1:])) == 14
        assert rows_of(survivors[1:]) <= rows_of(image[1:])


def test_patch_dropout_keeps_every_patch_equally_often():
    layer = PatchDropout(0.75)
    x = torch.arange(1 + 8).float().expand(4000, -1).unsqueeze(-1)
    counts = layer(x, layer.draw(4000, 8, x.device))[:, 1:].flatten().long().bincount(minlength=9)[1:]
    assert (counts - 1000).abs().max() < 150  # 2 of 8 patches, 4000 images: standard deviation 27


def test_patch_dropout_repeats_with_the_generator_and_is_off_in_evaluation(config):
    model = build_model(config.replace(vision_cfg={"patch_dropout": 0.5}))
    assert model.config.vision_cfg.patch_dropout == 0.5
    images = batch()[0]
    state = torch.get_rng_state()
    first = model(images)[0]
    second = model(images)[0]
    torch.set_rng_state(state)
    assert torch.equal(model(images)[0], first)
    assert not torch.equal(second, first)
    model.eval()
    assert torch.equal(model(images)[0], model(images)[0])


def test_only_the_image_tower_draws_random_numbers_and_it_runs_first(config):
    """The gradient cache replays the image tower with and without the text tower, and requires equal random numbers."""
    model = build_model(config.replace(vision_cfg={"patch_dropout": 0.5})).train()
    images, tokens = batch()
    torch.manual_seed(1)
    alone = model(images)[0]
    torch.manual_seed(1)
    assert torch.equal(alone, model(images, tokens[:1])[0])
    before = torch.get_rng_state()
    model(None, tokens)
    assert torch.equal(before, torch.get_rng_state())


def test_activation_checkpointing_gives_the_same_gradients(config):
    torch.manual_seed(0)
    model = build_model(config.replace(vision_cfg={"patch_dropout": 0.5}))
    calls = []

    def counting(function, *tensors):
        calls.append(function)
        return checkpoint(function, *tensors, use_reentrant=False)

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        image_features, text_features, log_scale = model(*batch())
        ((image_features * text_features).sum() * log_scale).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    model.set_activation_checkpointing(counting)
    got = gradients()
    assert [call.__self__ for call in calls] == [*model.visual.transformer.resblocks, *model.text.transformer.resblocks]
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name

    calls.clear()
    with torch.no_grad():
        model(*batch())
    model.set_activation_checkpointing(None)
    model(*batch())
    assert calls == []
