"""Sets up the service's log: text lines on a terminal, and otherwise one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from collections import OrderedDict
from datetime import UTC, datetime
from typing import TextIO

from aiodelay.operations.text_log import TEXT, TextFormatter

from .config import LogSettings

__all__ = ["JsonFormatter", "set_up_logs"]

AGAIN_S = 30.0
TEXTS = 1_000
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: `time`, `level`, `logger`, `message`, an `exception` if any, and the `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, on one line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Seldom(logging.Filter):
    """Lets each log text of aiokafka through once in 30 s.

    While a Kafka cluster does not answer, aiokafka logs the same text 200 times a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record. A written record tells how often its text was left out before."""
        if not record.name.startswith("aiokafka"):
            return True
        text = record.getMessage()
        written_s, more = self._written.pop(text, (0.0, 0))
        is_due = record.created - written_s >= AGAIN_S
        self._written[text] = (record.created, 0) if is_due else (written_s, more + 1)
        while len(self._written) > TEXTS:
            self._written.popitem(last=False)
        if is_due and more:
            record.msg, record.args = f"{text} (and {more} times more)", None
        return is_due


def set_up_logs(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Log to a stream, usually stderr.

    The level `debug` applies only to aiodelay's own loggers. Client libraries stay at `info`: at `debug`, they would
    log values that they receive, such as passwords.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    is_text = settings.format == "text" or (settings.format == "auto" and stream.isatty())
    handler.addFilter(_Seldom())
    handler.setFormatter(TextFormatter(TEXT) if is_text else JsonFormatter())
    level = settings.level.upper()
    logging.basicConfig(level="INFO" if level == "DEBUG" else level, handlers=[handler], force=True)
    logging.getLogger("aiodelay").setLevel(level)
    logging.getLogger("aiodelay.audit").setLevel("INFO")  # the audit log is written at every level
    logging.getLogger("uvicorn").setLevel("ERROR")  # at lower levels, uvicorn repeats our lines
