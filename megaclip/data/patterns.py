"""File patterns: braces as in bash, {00000..00331} and {a,b}, and globs with * ? [ ]."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Sequence

from braceexpand import braceexpand

from megaclip.errors import DataError

MAX_FILES = 10_000_000
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")


def expand_braces(pattern: str) -> list[str]:
    r"""Return every string that the braces of `pattern` expand to, in order.

    Zero padding is kept, braces may be nested, and a backslash makes the next character literal, as in bash.
    Raises DataError if the braces are not balanced or stand for more than MAX_FILES strings.
    """
    ranges = [[int(number or 1) for number in match.groups()] for match in _RANGE.finditer(pattern)]
    # braceexpand stores every number of a range in memory.
    is_too_long = any(abs(last - first) // max(step, 1) >= MAX_FILES for first, last, step in ranges)
    try:
        names = [] if is_too_long else list(itertools.islice(braceexpand(pattern), MAX_FILES + 1))
    except ValueError as error:  # UnbalancedBracesError, which the library's type hints do not declare
        raise DataError(f"data {pattern!r}: the braces are not balanced; write '\\{{' for a brace in a name") from error
    if is_too_long or len(names) > MAX_FILES:
        raise DataError(
            f"data {pattern!r}: the braces stand for more than {MAX_FILES:,} files; use shorter ranges or a glob"
        )
    return names


def literal(path: str | os.PathLike) -> str:
    """Return the pattern that matches only the file or folder `path`."""
    return re.sub(r"[\\{}]", r"\\\g<0>", glob.escape(os.fspath(path)))


def expand_pattern(pattern: str) -> list[str]:
    """Return the existing paths that `pattern` matches, in the order of the braces. The matches of a glob are sorted.

    A file or folder with exactly the name `pattern` is used as it is. Raises DataError if nothing matches or if a file
    or glob that the braces name is missing.
    """
    whole = os.path.expanduser(pattern)
    paths: list[str] = []
    for name in [whole] if os.path.exists(whole) else expand_braces(whole):
        found = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        paths += found or [name]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        problem = f"{len(missing)} of {len(paths)} files are missing, first {missing[0]}"
        if len(paths) == 1 and glob.has_magic(paths[0]):
            problem = "no file matches"
        raise DataError(f"data {pattern!r}: {problem} (working directory {os.getcwd()}){_advice(pattern)}")
    refuse_special_files(pattern, paths)
    return paths


def refuse_special_files(pattern: str, paths: Sequence[str]) -> None:
    """Raise DataError for pipes, devices and broken links. Reading a pipe or a device could block or never end."""
    special = next((path for path in paths if not (os.path.isfile(path) or os.path.isdir(path))), None)
    if special is not None:
        raise DataError(f"data {pattern!r}: {special} is neither a file nor a folder; copy the data to a file")


def _advice(pattern: str) -> str:
    """Return what to write instead of the URLs, pipes and '::' lists that webdataset and open_clip accept."""
    if pattern.startswith("pipe:"):
        return "; pipes are not read: give the URL itself, such as s3://bucket/00000.tar"
    if re.match(r"[a-z][a-z0-9+.-]*://", pattern, re.IGNORECASE):
        return "; use s3://, gs://, hf://, http://, https://, abfs://, or copy or mount the data"
    if "::" in pattern:
        return f"; separate several datasets by spaces: {' '.join(pattern.split('::'))}"
    return ""
