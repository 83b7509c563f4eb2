"""Check that an error is clear, and that no command reached the store."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Self

from aiodelay import AiodelayError, ConfigurationError, InputError, Scheduler, TargetError
from aiodelay.core.values import Command, Delivery, Demand, Outcome, Sent, SourcePosition
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock

SECRETS = PAYLOAD, HEADER, KEY, PASSWORD = ("visa-4111", "bearer-7f3a", "customer-0815", "hunter2")
"""Secrets in every message of the tests. No error and no log line may contain them."""

PYTHON_WORDS = re.compile(r"datetime|timedelta|\b(dict|str|int|None|True|False|Python|Decimal|_Object)\b")
"""Texts that an error about JSON never contains."""

LONGEST_LINE = 700
HORIZON = timedelta(days=3650)
MOST_PAYLOAD = 262_144


@dataclasses.dataclass(frozen=True, slots=True)
class Bad:
    """The expected error for a bad input.

    Attributes:
        error: The exact class of the error.
        field: The argument or setting that the error names.
        value: A part of its text about the value.
        allowed: A part of its text about the allowed values.
    """

    error: type[AiodelayError]
    field: str
    value: str
    allowed: str


class RecordingStore(MemoryStore):
    """A memory store that keeps the commands that reach it."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.applied: list[Command] = []

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        self.applied += commands
        return await super().apply(commands, source=source)


def assert_clear(error: BaseException, bad: Bad) -> None:
    """Check an error: class, field, value and allowed values, all in one line, and without a secret."""
    assert type(error) is bad.error, repr(error)
    assert isinstance(error, InputError | ConfigurationError)
    assert isinstance(error, ValueError)
    field = error.field if isinstance(error, InputError) else error.setting
    assert field == bad.field
    assert bad.value in error.value
    assert bad.allowed in error.allowed
    line = str(error)
    assert field in line
    assert error.value in line
    assert error.allowed in line
    assert line.isprintable()
    assert len(line) <= LONGEST_LINE
    assert_no_secret(error)


def assert_no_secret(error: BaseException, *more: str) -> None:
    """Check that the error, its chained errors and `more` contain no secret."""
    told = [text for each in chain(error) for text in (str(each), repr(each), *getattr(each, "__notes__", ()))]
    for text in [*told, *more]:
        assert not [secret for secret in SECRETS if secret in text], text


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its causes and its contexts, also those that a traceback hides."""
    if error is not None:
        yield error
        yield from chain(error.__cause__)
        yield from chain(error.__context__)


# --- the scheduler, the event and the sink that get the bad inputs


@dataclasses.dataclass
class Pay:
    card: Any = PAYLOAD


class Sink:
    """A sink that refuses one address and accepts all others."""

    name = "sink"
    limits = Demand(10)

    def check(self, address: str) -> None:
        if address == "nowhere":
            raise TargetError("to", "'sink:nowhere'", "addresses that exist")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Sent]:
        return [Sent()] * len(deliveries)


@asynccontextmanager
async def opened(clock: VirtualClock, **settings: object) -> AsyncIterator[tuple[Scheduler, RecordingStore]]:
    """Open a scheduler that does not dispatch. Yield it and its store."""
    store = RecordingStore(clock=clock)
    options: dict[str, Any] = {"clock": clock, "sinks": [Sink()], "dispatch": False} | settings
    async with Scheduler(store, **options) as scheduler:
        yield scheduler, store


GOOD: dict[str, Any] = {
    "event": Pay(),
    "delay": "1s",
    "id": "order-7",
    "key": KEY.encode(),
    "headers": {"authorization": HEADER.encode()},
}


def call(**changed: object) -> dict[str, Any]:
    """Return the arguments of a good call, with some of them changed. None leaves an argument out."""
    return {name: value for name, value in (GOOD | changed).items() if value is not None}


def at(when: object) -> dict[str, Any]:
    return call(at=when, delay=None)
