"""Run several checks in one launch of ranks, and report each of them as a separate test; cover pairs of settings.

A rank calls `run_checks`, usually from a module-scoped fixture through `run_ranks`; each test calls `assert_passed`
with the name of its check. A check is a function that raises if it fails.
"""

import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Outcome = dict[str, str]
"""Name of every check that a rank has run -> its traceback, or "" if it passed."""


def run_checks(checks: Mapping[str, Callable[[], None]]) -> Outcome:
    """Run the checks in order until one fails, and return their outcomes.

    The rank stops at its first failure, because it may have left the other ranks inside a collective. They then fail
    too when its process ends.
    """
    outcome: Outcome = {}
    for name, check in checks.items():
        outcome[name] = ""
        try:
            check()
        except (Exception, pytest.fail.Exception):
            outcome[name] = traceback.format_exc()
            break
    return outcome


def assert_passed(outcomes: list[Outcome], name: str) -> None:
    """Raise AssertionError unless check `name` passed on every rank. outcomes: one per rank."""
    texts = [outcome.get(name, "not run, because an earlier check failed") for outcome in outcomes]
    assert not any(texts), "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(texts) if text)


def covering_rows(
    *factors: Iterable[Any], possible: Callable[[tuple[Any, ...]], bool] = lambda row: True
) -> list[tuple[Any, ...]]:
    """Return rows of one level of each factor, in which every pair of levels of two factors occurs.

    Most faults show with one or two settings, so these rows replace the grid of all combinations. Each row has as many
    new pairs as any other. If several have, it is the first of the grid. possible: False for rows to leave out.
    """
    grid = [row for row in itertools.product(*factors) if possible(row)]
    missing = {pair for row in grid for pair in _pairs(row)}
    rows = []
    while missing:
        rows.append(max(grid, key=lambda row: len(missing & _pairs(row))))
        missing -= _pairs(rows[-1])
    return rows


def _pairs(row: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))
