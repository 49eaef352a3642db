"""Messages that all ranks have in common, and numbers in messages."""

from megaclip.logging import format_count, log_once


def test_a_common_message_is_logged_once_by_rank_0(monkeypatch):
    lines: list[str] = []
    for rank in ("1", "0", "0"):
        monkeypatch.setenv("RANK", rank)
        log_once(lines.append, "a common message")
    assert lines == ["a common message"]


def test_a_noun_is_in_the_plural_unless_there_is_one():
    assert [format_count(count, "more file") for count in range(3)] == ["0 more files", "1 more file", "2 more files"]
