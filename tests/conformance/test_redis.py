from collections.abc import Iterator, Sequence
from uuid import uuid4

import pytest

from aiodelay.model import Record
from aiodelay.ports import Sink, Store
from aiodelay.redis import RedisListSink, RedisStore, open_store
from aiodelay.redis.elements import decode_element
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance, TransferConformance
from tests.support.servers import redis_servers, serving


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


class OnRedis:
    protocol = 2

    @pytest.fixture(autouse=True)
    def _server(self, server_url: str) -> None:
        self.server_url = server_url

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        self.namespace = uuid4().hex
        self.url = f"{self.server_url}?journal={journal}&protocol={self.protocol}"
        return open_store(self.url, namespace=self.namespace, clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return open_store(self.url, namespace=self.namespace, clock=clock)


class TestRedisStore(OnRedis, StoreConformance):
    pass


class TestRedisStoreResp3(OnRedis, StoreConformance):
    protocol = 3


class TestRedisLists(OnRedis, TransferConformance):
    """Lists on the store's own server."""

    def make_sink(self, store: Store, *, limit: int) -> Sink:
        return RedisListSink(self.server_url, max_length=limit)

    async def arrived(self, store: Store, sink: Sink, address: str) -> Sequence[Record]:
        assert isinstance(store, RedisStore)
        elements = await store.command("LRANGE", address, 0, -1)
        return [decode_element(element, lane=sink.name).record for element in elements]

    async def clear(self, store: Store, sink: Sink, address: str) -> None:
        assert isinstance(store, RedisStore)
        await store.command("DEL", address)

    async def spoil(self, store: Store, sink: Sink, address: str) -> None:
        assert isinstance(store, RedisStore)
        await store.command("SET", address, "no list")
