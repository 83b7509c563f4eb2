import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar
from uuid import uuid4

import pytest
from redis import Redis

from aiodelay.backends.redis.records.elements import decode_element
from aiodelay.core.values import Record
from aiodelay.ports import Sink, Store
from aiodelay.redis import RedisFanoutSink, RedisListSink, RedisLog, RedisStore, open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance, TransferConformance
from aiodelay.testing.conformance.stage import Stage
from aiodelay.testing.conformance.transfer_bench import Moves
from tests.support.servers import redis_products, redis_servers, serving
from tests.support.slow_stores import wait_long_for_wake_ups
from tests.support.topologies import clustered


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


@pytest.fixture(scope="module", params=redis_products(), ids=lambda found: found.name)
def cluster_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with clustered(request.param.program, replicas=False) as cluster:
        yield f"{cluster.url}/"


class OnRedis:
    wakes_other_processes: ClassVar[bool] = True
    protocol = 2  # the default
    open_store: Callable[..., Store] = staticmethod(open_store)

    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wait_long_for_wake_ups(monkeypatch, RedisStore)

    @pytest.fixture(autouse=True)
    def _server(self, server_url: str) -> Iterator[None]:
        self.server_url, self.namespace = server_url, ""
        yield
        if self.namespace:
            asyncio.run(self._check_keys())

    async def _check_keys(self) -> None:
        """Whatever a test did, its keys agree with each other."""
        async with RedisStore(self.server_url, namespace=self.namespace) as store:
            assert await store.vanished() == ""

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        self.namespace = uuid4().hex
        self.url = f"{self.server_url}?journal={journal}&protocol={self.protocol}&timeout_ms=60000"
        return self.open_store(self.url, namespace=self.namespace, clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return self.open_store(self.url, namespace=self.namespace, clock=clock)


class TestRedisStore(OnRedis, StoreConformance):
    protocol = 3


@pytest.mark.nightly
class TestRedisStoreResp2(OnRedis, StoreConformance):
    """The same with the older protocol, which is the default; lists, topics and logs below use it."""


@pytest.mark.nightly
class TestRedisStoreOnCluster(OnRedis, StoreConformance):
    """The same on a cluster, whose nodes check the slot of every key."""

    @pytest.fixture
    def server_url(self, cluster_url: str) -> str:  # type: ignore[override] # the fixture of the module, for this class
        return cluster_url


class Moving(OnRedis, TransferConformance):
    open_store = RedisStore


class TestRedisLists(Moving):
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


@pytest.mark.nightly
class TestRedisListsOnCluster(TestRedisLists):
    """Lists in the slot of the namespace on a cluster."""

    @pytest.fixture
    def server_url(self, cluster_url: str) -> str:  # type: ignore[override] # the fixture of the module, for this class
        return cluster_url

    def moves(self, stage: Stage, *, limit: int = 0) -> Moves:
        moves = super().moves(stage, limit=limit)
        tag = f"{{{self.namespace}:00}}"
        moves.here, moves.there = moves.here + tag, moves.there + tag
        return moves

    def test_reach_says_what_is_promised_and_why(self) -> None:
        pytest.skip("the answer depends on the address: tests/integration/test_redis_topologies.py")

    test_the_sinks_that_a_store_brings_along_are_reached_exactly_once = test_reach_says_what_is_promised_and_why


class TestRedisTopics(Moving):
    """Topics of the store's own namespace, of two consumers each."""

    has_limit = False
    consumers = ("one", "two")

    def key(self, address: str, name: str) -> str:
        return f"{{{self.namespace}:00}}:fanout:{address}{name}"

    def make_sink(self, store: Store, *, limit: int) -> Sink:
        return RedisFanoutSink(self.server_url, namespace=self.namespace)

    def moves(self, stage: Stage, *, limit: int = 0) -> Moves:
        moves = super().moves(stage, limit=limit)
        with Redis.from_url(self.server_url) as client:
            for address in (moves.here, moves.there):
                client.sadd(self.key(address, ":consumers"), *self.consumers)
        return moves

    async def arrived(self, store: Store, sink: Sink, address: str) -> Sequence[Record]:
        assert isinstance(store, RedisStore)
        lists = [await store.command("LRANGE", self.key(address, f"@{name}:refs"), 0, -1) for name in self.consumers]
        assert lists[0] == lists[1]
        elements = [await store.command("HGET", self.key(address, ":content"), index) for index in lists[0]]
        return [decode_element(element, lane=sink.name).record for element in elements]

    async def clear(self, store: Store, sink: Sink, address: str) -> None:
        assert isinstance(store, RedisStore)
        lists = [self.key(address, f"@{name}:refs") for name in self.consumers]
        await store.command("DEL", self.key(address, ":content"), self.key(address, ":left"), *lists)

    async def spoil(self, store: Store, sink: Sink, address: str) -> None:
        assert isinstance(store, RedisStore)
        await store.command("SET", self.key(address, ":content"), "no hash")


class TestRedisLogs(Moving):
    """Logs of the store's own namespace."""

    has_limit = False

    def key(self, address: str) -> str:
        return f"{{{self.namespace}:00}}:log:{address}"

    def make_sink(self, store: Store, *, limit: int) -> Sink:
        return RedisLog(self.server_url, namespace=self.namespace)

    async def arrived(self, store: Store, sink: Sink, address: str) -> Sequence[Record]:
        assert isinstance(store, RedisStore)
        entries = await store.command("XRANGE", self.key(address), "-", "+")
        assert [entry_id for entry_id, _ in entries] == [b"0-%d" % (i + 1) for i in range(len(entries))]
        return [decode_element(fields[1], lane=sink.name).record for _, fields in entries]

    async def clear(self, store: Store, sink: Sink, address: str) -> None:
        assert isinstance(store, RedisStore)
        await store.command("DEL", self.key(address))

    async def spoil(self, store: Store, sink: Sink, address: str) -> None:
        assert isinstance(store, RedisStore)
        await store.command("SET", self.key(address), "no stream")
