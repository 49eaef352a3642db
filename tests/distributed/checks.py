"""Run several checks in one launch of ranks, and report each of them as a separate test.

A rank calls `run_checks`, usually from a module-scoped fixture through `run_ranks`; each test calls `assert_passed`
with the name of its check. A check is a function that raises if it fails.
"""

import traceback
from collections.abc import Callable, Mapping

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
