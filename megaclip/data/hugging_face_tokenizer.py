"""Tokenizers of the Hugging Face hub, through open_clip's own class: its cleaning, modes and truncation.

The files come from a directory, or from the local cache of the hub. Nothing is downloaded.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megaclip.data.tokenizers import Tokenizer
from megaclip.errors import ConfigError, first_line
from megaclip.open_clip_package import import_open_clip

CACHED = "hf:"
"""Prefix of the name of a tokenizer in the local cache of the Hugging Face hub."""


class HuggingFaceTokenizer(Tokenizer):
    """open_clip's `HFTokenizer`. It returns the same ids for the same caption."""

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

    def _encode(self, caption: str) -> list[int]:
        return [int(token) for token in self([caption])[0]]

    def ends_captions_with(self, token: int) -> bool:
        """Return whether the id `token` first occurs after the text of a caption, even if the caption is truncated."""
        is_end = self(["a", "a photo of a cat " * self.context_length]) == token
        return bool(is_end.any(dim=1).all() and not is_end[:, 0].any())

    def write_open_clip(self, directory: Path | str) -> dict[str, Any]:
        """Write the tokenizer's files. Returns the keys and values for `text_cfg`."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._tokenizer.save_pretrained(str(directory))
        return {
            "context_length": self.context_length,
            "tokenizer_mode": self._mode,
            "tokenizer_kwargs": self._options,
        }
