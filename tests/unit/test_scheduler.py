"""The scheduler's calls: when messages are delivered, their outcomes, and their visible states."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias, TypeVar

import pytest

from aiodelay import (
    CancelOutcome,
    ClosedError,
    Conflict,
    Context,
    DuplicateIdError,
    Every,
    FireOutcome,
    Late,
    Message,
    Reject,
    RescheduleOutcome,
    Retry,
    ScheduleOutcome,
    Scheduler,
    StoreUnavailableError,
    UnknownSinkError,
    event,
)
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Cancel,
    DeadKey,
    Envelope,
    LaneCounts,
    LoadBucket,
    Put,
    Query,
    Refused,
    Snapshot,
    State,
    Stored,
)
from aiodelay.engine.control import PAGE
from aiodelay.memory import MemoryStore
from aiodelay.testing import START, FaultyStore, RecordingSink, VirtualClock, assert_delivered, assert_scheduled

pytestmark = pytest.mark.asyncio

T = TypeVar("T")
SECOND = timedelta(seconds=1)


@dataclass
class Order:
    number: int = 0


@event("payment.check", aliases=("CheckPayment",))
@dataclass
class Check:
    number: int = 0


class Log:
    """A handler of orders that notes its runs; fails or waits when told to."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.runs: list[tuple[int, timedelta]] = []
        self.fails = 0
        self.takes = timedelta()

    async def __call__(self, order: Order) -> None:
        self.runs.append((order.number, self._clock.now() - START))
        if self.takes:
            await asyncio.sleep(self.takes.total_seconds())
        if self.fails:
            self.fails -= 1
            raise ConnectionError("away")


@pytest.fixture
def log(clock: VirtualClock, scheduler: Scheduler) -> Log:
    log = Log(clock)
    scheduler.add_handler(log, retry=Retry.intervals(["10s"], jitter=0))
    return log


async def listed(found: AsyncIterator[T]) -> list[T]:
    return [each async for each in found]


async def ids(scheduler: Scheduler) -> list[str]:
    return [each.record.id async for each in scheduler.pending()]


# --- when -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "due"),
    [
        ({"delay": "1m30s"}, timedelta(minutes=1.5)),
        ({"delay": timedelta(milliseconds=1)}, timedelta(milliseconds=1)),
        ({"delay": timedelta(microseconds=1)}, timedelta(milliseconds=1)),
        ({"delay": "0s"}, timedelta()),
        ({"at": START + timedelta(minutes=3)}, timedelta(minutes=3)),
        ({"at": START + timedelta(milliseconds=7, microseconds=1)}, timedelta(milliseconds=8)),
        ({"every": Every("7s")}, 7 * SECOND),
    ],
    ids=str,
)
async def test_s1_it_is_delivered_at_its_due_time_rounded_up_to_a_millisecond(
    scheduler: Scheduler, clock: VirtualClock, log: Log, when: dict[str, object], due: timedelta
) -> None:
    async with scheduler:
        made = await scheduler.schedule(Order(7), **when)  # type: ignore[arg-type]
        assert made.due == START + due
        await clock.advance(due + SECOND)
    assert log.runs == [(7, due)]


@pytest.mark.parametrize("at", [START - timedelta(milliseconds=1), START - timedelta(days=400)], ids=str)
async def test_what_was_due_in_the_past_is_delivered_now(
    scheduler: Scheduler, clock: VirtualClock, log: Log, at: datetime
) -> None:
    await asyncio.sleep(60)
    async with scheduler:
        made = await scheduler.schedule(Order(), at=at)
        assert made.due == at
        await clock.advance()
    assert log.runs == [(0, 60 * SECOND)]


async def test_s9_one_at_a_time_they_come_by_due_time_then_as_scheduled(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    scheduler.set_concurrency(Order, 1)
    async with scheduler:
        for number, delay in enumerate([3, 1, 2, 1, 3, 1]):
            await scheduler.schedule(Order(number), at=START + delay * SECOND)
        await clock.advance("1m")
    assert [number for number, _ in log.runs] == [1, 3, 5, 2, 0, 4]


# --- the same id again ------------------------------------------------------------------------------------

Answer: TypeAlias = ScheduleOutcome | type[DuplicateIdError]
STORED, REPLACED, KEPT = ScheduleOutcome.STORED, ScheduleOutcome.REPLACED, ScheduleOutcome.KEPT
IN_FLIGHT, OUTDATED, DUPLICATE = ScheduleOutcome.IN_FLIGHT, ScheduleOutcome.OUTDATED, DuplicateIdError
AGAIN: dict[str, tuple[Conflict, dict[str, Answer]]] = {
    "replace": (
        Conflict.replace(),
        {"pending": REPLACED, "in flight": REPLACED, "done": STORED, "dead": STORED},
    ),
    "keep": (Conflict.keep(), {"pending": KEPT, "in flight": IN_FLIGHT, "done": STORED, "dead": STORED}),
    "newer": (Conflict.newer(8), {"pending": REPLACED, "in flight": REPLACED, "done": STORED, "dead": STORED}),
    "not newer": (
        Conflict.newer(7),
        {"pending": OUTDATED, "in flight": OUTDATED, "done": OUTDATED, "dead": OUTDATED},
    ),
    "error": (Conflict.error(), {"pending": DUPLICATE, "in flight": DUPLICATE, "done": STORED, "dead": STORED}),
}


@pytest.mark.parametrize("state", ["pending", "in flight", "done", "dead"])
@pytest.mark.parametrize(("conflict", "answers"), AGAIN.values(), ids=AGAIN)
async def test_s4_the_same_id_again(
    scheduler: Scheduler, clock: VirtualClock, conflict: Conflict, answers: Mapping[str, Answer], state: str
) -> None:
    started, goes_on = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    @scheduler.handler
    async def handle(order: Order) -> Reject | None:
        handled.append(order.number)
        started.set()
        await goes_on.wait()
        return Reject("no") if state == "dead" and order.number == 1 else None

    async with scheduler:
        first = await scheduler.schedule(Order(1), delay="10s", id="a", conflict=Conflict.newer(7))
        if state != "pending":
            await started.wait()
        if state in ("done", "dead"):
            goes_on.set()
            await clock.advance("1s")
        answer = answers[state]
        if isinstance(answer, ScheduleOutcome):
            again = await scheduler.schedule(Order(2), delay="2m", id="a", conflict=conflict)
            assert again.outcome is answer
            if answer in (KEPT, IN_FLIGHT):
                assert (again.revision, again.due_ms) == (first.revision, first.due_ms)
            elif answer is not OUTDATED:
                assert again.revision > first.revision
        else:
            with pytest.raises(answer):
                await scheduler.schedule(Order(2), delay="2m", id="a", conflict=conflict)
        goes_on.set()
        await clock.advance("3m")
    is_replaced = answer in (STORED, REPLACED)
    assert handled == [1] * (not (is_replaced and state == "pending")) + [2] * is_replaced


# --- late -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", ["first", "retry"])
@pytest.mark.parametrize(
    "policy",
    [
        (Late.deliver(), 1, []),
        (Late.drop(after="4s"), 0, []),
        (Late.dead_letter(after="4s"), 0, ["late"]),
        (Late.drop(after="30s"), 1, []),
        (Late.dead_letter(after="30s"), 1, []),
    ],
    ids=str,
)
async def test_what_is_claimed_too_late_ends_as_its_policy_says(
    scheduler: Scheduler, clock: VirtualClock, log: Log, policy: tuple[Late, int, list[str]], attempt: str
) -> None:
    late, runs, dead = policy
    async with scheduler:
        if attempt == "first":
            await scheduler.pause(Order)
        else:
            log.fails = 1
        await scheduler.schedule(Order(), delay="1s", late=late)
        await clock.advance("6s")
        before = len(log.runs)
        await scheduler.resume(Order)
        await clock.advance("10s")  # the retry is due 10 s after the first attempt
        assert len(log.runs) - before == runs
        assert [letter.reason async for letter in scheduler.dead_letters()] == dead
        assert await ids(scheduler) == []


# --- cancel, reschedule, fire -----------------------------------------------------------------------------


async def test_s5_what_was_cancelled_is_not_delivered(scheduler: Scheduler, clock: VirtualClock, log: Log) -> None:
    async with scheduler:
        await scheduler.schedule(Order(), delay="1s", id="a")
        assert await scheduler.cancel("a") is CancelOutcome.CANCELLED
        assert await scheduler.cancel("a") is CancelOutcome.NOT_FOUND
        await clock.advance("5m")
    assert log.runs == []


async def test_s5_cancelled_in_flight_it_is_not_tried_again(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    log.takes, log.fails = 5 * SECOND, 1
    async with scheduler:
        await scheduler.schedule(Order(), delay="1s", id="a")
        await asyncio.sleep(2)
        assert await scheduler.cancel("a") is CancelOutcome.IN_FLIGHT
        await clock.advance("5m")
        assert await listed(scheduler.dead_letters()) == []
    assert len(log.runs) == 1


async def test_s5_cancelled_while_it_waits_for_its_retry_it_is_over(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    log.fails = 1
    async with scheduler:
        await scheduler.schedule(Order(), delay="1s", id="a")
        await clock.advance("2s")
        assert await scheduler.cancel("a") is CancelOutcome.CANCELLED
        await clock.advance("5m")
    assert len(log.runs) == 1


async def test_rescheduled_it_is_delivered_at_the_new_time_alone(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    async with scheduler:
        for number, again in enumerate([{"delay": "1m"}, {"at": START + 10 * SECOND}, {"delay": "0s"}]):
            await scheduler.schedule(Order(number), delay="30s", id=f"m{number}")
            outcome = await scheduler.reschedule(f"m{number}", **again)  # type: ignore[arg-type]
            assert outcome is RescheduleOutcome.RESCHEDULED
        await clock.advance("5m")
    assert log.runs == [(2, timedelta()), (1, 10 * SECOND), (0, 60 * SECOND)]


async def test_fired_it_is_delivered_at_once_and_once(scheduler: Scheduler, clock: VirtualClock, log: Log) -> None:
    async with scheduler:
        await scheduler.schedule(Order(), delay="30d", id="a")
        await asyncio.sleep(5)
        assert await scheduler.fire("a") is FireOutcome.FIRED
        await clock.advance("1m")
        assert await scheduler.fire("a") is FireOutcome.NOT_FOUND
    assert log.runs == [(0, 5 * SECOND)]


async def test_fired_while_it_waits_for_its_retry_it_keeps_its_due_time(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    told: list[tuple[datetime, int]] = []

    @scheduler.handler(retry=Retry.intervals(["1h"]))
    async def handle(order: Order, context: Context) -> None:
        told.append((context.due, context.attempt))
        if context.attempt == 1:
            raise ConnectionError

    async with scheduler:
        made = await scheduler.schedule(Order(), delay="1s", id="a")
        await clock.advance("2s")
        assert await scheduler.fire("a") is FireOutcome.FIRED
        await clock.advance()
    assert told == [(made.due, 1), (made.due, 2)]


async def test_a_call_cancelled_before_it_was_sent_is_withdrawn(
    scheduler: Scheduler, clock: VirtualClock, faulty_store: FaultyStore, log: Log
) -> None:
    async with scheduler:
        await scheduler.schedule(Order(1), delay="1m", id="kept")
        faulty_store.inject("delay", "apply", lasting="1s")
        under_way = asyncio.create_task(scheduler.schedule(Order(2), delay="1m", id="sent"))
        await asyncio.sleep(0.5)
        waiting: list[asyncio.Task[object]] = [
            asyncio.create_task(scheduler.schedule(Order(3), delay="1m", id="withdrawn")),
            asyncio.create_task(scheduler.cancel("kept")),
        ]
        await asyncio.sleep(0)
        for call in (under_way, *waiting):
            call.cancel()
        await asyncio.wait([under_way, *waiting])
        await clock.advance("5m")
    assert sorted(number for number, _ in log.runs) == [1, 2], "what had left went on, what had not never will"


# --- looking ----------------------------------------------------------------------------------------------


async def test_get_shows_where_a_message_stands(scheduler: Scheduler, clock: VirtualClock, log: Log) -> None:
    async def seen() -> tuple[State, int, int] | None:
        found = await scheduler.get("a")
        return None if found is None else (found.state, found.record.attempt, found.next_attempt_ms - made.due_ms)

    log.takes, log.fails = 5 * SECOND, 1
    async with scheduler:
        made = await scheduler.schedule(Order(), delay="10s", id="a")
        states = [await seen()]
        for seconds in (12, 5, 10, 5):
            await asyncio.sleep(seconds)
            states.append(await seen())
    assert states == [
        (State.SCHEDULED, 0, 0),
        (State.IN_FLIGHT, 0, 0),
        (State.SCHEDULED, 1, 15_000),
        (State.IN_FLIGHT, 1, 15_000),
        None,
    ]


async def test_pending_lists_by_the_next_attempt_however_many_there_are(scheduler: Scheduler) -> None:
    many = 2 * PAGE + 3
    async with scheduler:
        await scheduler.schedule_many(
            Message(Order(), delay=timedelta(seconds=1000 - number // 10), id=f"m{number:04}") for number in range(many)
        )
        expected = sorted((f"m{number:04}" for number in range(many)), key=lambda each: (-(int(each[1:]) // 10), each))
        assert await ids(scheduler) == expected
        for limit in (0, 1, PAGE, PAGE + 1, many, many + 1):
            found = [each.record.id async for each in scheduler.pending(limit=limit)]
            assert found == expected[:limit]


async def test_pending_of_a_type_a_name_or_a_sink(clock: VirtualClock) -> None:
    async with Scheduler("memory://", clock=clock, sinks=[RecordingSink("log")]) as scheduler:
        await scheduler.schedule(Order(), delay="1h", id="order")
        await scheduler.schedule(Check(), delay="1h", id="check")
        await scheduler.schedule(b"{}", to="handler:CheckPayment", delay="2h", id="former name")
        await scheduler.schedule(b"", to="log:x", delay="1h", id="to x")
        await scheduler.schedule(Order(), to="log:y", delay="2h", id="to y")
        found = {
            of: [each.record.id async for each in scheduler.pending(of)]
            for of in (Order, Check, "Order", "payment.check", "CheckPayment", "handler:Order", "log", "nothing")
        }
    assert found == {
        Order: ["order"],
        Check: ["check", "former name"],
        "Order": ["order"],
        "payment.check": ["check"],
        "CheckPayment": ["former name"],
        "handler:Order": ["order"],
        "log": ["to x", "to y"],
        "nothing": [],
    }


async def test_pending_between_two_times(scheduler: Scheduler) -> None:
    async with scheduler:
        for second in range(5):
            await scheduler.schedule(Order(), at=START + (100 + second) * SECOND, id=f"m{second}")
        since, before = START + 101 * SECOND, START + 103 * SECOND
        assert [each.record.id async for each in scheduler.pending(since=since)] == ["m1", "m2", "m3", "m4"]
        assert [each.record.id async for each in scheduler.pending(before=before)] == ["m0", "m1", "m2"]
        assert [each.record.id async for each in scheduler.pending(since=since, before=before)] == ["m1", "m2"]


async def test_counts_by_lane_and_state(clock: VirtualClock) -> None:
    scheduler, go_on = Scheduler("memory://", clock=clock, sinks=[RecordingSink("log")]), asyncio.Event()

    @scheduler.handler(concurrency=1)
    async def handle(order: Order) -> Reject:
        if order.number:
            await go_on.wait()
        return Reject("no")

    async with scheduler:
        assert await scheduler.counts() == {}
        await scheduler.pause("log:held")
        for number, seconds in enumerate([1, 2, 3, 4, 3600]):
            await scheduler.schedule(Order(number), delay=seconds * SECOND)
        for address in ("held", "other"):
            await scheduler.schedule(b"", to=f"log:{address}", delay="1h")
        await scheduler.schedule(Check(), delay="1s")
        await asyncio.sleep(10)
        assert await scheduler.counts() == {
            "Order": LaneCounts(dead=1, in_flight=1, overdue=2, scheduled=1),
            "log": LaneCounts(held=1, scheduled=1),
            "payment.check": LaneCounts(overdue=1, read_by_nobody=True),
        }
        go_on.set()


async def test_load_ahead_by_lane_and_span(scheduler: Scheduler) -> None:
    async with scheduler:
        for seconds in (0.5, 59, 60, 61, 3 * 60, 10 * 60):
            await scheduler.schedule(Order(), delay=timedelta(seconds=seconds))
        await scheduler.schedule(Check(), delay="90s")
        ahead = await scheduler.load(bucket="1m", buckets=5)
    start = int(START.timestamp() * 1000)
    assert ahead == [
        LoadBucket(start, "Order", 2),
        LoadBucket(start + 60_000, "Order", 2),
        LoadBucket(start + 60_000, "payment.check", 1),
        LoadBucket(start + 180_000, "Order", 1),
    ]


async def test_the_journal_tells_what_became_of_a_message(clock: VirtualClock) -> None:
    async with Scheduler("memory://?journal=100", clock=clock) as scheduler:
        scheduler.add_handler(Log(clock))
        await scheduler.schedule(Order(), delay="1h", id="a")
        await scheduler.schedule(Order(), delay="1h", id="b")
        await scheduler.fire("a")
        await clock.advance("1s")
        entries = await scheduler.journal("a")
        assert [entry.event for entry in entries] == ["stored", "fired", "claimed", "delivered"]
        assert await scheduler.journal("a", after=entries[0].number, limit=2) == entries[1:3]
        assert [entry.id for entry in await scheduler.journal()] == ["a", "b", "a", "a", "a"]


# --- pause and resume -------------------------------------------------------------------------------------


async def test_a_paused_type_is_kept_and_delivered_once_it_is_resumed(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    log.takes = 5 * SECOND
    async with scheduler:
        await scheduler.schedule(Order(1), delay="1s")
        await scheduler.schedule(Order(2), delay="1m", id="held")
        await asyncio.sleep(2)
        assert await scheduler.pause(Order) is True
        assert await scheduler.pause("Order") is False, "it was paused already"
        assert await scheduler.paused() == ["Order"]
        await clock.advance("10m")
        assert len(log.runs) == 1, "what was in flight went on"
        held = await scheduler.get("held")
        assert held is not None
        assert held.state is State.HELD
        assert await scheduler.resume(Order) is True
        assert await scheduler.resume(Order) is False
        assert await scheduler.paused() == []
        await clock.advance("10s")
    assert [number for number, _ in log.runs] == [1, 2]


async def test_what_is_paused_is_paused_for_all_instances_and_after_a_restart(clock: VirtualClock) -> None:
    store, log = MemoryStore(clock=clock), Log(clock)
    other = Scheduler(store, clock=clock)
    other.add_handler(log)
    async with Scheduler(store, clock=clock, dispatch=False) as scheduler, other:
        await scheduler.pause(Order)
        await scheduler.schedule(Order(), delay="1s")
        await clock.advance("1m")
    async with other:
        await clock.advance("1m")
        assert log.runs == []
        await other.resume(Order)
        await clock.advance("1s")
        assert len(log.runs) == 1


async def test_one_address_is_paused_and_others_of_its_sink_are_not(clock: VirtualClock) -> None:
    sink = RecordingSink("log")
    async with Scheduler("memory://", clock=clock, sinks=[sink]) as scheduler:
        await scheduler.pause("log:a:b")
        for address in ("a:b", "c"):
            await scheduler.schedule(b"", to=f"log:{address}", delay="1s")
        await clock.advance("1m")
        assert [each.envelope.address for each in sink.deliveries] == ["c"]
        assert await scheduler.paused() == ["log:a:b"]
        await scheduler.resume("log:a:b")
        await clock.advance("1s")
        assert [each.envelope.address for each in sink.deliveries] == ["c", "a:b"]


async def test_a_paused_type_is_paused_under_its_former_names_too(scheduler: Scheduler, clock: VirtualClock) -> None:
    handled: list[Check] = []

    @scheduler.handler
    async def handle(check: Check) -> None:
        handled.append(check)

    async with scheduler:
        assert await scheduler.pause("CheckPayment") is True
        assert await scheduler.pause(Check) is True, "one of its names was running"
        assert await scheduler.pause("handler:payment.check") is False
        assert await scheduler.paused() == ["CheckPayment", "payment.check"]
        await scheduler.schedule(Check(1), delay="1s")
        await scheduler.schedule(b'{"number":2}', to="handler:CheckPayment", delay="1s")
        await clock.advance("1m")
        assert handled == []
        assert await scheduler.resume(Check) is True
        assert await scheduler.paused() == []
        await clock.advance("1s")
    assert sorted(check.number for check in handled) == [1, 2]


# --- dead letters -----------------------------------------------------------------------------------------


async def rejected(order: Order) -> Reject:
    return Reject(f"number {order.number}")


async def refused(check: Check) -> Reject:
    return Reject(f"check {check.number}")


@asynccontextmanager
async def with_dead_letters(scheduler: Scheduler, clock: VirtualClock, many: int) -> AsyncIterator[None]:
    scheduler.add_handler(rejected)
    scheduler.add_handler(refused)
    async with scheduler:
        for number in range(many):
            await scheduler.schedule(Order(number), delay=(1 + number) * SECOND, id=f"m{number}")
        await scheduler.schedule(b'{"number":1}', to="handler:CheckPayment", delay="1m", id="former name")
        await scheduler.schedule(Check(2), delay="1m", id="check")
        await clock.advance("10m")
        yield


async def test_dead_letters_are_listed_oldest_first_with_their_reasons(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    async with with_dead_letters(scheduler, clock, 3):
        letters = await listed(scheduler.dead_letters(Order))
        assert [(each.record.id, each.reason, each.record.last_error) for each in letters] == [
            (f"m{number}", "rejected", f"number {number}") for number in range(3)
        ]
        for limit in range(5):
            assert [each async for each in scheduler.dead_letters(limit=limit)] == (
                await listed(scheduler.dead_letters())
            )[:limit]
        assert sorted([each.record.id async for each in scheduler.dead_letters(Check)]) == ["check", "former name"]
        assert [each.record.id async for each in scheduler.dead_letters(Check, limit=1)] == ["check"]
        assert [each.record.id async for each in scheduler.dead_letters("CheckPayment")] == ["former name"]


async def test_dead_letters_of_any_number_are_listed(clock: VirtualClock) -> None:
    many = PAGE + 7
    async with Scheduler("memory://", clock=clock) as scheduler:
        scheduler.add_handler(rejected, concurrency=1000)
        await scheduler.schedule_many(Message(Order(number), delay="1s", id=f"m{number}") for number in range(many))
        await scheduler.run_until_idle()
        assert len({each.key async for each in scheduler.dead_letters()}) == many
        assert len(await listed(scheduler.dead_letters(limit=PAGE + 1))) == PAGE + 1


async def test_redriven_they_get_a_new_life(scheduler: Scheduler, clock: VirtualClock) -> None:
    told: list[tuple[int, str]] = []
    async with with_dead_letters(scheduler, clock, 3):
        await scheduler.remove_handler(Order)

        @scheduler.handler
        async def handle(order: Order, context: Context) -> None:
            told.append((context.attempt, context.delivery_id))

        first, second, third = await listed(scheduler.dead_letters(Order))
        await scheduler.schedule(Order(), delay="1h", id="m2")
        answers = await scheduler.redrive(first, second.key, third, DeadKey("nobody", 1))
        assert [type(answer) for answer in answers] == [Stored, Stored, Refused, Refused]
        assert answers[2:] == [Refused("exists"), Refused("not_found")]
        await clock.advance("1s")
        assert [attempt for attempt, _ in told] == [1, 1]
        before = {f"{each.record.id}/{each.record.revision}/{each.record.due_ms}" for each in (first, second)}
        assert before.isdisjoint(delivery_id for _, delivery_id in told)
        assert [each.record.id async for each in scheduler.dead_letters(Order)] == ["m2"]
        assert await scheduler.redrive(first) == [Refused("not_found")]


async def test_purged_they_are_gone(scheduler: Scheduler, clock: VirtualClock) -> None:
    async with with_dead_letters(scheduler, clock, 3):
        first, second, _ = await listed(scheduler.dead_letters(Order))
        assert await scheduler.purge(first, second.key, first) == 2
        assert [each.record.id async for each in scheduler.dead_letters(Order)] == ["m2"]
        assert await scheduler.redrive(first) == [Refused("not_found")]
        assert await scheduler.purge() == 0
        assert await scheduler.redrive() == []


# --- roles ------------------------------------------------------------------------------------------------


async def test_a_process_that_only_schedules_leaves_delivering_to_others(clock: VirtualClock) -> None:
    store, sink = MemoryStore(clock=clock), RecordingSink("log")
    producer_log, worker_log = Log(clock), Log(clock)
    producer = Scheduler(store, clock=clock, dispatch=False, sinks=[RecordingSink("log")])
    producer.add_handler(producer_log)
    async with producer:
        await producer.schedule(Order(), delay="1s")
        await producer.schedule(b"", to="log:x", delay="1s")
        await clock.advance("1m")
        assert (await producer.counts())["Order"] == LaneCounts(overdue=1, read_by_nobody=True)
        worker = Scheduler(store, clock=clock, sinks=[sink])
        worker.add_handler(worker_log)
        async with worker:
            await clock.advance("1s")
    assert producer_log.runs == []
    assert len(worker_log.runs) == len(sink.deliveries) == 1


async def test_each_process_serves_the_lanes_it_was_given(clock: VirtualClock) -> None:
    store, log, handled = MemoryStore(clock=clock), RecordingSink("log"), list[str]()

    def instance(name: str, lanes: list[str]) -> Scheduler:
        scheduler = Scheduler(store, clock=clock, lanes=lanes, sinks=[log])

        @scheduler.handler
        async def order(order: Order) -> None:
            handled.append(f"order by {name}")

        @scheduler.handler
        async def check(check: Check) -> None:
            handled.append(f"check by {name}")

        return scheduler

    async with instance("a", ["payment.check"]) as scheduler, instance("b", ["Order"]):
        for given in (Order(), Check()):
            await scheduler.schedule(given, delay="1s")
        await scheduler.schedule(b'{"number":2}', to="handler:CheckPayment", delay="1s")
        await scheduler.schedule(b"", to="log:x", delay="1s")
        await clock.advance("1m")
        assert sorted(handled) == ["check by a", "check by a", "order by b"]
        assert log.deliveries == []
        async with instance("c", ["log"]):
            await clock.advance("1s")
    assert len(log.deliveries) == 1


async def test_a_typed_event_goes_to_a_sink_as_it_is_written_with_its_type(clock: VirtualClock) -> None:
    sink = RecordingSink("log")
    async with Scheduler("memory://", clock=clock, sinks=[sink]) as scheduler:
        await scheduler.schedule(Check(7), to="log:x", delay="1s", key=b"k", headers={"h": b"v"})
        await clock.advance("2s")
    (delivery,) = sink.deliveries
    envelope = delivery.envelope
    assert (envelope.type, envelope.encoding, json.loads(envelope.payload)) == ("payment.check", "json", {"number": 7})
    assert (envelope.key, envelope.headers) == (b"k", {"h": b"v"})


# --- until idle -------------------------------------------------------------------------------------------


async def test_idle_at_once_where_there_is_nothing(scheduler: Scheduler, clock: VirtualClock, log: Log) -> None:
    async with scheduler:
        await scheduler.run_until_idle()
    assert clock.monotonic_ms() == 0


async def test_idle_once_all_has_been_delivered_however_far_ahead_and_whatever_follows_from_it(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    @scheduler.handler
    async def check(check: Check, context: Context) -> None:
        await context.scheduler.schedule(Order(check.number + 1), delay="10s")

    log.takes, log.fails = 7 * SECOND, 1
    async with scheduler:
        await scheduler.schedule(Order(1), delay="1m")
        await scheduler.schedule(b'{"number":1}', to="handler:CheckPayment", delay="2m")
        await scheduler.run_until_idle()
        assert await ids(scheduler) == []
    assert log.runs == [(1, 60 * SECOND), (1, 77 * SECOND), (2, 130 * SECOND)]


async def test_a_wait_for_messages_that_are_due_later_than_the_drain_is_told_once(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[int] = []
    scheduler = Scheduler("memory://", clock=clock, drain="30s")

    @scheduler.handler
    async def handle(order: Order) -> None:
        handled.append(order.number)

    async with scheduler:
        await scheduler.schedule(Order(0), every=Every("20s"))
        await scheduler.schedule(Order(1), delay="25s")
        for number in (2, 3, 4):
            await scheduler.schedule(Order(number), delay="30m25s")
        await scheduler.run_until_idle()
        assert {1, 2, 3, 4} < set(handled)
    (told,) = [each for each in caplog.records if "waiting" in each.getMessage()]
    assert told.levelno == logging.WARNING
    assert told.getMessage() == "run_until_idle() is waiting for 3 messages; the next is due in 30m"


async def test_a_store_that_does_not_answer_for_a_while_is_asked_again_whether_all_is_idle(
    scheduler: Scheduler, faulty_store: FaultyStore, clock: VirtualClock, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [StoreUnavailableError("memory", "no answer")] * 3
    whole = faulty_store.search

    async def search(query: Query) -> Sequence[Snapshot]:
        if refusals:
            raise refusals.pop()
        return await whole(query)

    monkeypatch.setattr(faulty_store, "search", search)
    async with scheduler:
        await scheduler.schedule(Order(1), delay="1m")
        await scheduler.run_until_idle()
    assert not refusals
    assert [number for number, _ in log.runs] == [1]


async def test_idle_does_not_wait_for_what_recurs_nor_for_what_others_serve(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    async with scheduler:
        await scheduler.schedule(Order(1), every=Every("10s"))
        await scheduler.schedule(Order(2), delay="25s")
        await scheduler.schedule(Check(), delay="1h")
        await scheduler.run_until_idle()
        assert [number for number, _ in log.runs] == [1, 1, 2]
    assert_scheduled(scheduler, Check)
    assert_delivered(scheduler, Check, times=0)


async def test_idle_once_the_last_message_is_cancelled(scheduler: Scheduler, clock: VirtualClock, log: Log) -> None:
    async with scheduler, asyncio.TaskGroup() as tasks:
        await scheduler.schedule(Order(1), delay="1h", id="last")
        waiting = tasks.create_task(scheduler.run_until_idle())
        await asyncio.sleep(3.2)
        assert await scheduler.cancel("last") is CancelOutcome.CANCELLED
        await waiting
        assert clock.now() - START < 3.3 * SECOND


async def test_idle_waits_for_what_another_instance_has_in_flight(clock: VirtualClock) -> None:
    store, logs = MemoryStore(clock=clock), (Log(clock), Log(clock))
    first, second = (Scheduler(store, clock=clock) for _ in logs)
    for each, log in zip((first, second), logs, strict=True):
        log.takes = 20 * SECOND
        each.add_handler(log)
    async with second:
        await second.schedule(Order(), delay="1s")
        await asyncio.sleep(2)
        async with first:
            await first.run_until_idle()
            assert clock.now() - START >= 21 * SECOND
    assert (len(logs[0].runs), len(logs[1].runs)) == (0, 1)


# --- what programs and other modules ask of it ---------------------------------------------------------------


async def test_its_store_and_sinks_are_there_open_or_not(clock: VirtualClock) -> None:
    store, sink = MemoryStore(clock=clock), RecordingSink("sent")
    scheduler = Scheduler(store, sinks=[sink], clock=clock)

    def seen() -> tuple[object, object, object]:
        return scheduler.store, scheduler.sinks, scheduler.sink("sent")

    assert seen() == (store, {"sent": sink}, sink)
    with pytest.raises(ClosedError, match="not open yet"):
        scheduler.opened_store()
    async with scheduler:
        assert seen() == (store, {"sent": sink}, sink)
        assert scheduler.opened_store() is store
    assert seen() == (store, {"sent": sink}, sink)
    with pytest.raises(ClosedError, match="closed"):
        scheduler.opened_store()
    with pytest.raises(UnknownSinkError, match="allowed: sent"):
        scheduler.sink("other")


async def test_commands_are_carried_out_as_they_are(clock: VirtualClock) -> None:
    scheduler, sink = Scheduler(MemoryStore(clock=clock), clock=clock), Envelope("m", "sent", "x")
    put = Put(new_op(), sink, After(1000), Conflict.error())
    with pytest.raises(ClosedError):
        await scheduler.carry_out([put])
    async with scheduler:
        stored, refused, cancelled = await scheduler.carry_out(
            [put, Put(new_op(), sink, After(1), Conflict.error()), Cancel(new_op(), "m")]
        )
        assert isinstance(stored, Stored)
        assert isinstance(refused, DuplicateIdError)
        assert isinstance(cancelled, Stored)
        assert cancelled.answer == "cancelled"


async def test_decoders_are_found_by_every_name_that_a_handler_serves(scheduler: Scheduler, log: Log) -> None:
    @scheduler.handler
    async def check(check: Check) -> None: ...

    decoders = scheduler.decoders()
    assert sorted(decoders) == ["CheckPayment", "Order", "payment.check"]
    assert decoders["CheckPayment"](b'{"number": 7}', "json") == Check(7)


async def test_it_tells_what_it_serves_and_what_is_in_flight(
    scheduler: Scheduler, clock: VirtualClock, log: Log
) -> None:
    log.takes = 20 * SECOND

    def seen() -> tuple[int, list[str]]:
        return scheduler.in_flight, list(scheduler.served())

    assert seen() == (0, [])
    async with scheduler:
        assert seen() == (0, ["Order"])
        await scheduler.schedule(Order(), delay="1s")
        await asyncio.sleep(2)
        assert seen() == (1, ["Order"])
        with scheduler.watch() as changed:
            while scheduler.in_flight:
                changed.clear()
                assert await changed.wait(60), "it is set when the message settles"
        assert seen() == (0, ["Order"])
    assert seen() == (0, [])
    with scheduler.watch() as changed:
        assert not await changed.wait(60)
