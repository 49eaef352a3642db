"""Clean captions before they are tokenised, as open_clip does, so that exported models see equal tokens."""

from __future__ import annotations

import html

import ftfy


def clean_caption(text: str, *, lower: bool = False) -> str:
    """Repair mis-decoded text, unescape HTML entities twice, and replace every run of white space by one space.

    This is open_clip's cleaning "whitespace" or, with `lower`, its cleaning "lower".
    """
    # ftfy takes longer than the tokenizer, and it does not change printable ASCII without HTML entities.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    text = " ".join(text.split())
    return text.lower() if lower else text
