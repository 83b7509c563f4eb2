"""If the store is gone for any reason, closing ends within `drain` and a few seconds."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aiodelay import Scheduler
from aiodelay.engine.subscriptions import CLOSE_S
from aiodelay.errors import AiodelayError
from tests.support.kafka import Broker, new_name
from tests.support.servers import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

DRAIN_S = 1
WORK_S = 3
"""What the work of closing may add."""
TICK_S = 0.05
"""The unit of the time limit. A tick is as late as the machine lets the timers of closing be."""
KAFKA_S = 10
"""What ending Kafka's clients may add while the cluster is away."""


async def closes_in_time(
    url: str, harm: Callable[[], object], caplog: pytest.LogCaptureFixture, *, clients_s: float = 0
) -> None:
    """Harm a store while a handler runs and a call waits, and close its scheduler."""
    scheduler, begun, may_end = Scheduler(url, drain=f"{DRAIN_S}s"), list[bytes](), asyncio.Event()

    @scheduler.handler(name="work", concurrency=2)
    async def work(payload: bytes) -> None:
        begun.append(payload)
        await may_end.wait()

    await scheduler.__aenter__()
    await scheduler.schedule(b"", to="handler:work", delay="0s")
    await until(lambda: begun, "the handler runs")
    harm()
    may_end.set()
    calls = asyncio.create_task(call_until_refused(scheduler))
    closing = asyncio.create_task(scheduler.__aexit__(None, None, None))
    for _ in range(round((DRAIN_S + CLOSE_S + clients_s + WORK_S) / TICK_S)):
        await asyncio.wait([closing], timeout=TICK_S)
    assert closing.done(), "closing takes longer than its bounds allow"
    await closing
    await calls
    assert "1 messages were not settled" in caplog.text
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def call_until_refused(scheduler: Scheduler) -> None:
    """Schedule until a call fails: a transaction that has begun before the harm may still store messages."""
    with suppress(AiodelayError):
        while True:
            await scheduler.schedule(b"", to="handler:work", delay="1h")


async def test_a_redis_server_that_was_killed(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    await closes_in_time(server.url, server.kill, caplog)


async def test_a_redis_server_that_was_stopped(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    try:
        await closes_in_time(server.url, lambda: os.kill(server.pid, signal.SIGSTOP), caplog)
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_a_kafka_broker_that_was_killed(own_broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    url = f"kafka://{own_broker.bootstrap}/{new_name()}?create_topic=true&partitions=2"
    await closes_in_time(url, own_broker.kill, caplog, clients_s=KAFKA_S)


async def test_a_kafka_broker_that_was_stopped(own_broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    url = f"kafka://{own_broker.bootstrap}/{new_name()}?create_topic=true&partitions=2"
    await closes_in_time(url, own_broker.freeze, caplog, clients_s=KAFKA_S)


async def test_a_file_that_was_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "delay.db"

    def damage() -> None:
        for each in tmp_path.glob("delay.db*"):
            if each.is_file():
                with each.open("r+b") as file:  # a file that was cut off would kill the process
                    file.write(os.urandom(each.stat().st_size))

    await closes_in_time(f"sqlite:///{path}", damage, caplog)


async def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limits_of_files() as forbid_growth:
        await closes_in_time(f"sqlite:///{tmp_path}/delay.db", forbid_growth, caplog)


@contextmanager
def limits_of_files() -> Iterator[Callable[[], None]]:
    """Give a function that lets no file of this process grow, which SQLite cannot tell from a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
