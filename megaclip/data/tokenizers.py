"""Turn captions into token ids: CLIP's byte-pair vocabulary, sentencepiece models and Hugging Face tokenizers.

`load_tokenizer` loads one by its name or path. The ids equal those of open_clip for the same captions.
`write_open_clip` exports a tokenizer for open_clip.
"""

from __future__ import annotations

import abc
import functools
import gzip
import hashlib
import html
import json
import string
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast, get_args

import ftfy
import sentencepiece
import tokenizers
import torch
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megaclip.errors import ConfigError, first_line, shortened
from megaclip.open_clip_package import import_open_clip

CLIP_VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
CLIP_MERGES = 49_152 - 256 - 2
CLIP_START, CLIP_END = "<start_of_text>", "<end_of_text>"
CACHED = "hf:"
"""Prefix of the name of a tokenizer in the local cache of the Hugging Face hub."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_END_OF_NAME = "\n"
"""End of the names of special pieces in exported tokenizers."""
Cleaning = Literal["whitespace", "lower", "canonicalize"]
"""open_clip's cleaning modes (`clean` in `text_cfg.tokenizer_kwargs`): "whitespace" repairs the text, "lower" also
lower-cases it, and "canonicalize" also removes ASCII punctuation."""
_CLEANINGS = "clean " + ", ".join(map(repr, get_args(Cleaning)))
# From simple_tokenizer.py of openai/CLIP. Special tokens are words too: open_clip keeps their names whole, in upper and
# lower case.
CLIP_WORDS = rf"(?i){CLIP_START}|{CLIP_END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"


def clean_caption(text: str, clean: Cleaning = "whitespace") -> str:
    """Return a caption as open_clip cleans it: repaired, HTML unescaped twice, one space per run of white space."""
    # ftfy takes longer than the tokenizer, and it does not change printable ASCII without HTML entities.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    if clean == "canonicalize":
        text = text.replace("_", " ").translate(_NO_PUNCTUATION).lower()
    text = " ".join(text.split())
    return text.lower() if clean == "lower" else text


class Tokenizer(abc.ABC):
    """Turns n captions into token ids (n, context_length) int64. The last one before the padding is the end of text."""

    vocab_size: int
    eos_id: int
    pad_id: int
    context_length: int
    files: tuple[Path, ...] = ()
    """Files that a checkpoint or an export stores beside its model card, to load the tokenizer again."""
    identity: str
    """Name of the vocabulary. Tokenizers that return equal ids have equal names, whatever the paths of their files."""

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the token ids (n, L) int64, padded with `pad_id`."""
        tokens = torch.full((len(captions), self.context_length), self.pad_id, dtype=torch.int64)
        for row, caption in enumerate(captions):
            ids = [*self._encode(caption)[: self.context_length - 1], self.eos_id]
            tokens[row, : len(ids)] = torch.tensor(ids)
        return tokens

    def _encode(self, caption: str) -> list[int]:
        """Return the ids of a caption, with the start of text if the vocabulary has one, without the end of text."""
        raise NotImplementedError

    @abc.abstractmethod
    def write_open_clip(self, directory: Path | str) -> dict[str, Any]:
        """Write the files that open_clip's `local-dir:` requires. Returns the keys and values for `text_cfg`."""


class ClipTokenizer(Tokenizer):
    """CLIP's 49,408 byte-pair tokens, made for lower-cased text. The ids equal those of open_clip's SimpleTokenizer."""

    def __init__(self, context_length: int, clean: Cleaning = "lower") -> None:
        self._model = _clip_model()
        self._clean = clean
        self.identity = "clip" if clean == "lower" else f"clip {clean}"
        self.context_length = context_length
        self.vocab_size = self._model.get_vocab_size()
        vocabulary = self._model.get_vocab()
        self._start_id, self.eos_id = vocabulary[CLIP_START], vocabulary[CLIP_END]
        self.pad_id = 0

    def _encode(self, caption: str) -> list[int]:
        return [self._start_id, *self._model.encode(clean_caption(caption, self._clean)).ids]

    def as_hugging_face(self) -> tokenizers.Tokenizer:
        """Return the vocabulary as a tokenizer of HF `tokenizers`, which adds no special tokens."""
        return self._model

    def write_open_clip(self, directory: Path | str) -> dict[str, Any]:
        """Return the keys and values for `text_cfg`. No file is written: this tokenizer is open_clip's default."""
        return {
            "hf_tokenizer_name": None,
            "context_length": self.context_length,
            "tokenizer_mode": None,
            "tokenizer_kwargs": None if self._clean == "lower" else {"clean": self._clean},
        }


@functools.lru_cache(maxsize=1)
def _clip_model() -> tokenizers.Tokenizer:
    packed = resources.files("megaclip.data").joinpath(CLIP_VOCABULARY).read_bytes()
    lines = gzip.decompress(packed).decode().split("\n")[1 : CLIP_MERGES + 1]
    merges = [(left, right) for left, right in (line.split() for line in lines)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one per byte, in the vocabulary's order
    words = [*letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges), CLIP_START, CLIP_END]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.add_special_tokens([CLIP_START, CLIP_END])
    return model


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (unigram or bpe) with padding and end-of-text pieces, as `megaclip tokenizer` makes."""

    def __init__(self, path: Path | str, context_length: int, clean: Cleaning = "whitespace") -> None:
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"tokenizer {str(path)!r} is not a sentencepiece model ({first_line(error)}); use 'clip', the path of "
                "a .model file, as `megaclip tokenizer` makes, or the directory of a Hugging Face tokenizer"
            ) from error
        self.files = (Path(path),)
        digest = hashlib.sha256(self._model.serialized_model_proto()).hexdigest()
        self._clean = clean
        self.identity = f"sentencepiece {digest[:16]}" + ("" if clean == "whitespace" else f" {clean}")
        self.context_length = context_length
        self.vocab_size = self._model.vocab_size()
        self.eos_id = self._model.eos_id()
        self.pad_id = self._model.pad_id()
        if self.eos_id < 0 or self.pad_id < 0:
            raise ConfigError(
                f"tokenizer {str(path)!r} has no end-of-text or padding piece; make one with `megaclip tokenizer`"
            )

    def _encode(self, caption: str) -> list[int]:
        return self._model.encode(clean_caption(caption, self._clean))

    def write_open_clip(self, directory: Path | str) -> dict[str, Any]:
        """Write tokenizer.json and tokenizer_config.json, with which transformers and open_clip return equal ids."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.as_hugging_face().save(str(directory / "tokenizer.json"))
        pieces = {"unk": self._model.unk_id(), "eos": self.eos_id, "pad": self.pad_id}
        names = {f"{name}_token": self._model.id_to_piece(number) + _END_OF_NAME for name, number in pieces.items()}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.context_length,
            "clean_up_tokenization_spaces": False,
            **names,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        return {
            "hf_tokenizer_name": "sentencepiece",  # any name makes `local-dir:` read the files beside the card
            "context_length": self.context_length,
            "pool_type": "eos",
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
            "tokenizer_mode": None,
            "tokenizer_kwargs": None if self._clean == "whitespace" else {"clean": self._clean},
        }

    def as_hugging_face(self) -> tokenizers.Tokenizer:
        """Return this model as a tokenizer of HF `tokenizers`, which adds the end of text itself.

        The names of special pieces contain a line break, which no cleaned caption has. HF `tokenizers` would find
        plain names, such as "</s>", in captions. For sentencepiece they are ordinary text there.
        """
        proto = sentencepiece_model_pb2.ModelProto.FromString(  # type: ignore[attr-defined]
            self._model.serialized_model_proto()
        )
        for piece in proto.pieces:
            if piece.type in (piece.CONTROL, piece.UNKNOWN):
                piece.piece += _END_OF_NAME
        model = tokenizers.Tokenizer(_hugging_face_model(proto, self._model.unk_id()))
        model.normalizer = _normalizer(proto.normalizer_spec)
        prefix = "always" if proto.normalizer_spec.add_dummy_prefix else "never"
        model.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix)
        model.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prefix)
        end = proto.pieces[self.eos_id].piece
        model.post_processor = processors.TemplateProcessing(
            single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, self.eos_id)]
        )
        special = sorted((self.pad_id, self.eos_id, self._model.unk_id()))
        model.add_special_tokens([proto.pieces[number].piece for number in special])
        return model


def _hugging_face_model(proto: Any, unknown_id: int) -> models.Model:
    """Return the vocabulary as a model of HF `tokenizers`. Raises ConfigError for other models than unigram and bpe."""
    spec = proto.trainer_spec
    if spec.model_type == spec.UNIGRAM:
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(pieces, unk_id=unknown_id, byte_fallback=spec.byte_fallback)
    if spec.model_type == spec.BPE:
        ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        unknown = proto.pieces[unknown_id].piece
        return models.BPE(ids, _merges(ids), unk_token=unknown, fuse_unk=True, byte_fallback=spec.byte_fallback)
    raise ConfigError("the sentencepiece model is neither unigram nor bpe and cannot be exported; train one of these")


def _merges(ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that join to a third piece, in the order in which sentencepiece learnt the third."""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(ids, key=ids.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """Return sentencepiece's normalisation: its compiled character map, then one space per run of white space."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the Hugging Face hub, through open_clip's own class: its cleaning, modes and truncation.

    The files come from a directory, or from the local cache of the hub. Nothing is downloaded.
    """

    def __init__(self, source: str, context_length: int, *, mode: str | None, options: dict[str, Any] | None) -> None:
        """source: a directory with tokenizer files, or "hf:NAME". mode, options: `text_cfg.tokenizer_mode` and
        `text_cfg.tokenizer_kwargs`. Raises ConfigError if the tokenizer cannot be loaded."""
        import_open_clip()
        from open_clip.tokenizer import HFTokenizer

        self._mode, self._options = mode, options
        self._name = source.removeprefix(CACHED)
        try:
            self._tokenizer = HFTokenizer(
                self._name,
                context_length=context_length,
                tokenizer_mode=mode,
                local_files_only=True,
                **(options or {}),
            )
        except Exception as error:  # transformers does not document the exceptions that it raises
            raise ConfigError(
                f"tokenizer {self._name!r} cannot be loaded ({type(error).__name__}: {first_line(error)}); MegaCLIP "
                "downloads nothing: download the tokenizer's files (tokenizer.json, tokenizer_config.json, ...) into a "
                "directory, and give it as --tokenizer DIRECTORY"
            ) from None
        words: Any = self._tokenizer.tokenizer
        self.context_length = context_length
        self.vocab_size = len(words)
        self.pad_id = words.pad_token_id if words.pad_token_id is not None else 0
        ends = (words.eos_token_id, words.sep_token_id, self.pad_id)
        self.eos_id = next(number for number in ends if number is not None)
        content = json.dumps([sorted(words.get_vocab().items()), mode, options], sort_keys=True)
        self.identity = f"hugging face {hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the token ids (n, L) int64, as open_clip pads and truncates them."""
        tokens: torch.Tensor = self._tokenizer(list(captions))
        return tokens

    def ends_captions_with(self, token: int) -> bool:
        """Return whether the id `token` first occurs after the text of a caption, even if the caption is truncated."""
        is_end = self(["a", "a photo of a cat " * self.context_length]) == token
        return bool(is_end.any(dim=1).all() and not is_end[:, 0].any())

    def write_open_clip(self, directory: Path | str) -> dict[str, Any]:
        """Write the tokenizer's files. Returns the keys and values for `text_cfg`."""
        self._tokenizer.save_pretrained(str(directory))
        return {
            "context_length": self.context_length,
            "tokenizer_mode": self._mode,
            "tokenizer_kwargs": self._options,
        }


def load_tokenizer(
    spec: str, context_length: int, *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Tokenizer:
    """Load a tokenizer.

    spec: "clip", the path of a sentencepiece .model file, a directory with the files of a Hugging Face tokenizer, or
    "hf:NAME" for one in the local cache of the Hugging Face hub.
    context_length: number of tokens per caption.
    mode, options: `text_cfg.tokenizer_mode` and `text_cfg.tokenizer_kwargs`. Only Hugging Face tokenizers have other
    options than `clean`.
    Raises ConfigError if there is no such tokenizer, it lacks an option, or the context length is too short.
    """
    if context_length < 2:
        raise ConfigError(f"the context length is {context_length}; use at least 2")
    if is_hugging_face(spec):
        return HuggingFaceTokenizer(spec, context_length, mode=mode, options=options)
    clean = _cleaning(spec, mode, options or {})
    if spec == "clip":
        return ClipTokenizer(context_length, clean or "lower")
    return SentencePieceTokenizer(spec, context_length, clean or "whitespace")


def is_hugging_face(spec: str) -> bool:
    """Return whether `load_tokenizer` loads a Hugging Face tokenizer for `spec`."""
    return spec.startswith(CACHED) or Path(spec).is_dir()


def _cleaning(spec: str, mode: str | None, options: dict[str, Any]) -> Cleaning | None:
    """Return the option `clean`, or None if it is not set. Raises ConfigError for other options, and for a mode."""
    clean = options.get("clean")
    others = {name: value for name, value in options.items() if name != "clean" and value not in (None, False)}
    for setting, value, refused, accepted in (
        ("tokenizer_mode", mode, bool(mode), "null"),
        ("tokenizer_kwargs", options, bool(others), "only clean"),
        ("tokenizer_kwargs", options, clean is not None and clean not in get_args(Cleaning), _CLEANINGS),
    ):
        if refused:
            raise ConfigError(
                f"text_cfg.{setting} {shortened(json.dumps(value, default=str))} is not an option of tokenizer "
                f"{spec!r}; expected {accepted}; change it in a copy of the model's JSON, or give the directory of a "
                "Hugging Face tokenizer as --tokenizer"
            )
    return cast(Cleaning | None, clean)
