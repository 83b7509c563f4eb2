from collections.abc import Iterator
from uuid import uuid4

import pytest

from aiodelay.ports import Store
from aiodelay.redis import open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance
from tests.support.servers import redis_servers, serving


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


class RedisConformance(StoreConformance):
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


class TestRedisStore(RedisConformance):
    pass


class TestRedisStoreResp3(RedisConformance):
    protocol = 3
