"""Recurring messages end to end on virtual time: next occurrences, retries, overlap, missed, handlers' own series."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aiodelay import CancelOutcome, Conflict, Context, Cron, Every, Late, Later, Reject, Retry, Scheduler
from aiodelay.core.durations import from_epoch_ms
from aiodelay.core.values import State
from aiodelay.handlers.context import RunContext
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock

pytestmark = pytest.mark.asyncio


@dataclass
class Tick:
    pass


@dataclass
class Report:
    name: str


class Log:
    """What a handler was given: seconds since the start, attempt and delivery id of each run."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._start = clock, clock.now()
        self.runs: list[tuple[float, int]] = []
        self.delivery_ids: list[str] = []

    def add(self, context: Context) -> None:
        self.runs.append(((self._clock.now() - self._start).total_seconds(), context.attempt))
        self.delivery_ids.append(context.delivery_id)

    @property
    def seconds(self) -> list[float]:
        return [second for second, _ in self.runs]


async def test_every_is_rearmed_on_its_grid_however_long_a_run_takes(scheduler: Scheduler, clock: VirtualClock) -> None:
    log = Log(clock)

    @scheduler.handler
    async def slow(event: Tick, context: Context) -> None:
        log.add(context)
        await asyncio.sleep(3)

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s"), id="tick")
        await clock.advance(seconds=35)
    assert log.seconds == [10, 20, 30]


async def test_a_failing_occurrence_is_retried_beside_the_series(scheduler: Scheduler, clock: VirtualClock) -> None:
    log = Log(clock)

    @scheduler.handler(retry=Retry.intervals(["4s", "4s", "4s"], jitter=0))
    async def failing(event: Tick, context: Context) -> None:
        log.add(context)
        if context.attempt < 4 and context.due == first_due:
            raise ConnectionError("away")

    async with scheduler:
        scheduled = await scheduler.schedule(Tick(), every=Every("10s"), id="tick")
        first_due = scheduled.due
        await clock.advance(seconds=31)
        assert log.runs == [(10, 1), (14, 2), (18, 3), (20, 1), (22, 4), (30, 1)]
        of_first = [each for each, (_, attempt) in zip(log.delivery_ids, log.runs, strict=True) if attempt > 1]
        assert set(of_first) == {log.delivery_ids[0]}
        snapshot = await scheduler.get("tick")
    assert snapshot is not None
    assert snapshot.record.live == ()


async def test_a_dead_occurrence_does_not_end_its_series(scheduler: Scheduler, clock: VirtualClock) -> None:
    @scheduler.handler
    async def rejecting(event: Report) -> Reject:
        return Reject("no")

    async with scheduler:
        await scheduler.schedule(Report("daily"), every=Every("1m"), id="report")
        await clock.advance(minutes=3)
        dead = [letter async for letter in scheduler.dead_letters(Report)]
        assert await scheduler.get("report") is not None
    assert [letter.reason for letter in dead] == ["rejected"] * 3
    assert len({letter.key for letter in dead}) == 3


async def test_overlap_skip_leaves_out_occurrences_while_one_is_retried(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    log = Log(clock)

    @scheduler.handler(retry=Retry.intervals(["25s"], jitter=0))
    async def failing_once(event: Tick, context: Context) -> None:
        log.add(context)
        if log.runs == [(10.0, 1)]:
            raise ConnectionError("away")

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s", overlap="skip"), id="tick")
        await clock.advance(seconds=41)
    assert log.runs == [(10, 1), (35, 2), (40, 1)]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [("coalesce", [0, 5]), ("all", [0, 0, 0, 0, 5]), ("skip", [5])],
)
async def test_what_was_missed_while_nothing_ran(
    scheduler: Scheduler, clock: VirtualClock, missed: str, expected: list[int]
) -> None:
    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s", missed=missed), id="tick")  # type: ignore[arg-type]
        await clock.advance(seconds=45)  # due at 10, 20, 30 and 40, and nobody serves it
        log = Log(clock)

        @scheduler.handler
        async def late(event: Tick, context: Context) -> None:
            log.add(context)

        await clock.advance(seconds=6)
    assert log.seconds == expected


@pytest.mark.parametrize(
    ("missed", "run_s", "expected"),
    [
        ("coalesce", 11, [(10, 10), (20, 21), (30, 30)]),
        ("skip", 11, [(10, 10), (20, 21), (30, 30)]),
        ("all", 11, [(10, 10), (20, 21), (30, 30)]),
        ("coalesce", 35, [(10, 10), (20, 45), (50, 50)]),
        ("skip", 35, [(10, 10), (50, 50), (60, 60)]),
        ("all", 35, [(10, 10), (20, 45), (30, 45), (40, 45), (50, 50)]),
    ],
)
@pytest.mark.parametrize("end", ["returns", "fails", "later", "rejects"])
@pytest.mark.parametrize("is_batch", [False, True])
async def test_the_next_claim_decides_about_occurrences_that_came_due_during_a_run(
    scheduler: Scheduler,
    clock: VirtualClock,
    *,
    missed: str,
    run_s: float,
    expected: list[tuple[float, float]],
    end: str,
    is_batch: bool,
) -> None:
    """The first run is long. Each pair is the due time of a run and its start, in seconds."""
    start, runs = clock.now(), list[tuple[float, float]]()

    async def run(context: RunContext[Any]) -> Later | Reject | None:
        runs.append(((context.due - start).total_seconds(), (clock.now() - start).total_seconds()))
        if len(runs) == 1:
            await asyncio.sleep(run_s)
        if end == "fails":
            raise ConnectionError("away")
        if end == "rejects":
            return Reject("no")
        return Later("1h") if end == "later" else None

    if is_batch:

        @scheduler.handler(batch=2, batch_wait="0s", retry=Retry.intervals(["1h"], jitter=0))
        async def many(events: list[Tick], context: Context) -> list[Later | Reject | None]:
            return [await run(each) for each in context.messages]
    else:

        @scheduler.handler(retry=Retry.intervals(["1h"], jitter=0))
        async def one(event: Tick, context: Context) -> Later | Reject | None:
            return await run(context)

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s", missed=missed), id="tick")  # type: ignore[arg-type]
        await clock.advance(seconds=65)
    assert runs[: len(expected)] == expected
    assert len({due for due, _ in runs}) == len(runs)


async def test_the_journal_has_an_occurrence_that_came_due_during_a_run_and_was_skipped(clock: VirtualClock) -> None:
    scheduler = Scheduler(MemoryStore(clock=clock, journal=100), clock=clock)
    start = clock.now_ms()

    @scheduler.handler
    async def slow(event: Tick) -> None:
        await asyncio.sleep(25)

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s", missed="skip"), id="tick")
        await clock.advance(seconds=36)
        noted = [(each.event, (each.due_ms - start) // 1000) for each in await scheduler.journal()]
    assert sorted(each for each in noted if each[0] in ("delivered", "skipped")) == [("delivered", 10), ("skipped", 20)]


async def test_late_drop_applies_to_a_series_and_its_next_occurrence_runs(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("1m"), id="tick", late=Late.drop(after="5s"))
        await clock.advance(seconds=80)
        log = Log(clock)

        @scheduler.handler
        async def handle(event: Tick, context: Context) -> None:
            log.add(context)

        await clock.advance(seconds=41)
    assert log.seconds == [40]


async def test_cancel_ends_a_series_and_the_retries_beside_it(scheduler: Scheduler, clock: VirtualClock) -> None:
    log = Log(clock)

    @scheduler.handler(retry=Retry.intervals(["15s"], jitter=0))
    async def failing(event: Tick, context: Context) -> None:
        log.add(context)
        raise ConnectionError("away")

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s"), id="tick")
        await clock.advance(seconds=12)
        assert await scheduler.cancel("tick") is CancelOutcome.CANCELLED
        await clock.advance(seconds=60)
        assert [snapshot async for snapshot in scheduler.pending()] == []
    assert log.runs == [(10, 1)]


async def test_cancel_in_flight_lets_the_run_end_and_nothing_follows(scheduler: Scheduler, clock: VirtualClock) -> None:
    log = Log(clock)

    @scheduler.handler
    async def slow(event: Tick, context: Context) -> None:
        log.add(context)
        assert await scheduler.cancel("tick") is CancelOutcome.IN_FLIGHT
        raise ConnectionError("away")

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s"), id="tick")
        await clock.advance(minutes=2)
    assert log.runs == [(10, 1)]


async def test_a_replaced_series_follows_its_new_rule(scheduler: Scheduler, clock: VirtualClock) -> None:
    log = Log(clock)

    @scheduler.handler
    async def handle(event: Tick, context: Context) -> None:
        log.add(context)

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s"), id="tick")
        await clock.advance(seconds=15)
        await scheduler.schedule(Tick(), every=Every("20s"), id="tick")
        await clock.advance(seconds=45)
    assert log.seconds == [10, 35, 55]


async def test_keep_keeps_a_series_only_while_its_rule_is_the_same(scheduler: Scheduler, clock: VirtualClock) -> None:
    async with scheduler:
        first = await scheduler.schedule(Tick(), every=Every("1h"), id="tick")
        same = await scheduler.schedule(Tick(), every=Every("60m"), id="tick", conflict=Conflict.keep())
        other = await scheduler.schedule(Tick(), every=Every("2h"), id="tick", conflict=Conflict.keep())
    assert (same.outcome, same.revision) == ("kept", first.revision)
    assert other.outcome == "replaced"


async def test_cron_keeps_wall_time_over_a_change_of_clocks(clock: VirtualClock, scheduler: Scheduler) -> None:
    runs: list[datetime] = []

    @scheduler.handler
    async def handle(event: Tick, context: Context) -> None:
        runs.append(context.due)

    start = datetime(2030, 3, 29, 12, tzinfo=UTC)
    clock.step(start - clock.now())
    async with scheduler:
        await scheduler.schedule(Tick(), every=Cron("0 9 * * *", tz="Europe/Paris"), id="tick")
        for _ in range(3):
            snapshot = await scheduler.get("tick")
            assert snapshot is not None
            clock.step(from_epoch_ms(snapshot.record.due_ms) - clock.now() - timedelta(minutes=1))
            await clock.advance(minutes=2)
    assert [run.hour for run in runs] == [8, 7, 7]  # UTC; clocks go forward on 2030-03-31


async def test_a_handlers_own_series_is_armed_kept_and_rearmed_when_its_rule_changes(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    log = Log(clock)

    @scheduler.handler(every=Every("1m"))
    async def tick(event: Tick, context: Context) -> None:
        log.add(context)

    async with scheduler:
        await clock.advance(seconds=90)
    async with scheduler:  # a restart keeps the series where it stands
        await clock.advance(seconds=45)
    assert log.seconds == [60, 120]
    await scheduler.remove_handler(Tick)
    scheduler.add_handler(tick, every=Every("10s"))
    async with scheduler:
        snapshot = await scheduler.get("handler:Tick")
        assert snapshot is not None
        assert from_epoch_ms(snapshot.record.due_ms) - clock.now() == timedelta(seconds=10)


async def test_a_handler_added_while_open_arms_its_series(scheduler: Scheduler, clock: VirtualClock) -> None:
    log = Log(clock)
    async with scheduler:

        @scheduler.handler(every=Every("10s"))
        async def tick(event: Tick, context: Context) -> None:
            log.add(context)

        await clock.advance(seconds=25)
    assert log.seconds == [10, 20]


async def test_a_series_is_listed_once_and_in_flight_while_it_runs(scheduler: Scheduler, clock: VirtualClock) -> None:
    states: list[State] = []

    @scheduler.handler
    async def handle(event: Tick) -> None:
        snapshot = await scheduler.get("tick")
        assert snapshot is not None
        states.append(snapshot.state)

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10s"), id="tick")
        await clock.advance(seconds=11)
        assert [snapshot.record.id async for snapshot in scheduler.pending()] == ["tick"]
    assert states == [State.IN_FLIGHT]


async def test_what_is_listed_can_be_looked_at_also_the_retry_of_an_occurrence(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    @scheduler.handler(retry=Retry(attempts=5, first="1h"))
    async def handle(event: Tick) -> None:
        raise OSError("not yet")

    async with scheduler:
        await scheduler.schedule(Tick(), every=Every("10m"), id="tick")
        await clock.advance(minutes=11)
        listed = [snapshot async for snapshot in scheduler.pending()]
        assert [await scheduler.get(snapshot.record.id) for snapshot in listed] == listed
    assert len(listed) == 2
