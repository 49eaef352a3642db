"""The tokenizer of a run: the text tower pools at the end of text of this tokenizer, in MegaCLIP and in open_clip."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from megaclip.checkpoint.model_card import OPENAI_PREPROCESS, ModelCard, read_model_card, write_model_card
from megaclip.checkpoint.open_clip_weights import write_weights
from megaclip.checkpoint.verify import verify
from megaclip.data.sentencepiece_training import train_sentencepiece
from megaclip.data.tokenizers import load_tokenizer
from megaclip.engine.inputs import _check_tokenizer_of
from megaclip.engine.tokenizer_choice import TokenizerChoice, choose_tokenizer
from megaclip.errors import ConfigError
from megaclip.models import ModelConfig, ModelDescription, build_model, load_model_config
from megaclip.models.descriptions import describe
from megaclip.models.text import pooled_position
from megaclip.open_clip_package import import_open_clip

pytest.importorskip("transformers", reason="Hugging Face tokenizers are read with transformers")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("a", "photo", "of", "red", "dog", "cat")
CAPTIONS = ["a photo of a red dog", "a cat", "a photo of a cat " * 40]


def write_tokenizer(folder: Path, words: tuple[str, ...], template: str = "[CLS] $A [SEP]") -> str:
    """Write a Hugging Face tokenizer whose ids are the positions in `words`, and return its directory."""
    ids = {word: number for number, word in enumerate(words)}
    model = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    named = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    model.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    model.add_special_tokens([word for word in words if word in SPECIAL])
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Return a tokenizer whose id 2 starts every caption. Its end of text, id 4, is not its highest id."""
    return write_tokenizer(tmp_path / "words", ("[PAD]", "[UNK]", "[CLS]", "a", "[SEP]", *WORDS[1:]))


def described(towers: str = "own", **text: Any) -> ModelDescription:
    description = load_model_config("demo-tiny").replace(text_cfg={"vocab_size": 64, **text}).to_open_clip()
    return describe(description, "model", "open_clip" if towers == "open_clip" else "auto")


def fitted(given: str | None, config: ModelDescription, card: ModelCard | None = None) -> ModelDescription:
    return choose_tokenizer(given, card, config).fit(config)


@pytest.mark.parametrize("towers", ["own", "open_clip"])
@pytest.mark.parametrize("pool", ["eos", "argmax"])
def test_the_feature_is_taken_at_the_end_of_text_of_a_given_tokenizer(
    directory: str, tmp_path: Path, pool: str, towers: str
) -> None:
    """open_clip computes equal features from the export."""
    given = described(towers, pool_type=pool)
    chosen = choose_tokenizer(directory, None, given)
    config = fitted(directory, given)
    assert (config.text_cfg.pool_type, config.text_cfg.eos_id, config.text_cfg.pad_id) == ("eos", 4, 0)
    tokens = chosen.tokenizer(CAPTIONS)
    assert tokens.gather(1, pooled_position(tokens, config.text_cfg)[:, None]).flatten().tolist() == [4] * 3

    torch.manual_seed(0)
    model = build_model(config).eval()
    features = model(None, tokens)[1]
    assert (features @ features.T)[0, 1] < 0.999  # pooled at the first token, all captions would have one feature
    chosen.tokenizer.write_open_clip(tmp_path / "out")
    write_model_card(tmp_path / "out", config, OPENAI_PREPROCESS)
    write_weights(tmp_path / "out", model.state_dict(), config)
    assert verify(tmp_path / "out", model, chosen.tokenizer).passed
    exported = read_model_card(tmp_path / "out")
    assert fitted(None, exported.config, exported).text_cfg == config.text_cfg


def test_argmax_is_kept_if_the_end_of_text_is_the_highest_id(tmp_path: Path) -> None:
    last = write_tokenizer(tmp_path / "words", ("[PAD]", "[UNK]", "[CLS]", *WORDS, "[SEP]"))
    assert fitted(last, described(pool_type="argmax")).text_cfg.pool_type == "argmax"


@pytest.mark.parametrize("pool", ["eos", "argmax"])
@pytest.mark.parametrize("template", ["[CLS] $A", "[SEP] $A [SEP]"])
def test_a_tokenizer_that_does_not_end_captions_is_refused(tmp_path: Path, template: str, pool: str) -> None:
    directory = write_tokenizer(tmp_path / "words", (*SPECIAL, *WORDS), template)
    with pytest.raises(ConfigError, match=r"words does not end every caption with id 3, .*; use a tokenizer that"):
        fitted(directory, described(pool_type=pool))


@pytest.mark.parametrize("pool", ["last", "first"])
def test_a_pool_that_needs_no_end_of_text_is_kept(tmp_path: Path, pool: str) -> None:
    """SigLIP has the pool type "last". Its tokenizer may be named or given as files."""
    directory = write_tokenizer(tmp_path / "words", (*SPECIAL, *WORDS), "$A")
    config = described(pool_type=pool, no_causal_mask=True)
    assert fitted(directory, config).text_cfg.pool_type == pool
    named = ModelConfig.model_validate(config.model_dump())
    named = named.model_copy(update={"text_cfg": named.text_cfg.model_copy(update={"hf_tokenizer_name": directory})})
    text = choose_tokenizer(None, None, named).fit(config).text_cfg
    assert (text.pool_type, text.eos_id) == (pool, config.text_cfg.eos_id)


def written_card(directory: str, folder: Path, **text: Any) -> ModelCard:
    """Return the card of a model with the tokenizer in `directory`."""
    shutil.copytree(directory, folder)
    write_model_card(folder, described(hf_tokenizer_name="words", **text), OPENAI_PREPROCESS)
    return read_model_card(folder)


def test_the_settings_that_weights_were_trained_with_are_kept(
    directory: str, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """A copy of the card's tokenizer counts as the same tokenizer. Another tokenizer does not."""
    card = written_card(directory, tmp_path / "card", pool_type="argmax")
    for given in (None, str(tmp_path / "card"), directory):
        warnings.clear()
        assert fitted(given, card.config, card).text_cfg.pool_type == "argmax"
        assert [message[:30] for message in warnings.messages] == ['text_cfg.pool_type "argmax" ta']
    warnings.clear()
    other = write_tokenizer(tmp_path / "other", (*SPECIAL, *WORDS))
    text = fitted(other, card.config, card).text_cfg
    assert (text.pool_type, text.eos_id) == ("eos", 3)
    assert warnings.messages == [
        f"--tokenizer {other} is not the tokenizer of the model in {card.directory}, {card.directory}"
    ]


def test_a_card_supplies_the_end_of_text_of_its_tokenizer(directory: str, tmp_path: Path) -> None:
    card = written_card(directory, tmp_path / "card", pool_type="eos", eos_id=4)
    for pool in ("eos", "argmax"):
        text = fitted(None, described(pool_type=pool), card).text_cfg
        assert (text.pool_type, text.eos_id) == ("eos", 4)


def test_a_card_whose_end_of_text_never_occurs_is_refused(directory: str, tmp_path: Path) -> None:
    """Id 2 starts every caption, so a causal tower pooled there would give all captions one feature."""
    card = written_card(directory, tmp_path / "card", pool_type="eos", eos_id=2)
    with pytest.raises(ConfigError, match="does not end every caption with id 2"):
        fitted(None, card.config, card)
    both_ways = card.config.replace(text_cfg={"no_causal_mask": True})
    owned = TokenizerChoice(choose_tokenizer(None, card, both_ways).tokenizer, "words", both_ways)
    assert owned.fit(both_ways).text_cfg.eos_id == 2


def test_a_given_tokenizer_replaces_a_sentencepiece_model(directory: str) -> None:
    text = fitted(directory, described(hf_tokenizer_name="sentencepiece")).text_cfg
    assert text.hf_tokenizer_name == "hugging face"  # the old name would require its .model file


@pytest.mark.parametrize("towers", ["own", "open_clip"])
@pytest.mark.parametrize("kind", ["clip", "sentencepiece", "hugging face"])
def test_the_text_tower_has_the_embeddings_of_the_description(
    directory: str, tmp_path: Path, kind: str, towers: str
) -> None:
    """A padded table stays as it is, without and with a model card, and is exported. A smaller one is refused."""
    (path,) = train_sentencepiece(SHOUTED * 9, tmp_path / "own.model", vocab_size=40).files
    given = {"clip": "clip", "sentencepiece": str(path), "hugging face": directory}[kind]
    ids = choose_tokenizer(given, None, described()).tokenizer.vocab_size
    padded = described(towers, vocab_size=ids + 24)
    chosen = choose_tokenizer(given, None, padded)
    config = chosen.fit(padded)
    assert build_model(config).vocab_size == config.text_cfg.vocab_size == ids + 24
    chosen.tokenizer.write_open_clip(tmp_path / "out")
    write_model_card(tmp_path / "out", config, OPENAI_PREPROCESS, chosen.tokenizer.files)
    card = read_model_card(tmp_path / "out")
    assert choose_tokenizer(None, card, described(towers)).fit(described(towers)).text_cfg.vocab_size == ids + 24
    small = described(towers, vocab_size=ids - 1)
    message = rf"has {ids} ids, and the text tower has {ids - 1} embeddings \(text_cfg\.vocab_size\); give the token"
    with pytest.raises(ConfigError, match=message):
        fitted(given, small)
    without = padded.to_open_clip()
    del without["text_cfg"]["vocab_size"]
    assert fitted(given, describe(without, "model", "auto")).text_cfg.vocab_size == ids


CANONICAL = {"clean": "canonicalize"}
SHOUTED = ["Two DOGS, playing in the snow!"]


def tokens_of_open_clip(chosen: TokenizerChoice, config: ModelDescription, folder: Path) -> torch.Tensor:
    """Return the tokens of SHOUTED that open_clip computes with an export of the tokenizer."""
    chosen.tokenizer.write_open_clip(folder)
    write_model_card(folder, config, OPENAI_PREPROCESS, chosen.tokenizer.files)
    tokens: torch.Tensor = import_open_clip().get_tokenizer(f"local-dir:{folder}")(SHOUTED)
    return tokens


@pytest.mark.parametrize("towers", ["own", "open_clip"])
@pytest.mark.parametrize("options", [CANONICAL, {"strip_sep_token": True}])
@pytest.mark.parametrize("kind", ["clip", "sentencepiece"])
def test_options_of_another_tokenizer_are_not_exported(
    tmp_path: Path, kind: str, options: dict[str, Any], towers: str
) -> None:
    """SigLIP and CLIPA specify such options for their own tokenizers."""
    settings = {"vocab_size": 49408, "tokenizer_kwargs": options, "tokenizer_mode": "clips"}
    config = described(towers, hf_tokenizer_name="its/own", **settings)
    (path,) = train_sentencepiece(SHOUTED * 9, tmp_path / "own.model", vocab_size=40).files
    chosen = choose_tokenizer("clip" if kind == "clip" else str(path), None, config)
    config = chosen.fit(config)
    assert (config.text_cfg.tokenizer_kwargs, config.text_cfg.tokenizer_mode) == (None, None)
    assert torch.equal(tokens_of_open_clip(chosen, config, tmp_path / "out"), chosen.tokenizer(SHOUTED))


def test_options_of_the_descriptions_own_tokenizer_are_used_and_exported(directory: str, tmp_path: Path) -> None:
    for given, text in (("clip", {"vocab_size": 49408}), (directory, {"hf_tokenizer_name": "its/own"})):
        config = described(tokenizer_kwargs=CANONICAL, **text)
        chosen = choose_tokenizer(given, None, config)
        config = chosen.fit(config)
        assert config.text_cfg.tokenizer_kwargs == CANONICAL
        tokens = tokens_of_open_clip(chosen, config, tmp_path / Path(given).name / "out")
        assert torch.equal(tokens, chosen.tokenizer(SHOUTED))
        assert torch.equal(tokens, chosen.tokenizer(["two dogs playing in the snow"]))
    with pytest.raises(ConfigError, match="is not an option of tokenizer 'clip'"):
        choose_tokenizer(None, None, described(tokenizer_kwargs={"strip_sep_token": True}))


def test_a_card_supplies_the_options_of_its_tokenizer(directory: str, tmp_path: Path) -> None:
    card = written_card(directory, tmp_path / "card", pool_type="eos", eos_id=4, tokenizer_kwargs=CANONICAL)
    assert fitted(None, described(), card).text_cfg.tokenizer_kwargs == CANONICAL


@pytest.mark.parametrize(
    "change", [{"normalizer": {"type": "Lowercase"}}, {"post_processor": None}, {"pad_token": "[UNK]"}], ids=str
)
def test_a_live_teacher_with_another_tokenizer_of_the_same_vocabulary_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """The identities name only the vocabulary, so they are equal."""
    teacher, copy = tmp_path / "teacher", tmp_path / "copy"
    write_tokenizer(teacher, (*SPECIAL, *WORDS))
    text = {"hf_tokenizer_name": "own", "vocab_size": len((*SPECIAL, *WORDS))}
    write_model_card(teacher, load_model_config("demo-tiny").replace(text_cfg=text), OPENAI_PREPROCESS)
    card = read_model_card(teacher)
    shutil.copytree(teacher, copy)
    _check_tokenizer_of(card, load_tokenizer(str(copy), 9), 9)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(content | {key: value for key, value in change.items() if key in content}))
    with pytest.raises(ConfigError, match=r"other ids for the caption '.*'; use its tokenizer as --tokenizer"):
        _check_tokenizer_of(card, load_tokenizer(str(copy), 9), 9)
