"""The publisher suite for `scheduler.messages(...)`, on Redis and every source on Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from aiodelay import Message, Received, Scheduler
from aiodelay.reactive import Publisher
from aiodelay.redis import RedisFanout
from tests.support.publishing import LANE, MessagesConformance
from tests.support.servers import redis_servers, serving


class OnRedis(MessagesConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server_url: str) -> None:
        self.url, self.namespace = f"{server_url}?timeout_ms=60000", uuid4().hex

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
