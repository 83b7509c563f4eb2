"""`FastStreamSink` with FastStream's Redis broker: due messages reach subscribers, also after the server was away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from faststream.redis import RedisBroker, RedisMessage

from aiodelay import Retry, Scheduler, SinkUnavailableError, TargetError
from aiodelay.contrib import faststream
from aiodelay.contrib.faststream import FastStreamSink
from tests.support.servers import RedisServer, redis_products, start
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore:.*'lib_:DeprecationWarning"),  # FastStream 0.7.4 with redis-py 8
]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = start(redis_products()[0].program)
    yield server
    server.stop()


def scheduler_to(broker: RedisBroker) -> Scheduler:
    return Scheduler("memory://", sinks=[FastStreamSink(broker, destination="list")], retry=Retry(attempts=1))


async def test_a_subscriber_gets_what_was_scheduled(redis: RedisServer) -> None:
    broker = RedisBroker(redis.url)
    got: asyncio.Queue[tuple[object, RedisMessage]] = asyncio.Queue()

    @broker.subscriber(list="orders")
    async def remind(body: dict[str, int], message: RedisMessage) -> None:
        got.put_nowait((body, message))

    async with scheduler_to(broker) as scheduler:
        await broker.start()
        await scheduler.schedule(
            b'{"order": 7}', to="faststream:orders", delay="0s", id="remind-7", headers={"shop": b"corner"}
        )
        body, message = await got.get()
        await scheduler.run_until_idle()
    assert body == {"order": 7}
    assert message.headers["shop"] == "corner"
    assert message.correlation_id.startswith("remind-7/")
    assert await broker.ping(60), "the application's broker goes on"
    await broker.stop()


async def test_a_message_waits_while_the_server_is_away_which_costs_no_attempt(redis: RedisServer) -> None:
    broker = RedisBroker(redis.url)
    async with scheduler_to(broker) as scheduler:
        redis.kill()
        await scheduler.schedule(b"x", to="faststream:orders", delay="0s", id="a")
        await until(lambda: waits(scheduler), "the message is back in the store")
        redis.start()
        await scheduler.run_until_idle()
        assert [letter async for letter in scheduler.dead_letters()] == []
    assert redis.command("LLEN", "orders") == b":1\r\n"


async def waits(scheduler: Scheduler) -> bool:
    snapshot = await scheduler.get("a")
    return snapshot is not None and "Error" in (snapshot.record.last_error or "")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": b"k"}, "unexpected keyword argument 'key'"),
        ({"headers": {"shop": "größe".encode()}}, "the header 'shop' is not ASCII text"),
    ],
)
async def test_what_the_broker_cannot_take_is_given_up(redis: RedisServer, options: Any, error: str) -> None:  # noqa: ANN401
    async with scheduler_to(RedisBroker(redis.url)) as scheduler:
        await scheduler.schedule(b"x", to="faststream:orders", delay="0s", **options)
        await scheduler.run_until_idle()
        (letter,) = [letter async for letter in scheduler.dead_letters()]
    assert error in (letter.record.last_error or "")


async def test_an_address_must_be_given() -> None:
    with pytest.raises(TargetError, match="allowed: faststream:<topic"):
        FastStreamSink(RedisBroker()).check("")


async def test_the_sink_disconnects_what_it_has_connected(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = RedisBroker(redis.url)
    with monkeypatch.context() as patient:
        patient.setattr(faststream, "PING_S", 60.0)
        async with FastStreamSink(broker):
            assert await broker.ping(60)
    assert not await broker.ping(0.1)
    redis.kill()
    with pytest.raises(SinkUnavailableError, match="no answer to a ping"):
        await FastStreamSink(broker).__aenter__()
    assert broker._connection is None
