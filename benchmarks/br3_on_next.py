"""BR3: the rate of messages by `on_next`, one by one, compared with the batches of the dispatch loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from aiodelay import Message, Received, Scheduler
from aiodelay.core.values import LEASE_MS, MAX_CLAIM_MESSAGES, MAX_LAPSES, Demand, Done, SettleOutcome
from aiodelay.engine.delivery.dispatcher import Dispatcher
from aiodelay.engine.delivery.lease_book import Held, LeaseBook
from aiodelay.engine.delivery.runners import Runners
from aiodelay.memory import MemoryStore
from aiodelay.ports.clock import SystemClock
from aiodelay.reactive import Subscription

from .harness import (
    Benchmark,
    Goal,
    Plan,
    Row,
    Stopwatch,
    check,
    check_once_each,
    in_turn,
    number_of,
    per_message_us,
    ratios,
    raw_payload,
)

__all__ = ["BENCHMARK"]

MESSAGES = 100_000
LANE = "raw"
WINDOW = MAX_CLAIM_MESSAGES
GOAL = Goal("at least", 0.5)


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    times = in_turn(plan, {"bare": lambda: plan.run(in_batches(n)), "ours": lambda: plan.run(one_by_one(n))})
    what = f"memory: {n:,} messages by `on_next`, {WINDOW} requested at a time, each settled"
    beside = f"{per_message_us(times['ours'], n)} a message, in batches {per_message_us(times['bare'], n)}"
    return [Row("BR3", what, "x speed of batches", ratios(times["bare"], times["ours"]), Goal("at least", 0.5), beside)]


async def loaded(n: int) -> MemoryStore:
    """Return a store with due messages."""
    store, at = MemoryStore(), datetime.now(UTC)
    async with Scheduler(store, dispatch=False) as producer:
        messages = (Message(raw_payload(number), at=at, to=f"handler:{LANE}") for number in range(n))
        check(await producer.schedule_many(messages) == n, "not all were scheduled")
    return store


# --- batches inside ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Batches:
    """The least work of a subscription: read each message, and settle it."""

    runners: Runners
    all_delivered: asyncio.Future[None]
    n: int
    delivered: list[int]
    lane: str = LANE
    in_flight: int = 0
    ahead: None = None

    def demand(self) -> Demand:
        return Demand(WINDOW - self.in_flight)

    def deliver(self, claimed: Sequence[Held]) -> None:
        self.in_flight += len(claimed)
        for held in claimed:
            record = held.claim.record
            self.delivered.append(number_of(record.envelope.payload))
            held.book.settle(held, Done(record.envelope.id, record.revision, held.claim.token))
        if len(self.delivered) == self.n:
            self.all_delivered.set_result(None)

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        self.in_flight -= 1

    def lost(self, held: Held) -> None: ...

    def give_back(self) -> None: ...

    def take_unbegun(self, book: LeaseBook) -> Sequence[Held]:
        return ()

    def drain(self) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


async def in_batches(n: int) -> float:
    store, clock = await loaded(n), SystemClock()
    delivered: list[int] = []
    all_delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with Stopwatch() as watch:
        async with store, store.work("bench", [LANE]) as work, asyncio.TaskGroup() as tasks:
            book = LeaseBook(work, clock, clock.now_ms, LEASE_MS, work.wake)
            batches = Batches(Runners(tasks), all_delivered, n, delivered)
            dispatcher = Dispatcher(
                work,
                book,
                {LANE: batches},
                LEASE_MS,
                may_claim=lambda: True,
                max_lapses=lambda: MAX_LAPSES,
                turns={},
                give_back=batches.give_back,
            )
            tasks.create_task(dispatcher.run())
            tasks.create_task(book.run())
            await all_delivered
            dispatcher.drain()
            book.close()
    await check_delivered(store, delivered, n)
    return watch.seconds


# --- one by one -------------------------------------------------------------------------------------------


class OneByOne:
    """A subscriber that reads each message, settles it, and requests more at 75 % of its window."""

    subscription: Subscription

    def __init__(self, n: int, all_delivered: asyncio.Future[None]) -> None:
        self.n, self.all_delivered = n, all_delivered
        self.delivered: list[int] = []
        self.settled = 0

    def on_subscribe(self, subscription: Subscription) -> None:
        self.subscription = subscription
        subscription.request(WINDOW)

    def on_next(self, item: Received[bytes], /) -> None:
        self.delivered.append(number_of(item.event))
        item.settle()
        self.settled += 1
        if self.settled == WINDOW // 4:
            self.subscription.request(self.settled)
            self.settled = 0
        if len(self.delivered) == self.n:
            self.all_delivered.set_result(None)

    def on_error(self, error: Exception) -> None:
        self.all_delivered.set_exception(error)

    def on_complete(self) -> None: ...


async def one_by_one(n: int) -> float:
    store = await loaded(n)
    subscriber = OneByOne(n, asyncio.get_running_loop().create_future())
    with Stopwatch() as watch:
        async with Scheduler(store) as scheduler:
            scheduler.messages(LANE).subscribe(subscriber)
            await subscriber.all_delivered
    await check_delivered(store, subscriber.delivered, n)
    return watch.seconds


async def check_delivered(store: MemoryStore, delivered: Sequence[int], n: int) -> None:
    check_once_each(delivered, n)
    check(not await store.counts(), "something is left in the store")


BENCHMARK = Benchmark("BR3", "on_next", run)
