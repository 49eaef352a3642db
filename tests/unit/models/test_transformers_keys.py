"""Parameter and module names of MegaCLIP's towers are those of transformers' models."""

import pytest
import torch

from megaclip.errors import CheckpointError
from megaclip.models import load_model_config, meta_model
from megaclip.models.transformers_keys import from_transformers, to_transformers, transformers_name
from megaclip.open_clip_package import import_torchvision


def clip_model():
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.CLIPModel(transformers.CLIPConfig())


def test_every_module_of_the_own_towers_that_an_adapter_can_change_has_a_module_in_transformers():
    theirs = dict(clip_model().named_modules())
    for name, module in meta_model(load_model_config("ViT-B-32")).named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.LayerNorm) or name.endswith(("_proj", "_fc")):
            found = theirs[transformers_name(name) or ""]
            assert found.weight.shape == module.weight.shape, name
            assert transformers_name(f"{name}.lora_A.weight") == f"{transformers_name(name)}.lora_A.weight"


def test_names_and_shapes_of_a_clip_are_those_of_transformers():
    shapes = {name: value.shape for name, value in clip_model().state_dict().items()}
    ours = dict(meta_model(load_model_config("ViT-B-32")).named_weights())
    assert {name: value.shape for name, value in to_transformers(ours).items()} == shapes


def test_projections_of_different_shapes_are_refused_before_they_are_stacked():
    stem = "text_model.encoder.layers.0.self_attn."
    parts = {f"{stem}{one}_proj.bias": torch.zeros(length) for one, length in (("q", 4), ("k", 4), ("v", 8))}
    with pytest.raises(CheckpointError, match=r"cannot be stacked: their shapes are \[4\], \[4\], \[8\]"):
        from_transformers(parts)
    with pytest.raises(CheckpointError, match="cannot be stacked"):
        from_transformers({name: torch.zeros(1).expand(1 << 60) for name in parts})
