"""Run several checks in one launch of ranks, and report each of them as a separate test; cover pairs of settings.

A rank calls `run_checks`, usually from a module-scoped fixture through `run_ranks`; each test calls `assert_passed`
with the name of its check. A check is a function that raises if it fails.
"""

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    possible: Callable[[dict[str, Any]], bool] = lambda row: True, **factors: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return rows of one level of each factor, in which every pair of levels of two factors occurs.

    Most faults show with one or two settings, so these rows replace the grid of all combinations. Each row starts with
    a pair that is missing, and takes the levels that complete most missing pairs; of equal ones, the rarest.

    possible: False for rows to leave out. It is also called for rows that have levels of some factors only.
    """
    levels = {name: [(name, level) for level in factor] for name, factor in factors.items()}
    pairs = itertools.chain.from_iterable(itertools.product(*two) for two in itertools.combinations(levels.values(), 2))
    missing = dict.fromkeys(pair for pair in pairs if possible(dict(pair)))
    used: Counter[tuple[str, Any]] = Counter()
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in [name for name in factors if name not in row]:
            longer = filter(possible, (row | {name: level} for level in factors[name]))
            row = max(longer, key=lambda each: (len(missing.keys() & _pairs(each)), -used[name, each[name]]))
        rows.append({name: row[name] for name in factors})
        used.update(row.items())
        for pair in _pairs(row):
            missing.pop(pair, None)
    return rows


def _pairs(row: dict[str, Any]) -> set[Any]:
    return set(itertools.permutations(row.items(), 2))
