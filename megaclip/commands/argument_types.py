"""The parser of commands, and its types: numbers with bounds. An error is one line that names the flag."""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

from megaclip.config.command_line import DATASET_TYPES
from megaclip.errors import nearest


class CommandParser(argparse.ArgumentParser):
    """Parser of a command, with its module's docstring as help text. An unknown flag is an error with the nearest
    known one, and so is an empty value, for example "$RUN" if the variable is not set."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args=None, namespace=None):
        words, known = sys.argv[1:] if args is None else args, set(self._option_string_actions)
        for before, word in zip(["", *words], takewhile(lambda word: word != "--", words), strict=False):
            flag, equals, value = word.partition("=")
            if not word or (flag.startswith("--") and equals and not value):
                name = flag or (before if before.startswith("-") else "an argument")
                self.error(f"{name}: the value is empty; give it a value, or leave it out")
            if flag.startswith("--") and not any(name.startswith(flag) for name in known):
                self.error(f"unknown argument {flag!r}{nearest(flag, known)}")
        return super().parse_known_args(args, namespace)


def add_reading_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ReadingOptions`, which `reading_flags` returns as arguments of `open_pairs`."""
    parser.add_argument("--dataset-type", choices=DATASET_TYPES, default="auto", help="format of the data")
    parser.add_argument("--image-key", help="column of the images, or their extension in tar shards and folders")
    parser.add_argument("--image-root", help="folder to which the image paths in tables are relative")
    parser.add_argument("--caption-key", help="column, extension or JSON field of the captions, or several")


def reading_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags that `add_reading_flags` adds."""
    return {name: getattr(arguments, name) for name in ("dataset_type", "image_key", "image_root", "caption_key")}


def _bounded(kind: Callable, name: str, least: float, most: float = math.inf) -> Callable:
    """Return a type for argparse: a finite number of a kind, from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
            if least <= value <= most and math.isfinite(value):
                return value
        except (ValueError, OverflowError):
            pass
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {name} {bounds}")

    return parse


integer, number = partial(_bounded, int, "an integer"), partial(_bounded, float, "a number")
