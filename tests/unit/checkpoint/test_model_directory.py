"""Models that transformers has saved are imported, trained and exported with the features of transformers."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from megaclip.checkpoint import model_directory
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, read_model_card, write_model_card
from megaclip.checkpoint.model_directory import export_checkpoint, import_weights
from megaclip.checkpoint.open_clip_weights import assigned_model, read_weights, write_weights
from megaclip.checkpoint.verify import TOLERANCE, verify
from megaclip.commands import export_open_clip
from megaclip.data import ImageTransform, load_tokenizer
from megaclip.data.sentencepiece_training import train_sentencepiece
from megaclip.data.tokenizers import ClipTokenizer, SentencePieceTokenizer
from megaclip.engine.transformers_tokenizer import write_transformers_tokenizer
from megaclip.errors import MegaclipError
from megaclip.losses import ClipLoss, SigLipLoss
from megaclip.models import DualEncoder, build_model, load_model_config, meta_model
from megaclip.models.descriptions import describe
from megaclip.models.transformers_config import ANY_TOKENIZER, FIELDS, config_of, processor_of, read_card
from megaclip.models.transformers_keys import to_transformers
from megaclip.open_clip_package import import_torchvision

import_torchvision()
transformers = pytest.importorskip("transformers")

SIZE = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZE, "vocab_size": 99, "max_position_embeddings": 12, "pad_token_id": 1, "bos_token_id": 97}
IMAGE = {**SIZE, "image_size": 32, "patch_size": 8}


def clip(act: str, end: int) -> Any:
    text, image = ({**section, "hidden_act": act} for section in ({**TEXT, "eos_token_id": end}, IMAGE))
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=24))


def siglip(act: str) -> Any:
    text, image = ({**section, "hidden_act": act} for section in ({**TEXT, "eos_token_id": 98}, IMAGE))
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=image))


def siglip2() -> Any:
    text, image = {**TEXT, "eos_token_id": 98}, {**SIZE, "patch_size": 8, "num_patches": 16}
    return transformers.Siglip2Model(transformers.Siglip2Config(text_config=text, vision_config=image))


MODELS: dict[str, Callable[[], Any]] = {
    "CLIP": lambda: clip("quick_gelu", 98),
    "CLIP with the end of text of old files": lambda: clip("quick_gelu", 2),
    "CLIP with GELU": lambda: clip("gelu", 60),
    "SigLIP": lambda: siglip("gelu_pytorch_tanh"),
    "SigLIP with GELU": lambda: siglip("gelu"),
    "SigLIP 2": siglip2,
}


def saved(name: str, directory: Path, **options: Any) -> Any:
    """Save a random model in `directory`, and return it."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # every parameter has an effect
        torch.nn.init.normal_(parameter, std=0.2, mean=0.5 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(directory, **options)
    return model


def loaded(directory: Path) -> DualEncoder:
    card = read_model_card(directory)
    return assigned_model(card.config, read_weights(directory, card.config))


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (samples, 12), generator=generator)
    tokens[:, 7], tokens[:, 8] = 98, 60  # the highest id is at another position than some ends of text
    return torch.randn(samples, 3, 32, 32, generator=generator).double(), tokens


def their_inputs(model: Any, images: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    if model.config.model_type != "siglip2":
        return {"pixel_values": images, "input_ids": tokens}
    patches = torch.nn.functional.unfold(images, 8, stride=8).transpose(1, 2)  # (b, P, channel row column)
    return {
        "pixel_values": patches.unflatten(2, (3, 64)).transpose(2, 3).flatten(2),
        "pixel_attention_mask": torch.ones(len(images), 16, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[4, 4]] * len(images)),
        "input_ids": tokens,
    }


@pytest.mark.parametrize("name", MODELS)
def test_import_two_steps_and_export_give_transformers_features(name, tmp_path):
    theirs = saved(name, tmp_path / "saved").double()
    assert import_weights(tmp_path / "saved", tmp_path / "imported", None).complete
    ours, (images, tokens) = loaded(tmp_path / "imported").double(), batch(6)
    inputs = their_inputs(theirs, images, tokens)

    def compare(limit: float) -> None:
        found = theirs(**inputs)
        image, text, *_ = ours(images, tokens)
        torch.testing.assert_close(image, found.image_embeds, rtol=0, atol=limit)
        torch.testing.assert_close(text, found.text_embeds, rtol=0, atol=limit)

    compare(1e-7)  # transformers' Siglip2Model interpolates positions in float32
    loss = ClipLoss() if ours.logit_bias is None else SigLipLoss()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for _ in range(2):
        image, text, log_scale, *bias = ours(images, tokens)
        loss(image, text, log_scale.exp(), *bias).backward()
        theirs(**inputs, return_loss=True).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(1e-6)
    write_weights(tmp_path / "imported", dict(ours.named_weights()), ours.config)
    (tmp_path / "imported" / MANIFEST).unlink()
    export_checkpoint(tmp_path / "imported", tmp_path / "out", None, formats=["transformers"])
    with torch.no_grad():
        again = transformers.AutoModel.from_pretrained(tmp_path / "out").double()(**inputs)
        trained = theirs(**inputs)
    torch.testing.assert_close(again.logits_per_text, trained.logits_per_text, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_way_in_and_out_changes_no_name_and_no_bit(name, tmp_path, monkeypatch):
    saved(name, tmp_path / "saved")
    import_weights(tmp_path / "saved", tmp_path / "imported", None)
    monkeypatch.setattr(model_directory, "MAX_PART", 60_000)  # several files
    export_checkpoint(tmp_path / "imported", tmp_path / "out", None, formats=["transformers"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {}
    for part in set(index["weight_map"].values()):
        tensors |= load_file(tmp_path / "out" / part)
    before = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors.keys() == before.keys() == index["weight_map"].keys()
    assert all(torch.equal(value, before[key]) for key, value in tensors.items())
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / one) for one in ("saved", "out")]
    assert type(configs[0]) is type(configs[1])
    for section, fields in FIELDS["defaults"][configs[0].model_type].items():
        before, after = (getattr(config, section) if section else config for config in configs)
        assert {field: getattr(before, field) for field in fields} == {field: getattr(after, field) for field in fields}
    assert import_weights(tmp_path / "out", tmp_path / "again", None).complete  # reads the parts
    assert (tmp_path / "again" / "open_clip_model.safetensors").read_bytes() == (
        tmp_path / "imported" / "open_clip_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("left", ["model.safetensors", "open_clip_config.json"])
def test_files_of_another_model_are_not_left_to_be_read_instead(left, clip_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(model_directory, "MAX_PART", 60_000)  # no model.safetensors replaces the other
    import_weights(clip_directory, tmp_path / "imported", None)
    out = tmp_path / "out"
    out.mkdir()
    (out / left).write_bytes(b"{}")
    with pytest.raises(MegaclipError, match=f"also has {left} of another model"):
        export_checkpoint(tmp_path / "imported", out, None, overwrite=True, formats=("transformers",))
    assert not (out / MANIFEST).exists()
    (out / left).unlink()
    export_checkpoint(tmp_path / "imported", out, None, overwrite=True, formats=("transformers",))


def test_weights_of_old_programs_in_bfloat16_with_buffers_are_read(tmp_path):
    """torch.save instead of safetensors, wrapped names, and the ids of positions, which are buffers."""
    saved("CLIP", tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    (tmp_path / "saved" / "model.safetensors").unlink()
    buffers = {f"{tower}_model.embeddings.position_ids": torch.arange(12)[None] for tower in ("text", "vision")}
    halves = {f"module.{name}": value.bfloat16() for name, value in tensors.items()}
    torch.save(halves | {f"module.{name}": ids for name, ids in buffers.items()}, tmp_path / "saved/pytorch_model.bin")
    assert import_weights(tmp_path / "saved", tmp_path / "imported", None).complete
    export_checkpoint(tmp_path / "imported", tmp_path / "out", None, formats=["transformers"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value.bfloat16().float()) for name, value in tensors.items())


@pytest.mark.parametrize("kind", FIELDS["defaults"])
def test_defaults_are_those_of_transformers_classes(kind):
    config = transformers.AutoConfig.for_model(kind)
    for section, fields in FIELDS["defaults"][kind].items():
        of_class = type(getattr(config, section))() if section else config
        theirs = {name: getattr(of_class, name) for name in fields}
        assert theirs == fields | ({"projection_size": 768} if "projection_size" in fields else {})
        known = fields.keys() | set(FIELDS["neutral"]) | set(FIELDS["off"])
        assert set(of_class.to_dict()) <= known, "every field of the class is known"


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    """Return a function that sets fields of a JSON file of a directory. A name has its section before a "__"."""

    def change(directory: Path) -> None:
        path = directory / file
        content = json.loads(path.read_text()) if path.exists() else {}
        for name, value in values.items():
            section, _, field = name.rpartition("__")
            (content[section] if section else content)[field] = value
        path.write_text(json.dumps(content))

    return change


def in_parts(**changes: str) -> Callable[[Path], None]:
    """Return a function that makes the weights a model in parts, of which some entries of the index are changed."""

    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").rename(directory / "part.safetensors")
        listed = {name: "part.safetensors" for name in tensors} | changes
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))

    return change


def reshaped(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = "text_model.encoder.layers.0.self_attn.v_proj.weight"
    save_file(tensors | {name: torch.zeros(32, 31)}, directory / "model.safetensors")


CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no model_type": (changed(CONFIG, model_type=None), "has no model_type; expected clip, siglip"),
    "a list as model_type": (changed(CONFIG, model_type=["clip"]), r"has the model_type ..clip.\W+; expected clip"),
    "another model": (changed(CONFIG, model_type="bert"), "has the model_type 'bert'; expected clip"),
    "Chinese CLIP": (changed(CONFIG, model_type="chinese_clip"), "has the model_type 'chinese_clip'"),
    "a tower": (changed(CONFIG, model_type="siglip_vision_model"), "--pretrained-text read a tower alone"),
    "section": (changed(CONFIG, text_config=[1]), "text_config is not a JSON object"),
    "unknown": (changed(CONFIG, vision_config__rope_theta=1.0), "vision_config.rope_theta 1.0 is not known"),
    "unknown and off": (changed(CONFIG, text_config__use_bias=False), "text_config.use_bias false is not known"),
    "pruned": (changed(CONFIG, text_config__pruned_heads={"0": [1]}), "text_config.pruned_heads .* is not known"),
    "dropout": (changed(CONFIG, text_config__attention_dropout=0.1), "text_config.attention_dropout 0.1: .* only 0 "),
    "activation": (changed(CONFIG, vision_config__hidden_act="relu"), "vision_config.hidden_act 'relu': .* gelu"),
    "two activations": (changed(CONFIG, text_config__hidden_act="gelu"), 'hidden_act "gelu": .* only "quick_gelu"'),
    "channels": (changed(CONFIG, vision_config__num_channels=1), "vision_config.num_channels 1: .* only 3 "),
    "heads": (changed(CONFIG, text_config__num_attention_heads=5), "hidden_size 32 is not a multiple .* 5"),
    "a list of ends": (changed(CONFIG, text_config__eos_token_id=[1, 2]), r"eos_token_id is \[1, 2\]"),
    "text": (changed(CONFIG, text_config__hidden_size="32"), 'hidden_size is "32"; expected a value like 512'),
    "infinite": (changed(CONFIG, vision_config__hidden_size=1 << 60), "vision_cfg.width"),
    "not square": (changed(CONFIG, vision_config__image_size=[32, 64]), r"image_size is \[32, 64\]"),
    "code": (changed(CONFIG, auto_map={"AutoModel": "a.B"}), "auto_map .* is not known"),
    "NaFlex": (changed(PROCESSOR, max_num_patches=256), "keeps the aspect ratio of images .NaFlex."),
    "resampling": (changed(PROCESSOR, resample=1, size=32, crop_size=32), "resample 1; expected 2 .bilinear. or 3"),
    "a list as filter": (changed(PROCESSOR, resample=[3], size=32, crop_size=32), r"resample \[3\]; expected 2 "),
    "a text as factor": (changed(PROCESSOR, rescale_factor="1", size=32, crop_size=32), 'rescale_factor "1": '),
    "a list as processor": (changed("processor_config.json", image_processor=[1]), "image_processor is not a JSON"),
    "no scaling": (changed(PROCESSOR, rescale_factor=1, size=32, crop_size=32), "rescale_factor 1: "),
    "margin": (changed(PROCESSOR, size={"shortest_edge": 36}, crop_size=32), "does not give the model's 32 x 32 "),
    "padding": (changed(PROCESSOR, do_pad=True), "do_pad true is not known"),
    "no mean": (changed(PROCESSOR, image_mean=None, size=32, crop_size=32), "image_mean is null; expected three"),
    "one deviation": (changed(PROCESSOR, image_std=0.5, size=32, crop_size=32), "image_std is 0.5; expected three"),
    "wrong shape": (reshaped, r"cannot be stacked: their shapes are \[32, 32\], \[32, 32\], \[32, 31\]"),
    "missing part": (in_parts(logit_scale="part2.safetensors"), "lists part2.safetensors, which does not exist"),
    "missing tensor": (in_parts(more="part.safetensors"), "part.safetensors lacks more"),
    "part outside": (in_parts(logit_scale="../saved/part.safetensors"), "expected names of files beside it"),
    "absolute part": (in_parts(logit_scale="/etc/passwd"), "'/etc/passwd'; expected names of files beside it"),
    "empty index": (
        lambda folder: (in_parts()(folder), changed("model.safetensors.index.json", weight_map=[])(folder)),
        "has no weight_map of names and files",
    ),
}


@pytest.fixture(scope="module")
def clip_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("clip") / "saved"
    saved("CLIP", directory)
    return directory


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_exactly_is_one_line_and_nothing_is_written(case, clip_directory, tmp_path):
    change, message = REFUSED[case]
    shutil.copytree(clip_directory, tmp_path / "saved")
    change(tmp_path / "saved")
    with pytest.raises(MegaclipError, match=message) as error:
        import_weights(tmp_path / "saved", tmp_path / "out", None)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


NEUTRAL = {
    "text_config__top_k": 50,
    "text_config__is_decoder": False,
    "vision_config__id2label": {"0": "a"},
    "vision_config__dropout": 0.0,
    "text_config__prefix": None,
    "initializer_factor": 2.0,
}


def test_a_full_old_configuration_gives_the_same_model(clip_directory, tmp_path):
    """Old files repeat each section under another name, which replaces it, and hold fields of text generation."""
    shutil.copytree(clip_directory, tmp_path / "saved")
    expected = read_card(clip_directory / CONFIG)
    changed(CONFIG, **NEUTRAL)(tmp_path / "saved")
    sections = json.loads((tmp_path / "saved" / CONFIG).read_text())
    old = {f"{name}_dict": sections[name] for name in ("text_config", "vision_config")}
    changed(CONFIG, text_config={"hidden_size": 64}, vision_config=None, **old)(tmp_path / "saved")
    assert read_card(tmp_path / "saved" / CONFIG) == expected


PROCESSORS: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "CLIP": ("CLIP", {}, ("shortest", "bicubic")),
    "old CLIP": ("CLIP", {"size": 32, "crop_size": 32, "resample": 2}, ("shortest", "bilinear")),
    "squashed": ("CLIP", {"size": {"height": 32, "width": 32}, "do_center_crop": False}, ("squash", "bicubic")),
    "not normalised": ("CLIP", {"do_normalize": False, "size": 32, "crop_size": 32}, ("shortest", "bicubic")),
    "SigLIP": ("SigLIP", {}, ("squash", "bicubic")),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_of_an_imported_processor_and_its_export_are_transformers(case, tmp_path):
    name, values, (mode, interpolation) = PROCESSORS[case]
    saved(name, tmp_path / "saved")
    kind = transformers.CLIPImageProcessorPil if name == "CLIP" else transformers.SiglipImageProcessorPil
    square = {"height": 32, "width": 32}
    size = {"size": {"shortest_edge": 32}, "crop_size": square} if name == "CLIP" else {"size": square}
    theirs = kind(**{**size, **values})
    theirs.save_pretrained(tmp_path / "saved")
    card = read_model_card(tmp_path / "saved")
    assert (card.preprocess_cfg["resize_mode"], card.preprocess_cfg["interpolation"]) == (mode, interpolation)
    export_checkpoint(tmp_path / "saved", tmp_path / "out", None, formats=["transformers"])
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    transform = ImageTransform(card.config.vision_cfg.image_size, **card.pixel_settings)
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 72), (90, 80), (32, 32)):
        picture = Image.fromarray(torch.randint(256, (*shape, 3), dtype=torch.uint8, generator=generator).numpy())
        picture.save(file := io.BytesIO(), "PNG")
        expected = theirs(picture, return_tensors="pt").pixel_values
        torch.testing.assert_close(transform.normalise(transform(file.getvalue())[None]), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(again(picture, return_tensors="pt").pixel_values, expected, rtol=0, atol=1e-6)


def own_model(directory: Path, **text: Any) -> None:
    """Write a small model of MegaCLIP's towers with CLIP's tokenizer, or that of `text`."""
    description = {
        **{"embed_dim": 24, "quick_gelu": True},
        "vision_cfg": {"image_size": 32, "patch_size": 8, "layers": 2, "width": 32, "head_width": 8},
        "text_cfg": {"context_length": 16, "width": 32, "heads": 4, "layers": 2, **text},
    }
    config = describe(description, "test")
    directory.mkdir()
    write_model_card(directory, config, OPENAI_PREPROCESS)
    write_weights(directory, dict(build_model(config).named_weights()), config)


def test_both_formats_in_one_folder_are_verified_and_uploaded(tmp_path, monkeypatch, capsys):
    own_model(tmp_path / "own")
    calls = []
    api = SimpleNamespace(
        create_repo=lambda name, **options: calls.append((name, options)),
        upload_folder=lambda repo_id, folder_path: calls.append((repo_id, sorted(os.listdir(folder_path)))) or "URL",
    )
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    flags = ["--format", "both", "--verify", "--push-to-hub", "me/model"]
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "own"), str(tmp_path / "out"), *flags])
    export_open_clip.main()  # exits if a library's features, pixels or tokens differ
    printed = capsys.readouterr().out
    for library in ("open_clip", "transformers"):
        assert f"export_captions_differing {library} 0 of 6" in printed
    assert calls[0] == ("me/model", {"private": True, "exist_ok": True}) and "uploaded to URL" in printed
    assert {"config.json", "model.safetensors", "open_clip_config.json", "open_clip_model.safetensors"} <= set(
        calls[1][1]
    )
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    tokens = processor(text=["a photo of a cat"], return_tensors="pt").input_ids
    assert tokens.tolist() == [[49406, 320, 1125, 539, 320, 2368, 49407]]
    again = import_weights(tmp_path / "out", tmp_path / "again", None)
    assert again.complete and read_model_card(tmp_path / "again").config == read_model_card(tmp_path / "own").config


def test_verify_finds_another_model_processor_and_tokenizer(tmp_path):
    own_model(tmp_path / "own")
    card = read_model_card(tmp_path / "own")
    export_checkpoint(
        tmp_path / "own", tmp_path / "out", None, formats=["transformers"], write_tokenizer=write_transformers_tokenizer
    )
    model, tokenize = loaded(tmp_path / "own"), ClipTokenizer(16)
    transform = ImageTransform(32, **card.pixel_settings)

    def difference(**arguments: Any) -> float:
        given = {"captions": ["a cat"], "pixels": lambda file: transform.normalise(transform(file)[None])[0]}
        return verify(tmp_path / "out", model, library="transformers", **{"tokenize": tokenize, **given, **arguments})

    assert difference().passed
    shifted = ImageTransform(32, **{**card.pixel_settings, "interpolation": "bilinear"})
    assert not difference(pixels=lambda file: shifted.normalise(shifted(file)[None])[0]).passed
    assert difference(tokenize=lambda captions: tokenize([f"{one} s" for one in captions])).captions_differing == 1
    changed(CONFIG, vision_config__hidden_act="gelu")(tmp_path / "out")
    assert difference().max_abs_diff > TOLERANCE


@pytest.mark.parametrize("clean", ["whitespace", "canonicalize"])
def test_cleaning_of_captions_is_part_of_the_exported_tokenizer(clean, tmp_path):
    captions = [f"two dogs {word} in the snow" for word in ("playing", "run", "sleep", "sit", "jump")]
    train_sentencepiece(captions, tmp_path / "spm.model", vocab_size=60, model_type="unigram")
    text = {"hf_tokenizer_name": ANY_TOKENIZER, "pool_type": "eos", "eos_id": 3, "vocab_size": 60}
    own_model(tmp_path / "own", **text, tokenizer_kwargs={"clean": clean})
    SentencePieceTokenizer(tmp_path / "spm.model", 16).write_open_clip(tmp_path / "own")
    export_checkpoint(
        tmp_path / "own", tmp_path / "out", None, formats=["transformers"], write_tokenizer=write_transformers_tokenizer
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    captions = ["Two DOGS,   playing_in the snow!", "a (small) cat", ""]
    found = theirs(captions, padding="max_length", truncation=True, max_length=16, return_tensors="pt").input_ids
    assert torch.equal(found, load_tokenizer(str(tmp_path / "own"), 16, options={"clean": clean})(captions))


REFUSED_EXPORTS = {
    "ViT-B-16-SigLIP-i18n-256": None,
    "ViT-SO400M-14-SigLIP2-378": None,
    "ViT-H-14-378-quickgelu": None,
    "xlm-roberta-base-ViT-B-32": 'text_cfg.hf_model_name "xlm-roberta-base": ',
    "RN50": r"vision_cfg.layers \[3, 4, 6, 3\]",
    "convnext_base": "vision_cfg.timm_model_name convnext_base: ",
    "ViT-H-14-CLIPA": "vision_cfg.no_ln_pre true",
}


@pytest.mark.parametrize("name", REFUSED_EXPORTS)
def test_a_preset_is_exportable_or_the_setting_is_named(name):
    description = load_model_config(name).to_open_clip()
    if REFUSED_EXPORTS[name] is None:
        with torch.device("meta"):
            config = config_of(description)
            theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config)).state_dict()
        model = meta_model(load_model_config(name))
        ours = to_transformers(dict(model.named_weights()))
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    else:
        with pytest.raises(MegaclipError, match=REFUSED_EXPORTS[name]):
            config_of(description)


@pytest.mark.parametrize("wrong", [{"mean": None}, {"std": 0.5}, {"interpolation": ["bicubic"]}, {"resize_mode": []}])
def test_pixel_settings_of_a_card_that_no_processor_has_are_refused(wrong):
    with pytest.raises(MegaclipError, match=r"preprocess_cfg .* use --format open_clip"):
        processor_of({**OPENAI_PREPROCESS, **wrong}, 32, "clip")


def test_a_card_with_another_kind_of_model_is_exported_as_its_towers():
    assert config_of(load_model_config("ViT-B-32").to_open_clip(), "siglip2")["model_type"] == "clip"
    assert config_of(load_model_config("ViT-B-16-SigLIP").to_open_clip(), "x")["model_type"] == "siglip"


def test_a_siglip2_whose_patches_do_not_cover_the_image_is_refused():
    with pytest.raises(MegaclipError, match=r"vision_cfg.image_size 384: "):
        config_of(load_model_config("ViT-SO400M-14-SigLIP-384").to_open_clip(), "siglip2")


def test_settings_of_training_are_in_the_readme_and_names_of_data_only_if_asked():
    state = {
        **{"step": 300, "samples_consumed": 76800, "global_batch": 256, "optimizer": "AdamW", "data": {"samples": 9}},
        "settings": {
            "arguments": {"train_data": ["s3://private/{00..99}.tar"], "lr_scheduler": "cosine"},
            "ds_config": {"megaclip": {"loss": "clip"}, "optimizer": {"params": {"lr": 0.002}}},
        },
    }
    text = model_directory.readme(["open_clip", "transformers"], state, data_names=False)
    assert "| samples seen | 76800 |" in text and "| lr | 0.002 |" in text and "private" not in text
    assert "s3://private" in model_directory.readme(["open_clip"], state, data_names=True)
