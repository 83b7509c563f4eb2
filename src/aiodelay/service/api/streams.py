"""`schedule_lines`: schedules a stream of messages, one per line of a request.

The service reads lines only as fast as the store takes messages, and never holds all lines in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from typing import IO, Any

import msgspec
from fastapi import Request, Response
from starlette.responses import StreamingResponse

from aiodelay.core.values import Message, Scheduled, ScheduleOutcome
from aiodelay.errors import AiodelayError
from aiodelay.operations.json_shapes import read_message, scheduled_shape

from .bodies import NDJSON, lines_of
from .problems import CLOSE, ApiError, problem_of
from .security import audit
from .served import Opened, Served, served_of

__all__ = ["answer_of", "schedule_lines"]

IN_MEMORY = 1_048_576
"""Most bytes of answers that stay in memory. If there are more, all answers go into a temporary file."""
AT_ONCE = 65_536
MOST_REFUSED = 10_000
"""The most refused lines of a stream. The answer to a bad line is longer than the line: without a limit, a client could
fill the disk."""


async def schedule_lines(request: Request, store: Opened, prepare: Callable[[Message, int], Message]) -> Response:
    """Schedule the message of each line; return an answer for each line, in any order, and the totals at the end.

    The service sends the answers after it has read all lines. Otherwise a client that reads nothing until it has sent
    everything would wait for the service, and the service for the client.

    Args:
        request: The request whose body holds the lines.
        store: The store to schedule in.
        prepare: Returns the message to schedule. Its arguments are the message of a line and the number of the line,
            counted from 1.
    """
    served = served_of(request)
    if served.streams >= served.limits.streams:
        detail = f"{served.limits.streams} streams are being read, and no more are allowed; repeat the request later"
        raise ApiError(429, "TooManyStreamsError", detail, {"retry-after": "1"})
    served.streams += 1
    answers: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - `_sent` closes it
    lines = _Lines(request, served, store, prepare, answers)
    try:
        await lines.run()
    except BaseException:
        answers.close()
        raise
    finally:
        served.streams -= 1
    headers = dict(lines.failure.headers) if lines.failure else {}
    return StreamingResponse(_sent(answers), headers=headers, media_type=NDJSON)


async def _sent(answers: IO[bytes]) -> AsyncIterator[bytes]:
    with answers:
        answers.seek(0)
        while part := answers.read(AT_ONCE):
            yield part


def _too_many(number: int) -> ApiError:
    detail = f"{MOST_REFUSED} lines are refused, and no more are allowed; the service stopped before line {number}"
    return ApiError(422, "TooManyRefusedError", detail, CLOSE)


def answer_of(scheduled: Scheduled, *, is_keyed: bool) -> dict[str, Any]:
    """Return the answer for a scheduled message.

    If the id comes from an idempotency key, the service has chosen the conflict rule, not the client. If that rule has
    kept the stored message, the outcome is `repeated`.
    """
    shape = scheduled_shape(scheduled)
    if is_keyed and scheduled.outcome in (ScheduleOutcome.OUTDATED, ScheduleOutcome.KEPT, ScheduleOutcome.IN_FLIGHT):
        shape["outcome"] = "repeated"
    return shape


class _Lines:
    """The lines of one stream, and their answers."""

    def __init__(
        self,
        request: Request,
        served: Served,
        store: Opened,
        prepare: Callable[[Message, int], Message],
        answers: IO[bytes],
    ) -> None:
        self._request, self._served, self._store, self._prepare = request, served, store, prepare
        self._answers, self._encode = answers, msgspec.json.Encoder().encode
        self._lines: dict[int, int] = {}  # the line number, by position among the valid messages
        self._keyed: set[int] = set()
        self._stored = self._refused = 0
        self.failure: ApiError | None = None

    async def run(self) -> None:
        try:
            await self._store.scheduler.schedule_many(self._messages(), answered=self._answered)
            totals: dict[str, object] = {"stored": self._stored, "refused": self._refused}
            if self.failure is not None:
                totals["problem"] = problem_of(self.failure)
            self._write(totals)
        except BaseException as error:  # the messages of earlier lines are stored
            self._audit(type(error).__name__)
            raise
        self._audit("done" if self.failure is None else type(self.failure).__name__)

    def _audit(self, outcome: str) -> None:
        counts = {"stored": self._stored, "refused": self._refused}
        audit(self._request, "schedule_many", store=self._store.name, **counts, outcome=outcome)

    async def _messages(self) -> AsyncIterator[Message]:
        number = position = 0
        try:
            async for line in lines_of(self._request, self._served.limits):
                number += 1
                if self._refused >= MOST_REFUSED:
                    self.failure = _too_many(number)
                    break
                if not line.strip():
                    continue
                try:
                    given = read_message(line)
                    self._store.check(given)
                    message = self._prepare(given, number)
                except AiodelayError as error:
                    self._refuse(number, error)
                else:
                    self._lines[position] = number
                    if message.id != given.id:
                        self._keyed.add(position)
                    position += 1
                    yield message
        except ApiError as error:  # further lines cannot be read; messages read so far are stored and answered
            self.failure = error

    def _answered(self, position: int, answer: Scheduled | AiodelayError) -> None:
        line = self._lines.pop(position)
        is_keyed = position in self._keyed
        self._keyed.discard(position)
        if isinstance(answer, AiodelayError):
            self._refuse(line, answer)
            return
        self._stored += 1
        self._write({"line": line, "scheduled": answer_of(answer, is_keyed=is_keyed)})

    def _refuse(self, line: int, error: AiodelayError) -> None:
        self._refused += 1
        self._write({"line": line, "problem": problem_of(error)})

    def _write(self, answer: object) -> None:
        self._answers.write(self._encode(answer) + b"\n")
