"""Adapters in open_clip's towers: which layers get them, whether the towers use them, merged weights, and refusals."""

import pytest
import torch
from torch import nn

from megaclip.checkpoint.model_card import read_model_card
from megaclip.checkpoint.open_clip_weights import assigned_model, read_weights
from megaclip.checkpoint.peft_folder import write_adapters
from megaclip.config.section import LoraSettings
from megaclip.errors import CheckpointError, ConfigError
from megaclip.models import build_model
from megaclip.models.lora import add_adapters, import_peft, merge_adapters
from megaclip.planner.tower_costs import tower_costs, trace_tower
from tests.open_clip_families import CONTEXT_LENGTH, IMAGE_SIZE, VOCAB_SIZE, family
from tests.unit.checkpoint.test_model_directory import batch, saved, their_inputs

# Family -> layers of the image tower and of the text tower that get adapters. open_clip's attention is one fused layer.
LAYERS = {
    "siglip": ({"qkv", "proj", "fc1", "fc2"}, {"c_fc", "c_proj"}),
    "roberta": ({"c_fc", "c_proj"}, {"query", "key", "value", "dense"}),
}


def settings(**given) -> dict:
    return LoraSettings(**given).model_dump()


@pytest.mark.parametrize("name", LAYERS)
def test_towers_use_all_adapters_and_merged_weights_have_their_features(name, tmp_path):
    torch.manual_seed(0)
    config = family(name, tmp_path)
    model = build_model(config).eval()
    weights = {key: value.clone() for key, value in model.named_weights().items()}
    layers = add_adapters(model, settings(rank=2))
    for prefix, expected in zip(("visual.", "text."), LAYERS[name], strict=True):
        assert {layer.rpartition(".")[2] for layer in layers if layer.startswith(prefix)} == expected
    assert {n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n} <= {
        "logit_scale",
        "logit_bias",
    }
    images = torch.randn(3, 3, IMAGE_SIZE, IMAGE_SIZE)
    tokens = torch.randint(3, VOCAB_SIZE, (3, CONTEXT_LENGTH))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".lora_B." in parameter_name:
                parameter.normal_()
    features = model(images, tokens)[:2]
    sum((side**2 * torch.randn(side.shape)).sum() for side in features).backward()
    assert [n for n, p in model.named_parameters() if ".lora_" in n and (p.grad is None or not p.grad.any())] == []
    merged = merge_adapters(model)
    assert {key: value.shape for key, value in merged.items()} == {key: value.shape for key, value in weights.items()}
    plain = build_model(config).eval()
    plain.load_state_dict(merged, strict=False)
    for ours, theirs in zip(plain(images, tokens), features, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for tower in ("image", "text"):
        tower_costs(config, tower, 4, lora=LoraSettings(rank=2))


@pytest.mark.parametrize("name", ["CLIP", "SigLIP", "SigLIP 2"])
def test_peft_reads_adapters_on_transformers_models(name, tmp_path):
    theirs = saved(name, tmp_path / "saved")
    card = read_model_card(tmp_path / "saved")
    model = assigned_model(card.config, read_weights(tmp_path / "saved", card.config))
    lora = settings(rank=3, rslora=True)
    add_adapters(model, lora)
    adapters = {key: p for key, p in model.named_parameters() if ".lora_" in key}
    for parameter in adapters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    write_adapters(tmp_path / "adapters", adapters, lora)
    images, tokens = batch(3)
    with torch.no_grad():
        before = theirs(**their_inputs(theirs, images.float(), tokens))
        image, text, *_ = model(images.float(), tokens)
        adapted = import_peft().PeftModel.from_pretrained(theirs, str(tmp_path / "adapters")).eval()
        after = adapted(**their_inputs(theirs, images.float(), tokens))
    for ours, kind in ((image, "image_embeds"), (text, "text_embeds")):
        torch.testing.assert_close(ours, after[kind], rtol=0, atol=1e-5)
        assert (ours - before[kind]).abs().max() > 1e-2


def test_refusals(tmp_path):
    with pytest.raises(CheckpointError, match=r"visual.trunk.blocks.0.attn.qkv has an adapter, and transformers"):
        write_adapters(tmp_path, {"visual.trunk.blocks.0.attn.qkv.lora_A.default.weight": torch.ones(2, 8)}, settings())
    config = family("roberta", tmp_path)
    with pytest.raises(ConfigError, match=r"lora.targets 'q_proj': .* they have c_fc, c_proj$"):
        add_adapters(build_model(config), settings(targets=["q_proj"]))
    with pytest.raises(ConfigError, match=r"lora.towers 'image': .* no linear layers"):
        add_adapters(build_model(family("resnet", tmp_path)), settings())


class _ReadsWeight(nn.Module):
    """Reads the weight of a layer, as attention in timm's EVA, BEiT and Swin V2 does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.qkv = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qkv.weight, self.qkv.bias)


def test_layers_that_a_tower_does_not_call_are_refused(tmp_path):
    with torch.device("meta"):
        model = build_model(family("siglip", tmp_path))
    for block in model.visual.get_submodule("trunk").blocks:
        block.attn.qkv = _ReadsWeight(block.attn.qkv)
    add_adapters(model, settings())
    with pytest.raises(ConfigError, match="reads the weights of its layers 'qkv' without calling the layers"):
        trace_tower(model.train(), "image", 8)
