"""The output of commands: JSON lines, tables and times. Also the question before a change that cannot be undone."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

import msgspec
from anyio import to_thread

from aiodelay.core.durations import LAST_MS, format_duration, from_epoch_ms
from aiodelay.errors import AiodelayError, cut
from aiodelay.operations.json_shapes import error_shape

from .errors import FAILED, NOT_UNDERSTOOD, CommandError

__all__ = ["ago", "confirm", "error_line", "json_line", "moment", "print_json", "print_refused_line", "print_table"]

MOST_SHOWN = 60
UNPRINTABLE = re.compile(r"[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that JSON text may hold unescaped and that a terminal acts on. JSON itself escapes U+0000 to U+001F."""


def json_line(shape: object) -> str:
    """Return JSON on one line, without characters that a terminal acts on."""
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(shape).decode())


def print_json(*shapes: object) -> None:
    """Print each value as a line of JSON."""
    for shape in shapes:
        print(json_line(shape))


def error_line(error: Exception) -> str:
    """Return an error as a line of JSON."""
    if isinstance(error, AiodelayError):
        return json_line(error_shape(error))
    return json_line({"error": type(error).__name__, "detail": str(error)})


def print_refused_line(number: int, error: AiodelayError, *, json: bool) -> None:
    """Print on stderr why a line of the input was refused. Lines count from 1."""
    print(json_line({"line": number} | error_shape(error)) if json else f"line {number}: {error}", file=sys.stderr)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows in columns. Characters that a terminal cannot print are escaped."""
    written = [[cut(str(cell), MOST_SHOWN) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *written, strict=True)]
    for row in [list(heads), *written]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def moment(ms: int) -> str:
    """Return a time as readable text, in UTC. A time after the year 9999 becomes the end of that year."""
    return from_epoch_ms(min(ms, LAST_MS)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def ago(ms: int, now_ms: int) -> str:
    """Return the distance of a time from now, such as `in 2h` or `5s ago`. From 1 s on, it is in whole seconds."""
    away_ms = abs(ms - now_ms)
    length = format_duration(away_ms if away_ms < 1000 else away_ms // 1000 * 1000)
    return f"in {length}" if ms > now_ms else f"{length} ago"


async def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal, unless `yes` is true.

    Raises:
        CommandError: The answer is no, or there is no terminal to ask on.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandError(f"{question}? There is no terminal to ask on: give --yes", exit_code=NOT_UNDERSTOOD)
    print(f"{question}? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = await to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was done", exit_code=FAILED)
