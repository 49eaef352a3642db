"""The cleaning of captions before they are tokenised: open_clip's, so that exported models see the same tokens."""

from __future__ import annotations

import html

import ftfy


def clean_caption(text: str, *, lower: bool = False) -> str:
    """Repair mis-decoded text, resolve HTML entities twice, and make every run of white space one space.

    open_clip's cleaning "whitespace", or with `lower` its "lower".
    """
    # Repairing costs more than tokenising, and leaves printable ASCII without entities as it is.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    text = " ".join(text.split())
    return text.lower() if lower else text
