"""Clean captions before they are tokenised, as open_clip does, so that exported models see equal tokens."""

from __future__ import annotations

import html
import string
from typing import Literal

import ftfy

Cleaning = Literal["whitespace", "lower", "canonicalize"]
"""open_clip's cleaning modes (`clean` in `text_cfg.tokenizer_kwargs`).

"whitespace" repairs the text, "lower" also lower-cases it, and "canonicalize" also removes ASCII punctuation."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def clean_caption(text: str, clean: Cleaning = "whitespace") -> str:
    """Repair mis-decoded text, unescape HTML entities twice, and replace every run of white space by one space."""
    # ftfy takes longer than the tokenizer, and it does not change printable ASCII without HTML entities.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    if clean == "canonicalize":
        text = text.replace("_", " ").translate(_NO_PUNCTUATION).lower()
    text = " ".join(text.split())
    return text.lower() if clean == "lower" else text
