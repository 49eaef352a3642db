"""Quoting the errors of other libraries in a message."""

import pytest

from megaclip.errors import ConfigError, first_line


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("disk full\nframe #0: somewhere"), "disk full"),
        (RuntimeError("\n  disk full \n"), "disk full"),
        (MemoryError(), "MemoryError"),
        (OSError(" \n "), "OSError"),
        (ValueError("x" * 500), "x" * 197 + "..."),
    ],
)
def test_the_first_line_of_an_error_is_quoted(error: Exception, expected: str) -> None:
    assert first_line(error) == expected


def test_a_value_of_any_length_is_shown_in_part() -> None:
    """It may come from a file that somebody else has made."""
    shown = str(ConfigError(f"--lr is {'9' * 5000} instead of a number"))
    assert shown == f"--lr is {'9' * 400}... instead of a number"
