"""The HTTP API under requests generated from its OpenAPI document: no 5xx, and all answers match the document."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from aiodelay import Reject, Scheduler
from aiodelay.service import ApiLimits, admin
from aiodelay.service.api.application import ROUTERS
from aiodelay.service.api.schemas import openapi_of
from tests.support.api import ALL, serving_app
from tests.support.waiting import PATIENCE_S

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a service runs, in a thread of its own, with some messages and dead letters in its store."""
    file: Path = tmp_path_factory.mktemp("fuzz") / "fuzz.db"
    found: list[str] = []
    started, loops = threading.Event(), list[asyncio.AbstractEventLoop]()
    ends = asyncio.Event()

    async def serve() -> None:
        scheduler = Scheduler(f"sqlite:///{file}?journal=100")

        @scheduler.handler(name="x")
        async def refuse(event: bytes) -> Reject:
            return Reject("no")

        async with scheduler, serving_app(admin(scheduler, **ALL, limits=ApiLimits(rate=0))) as base:
            for n in range(20):
                await scheduler.schedule(b"p", to=f"handler:{'x' if n % 2 else 'work'}", delay="1h" if n % 3 else "0s")
            found.append(base)
            loops.append(asyncio.get_running_loop())
            started.set()
            await ends.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(PATIENCE_S)
    yield found[0]
    loops[0].call_soon_threadsafe(ends.set)
    thread.join()


document = openapi_of(admin(Scheduler("memory://")), ROUTERS)
results: Any = schemathesis.openapi.from_dict(document).get_all_operations()
operations = {each.ok().label: each.ok() for each in results}


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # the service does, in its thread, meanwhile
@pytest.mark.parametrize("name", operations)
def test_no_request_makes_it_fail(base: str, name: str) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operations[name].as_strategy())
    def send(case: Any) -> None:  # noqa: ANN401 - schemathesis's
        case.call_and_validate(base_url=base, checks=CHECKS, timeout=PATIENCE_S)

    send()
