"""`Screen`: writes the demo's lines to a terminal, a file or a pipe. On a terminal, the last lines are the summary."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import TextIO

__all__ = ["SEPARATOR", "Screen"]

SEPARATOR = " │ "
COLOURS = {"delivered": 32, "retry": 33, "cancelled": 36, "replaced": 36, "dead letter": 31}


class Screen:
    """Writes lines until the reader closes the stream.

    Args:
        stream: The stream to write to, usually stdout.
        on_gone: Called once when the reader has closed the stream, as `| head` does after ten lines.
        environment: The environment variables, of which `TERM` and `NO_COLOR` are read.
    """

    def __init__(self, stream: TextIO, on_gone: Callable[[], object], environment: Mapping[str, str]) -> None:
        self._stream, self._on_gone = stream, on_gone
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
        is_capable = os.name != "nt" and environment.get("TERM") not in (None, "", "dumb")
        self.is_terminal: bool = stream.isatty() and is_capable
        self._has_colour = self.is_terminal and not environment.get("NO_COLOR")
        self._status = ""
        self.is_gone: bool = False

    def line(self, text: str, colour: str = "") -> None:
        """Write a line, above the status if there is one.

        Args:
            text: The line, without a line break.
            colour: A part of the text to colour, one of `COLOURS`.
        """
        if self._has_colour and colour in COLOURS:
            text = text.replace(colour, f"\x1b[{COLOURS[colour]}m{colour}\x1b[0m", 1)
        self._write(f"{self._clear()}{text}\n{self._status}")

    def status(self, text: str) -> None:
        """Show a text that the next status replaces. If the stream is not a terminal, write the text as a line."""
        if not self.is_terminal:
            self.line(text)
            return
        cleared, self._status = self._clear(), _folded(text, shutil.get_terminal_size().columns - 1)
        self._write(cleared + self._status)

    def end_status(self) -> None:
        """Remove the status from the terminal."""
        cleared, self._status = self._clear(), ""
        self._write(cleared)

    def _clear(self) -> str:
        """Return the control codes that move the cursor to the start of the status and clear the rest of the screen."""
        if not self._status:
            return ""
        above = self._status.count("\n")
        return f"\r\x1b[{above}A\x1b[J" if above else "\r\x1b[J"

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
        """Redirect the stream to nowhere, so that Python's flush at exit does not fail."""
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self._stream.fileno())
        os.close(devnull)


def _folded(text: str, columns: int) -> str:
    """Break a line between its parts, so that the terminal does not wrap it itself."""
    lines = [""]
    for part in text.split(SEPARATOR):
        longer = f"{lines[-1]}{SEPARATOR}{part}" if lines[-1] else part
        if len(longer) <= columns or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(line[:columns] for line in lines)
