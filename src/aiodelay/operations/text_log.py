"""Logs for a person to read: what would move a terminal's cursor, or pass for a line of its own, is escaped."""

from __future__ import annotations

import logging
from typing import Any

from aiodelay.errors import cut

__all__ = ["TEXT", "TextFormatter", "log_as_text"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LONGEST = 10_000


class TextFormatter(logging.Formatter):
    """Writes one line a record, and a traceback's below it: errors of handlers tell what others have sent."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        """Return the line."""
        return cut(super().formatMessage(record), LONGEST)

    def formatException(self, ei: Any) -> str:  # noqa: ANN401, N802 - logging's
        """Return the traceback."""
        return "\n".join(cut(line, LONGEST) for line in super().formatException(ei).split("\n"))


def log_as_text(level: int, text: str = TEXT) -> None:
    """Log to stderr; an application that has set up logging of its own keeps it."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(text))
    logging.basicConfig(level=level, handlers=[handler])
