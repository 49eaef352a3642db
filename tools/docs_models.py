"""Write the table of docs/models.md: the models of the installed open_clip, and the towers that run each.

    python tools/docs_models.py          # after another version of open_clip was installed; takes three minutes

Tests compare rows of the table with those that `megaclip models` prints.
"""

from __future__ import annotations

from pathlib import Path

from megaclip.commands.list_models import table
from megaclip.models.open_clip_config import open_clip_descriptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- begin: megaclip models -->", "<!-- end -->"


def parts() -> tuple[str, str, str]:
    """Return the text of the page until the first marker, between the markers, and from the second marker on."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    between, _, after = rest.partition(END)
    return before + BEGIN, between, END + after


def main() -> None:
    before, _, after = parts()
    PAGE.write_text(f"{before}\n\n{table(list(open_clip_descriptions()))}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
