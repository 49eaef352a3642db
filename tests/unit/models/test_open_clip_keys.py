"""MegaCLIP's towers compared with the real open_clip: features, gradients, names, locks and initial values."""

import copy

import pytest
import torch

from megaclip.models import ClipModel, ModelConfig, build_model, load_model_config, meta_model
from megaclip.models.open_clip_keys import from_open_clip, to_open_clip
from megaclip.open_clip_package import import_open_clip
from tests.open_clip_families import OWN_TIMM, own_description
from tests.tolerances import FEATURES, POSITIONS, TOWER_GRADIENT, assert_close

SMALL = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 20, "patch_size": 6, "layers": 3, "width": 48, "head_width": 16},
    "text_cfg": {"context_length": 11, "vocab_size": 50, "width": 40, "heads": 5, "layers": 3},
}
VARIANTS = {
    "plain": {},
    "quick_gelu": {"quick_gelu": True, "init_logit_scale": 1.5},
    "layer_scale": {"vision_cfg": {"ls_init_value": 0.3}, "text_cfg": {"ls_init_value": 0.2}},
    "odd_mlp": {"vision_cfg": {"mlp_ratio": 4.3637}, "text_cfg": {"mlp_ratio": 2.51}},
    "eos": {"text_cfg": {"pool_type": "eos", "eos_id": 3}},
    "first": {"text_cfg": {"pool_type": "first", "no_causal_mask": True}},
    "clipa": {
        "vision_cfg": {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": {"pool_type": "last", "no_causal_mask": True},
    },
    "average_after_norm": {"vision_cfg": {"pool_type": "avg"}},
    "custom_text": {"custom_text": True},
    "siglip": {"custom_text": True, "init_logit_scale": 2.303, "init_logit_bias": -10.0},
}


def variant(name):
    if name in OWN_TIMM:
        return own_description(name)
    model = copy.deepcopy(SMALL)
    for key, value in VARIANTS[name].items():
        if isinstance(value, dict):
            model[key].update(value)
        else:
            model[key] = value
    return model


def open_clip_model(description, seed=0):
    package = import_open_clip()
    description = copy.deepcopy(description)
    kind = package.CustomTextCLIP if description.pop("custom_text", False) else package.CLIP
    torch.manual_seed(seed)
    return kind(**description).eval()


def ours_with_weights_of(theirs, config: ModelConfig) -> ClipModel:
    model = meta_model(config)
    model.load_state_dict(from_open_clip(theirs.state_dict(), config), assign=True)
    return model.eval()


def inputs(config: ModelConfig, batch: int):
    generator = torch.Generator().manual_seed(1)
    size, text = config.vision_cfg.image_size, config.text_cfg
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(text.vocab_size, (batch, text.context_length), generator=generator)


@pytest.mark.long
@torch.no_grad()
def test_features_of_a_preset_equal_open_clips():
    theirs = open_clip_model(import_open_clip().get_model_config("ViT-B-32"))
    ours = ours_with_weights_of(theirs, load_model_config("ViT-B-32"))
    images, tokens = inputs(ours.config, 2)
    expected, got = theirs(images, tokens), ours(images, tokens)
    for theirs_part, ours_part in zip(expected[:2], got[:2], strict=True):
        assert_close(ours_part, theirs_part, FEATURES["float32"], size=1)
    assert got[2].exp().item() == pytest.approx(expected[2].item())


@pytest.mark.parametrize("name", [*VARIANTS, *OWN_TIMM])
def test_features_and_gradients_of_every_option_equal_open_clips(name):
    theirs = open_clip_model(variant(name)).double()
    config = ModelConfig.from_dict(variant(name))
    assert config == ModelConfig.from_dict(config.to_open_clip()), "the exported description is read alike"
    back = to_open_clip(from_open_clip(theirs.state_dict(), config), config)
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in theirs.state_dict().items())
    ours = ours_with_weights_of(copy.deepcopy(theirs), config)
    images, tokens = inputs(config, batch=5)
    images = images.double()
    weights = torch.randn(2, 5, config.embed_dim, dtype=torch.float64)
    expected, got = theirs(images, tokens), ours(images, tokens)
    for output in (expected, got):
        assert_close(got[0], expected[0], FEATURES["float64"], "image features")
        assert_close(got[1], expected[1], FEATURES["float64"], "text features")
        (output[0] * weights[0] + output[1] * weights[1]).sum().backward()

    ours_by_name = to_open_clip({name: p.grad for name, p in ours.named_parameters() if p.grad is not None}, config)
    theirs_by_name = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert ours_by_name.keys() == theirs_by_name.keys()
    for parameter, gradient in theirs_by_name.items():
        assert_close(ours_by_name[parameter], gradient, TOWER_GRADIENT, parameter)


LARGE = ["ViT-L-14-336", "ViT-bigG-14", "ViT-SO400M-16-SigLIP-i18n-256", "ViT-gopt-16-SigLIP2-256"]


@pytest.mark.parametrize("name", LARGE)
def test_names_and_shapes_of_the_large_towers_equal_open_clips(name):
    with torch.device("meta"):
        theirs = open_clip_model(import_open_clip().get_model_config(name)).state_dict()
    ours = meta_model(load_model_config(name))
    exported = to_open_clip(ours.state_dict(), ours.config)
    assert {key: value.shape for key, value in exported.items()} == {key: value.shape for key, value in theirs.items()}
    back = from_open_clip(theirs, ours.config)
    expected = {key: value.shape for key, value in ours.state_dict().items()}
    assert {key: value.shape for key, value in back.items()} == expected


def in_open_clips_names(flags, model):
    """Convert one boolean per parameter of our model to one per parameter of open_clip's model."""
    tensors = {name: torch.full(p.shape, float(flags[name])) for name, p in model.named_parameters()}
    return {name: set(value.flatten().tolist()) for name, value in to_open_clip(tensors, model.config).items()}


@pytest.mark.parametrize("name", ["layer_scale", *OWN_TIMM])
def test_locks_and_weight_decay_are_those_of_open_clip(name):
    theirs = open_clip_model(variant(name))
    ours = build_model(ModelConfig.from_dict(variant(name)))
    exempt = ours.no_weight_decay_names()
    flags = {name: name in exempt for name, _ in ours.named_parameters()}
    # open_clip_train/main.py, the lambda `exclude`
    expected = {
        name: {float(p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name)}
        for name, p in theirs.named_parameters()
    }
    assert in_open_clips_names(flags, ours) == expected
    for unlocked in reversed(range(6)):  # a lock of timm never unlocks
        theirs.lock_image_tower(unlocked)
        theirs.lock_text_tower(unlocked)
        for tower in ("image", "text"):
            ours.lock_tower(tower, unlocked)
        trainable = {name: p.requires_grad for name, p in ours.named_parameters()}
        expected = {name: {float(p.requires_grad)} for name, p in theirs.named_parameters()}
        assert in_open_clips_names(trainable, ours) == expected, unlocked


def kind_of(name):
    """Return the parameter's name without the layer number; open_clip uses one distribution for each such name."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def statistics_by_kind(state_dict):
    values = {}
    for name, value in state_dict.items():
        values.setdefault(kind_of(name), []).append(value.flatten().double())
    result = {}
    for kind, parts in values.items():
        x = torch.cat(parts)
        std = x.std(correction=0).item()
        kurtosis = ((x - x.mean()) ** 4).mean().item() / std**4 if std > 0 else 0.0
        result[kind] = (x.mean().item(), std, kurtosis, x.numel())
    return result


@pytest.mark.parametrize("name", ["plain", *OWN_TIMM])
def test_initial_values_have_open_clips_distributions(name):
    description = variant(name)
    if name == "plain":
        vision = {"image_size": 64, "patch_size": 8, "layers": 6, "width": 192, "head_width": 64, "ls_init_value": 0.1}
        description["vision_cfg"].update(vision)
    wide = {
        "context_length": 64,
        "vocab_size": 400,
        "width": description["embed_dim"] if name == "siglip i18n" else 128,
    }
    description["text_cfg"] = {**description["text_cfg"], **wide, "heads": 2, "layers": 6, "mlp_ratio": 3.0}
    config = ModelConfig.from_dict(description)
    expected = statistics_by_kind(open_clip_model(description, seed=11).state_dict())
    torch.manual_seed(12)
    got = statistics_by_kind(to_open_clip(build_model(config).state_dict(), config))
    assert got.keys() == expected.keys()
    for kind, (mean, std, kurtosis, count) in expected.items():
        error = 6 / count**0.5  # six standard errors of the mean of unit-variance samples
        assert got[kind][0] == pytest.approx(mean, abs=2 * error * std + 1e-7), kind
        assert got[kind][1] == pytest.approx(std, rel=2 * error, abs=1e-7), kind
        if count > 5000:  # a uniform distribution has kurtosis 1.8, a normal one 3
            assert got[kind][2] == pytest.approx(kurtosis, abs=0.5), kind


def test_sine_cosine_positions_equal_open_clips_and_are_learnable():
    config = load_model_config("demo-tiny")
    description = config.to_open_clip()
    description.pop("custom_text")
    description["vision_cfg"]["pos_embed_type"] = "sin_cos_2d"
    expected = open_clip_model(description).visual.positional_embedding
    ours = build_model(config).visual.positional_embedding
    assert ours.requires_grad
    assert_close(ours, expected, POSITIONS)
