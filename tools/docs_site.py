"""Prepare the website of `make docs` (a hook of mkdocs.yml): the pages of the repository's root, and formulas.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages beside those of docs/. The files do not change: the links
between them are rewritten in memory. A link to a file of the code becomes plain text, because the site does not contain
the code. Formulas become MathML, which browsers show without a script.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    return site_links(markdown, "." if page.file.src_uri in ROOT_PAGES else "docs")


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the formulas of a page by MathML."""
    from latex2mathml.converter import convert

    def mathml(found: re.Match[str]) -> str:
        return convert(html.unescape(found.group(3)), display="block" if found.group(2) == "[" else "inline")

    return FORMULA.sub(mathml, content)


def site_links(markdown: str, folder: str) -> str:
    """Return a page with links for the site, where the pages of the root and of docs/ are in one folder.

    Args:
        markdown: the page's text; links in its code blocks are not rewritten.
        folder: folder of the page in the repository: "." or "docs".
    """

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.group(1), found.group(2), found.group(3) or ""
        path = (ROOT / folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return f"{text}({path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        if path.parent == ROOT and path.name in ROOT_PAGES:
            return f"{text}({path.name}{anchor})"
        return text[1:-1] if path.exists() else found.group(0)  # --strict reports a link that leads nowhere

    return LINK.sub(link, markdown)
