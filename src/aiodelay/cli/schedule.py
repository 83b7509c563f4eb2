"""`aiodelay schedule`: stores one message, or one message for each JSON line on stdin."""

from __future__ import annotations

import os
import stat
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from anyio import to_thread
from cyclopts import Parameter

from aiodelay import (
    AiodelayError,
    Conflict,
    Cron,
    Every,
    HeaderError,
    Late,
    Message,
    PartlyScheduledError,
    ScheduleOutcome,
    Scheduler,
)
from aiodelay.core.conflict_text import read_conflict
from aiodelay.errors import ConfigurationError, cut, shortened
from aiodelay.operations.json_shapes import read_message, read_rule, read_time, scheduled_shape

from .errors import FAILED, NOT_UNDERSTOOD, TOO_LATE, CommandError
from .output import ago, moment, print_json, print_refused_line
from .place import Place

__all__ = ["schedule"]

READ_BYTES = 65_536
MOST_LINE = 8 << 20


async def schedule(
    to: str | None = None,
    payload: str | None = None,
    /,
    *,
    delay: str | None = None,
    at: str | None = None,
    every: str | None = None,
    tz: str | None = None,
    id_: Annotated[str | None, Parameter(name="--id")] = None,
    key: str | None = None,
    header: Annotated[list[str] | None, Parameter(negative="")] = None,
    payload_file: Path | None = None,
    conflict: str | None = None,
    newer: int | None = None,
    drop_after: str | None = None,
    dead_letter_after: str | None = None,
    spread: str | None = None,
    sink: Annotated[list[str] | None, Parameter(negative="")] = None,
    lines: Annotated[bool, Parameter(negative="")] = False,
    place: Place = Place(),
) -> int:
    """Store a message until it is due; or, with --lines, one message for each JSON line on stdin.

    A line has the form of a request to POST /v1/messages, such as {"to": "handler:mail", "payload": {"id": 7}, "delay":
    "5m"}. If a line is refused, stderr names its number and the reason, and the other lines are still stored.

    Args:
        to: The destination: SINK:ADDRESS, such as redis-list:orders; or handler:NAME, with the type name of an event.
        payload: The payload, as text.
        delay: The duration from now until the due time: 90s, 1h30m, 2d.
        at: The due time: 2026-12-01T09:00:00+01:00.
        every: The rule of a recurring message: 10m, or a cron expression such as "0 9 * * mon".
        tz: The time zone of the cron expression, such as Europe/Paris. Default: UTC.
        id_: Your id for the message, by which you can cancel or replace it.
        key: The key of the message, for sinks that use keys.
        header: A header to deliver with the message, as NAME=VALUE. May be repeated.
        payload_file: A file that holds the payload, instead of PAYLOAD.
        conflict: The rule if a pending message has the id already: replace it (the default), keep it, or fail (error).
            earlier, later: replace it only if that moves its due time so. debounce:5s, debounce:5s:1m: the quiet time
            and the longest wait. throttle:1h, throttle:1h:last: the window, and whether its last message is delivered
            too. append, append:50: join it as one more line. With a number, the message is due when it has this many
            lines.
        newer: The version of the message, instead of a conflict rule. The message replaces only an older version. It is
            refused if the same or a newer version is pending, or has ended within the last 24 h.
        drop_after: Drop the message if its lateness would exceed this duration.
        dead_letter_after: Make the message a dead letter if its lateness would exceed this duration.
        spread: A span after the due time, such as 5m: the id gives the message's place in the span. With --every, the
            rule must be a cron expression.
        sink: The URL of a sink that the store does not provide, such as kafka://host:9092. May be repeated.
        lines: Read JSON lines from stdin.
    """
    if lines:
        if to is not None:
            raise CommandError("--lines takes no destination: each line has its own", exit_code=NOT_UNDERSTOOD)
        async with place.opened(sink or (), may_create=True) as scheduler:
            return await _schedule_lines(scheduler, place)
    if to is None:
        text = "no destination: write aiodelay schedule TO PAYLOAD --delay 5m; or give --lines"
        raise CommandError(text, exit_code=NOT_UNDERSTOOD)
    message = Message(
        _payload(payload, payload_file),
        at=read_time(at, "at"),
        delay=delay,
        every=_rule(every, tz, spread),
        id=id_,
        to=to,
        key=None if key is None else os.fsencode(key),
        headers=_headers(header or []),
        conflict=_conflict(conflict, newer),
        late=_late(drop_after, dead_letter_after),
        spread=None if every is not None else spread,
    )
    async with place.opened(sink or (), may_create=True) as scheduler:
        return await _schedule(scheduler, message, place)


async def _schedule(scheduler: Scheduler, message: Message, place: Place) -> int:
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "event"}
    scheduled = await scheduler.schedule(message.event, **fields)
    shape, is_outdated = scheduled_shape(scheduled), scheduled.outcome is ScheduleOutcome.OUTDATED
    if place.json:
        print_json(shape)
    elif not is_outdated:
        now_ms = scheduler.store.now_ms()
        due = f"{moment(scheduled.due_ms)} ({ago(scheduled.due_ms, now_ms)})"
        print(f"{shape['outcome']} {cut(scheduled.id, 255)}, due {due}")
    else:
        print(f"{shape['outcome']} {cut(scheduled.id, 255)}: the store knows this version or a newer version")
    return TOO_LATE if is_outdated else 0


def _payload(text: str | None, path: Path | None) -> bytes:
    if (text is None) == (path is None):
        got = "no payload" if text is None else "PAYLOAD and --payload-file are both given"
        raise CommandError(f"{got}; give either PAYLOAD or --payload-file FILE", exit_code=NOT_UNDERSTOOD)
    if text is not None:
        return os.fsencode(text)
    assert path is not None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"--payload-file {path}: {error.strerror}") from None


def _rule(every: str | None, tz: str | None, spread: str | None) -> Every | Cron | None:
    if every is None:
        if tz is not None:
            raise CommandError("--tz needs --every: an instant in --at has its own offset", exit_code=NOT_UNDERSTOOD)
        return None
    return read_rule(every) if tz is None and spread is None else Cron(every, tz=tz or "UTC", spread=spread)


def _headers(given: list[str]) -> dict[str, bytes]:
    headers: dict[str, bytes] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise HeaderError("header", shortened(name), "NAME=VALUE")
        if name in headers:
            raise HeaderError("header", f"{shortened(name)}, which is given twice", "each name once")
        headers[name] = os.fsencode(value)
    return headers


def _conflict(text: str | None, newer: int | None) -> Conflict:
    if text is not None and newer is not None:
        raise CommandError("--conflict and --newer are both given; give one of them", exit_code=NOT_UNDERSTOOD)
    if newer is not None:
        return Conflict.newer(newer)
    try:
        return read_conflict("replace" if text is None else text)
    except ConfigurationError as error:
        raise CommandError(f"--conflict: {error}", exit_code=NOT_UNDERSTOOD) from None


def _late(drop_after: str | None, dead_letter_after: str | None) -> Late:
    if drop_after is not None and dead_letter_after is not None:
        raise ConfigurationError("late", "given as --drop-after and as --dead-letter-after", "one of these options")
    if drop_after is not None:
        return Late.drop(drop_after)
    return Late.deliver() if dead_letter_after is None else Late.dead_letter(dead_letter_after)


# --- JSON lines -------------------------------------------------------------------------------------------


async def _schedule_lines(scheduler: Scheduler, place: Place) -> int:
    numbered = _Lines(lambda number, error: print_refused_line(number, error, json=place.json))
    with _progress(numbered, shown=not place.json and sys.stderr.isatty()) as progress:
        try:
            stored = await scheduler.schedule_many(numbered.messages(), progress=progress)
        except PartlyScheduledError as error:
            stored = error.stored
            for rejected in error.rejected:
                numbered.refuse(numbered.line_of(rejected.position), rejected.error)
    if place.json:
        print_json({"stored": stored, "refused": numbered.refused})
    else:
        print(f"{stored} stored, {numbered.refused} refused")
    return FAILED if numbered.refused else 0


class _Lines:
    """Reads messages from the lines on stdin, and knows the line number of each message.

    Args:
        report: Called with the number of a refused line and the error.
    """

    def __init__(self, report: Callable[[int, AiodelayError], object]) -> None:
        self._report = report
        self._gaps_at: list[int] = []  # for each line that gave no message: the position of the next message
        self.refused = 0
        self.bytes_read = 0

    def line_of(self, position: int) -> int:
        """Return the number, from 1, of the line that gave the message at a position, from 0."""
        return position + 1 + bisect_right(self._gaps_at, position)

    def refuse(self, number: int, error: AiodelayError) -> None:
        """Report and count a line that was refused."""
        self.refused += 1
        self._report(number, error)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the message of each line. Skip blank lines, and report lines that cannot be read."""
        number = position = 0
        async for line in self._lines():
            number += 1
            try:
                message = read_message(line) if line.strip() else None
            except AiodelayError as error:
                self.refuse(number, error)
                message = None
            if message is None:
                self._gaps_at.append(position)
                continue
            position += 1
            yield message

    async def _lines(self) -> AsyncIterator[bytes]:
        """Yield each line as soon as it has arrived, without waiting for more input."""
        rest = b""
        while read := await to_thread.run_sync(os.read, sys.stdin.fileno(), READ_BYTES, abandon_on_cancel=True):
            self.bytes_read += len(read)
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > MOST_LINE:
                raise CommandError(f"a line is longer than {MOST_LINE} bytes; the lines before it are stored")
        if rest:
            yield rest


@contextmanager
def _progress(lines: _Lines, *, shown: bool) -> Iterator[Callable[[int], object] | None]:
    """Show a progress bar with the counts of stored and refused lines. Without a known size, show only the counts."""
    if not shown:
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs them
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    status = os.fstat(sys.stdin.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else None
    columns = (
        BarColumn(),
        TextColumn("{task.fields[stored]} stored, {task.fields[refused]} refused"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, stored=0, refused=0)
        yield lambda stored: bar.update(task, completed=lines.bytes_read, stored=stored, refused=lines.refused)
