"""`MessagesConformance`: the publisher suite for `scheduler.messages(...)`. Tests choose the store and the source."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from aiodelay import Message, Received, Scheduler
from aiodelay.reactive import Publisher
from aiodelay.testing.conformance import PublisherConformance

__all__ = ["LANE", "MessagesConformance"]

LANE = "numbers"


class MessagesConformance(PublisherConformance[Received[bytes]]):
    to = f"handler:{LANE}"
    source: str | None = None
    soon_s = 60.0

    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        return Scheduler("memory://", **settings)

    @asynccontextmanager
    async def publisher(self, items: int) -> AsyncIterator[Publisher[Received[bytes]]]:
        self.scheduler = self.make_scheduler(drain="0s")
        async with self.scheduler:
            messages = [Message(b"%d" % number, delay="0s", to=self.to) for number in range(items)]
            assert await self.scheduler.schedule_many(messages) == items
            yield self.scheduler.messages(LANE, source=self.source)

    def take(self, item: Received[bytes]) -> None:
        assert item.settle()

    async def end(self, publisher: Publisher[Received[bytes]]) -> None:
        await self.scheduler.__aexit__(None, None, None)

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[Publisher[Received[bytes]]]:
        yield self.make_scheduler().messages(LANE)

    def failing_publisher(self) -> AbstractAsyncContextManager[Publisher[Received[bytes]]]:
        return self._closed()
