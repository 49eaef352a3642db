"""Tokenizers: ids equal open_clip's, an exported sentencepiece model returns equal ids, training on captions."""

import json
import random
import string
from typing import get_args

import ftfy
import pytest
import sentencepiece
import tokenizers
import torch

from megaclip.data import load_tokenizer
from megaclip.data.sentencepiece_training import train_sentencepiece
from megaclip.data.tokenizers import Cleaning, clean_caption
from megaclip.errors import ConfigError
from megaclip.open_clip_package import import_open_clip

HARD = [
    "a CAT &amp;amp; a dog &lt;b&gt;",
    "caf\u00e9 na\u00efve \u00dcBER stra\u00dfe",
    "\u4f60\u597d\u4e16\u754c hello \u3053\u3093\u306b\u3061\u306f",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "it's we'll I'D 123 4567 ain't",
    "x  y\n\tz\u00a0w\u3000v",
    "mojibake: \u00c3\u00a9t\u00c3\u00a9 \u00e2\u20ac\u0153quotes\u00e2\u20ac\u009d",
    "don\u2019t \u201cquote\u201d \u2026",
    "!!!??? ... #hashtag @user http://example.com/a_b-c?d=e&f=g",
    "",
    "   ",
    "\u0130stanbul \u01c5 \ufb01ne \uff41\uff42\uff43 \u0301\u0301",
    "a" * 600,
    "word " * 200,
    "\0nul \x1b[31mred\x1b[0m \ufeffbom",
    "<end_of_text> in a caption",
    "a <s>red</s> photo<pad> of an <unk> thing </s>",
    "</s>",
    "<unk></s><pad> <unk> \u2581</s>\u2581",
    "&amp;amp;lt; twice and no more, beside <b>",
    "it'\u017f long s \u212a kelvin",
    "\u00a8a \u00a8 b\u00a8",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940",
]


@pytest.fixture(scope="module")
def captions():
    """Return a thousand captions: words, printable ASCII, and any letters of the basic multilingual plane."""
    generator = random.Random(0)
    words = [
        "a",
        "red",
        "three",
        "to",
        "the",
        "Blue",
        "seven's",
        "3x4",
        "&eacute;",
        "&#39;so&#39;",
        "--",
        "naïve",
        "東京",
    ]
    plane = [chr(code) for code in range(32, 0xFFFF) if chr(code).isprintable()]
    made = [" ".join(generator.choices(words, k=generator.randint(1, 30))) for _ in range(400)]
    made += ["".join(generator.choices(string.printable, k=generator.randint(1, 90))) for _ in range(300)]
    made += ["".join(generator.choices(plane, k=generator.randint(1, 40))) for _ in range(300)]
    return made + HARD


def test_clip_tokens_equal_open_clips(captions, tmp_path):
    theirs = import_open_clip().tokenizer.SimpleTokenizer()
    ours = load_tokenizer("clip", 77)
    assert torch.equal(ours(captions), theirs(captions))
    assert torch.equal(load_tokenizer("clip", 9)(captions), theirs(captions, context_length=9))
    assert ours.vocab_size == theirs.vocab_size == 49408
    assert ours.eos_id == theirs.eot_token_id
    settings = {"hf_tokenizer_name": None, "context_length": 77, "tokenizer_mode": None, "tokenizer_kwargs": None}
    assert ours.write_open_clip(tmp_path) == settings and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("clean", get_args(Cleaning))
def test_cleaning_equals_open_clips(captions, clean):
    theirs = import_open_clip().tokenizer
    assert [clean_caption(c, clean) for c in captions] == [theirs.get_clean_fn(clean)(c) for c in captions]
    shouted = [*captions, *(c.upper() for c in captions)]
    ours = load_tokenizer("clip", 77, options={"clean": clean})
    assert torch.equal(ours(shouted), theirs.SimpleTokenizer(clean=clean)(shouted))
    assert ours.write_open_clip("")["tokenizer_kwargs"] == (None if clean == "lower" else {"clean": clean})
    assert (ours.identity == load_tokenizer("clip", 77).identity) == (clean == "lower")


def test_ftfy_does_not_change_texts_for_which_cleaning_skips_it():
    generator = random.Random(1)
    printable = [chr(code) for code in range(32, 127) if chr(code) != "&"]
    for _ in range(300):
        text = "".join(generator.choices(printable, k=50))
        assert ftfy.fix_text(text) == text


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def sentencepiece_tokenizer(tmp_path_factory, captions, request):
    path = tmp_path_factory.mktemp("tokenizer") / "spm.model"
    train_sentencepiece(captions[:700], path, vocab_size=500, model_type=request.param)
    return load_tokenizer(str(path), 20)


def test_sentencepiece_tokens_have_one_end_of_text_and_fit_the_context(sentencepiece_tokenizer, captions):
    tokens = sentencepiece_tokenizer(captions)
    assert tokens.shape == (len(captions), 20) and tokens.dtype == torch.int64
    assert (sentencepiece_tokenizer.pad_id, sentencepiece_tokenizer.eos_id) == (0, 2)
    assert tokens.max() < sentencepiece_tokenizer.vocab_size <= 500
    for row in tokens.tolist():
        end = row.index(2)
        assert row.count(2) == 1 and 0 not in row[:end] and set(row[end + 1 :]) <= {0}
    assert sentencepiece_tokenizer([]).shape == (0, 20)


def test_the_exported_tokenizer_returns_equal_ids(sentencepiece_tokenizer, captions, tmp_path):
    """The reference is HF tokenizers, an independent implementation that transformers and open_clip use."""
    settings = sentencepiece_tokenizer.write_open_clip(tmp_path)
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    exported.enable_truncation(20)
    exported.enable_padding(length=20, pad_id=settings["pad_id"])
    theirs = [exported.encode(clean_caption(caption)).ids for caption in captions]
    assert torch.equal(sentencepiece_tokenizer(captions), torch.tensor(theirs))
    assert settings["pool_type"] == "eos" and settings["eos_id"] == 2 and settings["hf_tokenizer_name"]
    assert sentencepiece_tokenizer.vocab_size == exported.get_vocab_size()
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and written["eos_token"] == "</s>\n"


@pytest.mark.parametrize("clean", get_args(Cleaning))
def test_open_clip_itself_loads_the_export(sentencepiece_tokenizer, captions, tmp_path, clean):
    pytest.importorskip("transformers", reason="open_clip loads such tokenizers with transformers")
    (path,) = sentencepiece_tokenizer.files
    ours = load_tokenizer(str(path), 20, options={"clean": clean})
    options = ours.write_open_clip(tmp_path)["tokenizer_kwargs"]
    assert options == (None if clean == "whitespace" else {"clean": clean})
    theirs = import_open_clip().tokenizer.HFTokenizer(str(tmp_path), context_length=20, **(options or {}))
    assert torch.equal(ours(captions), theirs(captions))
    assert (ours.identity == sentencepiece_tokenizer.identity) == (clean == "whitespace")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "clips"}, r'text_cfg.tokenizer_mode "clips" is not an option of tokenizer .*; expected null; '),
        ({"options": {"strip_sep_token": True}}, r"tokenizer_kwargs {\"strip_sep_token\": true} is .* only clean; "),
        ({"options": {"clean": "no"}}, r"expected clean 'whitespace', 'lower', 'canonicalize'; change it in a copy"),
    ],
)
def test_options_that_a_tokenizer_does_not_have_are_refused(sentencepiece_tokenizer, settings, message):
    for name in ("clip", str(sentencepiece_tokenizer.files[0])):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(name, 20, **settings)
        assert load_tokenizer(name, 20, options={"strip_sep_token": False})


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_frequent_words_are_single_pieces_even_in_a_small_vocabulary(tmp_path, model_type):
    colours, digits = ["red", "blue", "magenta", "yellow"], ["seven", "three", "eight", "four"]
    draw = random.Random(0).choice
    captions = [f"the {draw(colours)} {draw(digits)} left of the {draw(digits)} handwritten" for _ in range(500)]
    train_sentencepiece(captions, tmp_path / "spm.model", vocab_size=100, model_type=model_type)
    tokens = load_tokenizer(str(tmp_path / "spm.model"), 20)(captions)
    assert (tokens != 0).sum(1).tolist() == [9] * 500  # eight words and the end


def test_unusable_tokenizers_are_errors(tmp_path, captions):
    with pytest.raises(ConfigError, match=r"No such file.*; use 'clip', .* or the directory of a Hugging Face"):
        load_tokenizer(str(tmp_path / "none.model"), 16)
    (tmp_path / "text.model").write_text("no model")
    with pytest.raises(ConfigError, match="not a sentencepiece model"):
        load_tokenizer(str(tmp_path / "text.model"), 16)
    with pytest.raises(ConfigError, match="at least 2"):
        load_tokenizer("clip", 1)
    with pytest.raises(ConfigError, match="no captions"):
        train_sentencepiece(["", "  "], tmp_path / "spm.model", vocab_size=50)


def test_long_captions_without_spaces_are_trained_on(tmp_path):
    """sentencepiece skips lines of more than 4,192 bytes by default, and their characters would be unknown."""
    captions = ["红色的猫坐在蓝色的桌子上" * 150 + str(number) for number in range(20)] + ["a small dog"] * 20
    tokenizer = train_sentencepiece(captions, tmp_path / "t.model", vocab_size=60)
    loaded = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.files[0]))
    assert loaded.unk_id() not in loaded.encode("红色的猫 dog")
