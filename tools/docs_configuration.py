"""Write the tables of docs/configuration.md (settings and flags) and docs/from_open_clip.md (flags of other trainers).

    python tools/docs_configuration.py          # after a setting, its docstring or a flag has changed

The text of the pages is written by hand, except between the markers. There the docstrings, types and defaults of the
pydantic models and config/open_clip_flags.json are the source. A test compares the pages with them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megaclip.config.command_line import OTHER_TRAINERS, TrainArguments, build_parser
from megaclip.config.section import LoraSettings, MegaclipSection
from megaclip.losses.settings import FastClipSettings

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "configuration.md", DOCS / "from_open_clip.md")
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
CODE = re.compile(
    r'"[\w.:]+"|(?<![\w/-])--[a-z][\w-]*|\boptimizer\.[\w.]+\w|(?<![\w/])(?!open_clip\b|ds_config\b)[a-z]+[\w.]*_\w+\b(?!\.md)'
)
"""Values, flags and names of settings in a docstring."""
TYPES = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}


def page(path: Path) -> str:
    """Return a page with newly made tables."""
    text = path.read_text(encoding="utf-8")
    tables = {
        "megaclip": settings(MegaclipSection),
        "fastclip": settings(FastClipSettings),
        "lora": settings(LoraSettings),
        "flags": flags(),
        "open_clip": flags_of("open_clip"),
        "FastCLIP": flags_of("FastCLIP"),
    }
    for name, part in tables.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
        before, found, rest = text.partition(begin)
        if found:
            text = f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


def flags_of(trainer: str) -> str:
    """Return a table of the flags of another trainer that are refused, with a row for each equivalent."""
    rows: dict[str, list[str]] = {}
    for kind, prefix in (("in ds_config.json", "ds_config.json: "), ("elsewhere", "")):
        for flag, instead in OTHER_TRAINERS[trainer][kind].items():
            text = linked(re.sub(r"\b(?:megaclip|bf16|wandb|comet)(?:\.\w+)+", r"`\g<0>`", instead))
            shown = flag if trainer == "open_clip" else "--" + flag[2:].replace("-", "_")
            rows.setdefault(prefix + text, []).append(f"`{shown}`")
    lines = [f"| {', '.join(theirs)} | {instead} |" for instead, theirs in rows.items()]
    return "\n".join([f"| {trainer} | MegaCLIP |", "| --- | --- |", *lines, ""])


def settings(section: type[BaseModel]) -> str:
    """Return one heading for each field of a section, with accepted values, default and docstring."""
    parts = []
    for name, meaning in docstrings(section).items():
        field = section.model_fields[name]
        values = wrapped(f"{accepted(field)}.{default(field)}")
        parts.append(f"### `{name}`\n\n{values}\n\n{wrapped(linked(meaning))}\n")
    return "\n".join(parts)


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field: those of the class itself first, then those of its base classes."""
    found = {}
    for model in section.__mro__[: section.__mro__.index(BaseModel)]:
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
        assert isinstance(declared, ast.ClassDef)
        for field, text in pairwise(declared.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return found


def accepted(field: FieldInfo) -> str:
    """Return the values that a field accepts."""
    limits = [(words, getattr(item, key, None)) for item in field.metadata for key, words in BOUNDS.items()]
    bounds = [f"{words} {limit:g}" for words, limit in limits if limit is not None]
    text = " ".join([kind(field.annotation), " and ".join(bounds)]).strip()
    return text[0].upper() + text[1:]


def kind(annotation: Any) -> str:
    """Return an annotation in words."""
    if get_origin(annotation) is Literal:
        return choices([f"`{json.dumps(value)}`" for value in get_args(annotation)])
    if get_args(annotation)[1:] == (...,):
        return f"list of {kind(get_args(annotation)[0])}"
    if get_origin(annotation) is tuple:
        return f"list of {len(get_args(annotation))} numbers"
    if inspect.isclass(annotation):
        return TYPES.get(annotation, "object")
    return choices([kind(one) for one in get_args(annotation) if one is not type(None)])


def choices(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def default(field: FieldInfo) -> str:
    """Return the default as it would be written in ds_config.json. The docstring describes the default `null`."""
    value = field.default
    plain = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
    return "" if plain is None else f" Default: `{json.dumps(plain)}`."


def linked(text: str) -> str:
    """Return a docstring in Markdown: values, settings and flags as code, pages as links with their titles."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for index in range(0, len(parts), 2):
        part = CODE.sub(r"`\g<0>`", parts[index])
        parts[index] = re.sub(r"docs/(\w+)\.md", lambda found: f"[{title(found[1])}]({found[1]}.md)", part)
    return "".join(parts)


def wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def title(name: str) -> str:
    """Return the title of a page of docs/."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def flags() -> str:
    """Return one table for each group of flags of the command line."""
    parts = []
    for group in build_parser()._action_groups:
        shown = [action for action in group._group_actions if action.dest in TrainArguments.model_fields]
        rows = [[f"`{action.option_strings[0]}`", linked(str(action.help).replace("%%", "%"))] for action in shown]
        lines = ["| flag | meaning |", "| --- | --- |", *(f"| {flag} | {meaning} |" for flag, meaning in rows), ""]
        parts += [f"### {str(group.title).capitalize()}\n", *lines] if rows else []
    return "\n".join(parts)


def main() -> None:
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
