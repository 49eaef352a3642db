"""Load the tokenizer that a name or a path stands for."""

from pathlib import Path
from typing import Any

from megaclip.data.hugging_face_tokenizer import CACHED, HuggingFaceTokenizer
from megaclip.data.tokenizers import ClipTokenizer, SentencePieceTokenizer, Tokenizer
from megaclip.errors import ConfigError


def load_tokenizer(
    spec: str, context_length: int, *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: "clip", the path of a sentencepiece .model file, a directory with the files of a Hugging Face tokenizer,
            or "hf:NAME" for one in the local cache of the Hugging Face hub.
        context_length: number of tokens per caption.
        mode, options: settings of Hugging Face tokenizers, `text_cfg.tokenizer_mode` and `text_cfg.tokenizer_kwargs`.

    Raises:
        ConfigError: there is no such tokenizer, or the context length is too short.
    """
    if context_length < 2:
        raise ConfigError(f"the context length is {context_length}; use at least 2")
    if spec == "clip":
        return ClipTokenizer(context_length)
    if spec.startswith(CACHED) or Path(spec).is_dir():
        return HuggingFaceTokenizer(spec, context_length, mode=mode, options=options)
    return SentencePieceTokenizer(spec, context_length)
