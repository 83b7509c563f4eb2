"""Random walks over the Redis store, on every server found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from aiodelay.ports import Store
from aiodelay.redis import open_store
from tests.stateful.test_store_machine import WALKS, StoreMachine
from tests.support.servers import redis_servers, serving


class RedisMachine(StoreMachine):
    """On a server that all walks share, each in a namespace of its own."""

    url: ClassVar[str]

    def make_store(self) -> Store:
        self.namespace = uuid4().hex
        return self.reopen_store()

    def reopen_store(self) -> Store:
        return open_store(self.url, namespace=self.namespace, clock=self.clock)


@pytest.fixture(params=redis_servers(), ids=lambda found: found.name)
def machine(request: pytest.FixtureRequest) -> Iterator[type[RedisMachine]]:
    with serving(request.param) as url:
        yield type("RedisMachineOf", (RedisMachine,), {"url": f"{url}?timeout_ms=60000"})


@pytest.mark.valkey_too
def test_walks(machine: type[RedisMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(WALKS, max_examples=12))


@pytest.mark.storm
def test_long_walks(machine: type[RedisMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(WALKS, max_examples=2000, stateful_step_count=200, derandomize=False)
    )
