"""Mark the tests that compare floating-point numbers: `pytest -m numbers` runs them. Record megaclip's log lines.

A test is marked if its module imports the table of bounds, or the tile cases that use it. The results of these tests
depend on the processor. `make test-portable` repeats them with other settings.
"""

import logging
import multiprocessing
import re
from functools import cache
from pathlib import Path

import pytest

COMPARES_NUMBERS = re.compile(r"^\s*from tests\.(tolerances|tile_cases) import", re.MULTILINE)


@cache
def compares_numbers(module: Path) -> bool:
    return COMPARES_NUMBERS.search(module.read_text()) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if compares_numbers(item.path):
            item.add_marker(pytest.mark.numbers)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Return pytest's record of log lines, with those of megaclip's logger, which has a handler of its own."""
    monkeypatch.setattr(logging.getLogger("megaclip"), "propagate", True)
    return caplog


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the record of warnings and errors."""
    caplog.set_level(logging.WARNING)
    return caplog


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Kill the processes that a failed test has left behind. Python waits for them when it exits, possibly for ever."""
    left = [process for process in multiprocessing.active_children() if not process.daemon]
    for process in left:
        process.kill()
    if left:
        raise RuntimeError(f"tests have left processes behind, which were killed: {[one.name for one in left]}")
