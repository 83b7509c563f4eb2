"""Where the demo's lines go: a terminal, whose last line is kept for the summary, or a file or pipe."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import TextIO

__all__ = ["Screen"]

CLEAR_LINE = "\r\x1b[2K"
COLOURS = {"delivered": 32, "retry": 33, "cancelled": 36, "replaced": 36, "dead letter": 31}


class Screen:
    """Writes lines until the reader goes away.

    Args:
        stream: Usually stdout.
        on_gone: Called once when the reader is gone, as `| head` is after ten lines.
        environment: Where `TERM` and `NO_COLOR` are read.
    """

    def __init__(self, stream: TextIO, on_gone: Callable[[], object], environment: Mapping[str, str]) -> None:
        self._stream, self._on_gone = stream, on_gone
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
        self.is_terminal = stream.isatty() and os.name != "nt" and environment.get("TERM") not in (None, "", "dumb")
        self._has_colour = self.is_terminal and not environment.get("NO_COLOR")
        self._status = ""
        self.is_gone = False

    def line(self, text: str, colour: str = "") -> None:
        """Write a line; above the status, if there is one.

        Args:
            text: Without a line break.
            colour: A part of the text that gets the colour it has in `COLOURS`.
        """
        if self._has_colour and colour in COLOURS:
            text = text.replace(colour, f"\x1b[{COLOURS[colour]}m{colour}\x1b[0m", 1)
        above = CLEAR_LINE if self._status else ""
        self._write(f"{above}{text}\n{self._status}")

    def status(self, text: str) -> None:
        """Show a line that the next status replaces; where nothing can be replaced, write it as a line."""
        if not self.is_terminal:
            self.line(text)
            return
        self._status = text[: shutil.get_terminal_size().columns - 1]
        self._write(CLEAR_LINE + self._status)

    def end_status(self) -> None:
        """Remove the status; what follows are lines."""
        if self._status:
            self._status = ""
            self._write(CLEAR_LINE)

    def _write(self, text: str) -> None:
        if self.is_gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self.is_gone = True
            self._discard_the_rest()
            self._on_gone()

    def _discard_the_rest(self) -> None:
        """Let Python's own flush at exit succeed: it would complain about what could not be written."""
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self._stream.fileno())
        os.close(devnull)
