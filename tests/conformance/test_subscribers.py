"""Handlers and sinks as subscribers: what one demands beyond what it has asked for already is what it requests."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar
from uuid import uuid4

import pytest

from aiodelay import Context, Retry, Scheduler
from aiodelay._runtime.dispatcher import Subscription as Place
from aiodelay._runtime.leases import LeaseBook
from aiodelay._runtime.runners import Runners
from aiodelay._runtime.sink_subscription import SinkSubscription
from aiodelay._runtime.subscription import HandlerSubscription
from aiodelay.clock import SystemClock
from aiodelay.handlers import EventTypes, Handler, spec_of
from aiodelay.memory import MemoryStore
from aiodelay.model import LEASE_MS, Claim, Demand, Envelope, Record, Settlement, SettleOutcome
from aiodelay.ports import Feed, Sink
from aiodelay.reactive import Subscriber, Subscription
from aiodelay.redis import RedisFanout, RedisFanoutSink, RedisListSink
from aiodelay.sinks import StdoutSink
from aiodelay.testing import RecordingSink
from aiodelay.testing.conformance import SubscriberConformance
from aiodelay.transitions import token_for
from tests.support.servers import redis_servers, serving

LANE = "numbers"
T = TypeVar("T")


class Settles:
    """A feed that takes every settlement."""

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return [SettleOutcome.SETTLED] * len(settlements)


class PlaceSubscriber:
    """A place in the dispatch loop, which speaks of demand in batches, as a subscriber of single claims."""

    book: LeaseBook
    place: Place

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self.awaited = 0

    def on_subscribe(self, subscription: Subscription) -> None:
        if subscription is None:
            raise TypeError
        if self.subscription is not None:
            subscription.cancel()
            return
        self.subscription = subscription
        self.ask()

    def ask(self) -> None:
        wanted = self.place.demand().messages - self.awaited
        if self.subscription is not None and wanted > 0:
            self.awaited += wanted
            self.subscription.request(wanted)

    def on_next(self, item: Claim, /) -> None:
        if item is None:
            raise TypeError
        self.awaited -= 1
        self.place.deliver(self.book.add([item], self.place))

    def on_error(self, error: Exception) -> None:
        if error is None:
            raise TypeError
        self.on_complete()

    def on_complete(self) -> None:
        self.place.drain()

    def leave(self) -> None:
        self.on_complete()
        assert self.subscription is not None
        self.subscription.cancel()


class PlaceConformance(SubscriberConformance[Claim]):
    quiet_s = 0.05

    @abstractmethod
    def make_place(self, runners: Runners, on_free: Callable[[], None]) -> Place: ...

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def subscriber(self) -> AsyncIterator[Subscriber[Claim]]:
        feed: Feed = Settles()  # type: ignore[assignment]
        subscriber = PlaceSubscriber()
        book = subscriber.book = LeaseBook(feed, SystemClock(), LEASE_MS, subscriber.ask)
        async with self.opened(), asyncio.TaskGroup() as tasks:
            subscriber.place = self.make_place(Runners(tasks), subscriber.ask)
            settling = tasks.create_task(book.run())
            yield subscriber
            subscriber.place.drain()
            await self.until(lambda: not subscriber.place.in_flight, "what was delivered is settled")
            subscriber.place.close()
            book.close()
            await settling

    def item(self, number: int) -> Claim:
        now = SystemClock().now_ms()
        envelope = Envelope(f"m{number}", LANE, address=self.address, payload=b"%d" % number)
        return Claim(Record(envelope, now, now, b"op"), token_for(now + LEASE_MS, number + 1))

    address = ""

    def leave(self, subscriber: Subscriber[Claim]) -> None:
        assert isinstance(subscriber, PlaceSubscriber)
        subscriber.leave()


class HandlerConformance(PlaceConformance):
    function: Handler

    def make_place(self, runners: Runners, on_free: Callable[[], None]) -> Place:
        spec = spec_of(
            type(self).function, types=EventTypes(), name=LANE, concurrency=3, timeout=None, retry=Retry(attempts=1)
        )
        scheduler = Scheduler(MemoryStore())
        now_ms = SystemClock().now_ms
        return HandlerSubscription(
            spec=spec,
            runners=runners,
            context=lambda claim, late: Context(claim, late, scheduler),
            now_ms=now_ms,
            on_free=on_free,
        )


async def at_once(payload: bytes) -> None: ...


async def after_a_while(payload: bytes) -> None:
    await asyncio.sleep(0.001)  # a run that takes real time


async def fails(payload: bytes) -> None:
    raise RuntimeError("no answer")


def in_a_thread(payload: bytes) -> None:
    time.sleep(0.001)  # a run that takes real time


class TestHandler(HandlerConformance):
    function = staticmethod(at_once)


class TestHandlerThatWaits(HandlerConformance):
    function = staticmethod(after_a_while)


class TestHandlerThatFails(HandlerConformance):
    function = staticmethod(fails)


class TestPlainHandler(HandlerConformance):
    function = staticmethod(in_a_thread)


class SinkConformance(PlaceConformance):
    @abstractmethod
    def make_sink(self) -> Sink: ...

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self.sink = self.make_sink()
        async with self.sink:
            yield

    def make_place(self, runners: Runners, on_free: Callable[[], None]) -> Place:
        return SinkSubscription(
            sink=self.sink, retry=Retry(attempts=1), runners=runners, now_ms=SystemClock().now_ms, on_free=on_free
        )


class TestRecordingSink(SinkConformance):
    def make_sink(self) -> Sink:
        return RecordingSink(LANE, limits=Demand(3))


class TestStdoutSink(SinkConformance):
    def make_sink(self) -> Sink:
        return StdoutSink()


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


class OnRedis(SinkConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server_url: str) -> None:
        self.url, self.address = server_url, uuid4().hex


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
