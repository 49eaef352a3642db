"""Types for argparse in tools: numbers with a lower bound. An error is one line that names the flag."""

import argparse
import math
from collections.abc import Callable


def integer(least: int) -> Callable[[str], int]:
    """Return a type for argparse: an integer that is at least `least`."""
    return _bounded(int, least, "an integer")


def number(least: float) -> Callable[[str], float]:
    """Return a type for argparse: a finite number that is at least `least`."""
    return _bounded(float, least, "a number")


def _bounded(kind: Callable, least: float, name: str) -> Callable:
    def parse(text: str) -> float:
        try:
            value = kind(text)
            if value >= least and math.isfinite(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {name} of at least {least:g}")

    return parse
