"""Parameter groups of towers and layers: settings without effect, and the groups that a resumed run must repeat.

tests/distributed/test_parameter_groups.py tests the values.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megaclip.config import load_training_config, parse_arguments
from megaclip.errors import ConfigError
from megaclip.models import ModelConfig, build_model
from megaclip.zero.parameter_groups import LR_SCALE, grouping, parameter_groups

MODEL = ModelConfig.from_dict(
    {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 8, "layers": 2, "width": 32, "head_width": 8, "patch_size": 2},
        "text_cfg": {"context_length": 6, "vocab_size": 32, "width": 32, "heads": 4, "layers": 1},
    }
)


def groups(folder: Path, section: dict[str, Any], image_unlocked: int | None = None) -> list[dict[str, Any]]:
    """Return the parameter groups of MODEL. The image tower is locked if a number of unlocked groups is given."""
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "megaclip": section,
    }
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    model = build_model(MODEL)
    if image_unlocked is not None:
        model.lock_tower("image", image_unlocked)
    return parameter_groups(model, load_training_config(path))


@pytest.mark.parametrize(
    ("section", "unlocked", "message"),
    [
        ({"image_lr": 1e-4}, 0, r"image_lr 0.0001 has no effect: the image tower has no trained parameters; leave"),
        ({"image_weight_decay": 0.2}, 0, r"image_weight_decay 0.2 has no effect: the image tower has no trained"),
        (
            {"image_layer_decay": 0.7},
            1,
            r"image_layer_decay 0.7 has no effect: .* no trained parameters below its head",
        ),
        ({"image_lr": 0}, None, r"megaclip\.image_lr: Input should be greater than 0"),
        ({"image_lr": True}, None, r"megaclip\.image_lr"),
        ({"text_weight_decay": -0.1}, None, r"megaclip\.text_weight_decay: Input should be greater than or equal to 0"),
        ({"text_layer_decay": 1.1}, None, r"megaclip\.text_layer_decay: Input should be less than or equal to 1"),
    ],
)
def test_a_setting_without_effect_or_out_of_range_is_refused(tmp_path, section, unlocked, message):
    with pytest.raises(ConfigError, match=message):
        groups(tmp_path, section, unlocked)


def test_layers_below_the_locked_ones_keep_their_depth(tmp_path):
    found = groups(tmp_path, {"image_layer_decay": 0.5}, image_unlocked=2)
    factors = {group["name"]: group[LR_SCALE] for group in found}
    assert factors == {
        "decayed": 1.0,
        "not_decayed": 1.0,
        "image_2_decayed": 0.5,
        "image_2_not_decayed": 0.5,
        "image_3_decayed": 1.0,
        "logit_scale": 1.0,
    }


def test_without_settings_the_groups_are_those_of_older_checkpoints(tmp_path):
    assert [group["name"] for group in groups(tmp_path, {})] == ["decayed", "not_decayed", "logit_scale"]


def test_a_resumed_run_must_repeat_the_groups_but_not_the_rates(tmp_path):
    def of(**section: float) -> dict[str, str | None]:
        groups(tmp_path, section)
        return grouping(load_training_config(tmp_path / "ds_config.json").megaclip)

    assert of() == {"image": None, "text": None}
    assert of(image_lr=1e-4) == of(image_weight_decay=0.3) == {"image": "tower", "text": None}
    assert of(text_layer_decay=0.8) == of(text_layer_decay=0.9, text_lr=1e-4) == {"image": None, "text": "layers"}


def test_open_clips_flag_names_the_setting():
    required = ["--deepspeed_config", "c.json", "--model", "ViT-B-32", "--train-data", "a.tar"]
    with pytest.raises(ConfigError, match=r"--image-layer-decay is set in ds_config.json: megaclip.image_layer_decay"):
        parse_arguments([*required, "--image-layer-decay", "0.7"])
