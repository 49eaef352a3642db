"""File patterns as users write them: braces as in a shell, {00000..00331} and {a,b}, and globs with * ? [ ].

`expand_pattern` gives existing files or says which are missing, in the pattern's own order (braces) or sorted (globs).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator

from megaclip.errors import DataError

MAX_FILES = 10_000_000
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(pattern: str) -> Iterator[str]:
    """Every string that the braces of `pattern` stand for, in order; zero padding is kept; braces may be nested."""
    start, end = _first_braces(pattern)
    if start < 0:
        yield pattern
        return
    before, inside, after = pattern[:start], pattern[start + 1 : end], pattern[end + 1 :]
    for choice in _choices(inside):
        for rest in expand_braces(after):
            yield before + choice + rest


def _first_braces(pattern: str) -> tuple[int, int]:
    """Where the first balanced {...} begins and ends; (-1, -1) when there is none."""
    start, depth = pattern.find("{"), 0
    for place in range(max(start, 0), len(pattern) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(pattern[place], 0)
        if depth == 0:
            return start, place
    if start >= 0:
        raise DataError(f"the braces of {pattern!r} are not balanced")
    return -1, -1


def _choices(inside: str) -> Iterator[str]:
    match = _RANGE.fullmatch(inside)
    if match:
        first, last = match.groups()
        count = abs(int(last) - int(first)) + 1
        if count > MAX_FILES:
            raise DataError(f"the range {{{inside}}} stands for {count:,} files; at most {MAX_FILES:,} are allowed")
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        step = 1 if int(first) <= int(last) else -1
        for number in range(int(first), int(last) + step, step):
            yield f"{number:0{width}d}"
        return
    for part in _split_commas(inside):
        yield from expand_braces(part)


def _split_commas(inside: str) -> list[str]:
    """Split at the commas that are not inside nested braces."""
    parts, depth = [""], 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def expand_pattern(pattern: str) -> list[str]:
    """The existing paths that `pattern` stands for; DataError when it matches nothing or a named file is missing."""
    paths: list[str] = []
    for name in expand_braces(os.path.expanduser(pattern)):
        if glob.has_magic(name) and not os.path.exists(name):
            paths.extend(sorted(glob.glob(name, recursive=True)))
        else:
            paths.append(name)
    missing = [path for path in paths if not os.path.exists(path)]
    if missing or not paths:
        what = f"{len(missing)} of {len(paths)} files are missing, first {missing[0]}" if missing else "no file matches"
        raise DataError(f"data {pattern!r}: {what} (working directory {os.getcwd()}){_advice(pattern)}")
    return paths


def _advice(pattern: str) -> str:
    """What to write instead of webdataset's and open_clip's ways to name data, which are no files."""
    if pattern.startswith("pipe:") or re.match(r"[a-z][a-z0-9+.-]*://", pattern, re.IGNORECASE):
        return "; nothing is streamed: copy or mount the data, and name the files"
    if "::" in pattern:
        return f"; several data sets are several words: {' '.join(pattern.split('::'))}"
    return ""
