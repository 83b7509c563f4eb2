"""Messages taken without a handler: every way to settle one, demand, and the ends of a subscription."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from aiodelay import (
    ClosedError,
    ConfigurationError,
    DuplicateHandlerError,
    Every,
    InputError,
    Later,
    Received,
    Reject,
    Retry,
    Scheduler,
    event,
)
from aiodelay.core.values import LEASE_MS, DeadLetter, Query
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import Probe
from tests.support.noted import NotedStore
from tests.support.sources import PlainSource

pytestmark = pytest.mark.asyncio

SOON = Retry(attempts=2, first="5s", jitter=0)


@event("number", aliases=("digit",))
@dataclass
class Number:
    n: int


class Stage:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.store = clock, NotedStore(clock)
        self.scheduler = Scheduler(self.store, clock=clock, drain="5s")

    async def schedule(self, *numbers: int) -> None:
        for n in numbers:
            await self.scheduler.schedule(Number(n), delay="0s", id=f"m{n}")

    async def letters(self) -> list[DeadLetter]:
        return list(await self.store.memory.dead_letters())

    async def attempts(self) -> dict[str, int]:
        """Return what is pending, with the attempts that it has cost."""
        return {each.record.id: each.record.attempt for each in await self.store.memory.search(Query(limit=1000))}

    @property
    def in_flight(self) -> int:
        return len(self.store.memory._table.leased)

    @asynccontextmanager
    async def taken(self, *numbers: int, **options: Any) -> AsyncIterator[list[Received[Number]]]:  # noqa: ANN401
        """Open the scheduler, and take messages without settling them."""
        async with self.scheduler, aclosing(aiter(self.scheduler.messages(Number, **options))) as messages:
            await self.schedule(*numbers)
            yield [await anext(messages) for _ in numbers]


@pytest.fixture
def stage(clock: VirtualClock) -> Stage:
    return Stage(clock)


def probe(take: Any = lambda item: item.settle(), *, request: int = 100) -> Probe[Any]:  # noqa: ANN401
    return Probe(on_subscribe=lambda probe: probe.request(request), on_next=lambda probe, item: take(item))


# --- settling ---------------------------------------------------------------------------------------------


async def test_what_a_block_leaves_is_done(stage: Stage) -> None:
    async with stage.taken(1) as (message,):
        assert message.context.id == "m1"
        with message as number:
            assert number == Number(1)
        assert message.is_settled
    assert await stage.attempts() == {}
    assert await stage.letters() == []


async def test_what_a_block_raises_goes_on_and_means_another_attempt(stage: Stage) -> None:
    began: list[tuple[int, int]] = []
    async with stage.scheduler:
        await stage.schedule(1)
        messages = aiter(stage.scheduler.messages(Number, retry=SOON))
        for _ in range(2):
            message = await anext(messages)
            began.append((stage.clock.monotonic_ms(), message.context.attempt))
            with pytest.raises(ConnectionError, match="no answer"), message:
                raise ConnectionError("no answer")
        await asyncio.sleep(1)
    assert began == [(0, 1), (5000, 2)]
    (letter,) = await stage.letters()
    assert (letter.reason, letter.record.last_error) == ("attempts_exhausted", "ConnectionError: no answer")


async def test_a_block_whose_task_is_cancelled_gives_back(stage: Stage) -> None:
    async with stage.taken(1) as (message,):

        async def work() -> None:
            with message:
                await asyncio.sleep(60)

        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(work())
            await asyncio.sleep(1)
            working.cancel()
    assert await stage.attempts() == {"m1": 0}


async def test_later_and_reject_are_as_of_handlers(stage: Stage) -> None:
    async with stage.taken(1, 2) as (first, second):
        assert first.settle(Later("1h"))
        assert second.settle(Reject("no such order"))
    assert await stage.attempts() == {"m1": 0}
    (letter,) = await stage.letters()
    assert (letter.record.id, letter.reason) == ("m2", "rejected")


async def test_anything_else_is_refused_and_the_message_still_held(stage: Stage) -> None:
    async with stage.taken(1) as (message,):
        with pytest.raises(InputError, match="None, Later, Reject or an exception"):
            message.settle("done")  # type: ignore[arg-type]
        assert not message.is_settled
        assert message.settle()
        assert not message.settle(Later("1h"))
    assert await stage.attempts() == {}


async def test_what_is_given_back_comes_again_at_once_and_has_cost_nothing(stage: Stage) -> None:
    seen: list[tuple[int, int]] = []

    def take(item: Received[Number]) -> None:
        seen.append((stage.clock.monotonic_ms(), item.context.attempt))
        assert item.give_back() if len(seen) < 4 else item.settle()

    async with stage.scheduler as scheduler:
        await scheduler.schedule(Number(1), every=Every("1h"))
        scheduler.messages(Number).subscribe(probe(take))
        await asyncio.sleep(3_700)
    assert seen == [(3_600_000, 1)] * 4


async def test_a_lost_lease_ends_the_hold(stage: Stage) -> None:
    async with stage.taken(1, concurrency=1) as (message,):
        stage.store.inject("unavailable", "renew", times=None)
        await asyncio.sleep(LEASE_MS / 1000 + 1)
        async with stage.store.memory.work("another", ["number"]) as other:
            await other.tidy(["number"], limit=10)
        stage.store.heal()
        await asyncio.sleep(LEASE_MS / 1000)
        assert message.is_settled
        assert not message.settle()
    assert (await stage.attempts()).keys() == {"m1"}


async def test_what_cannot_be_read_is_a_dead_letter_and_takes_nobodys_demand(stage: Stage) -> None:
    async with stage.scheduler as scheduler:
        await scheduler.schedule(b"{", to="handler:number", delay="0s", id="bad")
        await stage.schedule(1)
        taker = probe(request=1)
        scheduler.messages(Number).subscribe(taker)
        await asyncio.sleep(1)
    assert [item.context.id for item in taker.items] == ["m1"]
    assert [(letter.record.id, letter.reason) for letter in await stage.letters()] == [("bad", "undecodable")]


async def test_former_names_and_bytes_are_taken_too(stage: Stage) -> None:
    typed, raw = probe(), probe()
    async with stage.scheduler as scheduler:
        scheduler.messages(Number).subscribe(typed)
        scheduler.messages("raw").subscribe(raw)
        await scheduler.schedule(b'{"n":4}', to="handler:digit", delay="0s")
        await scheduler.schedule(b"\x00", to="handler:raw", delay="0s")
        await scheduler.run_until_idle()
    assert [item.event for item in typed.items] == [Number(4)]
    assert [item.event for item in raw.items] == [b"\x00"]


# --- demand -----------------------------------------------------------------------------------------------


async def test_a_loop_has_no_more_in_flight_than_its_concurrency(stage: Stage) -> None:
    async with stage.taken(*range(8), concurrency=8) as held:
        await stage.schedule(*range(8, 30))
        await asyncio.sleep(1)
        assert stage.in_flight == 8
        held[0].settle()
        await asyncio.sleep(1)
        assert stage.in_flight == 7, "one by one would take a round trip each"
        held[1].settle()
        await asyncio.sleep(1)
        assert stage.in_flight == 8
        for message in held[2:]:
            message.settle()
        await asyncio.sleep(1)
        assert stage.in_flight == 8
    assert len(await stage.attempts()) == 22


async def test_what_is_not_requested_stays_in_the_store(stage: Stage) -> None:
    taker = probe(request=3)
    async with stage.scheduler as scheduler:
        scheduler.messages(Number).subscribe(taker)
        await stage.schedule(*range(5))
        await asyncio.sleep(1)
        assert len(taker.items) == 3
        assert await scheduler.cancel("m4") == "cancelled"
    assert await stage.attempts() == {"m3": 0}


# --- the ends ---------------------------------------------------------------------------------------------


async def test_leaving_a_loop_gives_back_what_was_not_seen_and_leaves_its_place_free(stage: Stage) -> None:
    seen: list[int] = []
    async with stage.scheduler as scheduler:
        await stage.schedule(*range(10))
        for _ in range(10):
            async for message in scheduler.messages(Number):
                seen.append(message.event.n)
                break
            message.settle()
        assert stage.clock.monotonic_ms() < 1_000
    assert sorted(seen) == list(range(10))
    assert await stage.attempts() == {}


async def test_what_is_held_when_its_subscription_ends_can_be_settled_for_the_drain_time(stage: Stage) -> None:
    taker, after = probe(lambda item: None), probe()
    async with stage.scheduler as scheduler:
        scheduler.messages(Number).subscribe(taker)
        await stage.schedule(1, 2)
        await asyncio.sleep(1)
        first, second = taker.items
        taker.subscription.cancel()
        await asyncio.sleep(4)
        assert first.settle()
        scheduler.messages(Number).subscribe(after)
        await asyncio.sleep(2)
        assert not second.settle()
        await asyncio.sleep(1)
    assert [(item.context.id, item.context.attempt) for item in after.items] == [("m2", 1)]


async def test_a_lane_whose_subscription_has_ended_is_not_served_any_more(stage: Stage) -> None:
    async with stage.scheduler as scheduler:
        taker = probe()
        scheduler.messages(Number).subscribe(taker)
        assert scheduler._running is not None
        assert scheduler._running.subscriptions.lanes() == ["number", "digit"]
        taker.subscription.cancel()
        assert scheduler._running.subscriptions.lanes() == []


async def test_closing_ends_a_loop_and_waits_for_what_is_held(stage: Stage) -> None:
    async with stage.scheduler as scheduler:
        await stage.schedule(1, 2)
        messages = aiter(scheduler.messages(Number))
        first, second = await anext(messages), await anext(messages)

        async def settle_late() -> None:
            await asyncio.sleep(3)
            assert first.settle()

        settling = asyncio.get_running_loop().create_task(settle_late())
    await settling
    assert stage.clock.monotonic_ms() == 5_000, "the drain time, since one is never settled"
    assert not second.settle()
    assert await stage.attempts() == {"m2": 0}
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def test_what_was_lost_before_it_was_seen_is_not_seen(stage: Stage) -> None:
    async with stage.scheduler as scheduler:
        messages = aiter(scheduler.messages(Number))
        await stage.schedule(1, 2)
        assert (await anext(messages)).settle()
        await asyncio.sleep(1)
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


class SlowToEnd(PlainSource):
    """A source that holds nothing, and takes its time to end."""

    name, has_ended = "slow", False

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @asynccontextmanager
    async def feed(self, *arguments: object) -> AsyncIterator[Feed]:
        async with self._store, self._store.work("worker", []) as work:
            yield work
            await asyncio.sleep(1)
            self.has_ended = True


async def test_closing_waits_for_the_source_of_a_subscription_that_was_just_cancelled(clock: VirtualClock) -> None:
    taker, source = probe(), SlowToEnd(MemoryStore(clock=clock))
    async with Scheduler(MemoryStore(clock=clock), sources=[source], clock=clock) as scheduler:
        scheduler.messages(Number, source="slow:x").subscribe(taker)
        await asyncio.sleep(1)
        taker.subscription.cancel()
        await asyncio.sleep(0.1)
    assert source.has_ended


async def test_a_subscription_ends_with_on_complete_when_the_scheduler_closes(stage: Stage) -> None:
    taker = probe()
    async with stage.scheduler as scheduler:
        scheduler.messages(Number).subscribe(taker)
        await stage.schedule(1)
        await asyncio.sleep(1)
    assert taker.signals == ["on_subscribe", "on_next", "on_complete"]
    taker.request(1)
    taker.subscription.cancel()


async def test_a_subscription_ends_with_on_error_when_the_scheduler_fails(stage: Stage) -> None:
    taker = probe()

    @stage.scheduler.handler(name="deadly")
    async def deadly(payload: bytes) -> None:
        raise SystemExitOfAHandlerError

    async def take() -> None:
        async with stage.scheduler as scheduler:
            scheduler.messages(Number).subscribe(taker)
            await scheduler.schedule(b"", to="handler:deadly", delay="0s")
            await asyncio.sleep(60)

    with pytest.raises(BaseExceptionGroup):
        await take()
    assert taker.signals == ["on_subscribe", "on_error"]
    assert isinstance(taker.error, ClosedError)


async def test_a_loop_in_a_scheduler_that_fails_raises_nothing_of_its_own(stage: Stage) -> None:
    @stage.scheduler.handler(name="deadly")
    async def deadly(payload: bytes) -> None:
        raise SystemExitOfAHandlerError

    async def take() -> None:
        async with stage.scheduler as scheduler:
            await scheduler.schedule(b"", to="handler:deadly", delay="0s")
            async for _ in scheduler.messages(Number):
                pass

    with pytest.raises(BaseExceptionGroup) as caught:
        await take()
    assert caught.group_contains(SystemExitOfAHandlerError)
    assert not caught.group_contains(Exception)


class SystemExitOfAHandlerError(BaseException):
    """Ends a scheduler, as `SystemExit` does, but not the test."""


async def test_a_subscriber_that_raises_has_failed_an_attempt_and_is_left(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(item: object) -> None:
        raise LookupError("no such order")

    failing, good = probe(fail), probe()
    async with stage.scheduler as scheduler:
        scheduler.messages(Number, retry=SOON).subscribe(failing)
        await stage.schedule(1)
        await asyncio.sleep(1)
        scheduler.messages(Number).subscribe(good)
        await asyncio.sleep(10)
    assert failing.signals == ["on_subscribe", "on_next"]
    assert [item.context.attempt for item in good.items] == [2]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "number: the subscriber's on_next raised; the subscription is cancelled"


async def test_context_variables_that_a_subscriber_sets_end_with_the_message(stage: Stage) -> None:
    number = contextvars.ContextVar("number", default=0)
    seen: list[int] = []

    def take(item: Received[Number]) -> None:
        seen.append(number.get())
        number.set(item.event.n)
        item.settle()

    async with stage.scheduler as scheduler:
        await stage.schedule(1, 2, 3)
        scheduler.messages(Number).subscribe(probe(take))
        await asyncio.sleep(1)
    assert seen == [0] * 3


# --- who may subscribe ------------------------------------------------------------------------------------


async def test_a_lane_has_one_taker(stage: Stage) -> None:
    async with stage.scheduler as scheduler:
        taker, other = probe(), probe(request=1)
        scheduler.messages(Number).subscribe(taker)
        scheduler.messages(Number).subscribe(other)
        assert isinstance(other.error, DuplicateHandlerError)
        with pytest.raises(DuplicateHandlerError):
            scheduler.add_handler(on_number)
        taker.subscription.cancel()
        scheduler.add_handler(on_number)
        with pytest.raises(DuplicateHandlerError, match="a second handler for"):
            async for _ in scheduler.messages(Number):
                pass


async def on_number(number: Number) -> None: ...


async def test_a_scheduler_that_does_not_dispatch_gives_no_messages(clock: VirtualClock) -> None:
    async with Scheduler("memory://", clock=clock, dispatch=False) as scheduler:
        with pytest.raises(ConfigurationError, match="does not dispatch"):
            async for _ in scheduler.messages(Number):
                pass


async def test_lanes_do_not_keep_off_what_is_subscribed_to(clock: VirtualClock) -> None:
    async with Scheduler("memory://", clock=clock, lanes=[]) as scheduler:
        await scheduler.schedule(Number(1), delay="0s")
        message = await anext(aiter(scheduler.messages(Number)))
        assert message.settle()


async def test_a_scheduler_that_is_not_open_gives_no_messages(stage: Stage) -> None:
    with pytest.raises(ClosedError, match="not open yet"):
        async for _ in stage.scheduler.messages(Number):
            pass


@pytest.mark.parametrize("what", [int, 7, "a b", object()])
async def test_what_names_no_messages_is_refused_at_once(stage: Stage, what: Any) -> None:  # noqa: ANN401
    with pytest.raises((ConfigurationError, InputError)):
        stage.scheduler.messages(what)
