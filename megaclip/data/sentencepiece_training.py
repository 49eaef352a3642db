"""Train a sentencepiece model on captions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from megaclip.data.source import MAX_BYTES
from megaclip.data.tokenizers import SentencePieceTokenizer, clean_caption
from megaclip.errors import ConfigError, first_line

MAX_PIECE_LENGTH = 16
_MAX_CAPTION_BYTES = 4 * MAX_BYTES["caption"]
"""sentencepiece would skip captions of more than 4,192 bytes. A character of a caption has at most 4 bytes."""


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
            max_sentence_length=_MAX_CAPTION_BYTES,
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
