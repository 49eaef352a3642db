"""Messages that all ranks have in common."""

from megaclip.logging import log_once


def test_a_common_message_is_logged_once_by_rank_0(monkeypatch):
    lines: list[str] = []
    for rank in ("1", "0", "0"):
        monkeypatch.setenv("RANK", rank)
        log_once(lines.append, "a common message")
    assert lines == ["a common message"]
