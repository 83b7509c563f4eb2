"""The log of the service, on a terminal and elsewhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from typing import Literal

import pytest

from aiodelay.service.config import LogSettings
from aiodelay.service.logs import set_up_logs


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "aiodelay", "aiodelay.audit", "uvicorn")]
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def fail(text: str = "first\nsecond") -> None:
    raise ValueError(text)


def test_a_record_is_one_line_of_json_off_a_terminal() -> None:
    stream = StringIO()
    set_up_logs(LogSettings(), stream)
    try:
        fail()
    except ValueError:
        logging.getLogger("aiodelay.x").exception("a %s\nof two lines", "message", extra={"by": "me"})
    (text,) = stream.getvalue().splitlines()
    line = json.loads(text)
    assert list(line) == ["time", "level", "logger", "message", "by", "exception"]
    assert (line["level"], line["logger"], line["message"]) == ("error", "aiodelay.x", "a message\nof two lines")
    assert line["by"] == "me"
    assert line["exception"].endswith("ValueError: first\nsecond")
    assert abs((datetime.fromisoformat(line["time"]) - datetime.now(UTC)).total_seconds()) < 60


@pytest.mark.parametrize(
    ("stream", "chosen", "is_json"),
    [
        (Terminal, "auto", False),
        (Terminal, "json", True),
        (StringIO, "text", False),
        (StringIO, "auto", True),
    ],
)
def test_text_is_for_terminals(stream: type[StringIO], chosen: str, is_json: bool) -> None:
    written = stream()
    set_up_logs(LogSettings.model_validate({"format": chosen}), written)
    logging.getLogger("aiodelay").info("hello")
    assert written.getvalue().startswith("{") is is_json
    assert "hello" in written.getvalue()


def test_debug_is_of_aiodelay_alone() -> None:
    stream = StringIO()
    set_up_logs(LogSettings(level="debug"), stream)
    logging.getLogger("aiodelay.x").debug("ours")
    logging.getLogger("aiokafka").debug("theirs")
    logging.getLogger("aiokafka").info("told")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["ours", "told"]


def test_what_a_client_says_again_and_again_is_told_every_half_minute_with_how_often() -> None:
    stream = StringIO()
    set_up_logs(LogSettings(), stream)
    for name in ("aiokafka.client", "aiodelay.kafka"):
        for tenths in range(601):
            record = logging.LogRecord(name, logging.ERROR, "", 0, "no connection to %s", ("node 1",), None)
            record.created = 1_000 + tenths / 10
            logging.getLogger(name).handle(record)
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in told if line["logger"] == "aiokafka.client"] == [
        "no connection to node 1",
        "no connection to node 1 (and 299 times more)",
        "no connection to node 1 (and 299 times more)",
    ]
    assert len([line for line in told if line["logger"] == "aiodelay.kafka"]) == 601


def test_it_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(LogSettings(format="text"))
    logging.getLogger("aiodelay").warning("hello")
    captured = capsys.readouterr()
    assert "WARNING aiodelay: hello" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_who_has_changed_what_is_told_at_every_level(level: Literal["debug", "info", "warning", "error"]) -> None:
    stream = StringIO()
    set_up_logs(LogSettings(level=level), stream)
    logging.getLogger("aiodelay.audit").info("changed")
    assert json.loads(stream.getvalue())["message"] == "changed"


def test_whoever_sends_no_http_does_not_fill_the_log() -> None:
    stream = StringIO()
    set_up_logs(LogSettings(), stream)
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert stream.getvalue() == ""


def test_nothing_that_is_logged_moves_the_cursor_of_a_terminal_or_forges_a_line() -> None:
    stream = Terminal()
    set_up_logs(LogSettings(), stream)
    try:
        fail("\x1b[2J\x9b2Jof a payload\rforged")
    except ValueError:
        logging.getLogger("other").exception("lost %s", "\x1b]0;x\x07\n2026-11-21 INFO forged \u202e")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith(r"lost \x1b]0;x\x07\n2026-11-21 INFO forged \u202e")
    assert lines[-1] == r"ValueError: \x1b[2J\x9b2Jof a payload\rforged"
    assert all(line.isprintable() for line in lines)
    assert lines[1] == "Traceback (most recent call last):"
