"""Turn captions into token ids, with CLIP's byte-pair vocabulary or a sentencepiece model trained on the captions.

The ids of both equal those of open_clip for the same captions. `write_open_clip` exports a tokenizer for open_clip.
"""

from __future__ import annotations

import abc
import functools
import gzip
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import torch
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megaclip.data.text_cleaning import Cleaning, clean_caption
from megaclip.errors import ConfigError, first_line

CLIP_VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
CLIP_MERGES = 49_152 - 256 - 2
CLIP_START, CLIP_END = "<start_of_text>", "<end_of_text>"
MAX_PIECE_LENGTH = 16
# From simple_tokenizer.py of openai/CLIP. Special tokens are words too: open_clip keeps their names whole, in upper and
# lower case.
CLIP_WORDS = rf"(?i){CLIP_START}|{CLIP_END}|'s|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"


class Tokenizer(abc.ABC):
    """Turns n captions into token ids (n, context_length) int64.

    Longer captions are truncated. The last token before the padding is always the end of text.
    """

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

    @abc.abstractmethod
    def _encode(self, caption: str) -> list[int]:
        """Return the ids of a caption, with the start of text if the vocabulary has one, without the end of text."""

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

    def write_open_clip(self, directory: Path | str) -> dict[str, Any]:
        """Return the keys and values for `text_cfg`. No file is written: this tokenizer is open_clip's default."""
        return {
            "hf_tokenizer_name": None,
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "tokenizer_mode": None,
            "tokenizer_kwargs": None if self._clean == "lower" else {"clean": self._clean},
        }


@functools.lru_cache(maxsize=1)
def _clip_model() -> tokenizers.Tokenizer:
    packed = resources.files("megaclip.data").joinpath(CLIP_VOCABULARY).read_bytes()
    lines = gzip.decompress(packed).decode().split("\n")[1 : CLIP_MERGES + 1]
    merges = [(left, right) for left, right in (line.split() for line in lines)]
    letters = _byte_letters()
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


def _byte_letters() -> list[str]:
    """Return the printable letter for each byte, in the vocabulary's order: printable bytes come first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = len(set(range(256)) - set(printable))
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(others)]


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (unigram or bpe) with padding and end-of-text pieces, as `megaclip tokenizer` makes."""

    def __init__(self, path: Path | str, context_length: int, clean: Cleaning = "whitespace") -> None:
        if not Path(path).is_file():
            raise ConfigError(
                f"tokenizer {str(path)!r} does not exist; use 'clip', the path of a sentencepiece .model file or the "
                "directory of a Hugging Face tokenizer"
            )
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"tokenizer {str(path)!r} is not a sentencepiece model ({first_line(error)}); make one with "
                "`megaclip tokenizer`"
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
        """Write tokenizer.json and tokenizer_config.json, with which transformers and open_clip return equal ids.

        Returns the keys and values for `text_cfg`.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.as_hugging_face().save(str(directory / "tokenizer.json"))
        pieces = {"unk": self._model.unk_id(), "eos": self.eos_id, "pad": self.pad_id}
        names = {f"{name}_token": _exported_name(self._model.id_to_piece(number)) for name, number in pieces.items()}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.context_length,
            "clean_up_tokenization_spaces": False,
            **names,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        return {
            "hf_tokenizer_name": "sentencepiece",  # any name makes `local-dir:` read the files beside the card
            "vocab_size": self.vocab_size,
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
                piece.piece = _exported_name(piece.piece)
        model = tokenizers.Tokenizer(_hugging_face_model(proto, self._model.unk_id()))
        model.normalizer = _normalizer(proto.normalizer_spec)
        prefix = "always" if proto.normalizer_spec.add_dummy_prefix else "never"
        model.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix)
        model.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prefix)
        end = _exported_name(self._model.id_to_piece(self.eos_id))
        model.post_processor = processors.TemplateProcessing(
            single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, self.eos_id)]
        )
        special = (self.pad_id, self.eos_id, self._model.unk_id())
        model.add_special_tokens([_exported_name(self._model.id_to_piece(number)) for number in sorted(special)])
        return model


def _exported_name(special_piece: str) -> str:
    """Return the name of a special piece in an exported tokenizer."""
    return special_piece + "\n"


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


def _with_whole_words(captions: Iterable[str], vocab_size: int) -> Iterator[str]:
    """Yield the captions, then every frequent word twice on a line of its own.

    The candidates of a unigram model are the branches of a suffix tree: strings that are followed by different
    characters. A word that never ends a caption is always followed by a space. In captions that all follow one pattern,
    such as those of the demo, "left" would be split into "l e f t". In the line "left left" the word is followed by a
    space and by the end of the line. The additional line per word hardly changes the frequencies.
    """
    words: Counter[str] = Counter()
    for caption in captions:
        words.update(caption.split())
        yield caption
    for word, _ in words.most_common(vocab_size):
        if len(word) <= MAX_PIECE_LENGTH:
            yield f"{word} {word}"


def train_sentencepiece(
    captions: Iterable[str], path: Path | str, *, vocab_size: int, model_type: str = "unigram"
) -> SentencePieceTokenizer:
    """Train a sentencepiece model on captions and write it to `path`, which ends in .model.

    model_type: "unigram" or "bpe".
    vocab_size: largest number of pieces. Few captions give fewer.

    The ids 0, 1 and 2 are padding, unknown and end of text. The captions are cleaned as in training.

    Raises ConfigError without captions, or if sentencepiece cannot train, for example because the captions have more
    different characters than vocab_size.
    """
    cleaned = filter(None, map(clean_caption, captions))
    first = list(itertools.islice(cleaned, 1))
    if not first:
        raise ConfigError("the data has no captions; a tokenizer cannot be trained without captions")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_with_whole_words(itertools.chain(first, cleaned), vocab_size),
            model_prefix=str(Path(path).with_suffix("")),
            model_type=model_type,
            max_sentencepiece_length=MAX_PIECE_LENGTH,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            byte_fallback=False,
            pad_id=0,
            unk_id=1,
            eos_id=2,
            bos_id=-1,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"sentencepiece cannot train a tokenizer of {vocab_size} pieces and write it to {str(path)!r}: "
            f"{first_line(error)}; every different character is a piece, so a larger --vocab-size may help"
        ) from None
    return SentencePieceTokenizer(path, context_length=77)
