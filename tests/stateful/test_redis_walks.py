"""Random walks over the Redis store, on every server found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from aiodelay.ports import Store
from aiodelay.redis import open_store
from tests.stateful.test_store_machine import WALKS, StoreMachine
from tests.support.servers import Found, redis_servers, start


class RedisMachine(StoreMachine):
    """On a server that all walks share, each in a namespace of its own."""

    url: ClassVar[str]
    numbers_of_walks = count(1)

    def make_store(self) -> Store:
        self.namespace = f"walk{next(self.numbers_of_walks)}"
        return self.reopen_store()

    def reopen_store(self) -> Store:
        return open_store(self.url, namespace=self.namespace, clock=self.clock)


@pytest.fixture(params=redis_servers(), ids=lambda found: found.name)
def machine(request: pytest.FixtureRequest) -> Iterator[type[RedisMachine]]:
    found: Found = request.param
    server = None if found.url else start(found.program)
    url = found.url if server is None else server.url
    yield type("RedisMachineOf", (RedisMachine,), {"url": url})
    if server is not None:
        server.stop()


def test_walks(machine: type[RedisMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(WALKS, max_examples=20))


@pytest.mark.nightly
def test_long_walks(machine: type[RedisMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(WALKS, max_examples=2000, stateful_step_count=200))
