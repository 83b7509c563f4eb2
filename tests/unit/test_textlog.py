"""Logs of commands show the errors of handlers, which cannot move the cursor or forge a line."""

from __future__ import annotations

import logging

import pytest

from aiodelay.operations.text_log import log_as_text


def test_a_handlers_error_moves_no_cursor_and_forges_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.Logger("root")  # noqa: LOG001 - the tests have theirs
    monkeypatch.setattr(logging, "root", root)
    log_as_text(logging.INFO, "aiodelay: %(message)s")
    log_as_text(logging.DEBUG, "another: %(message)s")
    root.debug("is not told: the first one holds")
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        error.add_note("\x1b[2J\u202e")
        root.exception("work: attempt 1 at x failed: %s", "\x9b2J\r\nforged")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == r"aiodelay: work: attempt 1 at x failed: \x9b2J\r\nforged"
    assert lines[-1] == r"\x1b[2J\u202e"
    assert len(lines) > 3, "a traceback keeps its lines"
