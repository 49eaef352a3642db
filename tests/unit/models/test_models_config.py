"""Model descriptions: presets equal open_clip's own JSON files, and unknown keys are refused by name."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megaclip.errors import ConfigError
from megaclip.models import ClipModel, ModelConfig, list_models, load_model_config
from megaclip.models.descriptions import describe
from megaclip.open_clip_package import import_open_clip

OWN_PRESETS = {"demo-tiny", "ViT-5B-14", "ViT-18B-14"}


def description(**changes):
    base = {"embed_dim": 32, "vision_cfg": {"width": 64, "head_width": 32}, "text_cfg": {"width": 64, "heads": 2}}
    for key, value in changes.items():
        if isinstance(value, dict):
            base[key] = {**base[key], **value}
        else:
            base[key] = value
    return base


@pytest.mark.parametrize("name", sorted(set(list_models()) - OWN_PRESETS))
def test_preset_equals_open_clips_description(name):
    theirs = import_open_clip().get_model_config(name)
    ours = load_model_config(name).to_open_clip()
    for section in ("vision_cfg", "text_cfg"):
        assert {key: ours[section][key] for key in theirs[section]} == theirs[section]
    assert ours["embed_dim"] == theirs["embed_dim"]
    assert ours["quick_gelu"] == theirs.get("quick_gelu", False)


@pytest.mark.parametrize(("name", "billions"), [("ViT-5B-14", 5.0), ("ViT-18B-14", 17.6)])
def test_large_presets_have_the_image_tower_that_their_name_promises(name, billions):
    """Their heads and MLP widths divide by 8, so that 8 tensor-parallel ranks can share a layer."""
    config = load_model_config(name)
    with torch.device("meta"):
        model = ClipModel(config)
    assert sum(p.numel() for p in model.visual.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)
    for tower in (config.vision_cfg, config.text_cfg):
        assert tower.heads % 8 == 0 and int(tower.width * tower.mlp_ratio) % 8 == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_cfg": {"widht": 64}}, ["vision_cfg.widht", "vision_cfg.width"]),
        ({"text_cfg": {"contextlength": 7}}, ["text_cfg.contextlength", "text_cfg.context_length"]),
        ({"quickgelu": True}, ["quickgelu", "quick_gelu"]),
        ({"vision_cfg": {"attentional_pool": True}}, ["vision_cfg.attentional_pool true", "towers lack"]),
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, ["text_cfg.hf_model_name", "towers lack"]),
        ({"vision_cfg": {"width": "64"}}, ["vision_cfg.width", "integer"]),
        ({"init_logit_scale": float("nan")}, ["init_logit_scale", "finite"]),
        ({"vision_cfg": {"width": 65}}, ["vision_cfg.width", "65", "head_width"]),
        ({"text_cfg": {"width": 65}}, ["text_cfg.width", "heads"]),
        ({"text_cfg": {"pool_type": "eos", "eos_id": 50000}}, ["eos_id", "vocab_size"]),
        ({"text_cfg": {"pool_type": "mean"}}, ["text_cfg.pool_type", "argmax"]),
        ({"vision_cfg": {"patch_dropout": 1.0}}, ["vision_cfg.patch_dropout"]),
        ({"vision_cfg": {"patch_size": 300}}, ["patch_size", "image_size"]),
        ({"embed_dim": 0}, ["embed_dim"]),
    ],
)
def test_bad_descriptions_are_refused_by_name_in_one_line(changes, words):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(description(**changes))
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_description_with_all_of_open_clips_settings_has_own_towers():
    package = import_open_clip()
    sections = {"vision_cfg": asdict(package.CLIPVisionCfg()), "text_cfg": asdict(package.CLIPTextCfg())}
    assert isinstance(describe({"embed_dim": 32, **sections}, "model"), ModelConfig)


def test_features_that_are_turned_off_are_accepted():
    config = ModelConfig.from_dict(
        description(
            init_logit_bias=None,
            vision_cfg={"attentional_pool": False, "attn_pooler_heads": 8, "pos_embed_type": "learnable"},
            text_cfg={"hf_model_name": None, "hf_proj_type": "mlp", "qk_norm": False},
        )
    )
    assert config.vision_cfg.width == 64
    with pytest.raises(ConfigError, match=r"vision_cfg\.attn_pooler_heads"):
        ModelConfig.from_dict(description(vision_cfg={"attn_pooler_heads": 8}))


def test_card_file_and_directory_give_the_same_description(tmp_path: Path):
    card = tmp_path / "open_clip_config.json"
    card.write_text(json.dumps({"model_cfg": description(), "preprocess_cfg": {}}))
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(description()))
    assert load_model_config(card) == load_model_config(tmp_path) == load_model_config(bare)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        load_model_config(path)
    assert "\n" not in str(error.value)


def test_error_for_an_unknown_name_suggests_the_nearest_preset():
    with pytest.raises(ConfigError, match="'ViT-B-32'"):
        load_model_config("ViT-B32")
    with pytest.raises(ConfigError, match="unknown model"):
        load_model_config(json.dumps({"vision_cfg": "x" * 300}))  # no file has such a long name


def test_error_for_a_directory_without_a_card_names_the_commands_that_write_one(tmp_path):
    with pytest.raises(ConfigError, match=r"a directory without open_clip_config.json; give one that `mega"):
        load_model_config(tmp_path)


def test_exported_description_has_only_open_clips_keys_and_can_be_read():
    config = load_model_config("demo-tiny")
    exported = config.to_open_clip()
    assert "vision_position_init" not in exported
    assert ModelConfig.from_dict(exported) == config.replace(vision_position_init="normal")


def test_replace_checks_the_changed_keys():
    config = load_model_config("demo-tiny").replace(text_cfg={"vocab_size": 300, "eos_id": 7})
    assert (config.text_cfg.vocab_size, config.text_cfg.eos_id, config.text_cfg.width) == (300, 7, 96)
    with pytest.raises(ConfigError, match="vocab"):
        config.replace(text_cfg={"vocab": 3})


@pytest.mark.parametrize("key", ["image_size", "patch_size"])
def test_a_square_may_be_a_list_of_height_and_width_as_in_open_clip(key):
    config = load_model_config("ViT-B-32")
    side = getattr(config.vision_cfg, key)
    assert config.replace(vision_cfg={key: [side, side]}) == config
    for other in ([side, side + 32], [side], [side] * 3, [], [None, None], ["a", "a"], [[side], [side]]):
        with pytest.raises(ConfigError, match=f"vision_cfg.{key}: ") as error:
            config.replace(vision_cfg={key: other})
        assert "\n" not in str(error.value)
