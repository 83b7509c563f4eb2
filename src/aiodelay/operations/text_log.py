"""Sets up logs as text. Line breaks and control characters are escaped, so that a message cannot forge log lines."""

from __future__ import annotations

import logging
from typing import Any

from aiodelay.errors import cut

__all__ = ["TEXT", "TextFormatter", "log_as_text"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LONGEST = 10_000


class TextFormatter(logging.Formatter):
    """Formats each record as one line, with the lines of a traceback below it.

    All lines are escaped, because errors of handlers may hold text that other systems have sent.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        """Return the message of a record as one line."""
        return cut(super().formatMessage(record), LONGEST)

    def formatException(self, ei: Any) -> str:  # noqa: ANN401, N802 - logging's
        """Return the traceback, each line escaped."""
        return "\n".join(cut(line, LONGEST) for line in super().formatException(ei).split("\n"))


def log_as_text(level: int, text: str = TEXT) -> None:
    """Log to stderr, unless the application has set up logging itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(text))
    logging.basicConfig(level=level, handlers=[handler])
