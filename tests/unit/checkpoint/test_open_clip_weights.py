"""open_clip's directory format: open_clip loads our exports, and bad files raise one-line errors."""

import copy
import json
import os
import resource
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaclip.checkpoint import manifest
from megaclip.checkpoint.durable import checksum
from megaclip.checkpoint.manifest import MANIFEST
from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, remove_earlier_files, write_model_card
from megaclip.checkpoint.model_directory import import_weights
from megaclip.checkpoint.open_clip_weights import assigned_model, pretrained_weights, read_weights, write_weights
from megaclip.checkpoint.verify import TOLERANCE, verify
from megaclip.commands import import_open_clip as import_open_clip_command
from megaclip.data import load_tokenizer
from megaclip.data.sentencepiece_training import train_sentencepiece
from megaclip.errors import CheckpointError
from megaclip.models import build_model, load_model_config
from megaclip.models.open_clip_keys import to_open_clip
from megaclip.models.weights import LoadReport, compare_weights
from megaclip.open_clip_package import import_open_clip
from tests.pretrained import load_pretrained
from tests.tolerances import EXPORT, POSITIONS, assert_close, assert_far


@pytest.fixture(scope="module")
def config():
    """Return small towers with CLIP's vocabulary, so that open_clip's own tokenizer can be used."""
    text = {"vocab_size": 49408, "width": 24, "heads": 3, "pool_type": "argmax"}
    return load_model_config("demo-tiny").replace(text_cfg=text)


@pytest.fixture(scope="module")
def model(config):
    torch.manual_seed(7)
    return build_model(config).eval()


@pytest.fixture
def exported(tmp_path, config, model):
    directory = tmp_path / "exported"
    write_model_card(directory, config, {**OPENAI_PREPROCESS, "mean": [0.5, 0.5, 0.5], "resize_mode": "squash"})
    write_weights(directory, model.state_dict(), config)
    return directory


def open_clips_state_dict(model):
    return {name: value.clone() for name, value in to_open_clip(model.state_dict(), model.config).items()}


def test_all_ranks_read_initial_weights_and_rank_0_names_what_is_not_read(model, tmp_path, warnings, monkeypatch):
    torch.save({"state_dict": open_clips_state_dict(model), "model": {"a": torch.ones(1)}}, tmp_path / "weights.pt")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        pretrained_weights(model, tmp_path / "weights.pt")
        assert len(warnings.messages) == (rank == "0")


def assert_same_weights(got, model):
    expected = model.state_dict()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


# ------------------------------------------------------------------------------------------------ writing, verifying


def test_counts_of_batch_norms_are_not_rounded():
    """float32 has no odd integers above 2**24."""
    resnet = load_model_config("RN50").replace(vision_cfg={"layers": [1, 1, 1, 1], "width": 8}, text_cfg={"layers": 1})
    weights, name = dict(build_model(resnet).named_weights()), "visual.bn1.num_batches_tracked"
    weights[name] = torch.tensor(2**24 + 1)
    assert int(assigned_model(resnet, weights).named_weights()[name]) == 2**24 + 1


def test_open_clip_loads_an_exported_directory_with_equal_features_and_tokens(exported, model, config):
    theirs, _, _ = import_open_clip().create_model_and_transforms(f"local-dir:{exported}")
    preprocess = theirs.visual.preprocess_cfg
    assert [preprocess[key] for key in ("mean", "resize_mode", "size")] == [[0.5, 0.5, 0.5], "squash", (24, 24)]
    result = verify(exported, model, load_tokenizer("clip", config.text_cfg.context_length))
    assert result.passed
    assert EXPORT.limit == TOLERANCE
    assert_close(result.max_abs_diff, 0.0, EXPORT, size=1)
    assert (result.captions_compared, result.captions_differing) == (6, 0)


@pytest.mark.parametrize("parameter", ["visual.proj", "logit_scale"])
def test_verification_fails_if_one_parameter_differs(exported, model, parameter):
    torch.manual_seed(0)  # a change of one number might be too small without this seed
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_parameter(parameter).add_(torch.randn_like(changed.get_parameter(parameter)) * 1e-2)
    result = verify(exported, changed)
    assert_far(result.max_abs_diff, 0.0, EXPORT, f"another {parameter}", size=1)
    assert not result.passed
    assert result.captions_compared == 0


def test_verification_counts_captions_with_different_tokens(exported, model, config):
    tokenizer = load_tokenizer("clip", config.text_cfg.context_length)
    result = verify(exported, model, lambda captions: tokenizer([caption[:12] for caption in captions]))
    assert result.captions_differing == 5  # all except the empty caption
    assert not result.passed


def test_verification_passes_with_a_sentencepiece_tokenizer(tmp_path, config):
    pytest.importorskip("transformers", reason="open_clip reads Hugging Face tokenizers through transformers")
    captions = [f"a {colour} {thing}" for colour in ("red", "green", "blue") for thing in ("cat", "dog", "house")]
    tokenizer = train_sentencepiece(captions * 5, tmp_path / "tokenizer.model", vocab_size=60)
    additions = tokenizer.write_open_clip(tmp_path / "out")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"), config.text_cfg.context_length)
    additions |= {"context_length": config.text_cfg.context_length, "vocab_size": tokenizer.vocab_size}
    small = build_model(config.replace(text_cfg=additions)).eval()
    write_model_card(tmp_path / "out", small.config, OPENAI_PREPROCESS, [tmp_path / "tokenizer.model"])
    write_weights(tmp_path / "out", small.state_dict(), small.config)
    result = verify(tmp_path / "out", small, tokenizer)
    assert result.passed
    assert (result.captions_compared, result.captions_differing) == (6, 0)


def test_verification_without_weights_raises(tmp_path, model, config):
    write_model_card(tmp_path, config, OPENAI_PREPROCESS)
    with pytest.raises(CheckpointError, match="open_clip cannot load"):
        verify(tmp_path, model)


def test_open_clip_loads_an_exported_custom_text_model(tmp_path, config, model):
    custom = config.replace(custom_text=True)
    write_model_card(tmp_path, custom, OPENAI_PREPROCESS)
    write_weights(tmp_path, model.state_dict(), custom)
    assert "text.token_embedding.weight" in load_file(tmp_path / "open_clip_model.safetensors")
    assert verify(tmp_path, assigned_model(custom, model.state_dict())).passed


def test_only_complete_weights_are_written_and_in_float32(tmp_path, config, model):
    path = write_weights(tmp_path, {name: value.bfloat16() for name, value in model.state_dict().items()}, config)
    written = load_file(path)
    assert {value.dtype for value in written.values()} == {torch.float32}
    assert written["logit_scale"].shape == ()
    assert os.listdir(tmp_path) == [path.name]
    broken = dict(model.state_dict())
    del broken["visual.proj"]
    with pytest.raises(CheckpointError, match=r"1 missing \(first: visual\.proj\)"):
        write_weights(tmp_path, broken, config)


def test_tokenizer_files_are_copied_beside_the_card(tmp_path, config):
    source = tmp_path / "tokenizer.model"
    source.write_bytes(b"x")
    write_model_card(tmp_path / "out", config, OPENAI_PREPROCESS, [source])
    write_model_card(tmp_path / "out", config, OPENAI_PREPROCESS, [tmp_path / "out" / "tokenizer.model"])
    assert sorted(os.listdir(tmp_path / "out")) == ["open_clip_config.json", "tokenizer.model"]


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("visual.proj", torch.zeros(1).expand(10**9, 10**6)),  # 4 bytes in the file, 4 PB if copied
        ("visual.positional_embedding", torch.zeros(20, 96)),  # no square
    ],
)
def test_weights_of_another_shape_are_refused_before_they_are_copied(tmp_path, model, config, name, value):
    torch.save(open_clips_state_dict(model) | {name: value}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=rf"1 with a different shape \(first: {name}"):
        load_pretrained(build_model(config), tmp_path / "other.pt")


# ------------------------------------------------------------------------------------------------ starting from weights


def test_weights_that_are_not_finite_are_refused(tmp_path, model, config):
    state_dict = open_clips_state_dict(model) | {"ln_final.bias": torch.full((24,), float("nan"))}
    save_file(state_dict, path := tmp_path / "bad.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1 of \d+ parameters hold NaN or infinite values \(first: text.ln_final"
    ):
        load_pretrained(build_model(config), path)


def test_one_tower_as_a_whole_model_is_answered_with_the_flag_for_towers(tmp_path, model, config):
    tower = {name.removeprefix("visual."): value for name, value in open_clips_state_dict(model).items()}
    save_file(tower, path := tmp_path / "tower.safetensors")
    with pytest.raises(CheckpointError, match="the file has no image tower of open_clip; --pretrained-image"):
        load_pretrained(build_model(config), path)
    smaller = LoadReport(("logit_scale",), ("visual.ln_pre.bias",), (), (("visual.proj", (64, 32), (32, 32)),))
    assert smaller.advice.startswith("use the model description")


@pytest.mark.parametrize(("image_size", "context_length"), [(32, 40), (16, 10)])
def test_other_image_size_or_context_length_gives_open_clips_weights(exported, config, image_size, context_length):
    other = config.replace(vision_cfg={"image_size": image_size}, text_cfg={"context_length": context_length})
    write_model_card(exported, other, OPENAI_PREPROCESS)
    theirs = import_open_clip().create_model(f"local-dir:{exported}").state_dict()
    ours = build_model(other)
    load_pretrained(ours, exported)
    for name, value in open_clips_state_dict(ours).items():
        assert_close(value, theirs[name], POSITIONS, name)


def test_clip_weights_get_the_initial_logit_bias_of_the_model(exported, model, config):
    biased = build_model(config.replace(init_logit_bias=-10.0))
    load_pretrained(biased, exported)
    assert biased.logit_bias.tolist() == [-10.0]
    assert torch.equal(biased.logit_scale, model.logit_scale)


def test_weights_that_fit_only_partly_are_refused_and_reported(tmp_path, model, config):
    state_dict = open_clips_state_dict(model)
    del state_dict["ln_final.weight"]
    state_dict["visual.ln_post.bias"] = torch.zeros(5)
    state_dict["visual.transformer.resblocks.0.attn.in_proj_bias"] = torch.zeros(7)
    state_dict["visual.head"] = torch.zeros(1)
    save_file(state_dict, tmp_path / "partial.safetensors")
    fresh = build_model(config)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(
        CheckpointError, match=r"4 missing \(first: .*, 2 unexpected \(first: .*, 1 with a different shape"
    ):
        load_pretrained(fresh, tmp_path / "partial.safetensors")
    assert_same_weights(before, fresh)

    report = compare_weights(fresh, read_weights(tmp_path / "partial.safetensors", config))
    biases = {f"visual.transformer.resblocks.0.attn.{kind}_proj.bias" for kind in "qkv"}
    assert set(report.missing) == biases | {"text.ln_final.weight"}
    assert set(report.unexpected) == {"visual.head", "visual.transformer.resblocks.0.attn.in_proj_bias"}
    assert report.mismatched == (("visual.ln_post.bias", (96,), (5,)),)


# ------------------------------------------------------------------------------------------------ the import command


def test_import_keeps_the_card_and_the_tokenizer_of_a_directory(tmp_path, exported, model, config):
    (exported / "tokenizer.json").write_text("{}")
    assert import_weights(exported, tmp_path / "out", None).complete
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*os.listdir(exported), MANIFEST])
    assert load_model_config(tmp_path / "out") == config.replace(vision_position_init="normal")
    assert json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["preprocess_cfg"]["mean"] == [0.5] * 3
    assert_same_weights(load_pretrained(build_model(config), tmp_path / "out"), model)


def test_import_with_a_model_of_other_features_gives_a_warning(tmp_path, exported, config, caplog):
    other = {**config.to_open_clip(), "quick_gelu": not config.quick_gelu}
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert import_weights(exported, tmp_path / "out", str(tmp_path / "other.json")).complete
    (message,) = set(caplog.messages)
    assert f"has quick_gelu {not config.quick_gelu}, but the weights in {exported}" in message


def test_import_for_a_different_model_lists_the_differences_and_writes_nothing(
    tmp_path, exported, config, monkeypatch, capsys
):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config.replace(text_cfg={"layers": 1}, embed_dim=32).to_open_clip()))
    command = ["import", exported / "open_clip_model.safetensors", tmp_path / "out", "--model", other]
    monkeypatch.setattr(sys, "argv", [*map(str, command)])
    with pytest.raises(SystemExit, match=r"does not fit the model, so .* was not written"):
        import_open_clip_command.main()
    printed = capsys.readouterr().out
    assert "unexpected  text.transformer.resblocks.1.ln_1.weight" in printed
    assert "shape       visual.proj: the model has [96, 32], the file has [96, 64]" in printed
    assert not (tmp_path / "out").exists()


def test_import_refuses_a_directory_with_other_files(tmp_path, exported):
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="belongs to"):
            import_weights(exported, exported, None, overwrite=overwrite)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; choose another directory, or add --overwrite"):
        import_weights(exported, out, None)
    assert os.listdir(out) == ["mine.txt"]
    for target in (out / "mine.txt", out / "mine.txt" / "below"):
        with pytest.raises(CheckpointError, match=r"mine\.txt is not a directory; choose another directory"):
            import_weights(exported, target, None)
    assert import_weights(exported, out, None, overwrite=True).complete
    assert manifest.find_damage(out) == [] and (out / "mine.txt").read_text() == "mine"
    (exported / "file.txt").touch()
    with pytest.raises(CheckpointError, match="choose another directory"):
        import_weights(exported, exported / "file.txt", None)


def test_import_replaces_the_tokenizer_of_an_earlier_import(tmp_path, exported):
    out = tmp_path / "out"
    for name in ("first.model", "second.model"):
        (exported / name).write_text(name)
        assert import_weights(exported, out, None, overwrite=True).complete
        (exported / name).unlink()
        assert [path.name for path in out.glob("*.model")] == [name]
    assert manifest.find_damage(out) == []


def test_earlier_files_are_only_deleted_beside_a_model_card_and_inside_the_directory(tmp_path, exported):
    outside = tmp_path / "outside.txt"
    outside.touch()
    manifest.write(exported, {"../outside.txt": checksum(outside), "a.txt": checksum(outside)})
    (exported / "a.txt").touch()
    card = exported / "open_clip_config.json"
    kept = card.read_text()
    card.unlink()
    remove_earlier_files(exported, kept=[])
    assert (exported / "a.txt").exists()
    card.write_text(kept)
    remove_earlier_files(exported, kept=[])
    assert not (exported / "a.txt").exists() and outside.exists()
    assert (exported / "open_clip_model.safetensors").exists(), "the manifest does not list it"


@pytest.mark.parametrize("largest", [100, 100_000])  # bytes per file: no card, or a card without weights
def test_import_to_a_full_disk_is_one_line_and_leaves_no_part_of_the_weights(tmp_path, exported, largest):
    before, out = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "out"
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        with pytest.raises(CheckpointError, match=f"cannot write '{out}': .*File too large"):
            import_weights(exported, out, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(out.glob("*safetensors*")) + list(out.glob(".*safetensors*"))
