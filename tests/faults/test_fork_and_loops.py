"""F42: a scheduler used in a forked process, on another loop or in another thread raises, and continues to work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from aiodelay import Scheduler, WrongLoopError
from tests.faults.scene import Scene
from tests.support.judging import url_of
from tests.support.servers import redis_servers, serving

CALLS: dict[str, Callable[[Scheduler], Awaitable[object]]] = {
    "schedule": lambda scheduler: scheduler.schedule(b"", to="handler:work", delay="1h"),
    "schedule_many": lambda scheduler: scheduler.schedule_many([]),
    "cancel": lambda scheduler: scheduler.cancel("m"),
    "reschedule": lambda scheduler: scheduler.reschedule("m", delay="1h"),
    "fire": lambda scheduler: scheduler.fire("m"),
    "get": lambda scheduler: scheduler.get("m"),
    "counts": lambda scheduler: scheduler.counts(),
    "run_until_idle": lambda scheduler: scheduler.run_until_idle(),
}


def test_f42_a_forked_child_is_refused_and_the_parent_works_on(any_scene: Scene) -> None:
    process = any_scene.crew.start("forking", any_scene.plan("parent", serve=("work",), lease_ms=15_000), name="parent")
    for _ in range(3):
        assert "forked" in process.line("child")
    assert process.line("status") == "0"
    process.ended_well()
    report = any_scene.judge()
    assert (report.delivered, report.duplicates) == (20, 0)


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        with serving(redis_servers()[0]) as url:
            yield url
    else:
        yield "memory://" if request.param == "memory" else url_of(tmp_path / "delay.db")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.asyncio
async def test_f42_another_loop_in_another_thread_is_refused(url: str, name: str) -> None:
    scheduler = Scheduler(url)
    delivered = asyncio.Event()

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        delivered.set()

    async def call() -> None:
        await CALLS[name](scheduler)

    async with scheduler:
        with pytest.raises(WrongLoopError, match="event loop or thread"):
            await asyncio.to_thread(asyncio.run, call())
        await scheduler.schedule(b"", to="handler:work", delay="0s")
        async with asyncio.timeout(60):
            await delivered.wait()


def test_f42_a_scheduler_left_open_on_a_loop_that_has_ended_is_refused_on_the_next(url: str) -> None:
    scheduler = Scheduler(url, dispatch=False)

    async def open_only() -> None:
        await scheduler.__aenter__()

    async def use() -> None:
        with pytest.raises(WrongLoopError):
            await scheduler.schedule(b"", to="handler:work", delay="1h")

    with asyncio.Runner() as first:
        first.run(open_only())
        with asyncio.Runner() as second:
            second.run(use())
        first.run(scheduler.__aexit__(None, None, None))
