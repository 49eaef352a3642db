"""Quoting the errors of other libraries in a message."""

import pytest

from megaclip.comm.collectives import raise_on_all_ranks
from megaclip.errors import (
    BusyError,
    ConfigError,
    DataError,
    first_line,
    nearest,
    os_errors_as,
    refused_before_training,
)


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
    """The value may come from an untrusted file."""
    shown = str(ConfigError(f"--lr is {'9' * 5000} instead of a number"))
    assert shown == f"--lr is {'9' * 400}... instead of a number"


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("adamw", {"Adam", "AdamW", "SGD"}, "AdamW"),  # by its letters alone, Adam would be nearer
        ("vit_b_32", {"ViT-B-32", "ViT-S-32", "convnext_base_w_320"}, "ViT-B-32"),
        ("ViT-B/32", {"ViT-B-32", "ViT-S-32"}, "ViT-B-32"),
        ("--lr-mn", {"--lr-min", "--lr_min"}, "--lr-min"),  # spelled as in --help
    ],
)
def test_the_case_of_letters_and_the_separators_do_not_matter_for_the_nearest_word(word, known, expected) -> None:
    assert nearest(word, known) == f"; did you mean {expected!r}?"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), "cannot write a/b: No space left on device; free space"),
        (PermissionError(13, "Permission denied", "a/b"), "cannot write a/b: Permission denied; free space"),
        (PermissionError(13, "Permission denied", "a/b/c"), "cannot write a/b: a/b/c: Permission denied; free space"),
        (RuntimeError("enforce fail\nframe #0"), "cannot write a/b: enforce fail; free space"),
    ],
)
def test_an_error_of_the_system_names_its_file_once_and_remains_the_cause(error, expected) -> None:
    with (
        pytest.raises(ConfigError) as raised,
        os_errors_as(ConfigError, "cannot write a/b", "free space", also=RuntimeError),
    ):
        raise error
    assert str(raised.value) == expected and raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (DataError("no file matches"), None, 78),
        (DataError("cannot read"), FileNotFoundError(2, "No such file"), 78),
        (DataError("cannot read"), NotADirectoryError(20, "Not a directory"), 78),
        (DataError("cannot read"), OSError(5, "Input/output error"), 1),  # a restart may succeed
        (DataError("cannot load"), ConnectionError("the hub does not answer"), 1),
        (BusyError("the folder is in use"), None, 1),
    ],
)
def test_what_is_refused_before_training_is_not_started_again(error, cause, code) -> None:
    with pytest.raises(type(error)) as raised, refused_before_training(), raise_on_all_ranks():
        raise error from cause
    assert raised.value.exit_code == code and type(error).exit_code == 1
