"""The subscriber suite for Redis sinks: a sink requests the demand that it has not requested yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from aiodelay.ports import Sink
from aiodelay.redis import RedisFanout, RedisFanoutSink, RedisListSink
from tests.support.servers import redis_servers, serving
from tests.support.subscribing import SinkConformance


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


class OnRedis(SinkConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server_url: str) -> None:
        self.url, self.address = f"{server_url}?timeout_ms=60000", uuid4().hex


class TestRedisListSink(OnRedis):
    def make_sink(self) -> Sink:
        return RedisListSink(self.url)


class TestRedisFanoutSink(OnRedis):
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with RedisFanout(self.url) as fanout, super().opened():
            await fanout.register(self.address, "me")
            yield

    def make_sink(self) -> Sink:
        return RedisFanoutSink(self.url)
