"""`PageState`: the state of the page between requests, such as sessions, and answers of stores that viewers share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request

from aiodelay import ports
from aiodelay.core.values import Lane, LaneCounts, LoadBucket
from aiodelay.errors import AiodelayError, StoreMismatchError, UnsupportedByStoreError
from aiodelay.operations.activity import Activity
from aiodelay.operations.queries import Lateness, oldest_overdue_ms
from aiodelay.service.api.security import Tokens
from aiodelay.service.api.served import Opened
from aiodelay.service.api.sessions import Sessions

from .forms import Drafts

__all__ = ["SPANS", "Facts", "PageState", "Shared", "Span", "state_of"]

T = TypeVar("T")

FRESH_S = 1.0
"""Seconds for which an answer of a store is reused for other viewers."""


@dataclass(frozen=True, slots=True)
class Span:
    """A period of the chart of coming messages: a number of buckets, each of the same length."""

    name: str
    title: str
    bucket_ms: int
    buckets: int


SPANS: Mapping[str, Span] = {
    each.name: each
    for each in (
        Span("hour", "next hour", 60_000, 60),
        Span("day", "next 24 hours", 900_000, 96),
        Span("month", "next 30 days", 43_200_000, 60),
    )
}


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of a store.

    Attributes:
        now_ms: The time of the store.
        lanes: The counts of messages by lane.
        oldest_ms: The time since which the oldest overdue message waits; None if no message is overdue.
        lateness: The measured lateness; None if the store keeps no journal.
        journal: The URL option that turns the journal on; empty if the store keeps a journal.
    """

    now_ms: int
    lanes: Mapping[Lane, LaneCounts]
    oldest_ms: int | None
    lateness: Lateness | None
    journal: str

    def total(self, name: str) -> int:
        """Return the sum of a count over all lanes."""
        return sum(getattr(each, name) for each in self.lanes.values())


class Shared:
    """Answers of a store, shared by viewers: requests within `FRESH_S` get the same answer from one query."""

    def __init__(self) -> None:
        self._locks: dict[object, asyncio.Lock] = {}
        self._answers: dict[object, tuple[float, object, AiodelayError | None]] = {}

    async def get(self, key: object, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of `ask`, or a fresh answer to the same key. Errors of `ask` are shared in the same way."""
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(key, asyncio.Lock()):
            asked_s, answer, error = self._answers.get(key, (-FRESH_S, None, None))
            if loop.time() - asked_s >= FRESH_S:
                answer, error = None, None
                try:
                    answer = await ask()
                except AiodelayError as raised:
                    error = raised
                self._answers[key] = loop.time(), answer, error
            if error is not None:
                raise error
            return answer  # type: ignore[return-value]

    async def facts(self, store: Opened) -> Facts:
        """Return the state of a store."""
        return await self.get(("facts", store.name), lambda: _facts(store))

    async def load(self, store: Opened, span: Span) -> list[LoadBucket]:
        """Return the numbers of messages that come due in a period."""

        async def ask() -> list[LoadBucket]:
            return list(await store.scheduler.opened_store().load(bucket_ms=span.bucket_ms, buckets=span.buckets))

        return await self.get(("load", store.name, span.name), ask)

    async def activity(self, store: Opened) -> Activity | None:
        """Return the activity of the last hour; None if the store keeps no journal."""
        return await self.get(("activity", store.name), lambda: _activity(store))


async def _activity(store: Opened) -> Activity | None:
    opened = store.scheduler.opened_store()
    try:
        async with opened.journal_reader() as reader:
            await store.activity.read(reader, now_ms=opened.now_ms())
    except (UnsupportedByStoreError, StoreMismatchError):
        return None
    return store.activity.last_hour(opened.now_ms())


async def _facts(store: Opened) -> Facts:
    lateness, journal = None, ""
    try:
        lateness = await store.lateness.measure(store.scheduler)
    except UnsupportedByStoreError as error:
        journal = error.allowed
    counts = await store.scheduler.counts()
    return Facts(
        store.scheduler.opened_store().now_ms(),
        counts,
        await oldest_overdue_ms(store.scheduler, counts),
        lateness,
        journal,
    )


@dataclass(slots=True)
class PageState:
    """The state that the routes of the page share.

    Attributes:
        tokens: The tokens that are valid now.
        sessions: The browser sessions.
        environment: The text of the badge; empty = no badge.
        shared: The answers of stores that viewers share.
        drafts: The forms that were refused.
        viewers: The number of open pages with live updates.
        closing: Set when the service ends: live updates stop.
    """

    tokens: Tokens
    sessions: Sessions
    environment: str
    shared: Shared = field(default_factory=Shared)
    drafts: Drafts = field(default_factory=Drafts)
    viewers: int = 0
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_tokens(self) -> bool:
        """Whether users must sign in."""
        return not self.tokens.is_open

    def unable(self, store: Opened) -> Mapping[str, str]:
        """Return the tabs that a store does not support, with the reason."""
        opened = store.scheduler.store
        return {} if isinstance(opened, ports.Registry) else {"consumers": f"{opened.name} has no topics"}


def state_of(request: Request) -> PageState:
    """Return the state of the page in the app of this request."""
    state = request.app.state.page
    assert isinstance(state, PageState)
    return state
