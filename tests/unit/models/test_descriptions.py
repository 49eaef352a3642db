"""open_clip's towers: supported descriptions, batch norms in bfloat16, traced plans, tokenizers, the list of models."""

import json

import docs_models
import pytest
import torch

from megaclip.commands.list_models import row
from megaclip.data import load_tokenizer
from megaclip.data.sentencepiece_training import train_sentencepiece
from megaclip.errors import ConfigError
from megaclip.models import ModelConfig, OpenClipConfig, build_model, load_model_config, meta_model
from megaclip.models.config import reason_not_own
from megaclip.models.descriptions import describe
from megaclip.models.open_clip_config import open_clip_descriptions
from megaclip.models.open_clip_keys import to_open_clip
from megaclip.open_clip_package import import_open_clip
from megaclip.planner.tower_costs import trace_tower
from tests.open_clip_families import CONTEXT_LENGTH, FAMILIES, IMAGE_SIZE, VOCAB_SIZE, family

SMALL = {"embed_dim": 8, "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 8, "patch_size": 8}}
TEXT = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}


@pytest.mark.parametrize(
    ("name", "towers", "expected"),
    [
        ("ViT-B-32", "auto", ModelConfig),
        ("ViT-B-32", "open_clip", OpenClipConfig),
        ("RN50", "auto", OpenClipConfig),
        ("ViT-SO400M-14-SigLIP", "auto", ModelConfig),
        ("ViT-SO400M-14-SigLIP", "open_clip", OpenClipConfig),
        ("nllb-clip-base-siglip", "auto", OpenClipConfig),
        ("roberta-ViT-B-32", "open_clip", OpenClipConfig),
    ],
)
def test_the_description_chooses_the_towers(name, towers, expected):
    assert type(load_model_config(name, towers)) is expected


@pytest.mark.parametrize("name", ["EVA02-B-16", "MobileCLIP-S1", "PE-Core-T-16-384"])
def test_null_settings_are_passed_to_open_clip(name):
    """With `timm_proj` null, the trunk's classifier is the projection. The default of open_clip is another layer."""
    given = json.loads(open_clip_descriptions()[name].read_text())
    config = load_model_config(name)
    exported = OpenClipConfig.from_dict(config.to_open_clip()).to_open_clip()["vision_cfg"]
    assert given["vision_cfg"].items() <= exported.items()
    with torch.device("meta"):
        del given["custom_text"]
        theirs = import_open_clip().CustomTextCLIP(**given).state_dict()
    ours = to_open_clip(meta_model(config).state_dict(), config)
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


def test_null_at_the_top_level_turns_a_setting_off():
    """open_clip builds a CoCa as soon as the key multimodal_cfg is present."""
    description = {**SMALL, "text_cfg": TEXT, "multimodal_cfg": None, "init_logit_bias": None}
    config = describe(description, "model", "open_clip")
    assert set(config.to_open_clip()) == {"embed_dim", "vision_cfg", "text_cfg"}


@pytest.mark.parametrize(
    ("tower", "changes", "message"),
    [
        ("image", {"vision_cfg": {"image_size": 96}}, r"image_size 96: .* cannot encode such inputs: .* match model"),
        ("image", {"vision_cfg": {"timm_proj": "none"}}, r"the image tower TimmModel returns \[32\]"),
        ("text", {"text_cfg": {"pool_type": "none"}}, r"the text tower TextTransformer returns \[6, 16\]"),
    ],
)
def test_towers_without_features_for_the_loss_are_refused(tmp_path, tower, changes, message):
    model = meta_model(family("vit", tmp_path).replace(**changes)).train()
    with pytest.raises(ConfigError, match=message):
        trace_tower(model, tower, samples=2)


DECODER = {"multimodal_cfg": {"width": 16}, "text_cfg": {**TEXT, "output_tokens": True}, "custom_text": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multimodal_cfg": {"width": 8}}, "vision_cfg.output_tokens false, and multimodal_cfg requires true"),
        ({"vision_cfg": {"timm_model_name": "x", "output_tokens": True}, **DECODER}, "of timm or a ResNet"),
        ({"vision_cfg": {"output_tokens": True}, **DECODER, "custom_text": False}, "custom_text false"),
        ({"vision_cfg": {"output_tokens": True}, **DECODER, "multimodal_cfg": {"context_length": 4}}, "too short"),
        ({"vision_cfg": {"output_tokens": True}, **DECODER, "multimodal_cfg": {"query": 4}}, "multimodal_cfg.query"),
        ({"vision_cfg": {"output_tokens": True}, **DECODER, "multimodal_cfg": {"context_length": "8"}}, "too short"),
        ({"audio_cfg": {"width": 8}}, "audio tower"),
        ({"vision_cfg": {"timm_model_name": "naflexvit_base_patch16_gap"}}, "NaFlex"),
        ({"vision_cfg": {"timm_model_name": "x", "image_size": [32, 64]}}, "not square"),
        ({"vision_cfg": {"timm_model_name": "x", "image_size": "32px"}}, "a valid integer, got .32px"),
        ({"vision_cfg": {"timm_model_name": "x", "timm_pol": "avg"}}, "nearest valid key is vision_cfg.timm_pool"),
        ({"vision_cfg": {"timm_model_name": "x", "output_tokens": True}}, "output_tokens"),
        ({"vision_cfg": {"layers": [1, 1, 1, 1], "patch_dropout": 0.5}}, "no effect on a ResNet"),
        ({"text_cfg": {**TEXT, "embed_cls": True}}, "embed_cls true requires custom_text true"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        describe({**SMALL, "text_cfg": TEXT, **changes}, "model")


def test_open_clips_towers_refuse_starting_values_of_megaclips(tmp_path):
    description = {"embed_dim": 16, "vision_cfg": {"layers": 1}, "text_cfg": {"layers": 1}}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**description, "vision_position_init": "normal"}))
    assert type(load_model_config(path, "open_clip")) is OpenClipConfig
    with pytest.raises(ConfigError, match='vision_position_init "sin_cos_2d" requires MegaCLIP\'s own towers'):
        load_model_config("demo-tiny", "open_clip")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("vit_base_patch16_siglip_224", {"timm_pool": "avg"}, 'timm_pool "avg"'),
        ("vit_base_patch16_siglip_224", {"timm_proj": "linear"}, 'timm_proj "linear"'),
        ("vit_base_patch16_siglip_224", {"timm_drop_path": 0.1}, "timm_drop_path 0.1"),
        ("vit_base_patch16_siglip_224", {"image_size": 256}, "image_size 256"),
        ("vit_base_patch16_siglip_224", {"timm_model_kwargs": {"checkpoint_path": "x"}}, "timm_model_kwargs"),
        ("vit_base_patch16_siglip_224", {"timm_pool": "token"}, "no class token"),
        ("vit_base_patch16_siglip_224", {"timm_model_kwargs": {"num_heads": 5}}, "num_heads 5 and embed_dim 768"),
        ("vit_base_patch16_224", {}, "a class token and global_pool map"),
        ("hf-hub:timm/vit", {}, "a source outside timm"),
        ("vit_base_mci_224", {"timm_pool": "token"}, "no_embed_class True"),
        ("deit_base_distilled_patch16_224", {"timm_pool": "token"}, "class VisionTransformerDistilled"),
        ("no_such_model", {}, "Unknown model"),
    ],
)
def test_timm_models_that_own_towers_lack_are_left_to_open_clip_for_a_reason(name, changes, reason):
    vision = {"image_size": 224, "timm_model_name": name, "timm_pool": "map", "timm_proj": "none", **changes}
    assert reason in str(reason_not_own({"embed_dim": 768, "vision_cfg": vision, "text_cfg": {}}))


def test_own_towers_refuse_other_models_and_name_the_setting():
    with pytest.raises(ConfigError, match=r"vision_cfg.layers.*; set megaclip.towers to"):
        load_model_config("RN50", "own")
    with pytest.raises(ConfigError, match="open_clip cannot build the model"):
        build_model(describe({**SMALL, "text_cfg": TEXT, "vision_cfg": {"timm_model_name": "no_such_model"}}, "model"))


def test_batch_norms_keep_float32_statistics_in_bfloat16(tmp_path):
    torch.manual_seed(0)
    model = build_model(family("resnet", tmp_path)).train()
    images = torch.randn(4, 3, IMAGE_SIZE, IMAGE_SIZE)
    expected, *_ = model(images, None)
    statistics = [values.clone() for values in model.statistics(model.visual)]
    torch.manual_seed(0)
    model = build_model(family("resnet", tmp_path)).train().bfloat16()
    features, *_ = model(images, None)
    assert features is not None and features.dtype == torch.bfloat16
    for values, exact in zip(model.statistics(model.visual), statistics, strict=True):
        assert values.dtype == exact.dtype  # float32, and int64 for the number of batches
    assert torch.nn.functional.cosine_similarity(features.float(), expected).min() > 0.99


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"siglip", "roberta"}))  # test_lora plans these
def test_every_family_can_be_planned(name, tmp_path):
    """Sizes grow with the number of samples. The graph of a checkpointed tower is smaller."""
    model = meta_model(family(name, tmp_path)).train()
    for tower in ("image", "text"):
        few, many = (trace_tower(model, tower, samples) for samples in (4, 8))
        assert few.graph < many.graph and few.forward.products < many.forward.products
        assert few.backward.block_inputs < few.graph < few.backward_peak


def test_a_hugging_face_tokenizer_is_read_from_a_directory(tmp_path):
    captions = ["a red three to the left of a blue seven", "two green fives"]
    own = train_sentencepiece(captions * 20, tmp_path / "own.model", vocab_size=40)
    own.write_open_clip(tmp_path / "tokenizer")
    loaded = load_tokenizer(str(tmp_path / "tokenizer"), 20)
    assert torch.equal(loaded(captions), load_tokenizer(str(tmp_path / "own.model"), 20)(captions))
    assert loaded.identity != load_tokenizer(str(tmp_path / "tokenizer"), 20, options={"clean": "lower"}).identity
    settings = loaded.write_open_clip(tmp_path / "copy")
    assert settings == {"context_length": 20, "tokenizer_mode": None, "tokenizer_kwargs": None}
    assert torch.equal(load_tokenizer(str(tmp_path / "copy"), 20)(captions), loaded(captions))
    with pytest.raises(ConfigError, match="downloads nothing"):
        load_tokenizer("hf:nobody/no-such-tokenizer", 20)


def test_an_unknown_hugging_face_model_is_refused_without_the_network():
    text = {"context_length": CONTEXT_LENGTH, "vocab_size": VOCAB_SIZE, "hf_model_name": "nobody/no-such-model"}
    with pytest.raises(ConfigError, match="nor in the cache"):
        meta_model(describe({**SMALL, "text_cfg": text}, "model"))


def test_a_context_longer_than_the_positions_of_a_hugging_face_model_is_refused(tmp_path):
    """On a GPU the first long caption would end the run with a device-side assertion."""
    config = family("roberta", tmp_path)
    text = build_model(config.replace(text_cfg={"context_length": 14})).text
    assert text(torch.full((1, 14), 5)).isfinite().all()
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        text(torch.full((1, 15), 5))
    with pytest.raises(ConfigError, match=r"context_length is 15, and .*roberta has positions for 14 tokens"):
        meta_model(config.replace(text_cfg={"context_length": 15}))


def test_the_list_has_every_description_and_most_of_them_run():
    listed = [line.split("|")[1:3] for line in docs_models.parts()[1].splitlines() if line.startswith("| ")][2:]
    names, towers = ([part.strip() for part in column] for column in zip(*listed, strict=True))
    assert names == list(open_clip_descriptions())
    assert sum(kind in ("MegaCLIP", "open_clip") for kind in towers) >= 130
    for name in ("RN50", "ViT-S-32", "ViT-B-16-SigLIP", "coca_base"):
        assert row(name) in docs_models.parts()[1]


@pytest.mark.long
def test_the_list_equals_the_commands_output():
    for name in list(open_clip_descriptions())[::12]:  # all take minutes
        assert row(name) in docs_models.parts()[1], json.dumps(name)
