"""--pretrained-image and --pretrained-text: weights of one tower from every kind of file, also at another image size.

open_clip, timm and transformers write the files. Their own functions interpolate the positions.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megaclip.checkpoint.open_clip_weights import pretrained_weights
from megaclip.errors import CheckpointError
from megaclip.models import DualEncoder, ModelConfig, OpenClipConfig, build_model
from megaclip.models.open_clip_keys import to_open_clip
from megaclip.models.weights import fit_tower, stretched_positions
from tests.open_clip_families import family, own_description
from tests.pretrained import load_pretrained, load_pretrained_tower
from tests.tolerances import POSITIONS, assert_close

OWN = ModelConfig.from_dict(
    {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 8, "layers": 2, "width": 32, "head_width": 8, "patch_size": 2},
        "text_cfg": {"context_length": 6, "vocab_size": 32, "width": 32, "heads": 4, "layers": 1},
    }
)


def built(config: ModelConfig | OpenClipConfig, seed: int) -> DualEncoder:
    torch.manual_seed(seed)
    return build_model(config)


def values(model: DualEncoder) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_weights().items()}


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, path)
    return path


def assert_loaded(model: DualEncoder, before: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that the parameters in `expected` have its values, and that all others are unchanged."""
    for name, value in values(model).items():
        assert torch.equal(value, expected.get(name, before[name])), name
    assert any(not torch.equal(before[name], value) for name, value in expected.items())


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("alone", [False, True])
def test_one_tower_of_our_models_from_open_clips_files(tmp_path, tower, alone):
    source, model = built(OWN, 1), built(OWN, 2)
    before, prefix = values(model), {"image": "visual.", "text": "text."}[tower]
    theirs = to_open_clip(dict(source.state_dict()), OWN.replace(custom_text=True))
    if alone:  # visual.state_dict() of open_clip's model
        theirs = {name.removeprefix(prefix): value for name, value in theirs.items() if name.startswith(prefix)}
    line = load_pretrained_tower(model, tower, written(tmp_path, theirs))
    assert_loaded(model, before, {name: v for name, v in values(source).items() if name.startswith(prefix)})
    assert f"{tower} tower: " in line and ("tower alone" in line) == alone


def test_a_text_tower_of_open_clips_class_clip(tmp_path):
    """Its parameters are at the top level of the file, beside the image tower."""
    source, model = built(OWN, 1), built(OWN, 2)
    before = values(model)
    load_pretrained_tower(model, "text", written(tmp_path, to_open_clip(dict(source.state_dict()), OWN)).parent)
    assert_loaded(model, before, {name: v for name, v in values(source).items() if name.startswith("text.")})


def test_a_timm_trunk_at_another_image_size(tmp_path):
    """timm's file contains a classifier, and positions for 6 x 6 patches."""
    config = family("vit", tmp_path)
    import timm  # after open_clip, which makes it importable
    from timm.models.vision_transformer import checkpoint_filter_fn

    theirs = timm.create_model("small_vit", img_size=96, num_classes=10).state_dict()
    model = built(config, 2)
    before = values(model)
    expected = checkpoint_filter_fn(dict(theirs), model.visual.trunk)
    expected = {name: value for name, value in expected.items() if not name.startswith("head.")}
    assert theirs["pos_embed"].shape[1] == 37 and expected["pos_embed"].shape[1] == 17
    line = load_pretrained_tower(model, "image", written(tmp_path, theirs))
    assert_loaded(model, before, {f"visual.trunk.{name}": value for name, value in expected.items()})
    assert (
        "visual.head.proj.weight keep their initial values" in line
        and "parameters of the file that are not used: 2" in line
    )


@pytest.mark.parametrize("name", ["siglip", "eva02"])
def test_own_towers_read_a_timm_trunk_at_another_image_size_as_open_clips_towers_do(tmp_path, name):
    description = own_description(name)
    description["vision_cfg"] |= {"image_size": 96, "timm_model_kwargs": {"img_size": 96}}
    import timm

    trunk = timm.create_model(description["vision_cfg"]["timm_model_name"], num_classes=10)
    path, loaded = written(tmp_path, trunk.state_dict()), []
    for kind in (ModelConfig, OpenClipConfig):
        config = kind.from_dict(description)
        model = built(config, 2)
        line = load_pretrained_tower(model, "image", path)
        assert ("keep their initial values" in line) == (name == "eva02"), "the classifier is the projection"
        loaded.append(to_open_clip(values(model), config))
    own, expected = loaded
    assert own.keys() == expected.keys() and expected["visual.trunk.pos_embed"].shape[1] in (36, 37)
    for parameter in expected.keys() - {"visual.trunk.head.weight", "visual.trunk.head.bias"}:
        if parameter.startswith("visual."):
            assert_close(own[parameter], expected[parameter], POSITIONS, parameter)


@pytest.mark.parametrize(("classes", "loads"), [(0, False), (10, False), (16, True)])
def test_a_timm_trunk_whose_classifier_is_the_projection(tmp_path, classes, loads):
    """Only a classifier of the model's shape is read."""
    config = family("mobileclip", tmp_path)
    import timm

    theirs = timm.create_model("small_fastvit", num_classes=classes).state_dict()
    model = built(config, 2)
    before = values(model)
    line = load_pretrained_tower(model, "image", written(tmp_path, theirs))
    expected = {f"visual.trunk.{name}": value for name, value in theirs.items() if loads or "head." not in name}
    assert_loaded(model, before, expected)
    assert ("visual.trunk.head.fc.weight keep their initial values" in line) != loads


def test_open_clips_vision_transformer_at_another_image_size(tmp_path):
    config = family("open_clip", tmp_path)
    from open_clip.model import resize_pos_embed  # after the family, which makes it importable

    source = built(config, 1)
    model = built(config.replace(vision_cfg={**config.vision_cfg.model_dump(exclude_unset=True), "image_size": 96}), 2)
    before, expected = values(model), values(source)
    resize_pos_embed(expected, model)
    assert len(expected["visual.positional_embedding"]) == 37
    path = written(tmp_path, to_open_clip(values(source), config))
    load_pretrained_tower(model, "image", path)
    assert_loaded(model, before, {name: v for name, v in expected.items() if name.startswith("visual.")})
    load_pretrained(model, path)
    assert_loaded(model, before, expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("roberta", "RobertaForMaskedLM"),
        ("bert", "BertModel"),
        ("mt5", "MT5ForConditionalGeneration"),
        ("m2m_100", "M2M100Model"),
    ],
)
def test_a_hugging_face_text_model(tmp_path, name, kind):
    """Also one with the head of another task, or with a decoder."""
    import transformers

    config = family(name, tmp_path)
    torch.manual_seed(1)
    source = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(tmp_path / name))
    source.save_pretrained(tmp_path / "saved")
    encoder = source.get_encoder() if name in ("mt5", "m2m_100") else getattr(source, name, source)
    model = built(config, 2)
    before, theirs = values(model), dict(encoder.state_dict())
    line = load_pretrained_tower(model, "text", tmp_path / "saved")
    own = {key: f"text.transformer.{key}" for key in theirs if f"text.transformer.{key}" in before}
    assert len(own) == sum(key.startswith("text.transformer.") for key in before)
    assert_loaded(model, before, {full: theirs[key] for key, full in own.items()})
    assert "Hugging Face's text model; text.proj" in line


def test_the_encoders_own_embeddings_are_read_wherever_the_file_has_others(tmp_path):
    model = built(family("mt5", tmp_path), 2)
    name, prefix = "text.transformer.embed_tokens.weight", "text.transformer."
    own = {f"encoder.{n.removeprefix(prefix)}": v for n, v in values(model).items() if n.startswith(prefix)}
    others = {name: torch.zeros(2, 2) for name in ("shared.weight", "transformer.embed_tokens.weight")}
    for tensors in ({**others, **own}, {**own, **others}):
        weights, _ = fit_tower(model, "text", tensors, "file")
        assert torch.equal(weights[name], own["encoder.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("visual.proj"),
            r"39 parameters loaded, 1 missing \(first: visual.proj\), .*; use weights of the same",
        ),
        (lambda t: t.update({"visual.more": torch.ones(1)}), r"1 unexpected \(first: visual.more\)"),
        (lambda t: [t.pop(n) for n in list(t) if n != "logit_scale"], r"0 parameters loaded, 40 missing"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(tmp_path, change, message):
    theirs, model = to_open_clip(dict(built(OWN, 1).state_dict()), OWN), built(OWN, 2)
    change(theirs)
    before = values(model)
    with pytest.raises(
        CheckpointError, match=r"--pretrained-image .* does not fit the image tower, read as .*" + message
    ):
        load_pretrained_tower(model, "image", written(tmp_path, theirs))
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def _long_clip(positions, kept, factor):
    """Long-CLIP's formula at an integer ratio, element by element: between neighbours, and beyond the last one."""
    rows = [positions[n] for n in range(kept)]
    for n in range(kept, len(positions)):
        step = positions[n + 1] - positions[n] if n + 1 < len(positions) else positions[n] - positions[n - 1]
        rows += [positions[n] + step * j / factor for j in range(factor)]
    return torch.stack(rows)


@pytest.mark.parametrize("from_text_flag", [False, True])
def test_a_longer_context_keeps_the_first_positions_as_long_clip(tmp_path, from_text_flag):
    source = built(OWN, 1)
    longer = OWN.replace(text_cfg={**OWN.text_cfg.model_dump(exclude_unset=True), "context_length": 2 + 4 * 4})
    path = written(tmp_path, to_open_clip(values(source), OWN))
    flags = {"text": path} if from_text_flag else {}
    weights = pretrained_weights(built(longer, 2), path, **flags, kept_positions=2)
    expected = _long_clip(values(source)["text.positional_embedding"].double(), 2, 4)
    stretched = weights["text.positional_embedding"]
    assert stretched.shape == (18, 32) and torch.equal(stretched[:2], values(source)["text.positional_embedding"][:2])
    torch.testing.assert_close(stretched.double(), expected, rtol=0, atol=1e-7)
    table = torch.randn(77, 4)
    torch.testing.assert_close(stretched_positions(table, 248, 20), _long_clip(table, 20, 4))  # the paper's sizes
    third = stretched_positions(torch.arange(5.0)[:, None], 11, 1)[:, 0]  # by hand: ratio 10 / 4
    torch.testing.assert_close(third, torch.tensor([0.0, *(1 + k * 0.4 for k in range(10))]))
    for model, kept in ((source, 2), (built(longer, 2), 5)):  # nothing to stretch; one position could not be stretched
        with pytest.raises(CheckpointError, match=f"--keep-text-positions {kept} requires"):
            pretrained_weights(model, path, kept_positions=kept)
