"""Test subscriptions of the dispatch loop with the subscriber suite. Tests choose the handler or the sink."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiodelay import Retry
from aiodelay.core.transitions import token_for
from aiodelay.core.values import LEASE_MS, Claim, Envelope, Record, Settlement, SettleOutcome
from aiodelay.engine.delivery.dispatcher import Subscription as Place
from aiodelay.engine.delivery.lease_book import LeaseBook
from aiodelay.engine.delivery.runners import Runners
from aiodelay.engine.delivery.sink_subscription import SinkSubscription
from aiodelay.ports import Feed, Sink
from aiodelay.ports.clock import SystemClock
from aiodelay.reactive import Subscriber, Subscription
from aiodelay.testing.conformance import SubscriberConformance

__all__ = ["LANE", "PlaceConformance", "SinkConformance"]

LANE = "numbers"


class Settles:
    """A feed that accepts every settlement."""

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return [SettleOutcome.SETTLED] * len(settlements)


class PlaceSubscriber:
    """An adapter from a subscription of the dispatch loop, with demand in batches, to a subscriber of single claims."""

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
    quiet_s, soon_s, at_once_s = 0.05, 60.0, 10.0

    @abstractmethod
    def make_place(self, runners: Runners, on_free: Callable[[], None]) -> Place: ...

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def subscriber(self) -> AsyncIterator[Subscriber[Claim]]:
        feed: Feed = Settles()  # type: ignore[assignment]
        subscriber = PlaceSubscriber()
        book = subscriber.book = LeaseBook(feed, SystemClock(), SystemClock().now_ms, LEASE_MS, subscriber.ask)
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
