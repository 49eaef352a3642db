"""Load a tokenizer by its name or path."""

import json
from pathlib import Path
from typing import Any, cast, get_args

from megaclip.data.hugging_face_tokenizer import CACHED, HuggingFaceTokenizer
from megaclip.data.text_cleaning import Cleaning
from megaclip.data.tokenizers import ClipTokenizer, SentencePieceTokenizer, Tokenizer
from megaclip.errors import ConfigError, shortened

_CLEANINGS = "clean " + ", ".join(map(repr, get_args(Cleaning)))


def load_tokenizer(
    spec: str, context_length: int, *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: "clip", the path of a sentencepiece .model file, a directory with the files of a Hugging Face tokenizer,
            or "hf:NAME" for one in the local cache of the Hugging Face hub.
        context_length: number of tokens per caption.
        mode, options: `text_cfg.tokenizer_mode` and `text_cfg.tokenizer_kwargs`. Only Hugging Face tokenizers have
            other options than `clean`.

    Raises:
        ConfigError: there is no such tokenizer, it does not have one of the options, or the context length is too
            short.
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
