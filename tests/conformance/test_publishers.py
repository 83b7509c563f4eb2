"""`scheduler.messages(...)` off every store and every source there is: the dispatcher, seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from aiodelay import Message, Received, Scheduler
from aiodelay.reactive import Publisher
from aiodelay.redis import RedisFanout
from aiodelay.testing.clock import VirtualLoop
from aiodelay.testing.conformance import PublisherConformance
from tests.support.servers import redis_servers, serving

LANE = "numbers"


class MessagesConformance(PublisherConformance[Received[bytes]]):
    to = f"handler:{LANE}"
    source: str | None = None

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


class TestOffMemory(MessagesConformance):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


class TestHeld(TestOffMemory):
    """Messages that nobody settles: demand is what was requested, whatever became of what came before."""

    def take(self, item: Received[bytes]) -> None: ...


class TestOffSqlite(MessagesConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        return Scheduler(f"sqlite:///{self.folder}/delay.db", **settings)


class OnRedis(MessagesConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server_url: str) -> None:
        self.url, self.namespace = server_url, uuid4().hex

    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        return Scheduler(self.url, namespace=self.namespace, **settings)


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


class TestOffRedis(OnRedis):
    pass


class TestFromARedisList(OnRedis):
    """Messages that went through a list first."""

    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        self.to = self.source = f"redis-list:{uuid4().hex}"
        return super().make_scheduler(**settings)


class TestFromARedisListAndTheStore(TestFromARedisList):
    """Two claims under way at a time: together they may bring twice what was requested."""

    @asynccontextmanager
    async def publisher(self, items: int) -> AsyncIterator[Publisher[Received[bytes]]]:
        async with super().publisher(items // 2) as publisher:
            half = [Message(b"%d" % number, delay="0s", to=f"handler:{LANE}") for number in range(items // 2, items)]
            await self.scheduler.schedule_many(half)
            yield publisher


class TestFromARedisLog(OnRedis):
    """Messages that went through a log first."""

    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        self.to = f"redis-log:{uuid4().hex}"
        self.source = f"{self.to}?consumer=numbers"
        return super().make_scheduler(**settings)


class TestFromARedisFanout(OnRedis):
    """Messages of a topic's consumer."""

    consumer = "me"

    @asynccontextmanager
    async def publisher(self, items: int) -> AsyncIterator[Publisher[Received[bytes]]]:
        async with RedisFanout(self.url, namespace=self.namespace) as fanout:
            await fanout.register("orders", "me")
        self.to, self.source = "redis-fanout:orders", f"redis-fanout:orders?consumer={self.consumer}"
        async with super().publisher(items) as publisher:
            yield publisher


class TestFromAnOrderedRedisFanout(TestFromARedisFanout):
    """One message in flight at a time, whatever was requested."""

    consumer = "me&ordered=true"
