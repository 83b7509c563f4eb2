"""Handlers of batches: when a run begins, its outcomes, its failures, and what ends it early."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Annotated, Any

import pytest

from aiodelay import (
    ConfigurationError,
    Context,
    Depends,
    HandlerSignatureError,
    Later,
    Message,
    Reject,
    Retry,
    Scheduler,
)
from aiodelay.core.ids import new_id
from aiodelay.core.values import Again, DeadLetter, Demand
from aiodelay.engine.delivery.halving import Halving
from aiodelay.testing.clock import VirtualClock
from tests.support.noted import NotedStore

pytestmark = pytest.mark.asyncio

AT_ONCE = Retry(attempts=3, first="0s", cap="0s", jitter=0)


@dataclass(frozen=True)
class Work:
    number: int


Do = Callable[[list[int], Context], object]


class Stage:
    """A scheduler with one handler of batches, which notes its runs and then does what its test says."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.store = clock, NotedStore(clock)
        self.scheduler = Scheduler(self.store, clock=clock, drain="5s", retry=AT_ONCE)
        self.runs: list[list[int]] = []
        self.began_ms: list[int] = []
        self.done: Counter[int] = Counter()
        self.end = asyncio.Event()

    def serve(self, do: Do | None = None, *, waits: bool = False, **options: Any) -> None:  # noqa: ANN401 - of a handler
        async def work(events: list[Work], context: Context) -> Any:  # noqa: ANN401 - also what no handler may return
            result = self.run(events, context, do)
            if waits:
                await self.end.wait()
            self.done.update(event.number for event in events)
            return result

        self.scheduler.add_handler(work, **options)

    def run(self, events: list[Work], context: Context, do: Do | None) -> object:
        numbers = [event.number for event in events]
        assert [each.id for each in context.messages] == [str(number) for number in numbers]
        self.runs.append(numbers)
        self.began_ms.append(self.clock.monotonic_ms())
        return None if do is None else do(numbers, context)

    async def schedule(self, *numbers: int, **options: Any) -> None:  # noqa: ANN401 - of a message
        await self.scheduler.schedule_many(
            Message(Work(n), **{"delay": "0s", "id": str(n), **options}) for n in numbers
        )

    async def letters(self) -> dict[str, DeadLetter]:
        return {each.record.id: each for each in await self.store.memory.dead_letters()}

    async def in_flight(self) -> int:
        counts = await self.store.memory.counts()
        return counts["Work"].in_flight if "Work" in counts else 0


@pytest.fixture
def stage(clock: VirtualClock) -> Stage:
    return Stage(clock)


def first_of(events: list[Work]) -> int:
    return events[0].number


def failing(*bad: int) -> Do:
    def do(numbers: list[int], context: Context) -> None:
        found = sorted(set(bad) & set(numbers))
        if found:
            raise ValueError(f"cannot take {found[0]}")

    return do


# --- when a run begins ------------------------------------------------------------------------------------


async def test_a_run_takes_the_messages_that_are_there(stage: Stage) -> None:
    await fill(stage, 250)
    stage.serve(concurrency=1)
    async with stage.scheduler:
        await stage.scheduler.run_until_idle()
    assert [len(run) for run in stage.runs] == [100, 100, 50]
    assert [number for run in stage.runs for number in run] == list(range(250))


async def test_a_batch_that_is_not_full_waits_no_longer_than_batch_wait(stage: Stage) -> None:
    stage.serve(batch=3, batch_wait="50ms", concurrency=1)
    async with stage.scheduler:
        start = stage.clock.monotonic_ms()
        await stage.schedule(1)
        await asyncio.sleep(0.03)
        await stage.schedule(2)
        await asyncio.sleep(0.04)
        await stage.schedule(3, 4, 5, 6)
        await asyncio.sleep(0.2)
    assert stage.runs == [[1, 2], [3, 4, 5], [6]]
    assert [began - start for began in stage.began_ms] == [50, 70, 120]


async def test_runs_at_once_are_limited_by_concurrency_and_messages_by_both(stage: Stage) -> None:
    stage.serve(waits=True, batch=10, concurrency=2)
    async with stage.scheduler:
        await stage.schedule(*range(25))
        await asyncio.sleep(1)
        assert [len(run) for run in stage.runs] == [10, 10]
        assert await stage.in_flight() == 20
        stage.end.set()
        await stage.scheduler.run_until_idle()
    assert stage.done == Counter(range(25))


async def test_nothing_is_claimed_behind_a_batch_that_began_before_it_was_full(stage: Stage) -> None:
    stage.serve(waits=True, batch=10, concurrency=1)
    async with stage.scheduler:
        await stage.schedule(1, 2)
        await asyncio.sleep(1)
        await stage.schedule(3)
        await asyncio.sleep(1)
        assert await stage.in_flight() == 2
        stage.end.set()
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1, 2], [3]]


async def test_a_message_that_is_cancelled_while_it_waits_is_not_in_the_batch(stage: Stage) -> None:
    stage.serve(batch_wait="1s")
    async with stage.scheduler:
        await stage.schedule(1, 2, 3)
        await asyncio.sleep(0.1)
        await stage.scheduler.cancel("2")
        await asyncio.sleep(2)
    assert stage.runs == [[1, 3]]


async def test_a_message_that_is_replaced_while_it_waits_is_delivered_in_its_new_version(stage: Stage) -> None:
    stage.serve(batch_wait="1s")
    async with stage.scheduler:
        await stage.schedule(1, 2)
        await asyncio.sleep(0.1)
        await stage.schedule(2, delay="5s")
        await asyncio.sleep(4)
        assert stage.runs == [[1]]
        await asyncio.sleep(4)
    assert stage.runs == [[1], [2]]


async def test_s7_a_message_that_is_claimed_again_while_it_waits_is_in_the_batch_once(stage: Stage) -> None:
    """A step of the clock ends the lease. Another step brings the clock back before the new claim is answered."""
    stage.serve(batch=3, batch_wait="1s", concurrency=1)
    async with stage.scheduler:
        await stage.schedule(1)
        await asyncio.sleep(0.1)
        stage.store.inject("late_reply", "claim", lasting="0.2s")
        stage.clock.step(timedelta(seconds=15.2))
        await stage.schedule(2)
        await asyncio.sleep(0.1)
        stage.clock.step(timedelta(seconds=-2.9))
        await asyncio.sleep(2)
        claimed = [claim.record.id for call in stage.store.made("claim") for claim in call.answer.claims]
        assert claimed == ["1", "1", "2"]
        assert stage.runs == [[1, 2]]
        assert await stage.in_flight() == 0


async def test_a_scheduler_that_closes_gives_back_messages_that_wait(stage: Stage) -> None:
    stage.serve(batch_wait="30s")
    async with stage.scheduler:
        await stage.schedule(1, 2)
        await asyncio.sleep(1)
        assert await stage.in_flight() == 2
        start = stage.clock.monotonic_ms()
    assert stage.clock.monotonic_ms() - start < 1000
    assert stage.runs == []
    counts = (await stage.store.memory.counts())["Work"]
    assert (counts.in_flight, counts.overdue) == (0, 2)


# --- outcomes ---------------------------------------------------------------------------------------------


async def test_a_list_of_outcomes_settles_each_message(stage: Stage) -> None:
    def do(numbers: list[int], context: Context) -> object:
        if len(numbers) < 3:
            return None
        return [None, Later("10s"), Reject("no such account")]

    stage.serve(do)
    async with stage.scheduler:
        await stage.schedule(1, 2, 3)
        await asyncio.sleep(1)
        assert stage.runs == [[1, 2, 3]]
        await asyncio.sleep(10)
    letters = await stage.letters()
    assert stage.runs == [[1, 2, 3], [2]]
    assert {id_: (each.reason, each.record.last_error) for id_, each in letters.items()} == {
        "3": ("rejected", "no such account")
    }


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ([None], "list of 1 for 2 messages"),
        ([None, None, None], "list of 3 for 2 messages"),
        ((None, None), "tuple"),
        (Later("1s"), "Later"),
        ({}, "dict"),
    ],
)
async def test_a_wrong_result_fails_each_message_and_is_not_halved(stage: Stage, result: object, named: str) -> None:
    stage.serve(lambda numbers, context: result if context.attempt == 1 else None)
    async with stage.scheduler:
        await stage.schedule(1, 2)
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1, 2], [1, 2]]
    errors = {each.error for call in stage.store.made("settle") for each in call.asked if getattr(each, "error", None)}
    (error,) = errors
    assert f"handler Work returned {named}; allowed: None, or a list with None, Later(delay) or Reject" in error


async def test_one_wrong_outcome_in_a_list_fails_its_message_alone(stage: Stage) -> None:
    stage.serve(lambda numbers, context: [None, 7, None][: len(numbers)])
    async with stage.scheduler:
        await stage.schedule(1, 2, 3)
        await stage.scheduler.run_until_idle()
    assert stage.runs[:2] == [[1, 2, 3], [2]]


async def test_a_message_that_cannot_be_read_is_given_up_without_the_others(stage: Stage) -> None:
    stage.serve()
    async with stage.scheduler:
        await stage.schedule(1, 3)
        await stage.scheduler.schedule(b"no json", to="handler:Work", delay="0s", id="2")
        await stage.scheduler.run_until_idle()
    assert stage.done == Counter([1, 3])
    assert {id_: each.reason for id_, each in (await stage.letters()).items()} == {"2": "undecodable"}


# --- failures ---------------------------------------------------------------------------------------------


def cost_of(n: int, bad: set[int]) -> tuple[int, list[int]]:
    """Return the runs after the first one, and the messages that are found."""
    halving, runs = Halving(range(n)), -1
    found: list[int] = []
    while part := halving.next():
        runs += 1
        if bad.isdisjoint(part):
            halving.succeeded()
        elif not halving.failed(part):
            assert len(part) == 1, "halving has stopped"
            found += part
    return runs, found


async def test_halving_finds_any_3_of_500_messages_in_at_most_50_runs() -> None:
    places = [0, 1, 2, 124, 125, 126, 249, 250, 251, 374, 375, 376, 497, 498, 499]
    costs = [(cost_of(500, set(bad)), bad) for bad in combinations(places, 3)]
    assert all(found == list(bad) for (_, found), bad in costs)
    assert max(runs for (runs, _), _ in costs) == 48


async def test_3_poison_messages_of_500_are_found_and_all_others_run_to_the_end_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiodelay.handlers")
    stage.serve(failing(3, 251, 499), batch=500, concurrency=1, retry=Retry(attempts=1))
    async with stage.scheduler:
        await stage.schedule(*range(500))
        await stage.scheduler.run_until_idle()
    assert len(stage.runs[0]) == 500
    assert len(stage.runs) - 1 <= 50
    assert stage.done == Counter(set(range(500)) - {3, 251, 499})
    assert set(await stage.letters()) == {"3", "251", "499"}
    succeeded = [number for run in stage.runs if not {3, 251, 499} & set(run) for number in run]
    assert succeeded == sorted(succeeded), "the halves run in order"


async def test_a_failure_that_is_not_of_the_messages_costs_few_runs_and_no_message(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiodelay.handlers")
    is_down = True

    def do(numbers: list[int], context: Context) -> None:
        if is_down:
            raise ConnectionError("the database is down")

    stage.serve(do, batch=500, concurrency=1, retry=Retry(attempts=3, first="1m", cap="1m", jitter=0))
    async with stage.scheduler:
        await stage.schedule(*range(500))
        await asyncio.sleep(1)
        assert len(stage.runs) <= 20
        is_down = False
        await asyncio.sleep(60)
    assert stage.done == Counter(range(500))


async def test_no_message_becomes_a_dead_letter_for_the_failure_of_others(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiodelay.handlers")
    bad = set(range(20, 60))
    stage.serve(failing(*bad), concurrency=1, retry=Retry(attempts=1))
    async with stage.scheduler:
        await stage.schedule(*range(100))
        await stage.scheduler.run_until_idle()
    assert set(await stage.letters()) == {str(number) for number in bad}
    assert stage.done == Counter(set(range(100)) - bad)


async def test_each_message_keeps_its_own_attempts(stage: Stage) -> None:
    attempts: dict[int, list[int]] = {}

    def do(numbers: list[int], context: Context) -> None:
        for number, each in zip(numbers, context.messages, strict=True):
            attempts.setdefault(number, []).append(each.attempt)
        failing(2)(numbers, context)

    stage.serve(do, concurrency=1)
    async with stage.scheduler:
        await stage.schedule(1, 2, 3)
        await stage.scheduler.run_until_idle()
    assert (attempts[2][-1], set(attempts[1]), set(attempts[3])) == (3, {1}, {1})
    assert (await stage.letters())["2"].record.attempt == 3


async def test_with_retry_all_each_message_of_a_failed_batch_has_failed(stage: Stage) -> None:
    stage.serve(failing(2), on_failure="retry_all")
    async with stage.scheduler:
        await stage.schedule(1, 2, 3)
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1, 2, 3]] * 3
    assert {id_: each.record.attempt for id_, each in (await stage.letters()).items()} == {"1": 3, "2": 3, "3": 3}


async def test_each_run_has_the_whole_timeout(stage: Stage) -> None:
    async def work(events: list[Work], context: Context) -> None:
        stage.run(events, context, None)
        await asyncio.sleep(10 if Work(2) in events else 0.9)
        stage.done.update(event.number for event in events)

    stage.scheduler.add_handler(work, timeout="1s", retry=Retry(attempts=1), concurrency=1)
    async with stage.scheduler:
        await stage.schedule(1, 2, 3, 4)
        await stage.scheduler.run_until_idle()
    assert stage.runs == [[1, 2, 3, 4], [1, 2], [1], [2], [3, 4]]
    assert stage.done == Counter([1, 3, 4])
    assert "HandlerTimeoutError" in str((await stage.letters())["2"].record.last_error)


async def test_a_message_that_is_replaced_between_two_halves_does_not_run_in_its_old_version(stage: Stage) -> None:
    async def work(events: list[Work], context: Context) -> None:
        stage.run(events, context, None)
        if len(events) == 4:
            await stage.schedule(4, delay="1h")
            raise ValueError("not together")

    stage.scheduler.add_handler(work, concurrency=1)
    async with stage.scheduler:
        await stage.schedule(1, 2, 3, 4)
        await asyncio.sleep(60)
    assert stage.runs == [[1, 2, 3, 4], [1, 2], [3]]


async def fail_in_outage(stage: Stage) -> None:
    """Run a batch that fails when its leases have ended, because the store has not answered for longer than a lease."""

    async def work(events: list[Work], context: Context) -> None:
        stage.run(events, context, None)
        if len(events) == 4:
            stage.store.inject("unavailable", "renew", "tidy", "claim", "settle", times=None)
            await asyncio.sleep(20)
            raise ValueError("not together")
        stage.done.update(event.number for event in events)

    stage.scheduler.add_handler(work, concurrency=1)
    await stage.schedule(1, 2, 3, 4)
    await asyncio.sleep(40)
    assert stage.runs == [[1, 2, 3, 4]], "no half begins while another process may have claimed its messages"


async def test_s7_halves_whose_leases_have_ended_wait_for_the_renewal(stage: Stage) -> None:
    async with stage.scheduler:
        await fail_in_outage(stage)
        stage.store.heal()
        await asyncio.sleep(5)
    assert stage.runs == [[1, 2, 3, 4], [1, 2], [3, 4]]
    assert stage.done == Counter([1, 2, 3, 4])


async def test_s7_halves_whose_messages_others_have_claimed_do_not_run(stage: Stage) -> None:
    async with stage.scheduler:
        await fail_in_outage(stage)
        async with stage.store.memory.work(new_id(), ["Work"]) as other:
            await other.tidy(["Work"], limit=10)
            claimed = await other.claim({"Work": Demand(2)}, request=new_id(), lease_ms=15_000)
            assert [claim.record.id for claim in claimed.claims] == ["1", "2"]
            stage.store.heal()
            await asyncio.sleep(5)
            assert stage.runs == [[1, 2, 3, 4], [3, 4]]


async def test_halves_that_wait_for_a_renewal_go_back_when_the_scheduler_closes(stage: Stage) -> None:
    async with stage.scheduler:
        await fail_in_outage(stage)
        stage.store.heal()
        start = stage.clock.monotonic_ms()
    assert stage.clock.monotonic_ms() - start < 5_000
    assert stage.runs == [[1, 2, 3, 4]]
    assert {each.attempt for call in stage.store.made("settle") for each in call.asked} == {0}


# --- ends -------------------------------------------------------------------------------------------------


async def test_a_batch_that_outlives_the_drain_is_cancelled_and_goes_back(stage: Stage) -> None:
    stage.serve(waits=True, batch=3, concurrency=1)
    async with stage.scheduler:
        await stage.schedule(1, 2, 3, 4)
        await asyncio.sleep(1)
        start = stage.clock.monotonic_ms()
    assert stage.clock.monotonic_ms() - start < 6_000
    assert stage.done == Counter()
    counts = (await stage.store.memory.counts())["Work"]
    assert (counts.in_flight, counts.overdue) == (0, 4)
    assert {each.attempt for call in stage.store.made("settle") for each in call.asked} == {0}


async def test_no_half_begins_after_the_drain(stage: Stage) -> None:
    async def work(events: list[Work], context: Context) -> None:
        stage.run(events, context, None)
        if len(events) == 4:
            raise ValueError("not together")
        await asyncio.sleep(3600)

    stage.scheduler.add_handler(work, concurrency=1)
    async with stage.scheduler:
        await stage.schedule(1, 2, 3, 4)
        await asyncio.sleep(1)
    assert stage.runs == [[1, 2, 3, 4], [1, 2]]
    assert {each.attempt for call in stage.store.made("settle") for each in call.asked} == {0}


async def test_a_plain_handler_of_batches_runs_in_a_thread_with_its_dependencies_and_middleware(
    stage: Stage,
) -> None:
    made: list[int] = []
    around: list[int] = []

    def work(events: list[Work], first: Annotated[int, Depends(first_of)]) -> None:
        stage.runs.append([event.number for event in events])
        made.append(first)

    scheduler = stage.scheduler

    @scheduler.middleware("handle")
    async def middleware(context: Context, call_next: Any) -> Any:  # noqa: ANN401 - of a middleware
        around.append(len(context.messages))
        return await call_next(context)

    scheduler.add_handler(work)
    async with scheduler:
        await scheduler.schedule_many(Message(Work(n), delay="0s") for n in range(5))
        await scheduler.run_until_idle()
    assert (stage.runs, made, around) == ([[0, 1, 2, 3, 4]], [0], [5])


# --- options ----------------------------------------------------------------------------------------------


async def singly(event: Work) -> None: ...


async def in_batches(events: list[Work]) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "named"),
    [
        (singly, {"batch": 10}, "batch"),
        (singly, {"batch_wait": "1s"}, "batch_wait"),
        (singly, {"on_failure": "halve"}, "on_failure"),
        (in_batches, {"batch": 0}, "an integer from 1 to 500"),
        (in_batches, {"batch": 501}, "an integer from 1 to 500"),
        (in_batches, {"batch_wait": "61s"}, "at most 60s"),
        (in_batches, {"batch_wait": "soon"}, "batch_wait"),
        (in_batches, {"on_failure": "stop"}, "'halve' or 'retry_all'"),
    ],
)
async def test_wrong_options_are_refused(handler: Any, options: dict[str, Any], named: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match=named):
        Scheduler(NotedStore(VirtualClock())).add_handler(handler, **options)


async def test_a_list_of_something_else_is_refused() -> None:
    async def handle(events: list[int]) -> None: ...

    with pytest.raises(HandlerSignatureError, match=r"list\[int\]"):
        Scheduler(NotedStore(VirtualClock())).add_handler(handle)


async def fill(stage: Stage, n: int) -> None:
    async with Scheduler(stage.store, clock=stage.clock, dispatch=False) as scheduler:
        await scheduler.schedule_many(Message(Work(i), delay="0s", id=str(i)) for i in range(n))


# --- suspects and leases ----------------------------------------------------------------------------------


async def lapse(stage: Stage, times: int) -> None:
    """Claim all messages, and let their leases end, as processes do that are killed."""
    for _ in range(times):
        async with stage.store.memory.work(new_id(), ["Work"]) as work:
            await work.claim({"Work": Demand(500)}, request=new_id(), lease_ms=15_000)
        await asyncio.sleep(20)


async def test_suspects_run_at_once_and_in_no_batch_with_other_messages(stage: Stage) -> None:
    async with Scheduler(stage.store, clock=stage.clock, dispatch=False) as producer:
        await producer.schedule_many(Message(Work(n), delay="0s", id=str(n)) for n in (1, 2))
        await lapse(stage, 2)
        stage.serve(batch_wait="30s")
        async with stage.scheduler:
            start = stage.clock.monotonic_ms()
            await asyncio.sleep(0.5)
            await stage.schedule(3, 4)
            await asyncio.sleep(100)
    assert sorted(map(sorted, stage.runs)) == [[1, 2], [3, 4]]
    assert stage.began_ms[0] - start < 1_000, "a suspect that waits for others would come through its trial unrun"


async def test_a_lease_that_is_lost_costs_the_other_messages_of_the_batch_nothing(stage: Stage) -> None:
    stage.serve(waits=True)
    async with stage.scheduler:
        await stage.schedule(1, 2)
        await asyncio.sleep(1)
        await steal(stage, "1")
        await asyncio.sleep(8)
        assert stage.runs == [[1, 2]], "the run goes on"
        stage.end.set()
        await asyncio.sleep(40)
    assert stage.done[2] == 1


async def steal(stage: Stage, message_id: str) -> None:
    """Let another process take a message over."""
    (held,) = [
        claim
        for call in stage.store.made("claim")
        if call.answer is not None
        for claim in call.answer.claims
        if claim.record.id == message_id
    ]
    record, token = held.record, held.token
    async with stage.store.memory.work(new_id(), ["Work"]) as work:
        await work.settle([Again("1", record.revision, token, record.due_ms, record.attempt)])
        await work.claim({"Work": Demand(1)}, request=new_id(), lease_ms=15_000)
