"""Write the tokenizer of a model as transformers reads it.

transformers returns equal token ids for captions whose HTML entities and wrong encodings were repaired before, as the
option "whitespace" of `data.tokenizers` does. The options "lower" and "canonicalize" become steps of tokenizer.json.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, normalizers

from megaclip.checkpoint.model_card import ModelCard
from megaclip.data import Tokenizer
from megaclip.data.tokenizers import CLIP_END, CLIP_START, ClipTokenizer
from megaclip.engine.tokenizer_choice import choose_tokenizer
from megaclip.errors import ConfigError
from megaclip.logging import get_logger
from megaclip.models.transformers_config import ANY_TOKENIZER
from megaclip.open_clip_package import import_open_clip

logger = get_logger(__name__)

_SETTINGS = "tokenizer_config.json"
_LOWER = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Lowercase()]
_STEPS = {
    "lower": _LOWER,
    "canonicalize": [normalizers.Replace("_", " "), normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""), *_LOWER],
}


def tokenizer_beside(card: ModelCard) -> Tokenizer | None:
    """Return the tokenizer of a model card. None, and a warning: it was imported from a directory without one."""
    if card.config.text_cfg.hf_tokenizer_name == ANY_TOKENIZER and not (card.directory / _SETTINGS).is_file():
        logger.warning("%s has no tokenizer, and the export will have none", card.directory)
        return None
    return choose_tokenizer(None, card, card.config).tokenizer


def write_transformers_tokenizer(card: ModelCard, directory: Path) -> None:
    """Write the files of the model's tokenizer that transformers' AutoTokenizer reads other than those beside the card.

    Raises:
        ConfigError: transformers has no such tokenizer.
    """
    text, tokenizer = card.config.text_cfg, tokenizer_beside(card)
    if tokenizer is None:
        return
    options = dict(text.tokenizer_kwargs or {})
    clean = options.pop("clean", None)
    if text.tokenizer_mode or any(options.values()):
        raise ConfigError(
            f"{card.path}: text_cfg.tokenizer_mode {text.tokenizer_mode!r} and tokenizer_kwargs "
            f"{json.dumps(text.tokenizer_kwargs)}: transformers' tokenizers have no such option; use --format open_clip"
        )
    is_clip = isinstance(tokenizer, ClipTokenizer)
    if is_clip and clean not in (None, "lower"):
        raise ConfigError(f"{card.path}: tokenizer_kwargs.clean {clean!r}: CLIPTokenizer only lower-cases")
    import_open_clip()  # and torchvision, which transformers needs
    if is_clip and not (card.directory / _SETTINGS).is_file():
        _write_clip(tokenizer.context_length, directory)
    elif not is_clip and clean in _STEPS:
        tokenizer.write_open_clip(directory)
        _add_steps(directory, _STEPS[clean], card)


def _write_clip(context_length: int, directory: Path) -> None:
    """Write CLIP's vocabulary, with transformers' names of the special tokens."""
    from transformers import CLIPTokenizer

    model = json.loads(ClipTokenizer(context_length).as_hugging_face().to_str())["model"]
    names = {CLIP_START: "<|startoftext|>", CLIP_END: "<|endoftext|>"}
    vocabulary = {names.get(word, word): number for word, number in model["vocab"].items()}
    merges: Any = [tuple(pair) for pair in model["merges"]]
    CLIPTokenizer(vocabulary, merges, model_max_length=context_length).save_pretrained(directory)


def _add_steps(directory: Path, steps: list[normalizers.Normalizer], card: ModelCard) -> None:
    """Clean captions in tokenizer.json, before its own steps, and let transformers read that file as it is."""
    path, settings = directory / "tokenizer.json", directory / _SETTINGS
    if not path.is_file():
        raise ConfigError(f"{card.path}: the tokenizer has no tokenizer.json, whose normalizer would clean captions")
    model = tokenizers.Tokenizer.from_file(str(path))
    own = [] if model.normalizer is None else [model.normalizer]
    model.normalizer = normalizers.Sequence([*steps, *own])
    model.save(str(path))
    content = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(content, indent=2) + "\n")
