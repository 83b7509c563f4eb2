"""Many messages in one request: lines are read as fast as the store takes them, and never held all at once."""

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

__all__ = ["schedule_lines", "told_of"]

IN_MEMORY = 1_048_576
"""How many bytes of answers are held in memory; further ones wait in a file."""
AT_ONCE = 65_536
MOST_REFUSED = 10_000
"""Lines; an answer to a bad one is longer than it, and the disk is not the client's."""


async def schedule_lines(request: Request, store: Opened, prepare: Callable[[Message, int], Message]) -> Response:
    """Schedule what each line asks for; answer each line, in no order, and the totals at last.

    Answers are sent when all lines are read: a client that reads none before it has sent all would otherwise wait
    for the service, and the service for it.

    Args:
        request: Whose body has the lines.
        store: Where to.
        prepare: Makes what is scheduled of a message and its line's number, from 1.
    """
    served = served_of(request)
    if served.streams >= served.limits.streams:
        detail = f"{served.limits.streams} streams are being read already"
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
    detail = f"{MOST_REFUSED} lines are refused; from line {number} on nothing was read"
    return ApiError(422, "TooManyRefusedError", detail, CLOSE)


def told_of(scheduled: Scheduled, *, is_keyed: bool) -> dict[str, Any]:
    """Return what is answered; the version that a key's message has is ours, and so is what it is refused for."""
    shape = scheduled_shape(scheduled)
    if is_keyed and scheduled.outcome in (ScheduleOutcome.OUTDATED, ScheduleOutcome.KEPT, ScheduleOutcome.IN_FLIGHT):
        shape["outcome"] = "repeated"
    return shape


class _Lines:
    """One stream."""

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
        self._lines: dict[int, int] = {}  # by position among the messages that were read
        self._keyed: set[int] = set()
        self._stored = self._refused = 0
        self.failure: ApiError | None = None

    async def run(self) -> None:
        await self._store.scheduler.schedule_many(self._messages(), answered=self._answered)
        totals: dict[str, object] = {"stored": self._stored, "refused": self._refused}
        if self.failure is not None:
            totals["problem"] = problem_of(self.failure)
        self._write(totals)
        audit(
            self._request,
            "schedule_many",
            store=self._store.name,
            stored=self._stored,
            refused=self._refused,
            outcome="done" if self.failure is None else type(self.failure).__name__,
        )

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
        except ApiError as error:  # the rest cannot be read; what was read is stored, and said to be
            self.failure = error

    def _answered(self, position: int, answer: Scheduled | AiodelayError) -> None:
        line = self._lines.pop(position)
        is_keyed = position in self._keyed
        self._keyed.discard(position)
        if isinstance(answer, AiodelayError):
            self._refuse(line, answer)
            return
        self._stored += 1
        self._write({"line": line, "scheduled": told_of(answer, is_keyed=is_keyed)})

    def _refuse(self, line: int, error: AiodelayError) -> None:
        self._refused += 1
        self._write({"line": line, "problem": problem_of(error)})

    def _write(self, answer: object) -> None:
        self._answers.write(self._encode(answer) + b"\n")
