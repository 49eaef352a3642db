"""Layer groups, locks and activation checkpointing of every kind of tower, which name their layers differently."""

import re
import sys

import pytest
import torch

from megaclip.errors import ConfigError
from megaclip.models import build_model
from megaclip.models.open_clip_layers import layer_groups
from tests.open_clip_families import FAMILIES, HUGGING_FACE, IMAGE_SIZE, family

BLOCKS = {"convnext": 6, "mobileclip": 4, "resnet": 4}
"""Blocks of the image towers, or stages; the others have 2 as all text towers."""


@pytest.mark.parametrize("name", [*FAMILIES, "bert"])
def test_layers_of_every_kind_of_tower_are_grouped_and_locked(name, tmp_path):
    """Groups contain every parameter once. Locks leave the last block and what follows it, and say what they cannot."""
    model = build_model(family(name, tmp_path))
    for tower, blocks in ((model.visual, BLOCKS.get(name, 2)), (model.text, 2)):
        groups = layer_groups(tower)
        found = [id(parameter) for group in groups for parameter in group]
        assert sorted(found) == sorted(map(id, tower.parameters()))
        assert len(groups) == blocks + 2
    model.set_activation_checkpointing(lambda function, *inputs: function(*inputs))
    model.lock_tower("text", 1)
    stem, first, last, _ = layer_groups(model.text)
    assert not any(parameter.requires_grad for parameter in stem)
    # open_clip's own text towers count the projection as a group
    locked = name in HUGGING_FACE or not any(parameter.requires_grad for parameter in last)
    assert locked and not any(parameter.requires_grad for parameter in first)
    assert name not in HUGGING_FACE or all(parameter.requires_grad for parameter in last)
    model.lock_tower("image", 0)
    assert not any(parameter.requires_grad for parameter in layer_groups(model.visual)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_patch_dropout_works_or_names_its_setting(name, tmp_path):
    config = family(name, tmp_path)
    images = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    try:
        model = build_model(config.replace(vision_cfg={"patch_dropout": 0.75})).train()
    except ConfigError as error:
        assert name in ("convnext", "mobileclip", "resnet")
        assert re.search(r"vision_cfg\.patch_dropout .* set it to 0", str(error))
        return
    first, second = (model.visual(images) for _ in range(2))
    assert (first != second).any()


def test_a_missing_transformers_is_named_with_what_installs_it(tmp_path, monkeypatch):
    config = family("roberta", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"requires transformers, .*pip install 'megaclip\[open-clip\]'"):
        build_model(config)
