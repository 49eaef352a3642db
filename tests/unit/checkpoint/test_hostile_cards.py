"""Model cards and model directories of unknown origin: bounded sizes, no code, no files from other folders."""

import json
import os
import sys
import time

import pytest

from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.model_card import CARD_NAME, OPENAI_PREPROCESS, read_model_card, write_model_card
from megaclip.checkpoint.open_clip_weights import write_weights
from megaclip.commands import import_open_clip
from megaclip.data import ImageTransform
from megaclip.engine.tokenizer_choice import tokenizer_of
from megaclip.errors import CheckpointError, ConfigError, MegaclipError
from megaclip.models import build_model, load_model_config
from megaclip.models.config import ModelConfig
from tests.pretrained import load_pretrained


@pytest.fixture(scope="module")
def config():
    return load_model_config("demo-tiny").replace(text_cfg={"vocab_size": 64})


@pytest.fixture
def directory(tmp_path, config):
    """Return an open_clip directory with a tokenizer."""
    place = tmp_path / "downloaded"
    write_model_card(place, config.replace(text_cfg={"hf_tokenizer_name": "sentencepiece"}), OPENAI_PREPROCESS)
    write_weights(place, build_model(config).state_dict(), config)
    (place / "tokenizer.json").write_text("{}")
    (place / "tokenizer.model").write_bytes(b"x")
    return place


def change_card(directory, change):
    path = directory / CARD_NAME
    card = json.loads(path.read_text())
    change(card)
    path.write_text(json.dumps(card))


@pytest.fixture
def run_import(monkeypatch):
    """Return a function that runs `megaclip import` in this process. It returns the error message, or ""."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["import_open_clip.py", *map(str, arguments)])
        try:
            import_open_clip.main()
        except (MegaclipError, SystemExit) as error:
            return str(error)
        return ""

    return run


SIZES = [
    ("vision_cfg", "layers", 10**9),
    ("text_cfg", "layers", 10**9),
    ("vision_cfg", "width", 64 * 10**9),
    ("text_cfg", "width", 8 * 10**12),
    ("vision_cfg", "image_size", 10**9),
    ("vision_cfg", "mlp_ratio", 1e15),
    ("text_cfg", "mlp_ratio", 1e300),
    ("text_cfg", "vocab_size", 10**18),
    ("text_cfg", "context_length", 10**12),
]


@pytest.mark.parametrize(("section", "key", "value"), [*SIZES, ("", "embed_dim", 10**30)])
def test_sizes_that_no_model_has_are_refused_at_once(config, section, key, value):
    description = config.to_open_clip()
    (description[section] if section else description)[key] = value
    began = time.process_time()
    with pytest.raises(ConfigError, match=rf"card: {section}\.?{key}: Input should be less than or equal to"):
        ModelConfig.from_dict(description, source="card")
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", ["secret.json", "notes.txt", "tokenizer.model"])
def test_import_copies_no_files_from_outside_the_directory(tmp_path, directory, run_import, name):
    secret = tmp_path / "secret"
    secret.write_text("a private key")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to("../secret")
    error = run_import(directory, tmp_path / "out")
    assert f"{name} is a link to {secret}, outside the directory" in error
    assert not (tmp_path / "out").exists()


def test_training_with_a_card_reads_no_tokenizer_from_outside_the_directory(tmp_path, directory):
    (tmp_path / "elsewhere.model").write_bytes(b"x")
    (directory / "tokenizer.model").unlink()
    (directory / "tokenizer.model").symlink_to(tmp_path / "elsewhere.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is a link to .*elsewhere\.model, outside"):
        tokenizer_of(read_model_card(directory))


def test_links_of_the_hugging_face_cache_and_inside_the_directory_are_followed(tmp_path, directory, run_import):
    """The cache keeps files in blobs/ and links to them from snapshots/COMMIT/."""
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    (snapshot / "folder.json").mkdir()
    assert run_import(snapshot, tmp_path / "out") == ""
    copied = {"tokenizer.json", "tokenizer.model", "vocab.json", CARD_NAME, MANIFEST, "open_clip_model.safetensors"}
    assert set(os.listdir(tmp_path / "out")) == copied
    assert not any((tmp_path / "out" / name).is_symlink() for name in copied)
    (tmp_path / "secret").touch()
    (snapshot / "more.json").symlink_to("../../../secret")  # beside the cache
    assert "outside the directory" in run_import(snapshot, tmp_path / "other")


@pytest.mark.parametrize("layers", [2, [1, 1, 1, 1]], ids=["own", "open_clip"])
@pytest.mark.parametrize("arguments", [{"trust_remote_code": True}, {"tokenizer_file": "/etc/passwd"}, {"clean": []}])
def test_tokenizer_arguments_that_load_code_or_files_are_refused(directory, layers, arguments):
    """open_clip passes these arguments to transformers, in a run and when it loads the exported model."""
    change_card(directory, lambda card: card["model_cfg"]["text_cfg"].update(tokenizer_kwargs=arguments))
    change_card(directory, lambda card: card["model_cfg"]["vision_cfg"].update(layers=layers))
    with pytest.raises(ConfigError, match=r"text_cfg\.tokenizer_kwargs.*only clean, language, strip_sep_token"):
        read_model_card(directory)


@pytest.mark.parametrize("name", ["/etc", "../../elsewhere", "a/../../b", "a\0b"])
def test_tokenizer_names_that_are_paths_to_other_folders_are_refused(directory, name):
    change_card(directory, lambda card: card["model_cfg"]["text_cfg"].update(hf_tokenizer_name=name))
    with pytest.raises(ConfigError, match=r"text_cfg\.hf_tokenizer_name"):
        read_model_card(directory)


PIXELS = [
    {"mean": [float("nan"), 0, 0]},
    {"std": [0, 1, 1]},
    {"mean": [[1], [1], [1]]},
    {"interpolation": ["bicubic"]},
    {"resize_mode": {"a": 1}},
]


@pytest.mark.parametrize("wrong", PIXELS)
def test_invalid_pixel_settings_are_refused(directory, wrong):
    change_card(directory, lambda card: card["preprocess_cfg"].update(wrong))
    with pytest.raises(ConfigError):
        ImageTransform(16, **read_model_card(directory).pixel_settings)


def test_weights_with_a_logit_bias_name_the_setting_that_they_require(tmp_path, config, run_import):
    biased = config.replace(init_logit_bias=-10.0)
    write_weights(tmp_path, build_model(biased).state_dict(), biased)
    model = tmp_path / "model.json"
    model.write_text(json.dumps(config.to_open_clip()))
    weights = tmp_path / "open_clip_model.safetensors"
    assert "add init_logit_bias to the model's JSON (SigLIP: -10" in run_import(
        weights, tmp_path / "out", "--model", model
    )
    with pytest.raises(CheckpointError, match=r"unexpected .*logit_bias.*add init_logit_bias to the model's JSON"):
        load_pretrained(build_model(config), weights)
    model.write_text(json.dumps(biased.to_open_clip()))
    assert run_import(weights, tmp_path / "out", "--model", model) == ""


def test_nothing_in_a_model_directory_is_run(tmp_path, directory, run_import):
    """Python files and remote code in a directory are neither imported nor copied."""
    evidence = tmp_path / "evidence"
    code = f"import os; os.mkdir({str(evidence)!r})"
    for name in ("tokenization_evil.py", "__init__.py", "setup.py", "sitecustomize.py"):
        (directory / name).write_text(code)
    auto_map = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(auto_map))
    assert run_import(directory, tmp_path / "out") == ""
    assert not evidence.exists() and not list((tmp_path / "out").glob("*.py"))
    assert sys.path.count(str(directory)) == 0
