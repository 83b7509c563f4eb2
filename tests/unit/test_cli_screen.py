from __future__ import annotations

import os
from io import StringIO, TextIOWrapper

import pytest

from aiodelay.cli.screen import Screen

TERMINAL = {"TERM": "xterm"}


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "14")
    return Terminal()


def nothing() -> None:
    pass


def test_a_status_is_a_line_where_nothing_can_be_replaced() -> None:
    stream = StringIO()
    screen = Screen(stream, nothing, TERMINAL)
    screen.status("a 1 │ b 2")
    screen.line("delivered", "delivered")
    screen.end_status()
    assert stream.getvalue() == "a 1 │ b 2\ndelivered\n"


@pytest.mark.skipif(os.name == "nt", reason="plain lines on Windows")
def test_a_terminal_keeps_the_status_below_the_lines(terminal: Terminal) -> None:
    screen = Screen(terminal, nothing, TERMINAL)
    screen.status("a 1 │ b 2")
    screen.line("x delivered", "delivered")
    screen.status("a 2 │ b 3")
    screen.end_status()
    assert terminal.getvalue() == ("a 1 │ b 2\r\x1b[Jx \x1b[32mdelivered\x1b[0m\na 1 │ b 2\r\x1b[Ja 2 │ b 3\r\x1b[J")


@pytest.mark.skipif(os.name == "nt", reason="plain lines on Windows")
def test_a_status_wider_than_the_terminal_takes_more_lines(terminal: Terminal) -> None:
    screen = Screen(terminal, nothing, {**TERMINAL, "NO_COLOR": "1"})
    screen.status("one 1 │ two 2 │ a part too wide for it")
    screen.line("delivered", "delivered")
    folded = "one 1 │ two 2\na part too wi"
    assert terminal.getvalue() == f"{folded}\r\x1b[1A\x1b[Jdelivered\n{folded}"


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}])
def test_a_dumb_terminal_gets_lines(environment: dict[str, str]) -> None:
    assert not Screen(Terminal(), nothing, environment).is_terminal


def test_a_reader_that_went_away_is_told_once_and_nothing_more_is_written() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    told: list[str] = []
    with open(writing, "w", encoding="utf-8") as stream:
        screen = Screen(stream, lambda: told.append("gone"), {})
        screen.line("one")
        screen.line("two")
    assert told == ["gone"]


def test_what_the_stream_cannot_write_is_replaced() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read, os.fdopen(writing, "wb") as raw:
        with TextIOWrapper(raw, encoding="ascii") as stream:
            Screen(stream, nothing, {}).line("a │ b")
        assert read.read() == f"a ? b{os.linesep}".encode()
