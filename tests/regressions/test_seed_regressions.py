"""Defects that comparable systems had, each repeated by one numbered test that needs no server.

The tests run end to end through a scheduler, on every store that needs no server. Numbers 15 to 18, 20 to 22, 24 and 25
are about Kafka. The other missing numbers are in test_redis_regressions.py, which also repeats these tests on Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest

from aiodelay import (
    CancelOutcome,
    Context,
    Cron,
    Every,
    Message,
    MessageIdError,
    RescheduleOutcome,
    Retry,
    ScheduleOutcome,
    Scheduler,
    ScheduleTimeError,
)
from aiodelay.core.values import Demand, Done, SettleOutcome
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store, Work
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore
from tests.support.disks import IN_MEMORY
from tests.support.passing import PassingStore

NEVER_LATER = Retry(attempts=1)


@dataclass
class Tick:
    n: int = 0
    text: str | None = None


@dataclass
class Seen:
    """One run of a handler."""

    id: str
    event: Any
    at: datetime
    due: datetime
    attempt: int


class Bench:
    """A store that outlives its schedulers, and what their handlers saw."""

    def __init__(self, kind: Literal["memory", "sqlite"], clock: VirtualClock, folder: Path) -> None:
        self.kind, self.clock, self._folder = kind, clock, folder
        self._memory: dict[str, MemoryStore] = {}
        self.seen: list[Seen] = []

    def store(self, namespace: str = "default") -> Store:
        """Open what is kept: for SQLite as another process would."""
        if self.kind == "sqlite":
            return SqliteStore(self._folder / "delay.db", namespace=namespace, clock=self.clock)
        return self._memory.setdefault(namespace, MemoryStore(clock=self.clock))

    def scheduler(self, store: Store | None = None, **settings: Any) -> Scheduler:  # noqa: ANN401
        return Scheduler(store or self.store(), clock=self.clock, **settings)

    def note(self, event: object, context: Context) -> None:
        self.seen.append(Seen(context.id, event, self.clock.now(), context.due, context.attempt))

    def serving(self, store: Store | None = None, **options: Any) -> Scheduler:  # noqa: ANN401
        """A scheduler whose handler of `Tick` notes what it sees."""
        scheduler = self.scheduler(store)

        async def handle(event: Tick, context: Context) -> None:
            self.note(event, context)

        scheduler.add_handler(handle, **options)
        return scheduler

    @property
    def ids(self) -> list[str]:
        return [seen.id for seen in self.seen]

    async def until(self, is_so: Callable[[], object], limit: str = "120s") -> None:
        """Let time pass until something is so."""
        async with asyncio.timeout(float(limit.removesuffix("s"))):
            while not is_so():  # noqa: ASYNC110 - virtual time: looking costs nothing, and needs no hook
                await asyncio.sleep(0.01)


@pytest.fixture(params=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, clock: VirtualClock) -> Iterator[Bench]:
    with TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as folder:
        yield Bench(request.param, clock, Path(folder))


def set_clock(clock: VirtualClock, when: datetime) -> None:
    clock.step(when - clock.now())


# --- the dispatcher ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_r01_store_errors_and_poison_never_stop_the_loop(bench: Bench) -> None:
    store = FaultyStore(bench.store(), seed=1)
    async with bench.serving(store) as scheduler:
        for n in range(30):
            await scheduler.schedule(Tick(n), delay=timedelta(seconds=n), id=f"good-{n}")
            await scheduler.schedule(b"{not json", delay=timedelta(seconds=n), to="handler:Tick", id=f"poison-{n}")
        faults = [
            store.inject("unavailable", "claim", "settle", "tidy", times=40, probability=0.5),
            store.inject("reply_lost", "claim", "settle", times=20, probability=0.5),
            store.inject("crash", "claim", "settle", "tidy", times=20, probability=0.5),
        ]
        await bench.until(lambda: len(set(bench.ids)) == 30)
        assert all(fault.hits for fault in faults)
        store.heal()
        await scheduler.run_until_idle()
        letters = [letter async for letter in scheduler.dead_letters()]
    assert set(bench.ids) == {f"good-{n}" for n in range(30)}
    assert {letter.record.id for letter in letters} == {f"poison-{n}" for n in range(30)}
    assert {letter.reason for letter in letters} == {"undecodable"}


@pytest.mark.asyncio
async def test_r02_what_is_due_at_once_is_drained_at_once(bench: Bench) -> None:
    """No ceiling of one batch per interval: three full claims' worth, and no wait in between."""
    due = bench.clock.now() + timedelta(minutes=1)
    async with bench.serving(concurrency=4) as scheduler:
        await scheduler.schedule_many(Message(Tick(n), at=due) for n in range(1_300))
        await scheduler.run_until_idle()
    assert sorted(seen.event.n for seen in bench.seen) == list(range(1_300))
    assert min(seen.at for seen in bench.seen) >= due
    assert max(seen.at for seen in bench.seen) < due + timedelta(milliseconds=100)


@pytest.mark.asyncio
async def test_r03_a_lapsed_claim_neither_settles_nor_frees_the_next_ones(bench: Bench) -> None:
    store = bench.store()
    async with bench.scheduler(store, dispatch=False) as scheduler:
        await scheduler.schedule(Tick(), delay="1s", id="a")
        await bench.clock.advance("1s")
        async with store.work("one", ["Tick"]) as one, store.work("two", ["Tick"]) as two:
            demand = {"Tick": Demand(5)}
            (lapsed,) = (await one.claim(demand, request="1", lease_ms=20)).claims
            assert (await two.claim(demand, request="1", lease_ms=5_000)).claims == []
            await bench.clock.advance("21ms")
            (held,) = (await two.claim(demand, request="2", lease_ms=5_000)).claims
            late = Done("a", lapsed.record.revision, lapsed.token)
            assert list(await one.settle([late])) == [SettleOutcome.GONE]
            assert (await one.claim(demand, request="2", lease_ms=5_000)).claims == []
            mine = Done("a", held.record.revision, held.token)
            assert list(await two.settle([mine])) == [SettleOutcome.SETTLED]
        assert await scheduler.get("a") is None


@pytest.mark.asyncio
async def test_r04_a_handler_outlives_its_lease_and_waiting_costs_no_attempt(bench: Bench) -> None:
    scheduler = bench.scheduler(retry=Retry(attempts=2))

    @scheduler.handler(concurrency=1)
    async def handle(event: Tick, context: Context) -> None:
        bench.note(event, context)
        await asyncio.sleep(40)  # more than two leases; the last message waits for 160 s

    async with scheduler:
        for n in range(5):
            await scheduler.schedule(Tick(n), delay="1s", id=f"m{n}")
        await scheduler.run_until_idle()
        assert [letter async for letter in scheduler.dead_letters()] == []
    assert bench.ids == [f"m{n}" for n in range(5)]
    assert {seen.attempt for seen in bench.seen} == {1}


@pytest.mark.asyncio
async def test_r05_the_failure_of_the_last_attempt_is_seen(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = bench.scheduler()

    @scheduler.handler(retry=Retry(attempts=3, first="1s"))
    async def handle(event: Tick, context: Context) -> None:
        raise ConnectionError(f"refused, run {context.attempt}")

    async with scheduler:
        await scheduler.schedule(Tick(7), delay="1s", id="a")
        await scheduler.run_until_idle()
        (letter,) = [letter async for letter in scheduler.dead_letters()]
        assert (await scheduler.counts())["Tick"].dead == 1
    assert (letter.record.id, letter.reason, letter.record.attempt) == ("a", "attempts_exhausted", 3)
    assert letter.record.first_error == "ConnectionError: refused, run 1"
    assert letter.record.last_error == "ConnectionError: refused, run 3"
    assert letter.record.envelope.payload == b'{"n":7,"text":null}'
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert told.getMessage() == "Tick: message a is given up after attempt 3: ConnectionError: refused, run 3"


@pytest.mark.asyncio
async def test_r06_completion_does_not_erase_what_replaced_it(bench: Bench) -> None:
    scheduler, go_on = bench.scheduler(), asyncio.Event()

    @scheduler.handler
    async def handle(event: Tick, context: Context) -> None:
        bench.note(event, context)
        if event.n == 1:
            await go_on.wait()

    async with scheduler:
        await scheduler.schedule(Tick(1), delay="1s", id="a")
        await bench.until(lambda: bench.seen)
        again = await scheduler.schedule(Tick(2), delay="1m", id="a")
        assert again.outcome is ScheduleOutcome.REPLACED
        go_on.set()
        await scheduler.run_until_idle()
    assert [(seen.event.n, seen.attempt) for seen in bench.seen] == [(1, 1), (2, 1)]
    assert bench.seen[1].at >= again.due


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
@pytest.mark.asyncio
async def test_r06_a_cancelled_message_does_not_come_back(bench: Bench, fails: bool) -> None:
    scheduler, go_on = bench.scheduler(), asyncio.Event()

    @scheduler.handler(retry=Retry(first="1s"))
    async def handle(event: Tick, context: Context) -> None:
        bench.note(event, context)
        await go_on.wait()
        if fails:
            raise ConnectionError

    async with scheduler:
        await scheduler.schedule(Tick(), delay="1s", id="a")
        await bench.until(lambda: bench.seen)
        assert await scheduler.cancel("a") is CancelOutcome.IN_FLIGHT
        go_on.set()
        await scheduler.run_until_idle()
    async with bench.serving() as scheduler:
        await asyncio.sleep(60)
        assert await scheduler.get("a") is None
    assert bench.ids == ["a"]


@pytest.mark.parametrize("fault", ["unavailable", "reply_lost", "crash"])
@pytest.mark.asyncio
async def test_r07_a_settlement_that_fails_costs_no_slot(
    bench: Bench, fault: Literal["unavailable", "reply_lost", "crash"]
) -> None:
    store = FaultyStore(bench.store())
    async with bench.serving(store, concurrency=2) as scheduler:
        struck = store.inject(fault, "settle", times=5)
        for n in range(10):
            await scheduler.schedule(Tick(n), delay="1s", id=f"m{n}")
        await scheduler.run_until_idle()
        assert struck.hits == 5
        await scheduler.schedule(Tick(), delay="1s", id="after")
        await scheduler.run_until_idle()
    assert Counter(bench.ids) == Counter([f"m{n}" for n in range(10)] + ["after"])


@pytest.mark.asyncio
async def test_r08_a_wait_below_one_unit_of_time_is_not_a_wait_for_ever(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        for microseconds in (1, 999, 1_001, 1_500, 2_000, 999_999):
            before = bench.clock.now()
            await scheduler.schedule(Tick(), delay=timedelta(microseconds=microseconds))
            await bench.until(lambda: bench.seen, "5s")
            (seen,) = bench.seen
            assert seen.at >= before + timedelta(microseconds=microseconds)
            assert seen.at <= before + timedelta(microseconds=microseconds, milliseconds=20)
            bench.seen.clear()


@pytest.mark.asyncio
async def test_r09_close_drains_and_leaves_what_is_the_users(bench: Bench) -> None:
    store = bench.store()
    scheduler, finished = bench.scheduler(store), list[int]()

    @scheduler.handler(concurrency=3)
    async def handle(event: Tick, context: Context) -> None:
        bench.note(event, context)
        await asyncio.sleep(5)
        finished.append(event.n)

    async with scheduler:
        for n in range(6):
            await scheduler.schedule(Tick(n), delay="1s", id=f"m{n}")
        await bench.until(lambda: len(bench.seen) == 3)
    assert sorted(finished) == [0, 1, 2]  # what had begun ended; nothing else began
    async with scheduler:  # the same scheduler and store, opened again
        await scheduler.run_until_idle()
    assert sorted(finished) == list(range(6))
    assert Counter(bench.ids) == Counter(f"m{n}" for n in range(6))
    assert {seen.attempt for seen in bench.seen} == {1}
    async with bench.scheduler(store, dispatch=False) as other:
        assert [counts.in_flight for counts in (await other.counts()).values()] in ([], [0])


# --- ids and time -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_r10_the_same_id_again_brings_its_own_payload_time_and_attempts(bench: Bench) -> None:
    scheduler = bench.scheduler()

    @scheduler.handler(retry=Retry(attempts=5, first="10m", jitter=0))
    async def handle(event: Tick, context: Context) -> None:
        bench.note(event, context)
        if event.n == 1:
            raise ConnectionError

    async with scheduler:
        await scheduler.schedule(Tick(1), delay="1s", id="a", headers={"v": b"1"})
        await bench.until(lambda: bench.seen)  # it waits for its second run
        again = await scheduler.schedule(Tick(2), delay="1m", id="a")
        assert again.outcome is ScheduleOutcome.REPLACED
        found = await scheduler.get("a")
        assert found is not None
        assert (found.record.attempt, found.record.last_error, found.record.envelope.headers) == (0, None, {})
        await scheduler.run_until_idle()
    assert [(seen.event.n, seen.attempt) for seen in bench.seen] == [(1, 1), (2, 1)]
    assert bench.seen[1].at == again.due


@pytest.mark.asyncio
async def test_r11_odd_times_and_ids(bench: Bench) -> None:
    start = bench.clock.now()
    async with bench.serving() as scheduler:
        await scheduler.schedule(Tick(), at=start - timedelta(days=400), id="past")
        await scheduler.schedule(Tick(), at=datetime(1, 1, 1, tzinfo=UTC), id="first year")
        await scheduler.schedule(Tick(), at=start, id="now")
        await scheduler.schedule(Tick(), delay="0s", id="at once")
        for wrong in (timedelta(seconds=-1), timedelta(days=293 * 366), "soon", float("inf"), None):
            with pytest.raises(ScheduleTimeError):
                await scheduler.schedule(Tick(), delay=wrong, id="wrong")  # type: ignore[arg-type]
        with pytest.raises(ScheduleTimeError):
            await scheduler.schedule(Tick(), at=datetime(9999, 12, 31, tzinfo=UTC), id="wrong")
        with pytest.raises(MessageIdError):
            await scheduler.schedule(Tick(), delay="0s", id="")
        made = await scheduler.schedule(Tick(), delay="0s", id=None)
        await scheduler.run_until_idle()
    assert Counter(bench.ids) == Counter(["past", "first year", "now", "at once", made.id])
    assert {seen.at for seen in bench.seen} == {start}


@pytest.mark.parametrize("offset_ms", [-1, 0, 1])
@pytest.mark.asyncio
async def test_r12_an_update_at_the_firing_instant_leaves_no_zombie(bench: Bench, offset_ms: int) -> None:
    """Moved just before, at and after its due time: delivered once, at the time that the answer says."""
    due, outcomes = bench.clock.now() + timedelta(seconds=5), dict[str, RescheduleOutcome]()
    async with bench.serving(concurrency=3) as scheduler:

        async def move(message_id: str) -> None:
            await asyncio.sleep((due - bench.clock.now()).total_seconds() + offset_ms / 1000)
            outcomes[message_id] = await scheduler.reschedule(message_id, delay="1m")

        for n in range(40):
            await scheduler.schedule(Tick(n), at=due, id=f"m{n}")
        await asyncio.gather(*(move(f"m{n}") for n in range(40)))
        await scheduler.run_until_idle()
        assert [snapshot async for snapshot in scheduler.pending()] == []
        assert all(counts.in_flight == 0 for counts in (await scheduler.counts()).values())
    assert sorted(bench.ids) == sorted(outcomes)
    for seen in bench.seen:
        moved = outcomes[seen.id] is RescheduleOutcome.RESCHEDULED
        assert (seen.at >= due + timedelta(seconds=59)) == moved
    if offset_ms < 0:
        assert set(outcomes.values()) == {RescheduleOutcome.RESCHEDULED}
    if offset_ms > 0:
        assert RescheduleOutcome.RESCHEDULED not in outcomes.values()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_r13_a_clock_set_back_delays_and_one_set_forward_does_not_lose(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        back = await scheduler.schedule(Tick(), delay="1h", id="back")
        await bench.clock.advance("30m")
        bench.clock.step(-timedelta(minutes=20))
        await bench.clock.advance("49m")
        assert bench.seen == []
        await bench.until(lambda: bench.seen)
        assert back.due <= bench.seen[0].at <= back.due + timedelta(seconds=3)
        forward = await scheduler.schedule(Tick(), delay="1h", id="forward")
        bench.clock.step(timedelta(hours=2))
        before = bench.clock.monotonic_ms()
        await bench.until(lambda: len(bench.seen) == 2)
        assert bench.clock.monotonic_ms() - before <= bench.store().traits.safety_poll_ms + 20
        assert bench.seen[1].at >= forward.due
    assert bench.ids == ["back", "forward"]


@pytest.mark.asyncio
async def test_r13_over_midnight(bench: Bench) -> None:
    set_clock(bench.clock, datetime(2030, 12, 31, 23, 59, 59, 500_000, tzinfo=UTC))
    midnight = datetime(2031, 1, 1, tzinfo=UTC)
    async with bench.serving() as scheduler:
        await scheduler.schedule(Tick(), at=midnight - timedelta(milliseconds=1), id="before")
        await scheduler.schedule(Tick(), at=midnight, id="at")
        await scheduler.schedule(Tick(), at=midnight + timedelta(milliseconds=1), id="after")
        await scheduler.schedule(Tick(), every=Cron("0 0 * * *"), id="daily")
        await bench.clock.advance("1s")
    ms = timedelta(milliseconds=1)
    assert sorted((seen.at, seen.id) for seen in bench.seen) == [
        (midnight - ms, "before"),
        (midnight, "at"),
        (midnight, "daily"),
        (midnight + ms, "after"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("day", "expected"),
    [
        ("2030-03-31", ["2030-03-31T03:00+02:00"]),  # 02:30 does not exist
        ("2030-10-27", ["2030-10-27T02:30+02:00"]),  # 02:30 exists twice
        ("2030-06-15", ["2030-06-15T02:30+02:00"]),
    ],
)
@pytest.mark.asyncio
async def test_r13_where_clocks_change(bench: Bench, day: str, expected: list[str]) -> None:
    zone = ZoneInfo("Europe/Paris")
    set_clock(bench.clock, datetime.fromisoformat(f"{day}T01:55").replace(tzinfo=zone))
    async with bench.serving() as scheduler:
        await scheduler.schedule(Tick(), every=Cron("30 2 * * *", tz="Europe/Paris"), id="nightly")
        await bench.clock.advance("100m")
    assert [seen.at.astimezone(zone).isoformat(timespec="minutes") for seen in bench.seen] == expected


@pytest.mark.asyncio
async def test_r14_the_same_id_in_two_namespaces(bench: Bench) -> None:
    one, two = (bench.scheduler(bench.store(name)) for name in ("one", "two"))
    seen = list[tuple[str, int]]()

    @one.handler
    async def handle_one(event: Tick) -> None:
        seen.append(("one", event.n))

    @two.handler
    async def handle_two(event: Tick) -> None:
        seen.append(("two", event.n))

    async with one, two:
        await one.schedule(Tick(1), delay="1s", id="a")
        assert (await two.schedule(Tick(2), delay="1s", id="a")).outcome is ScheduleOutcome.STORED
        await one.schedule(Tick(3), delay="1s", id="b")
        await two.schedule(Tick(4), delay="1s", id="b")
        assert await one.cancel("b") is CancelOutcome.CANCELLED
        await one.run_until_idle()
        await two.run_until_idle()
    assert sorted(seen) == [("one", 1), ("two", 2), ("two", 4)]


@pytest.mark.asyncio
async def test_r14_the_same_id_in_two_lanes_is_one_message(bench: Bench) -> None:
    """An id names one message of a namespace: scheduled for another lane, it moves there."""
    scheduler = bench.scheduler()

    @scheduler.handler
    async def handle(event: Tick, context: Context) -> None:
        bench.note(event, context)

    @scheduler.handler(name="raw")
    async def handle_raw(event: bytes, context: Context) -> None:
        bench.note(event, context)

    async with scheduler:
        await scheduler.schedule(Tick(1), delay="1s", id="a")
        moved = await scheduler.schedule(b"2", delay="2s", to="handler:raw", id="a")
        assert moved.outcome is ScheduleOutcome.REPLACED
        await scheduler.run_until_idle()
    assert [seen.event for seen in bench.seen] == [b"2"]


@pytest.mark.asyncio
async def test_r19_empty_is_not_nothing(bench: Bench) -> None:
    """An empty payload is a payload, not the word for "deleted"; an empty key is a key; None stays None."""
    scheduler, keys = bench.scheduler(), list[bytes | None]()

    @scheduler.handler(name="raw")
    async def handle_raw(event: bytes, context: Context) -> None:
        keys.append(context.key)
        bench.note(event, context)

    @scheduler.handler
    async def handle(event: Tick, context: Context) -> None:
        bench.note(event, context)

    async with scheduler:
        await scheduler.schedule(b"", delay="1s", to="handler:raw", id="empty", key=b"", headers={"x": b""})
        await scheduler.schedule(b"null", delay="2s", to="handler:raw", id="null")
        await scheduler.schedule(Tick(0, None), delay="3s", id="none")
        await scheduler.schedule(Tick(0, ""), delay="4s", id="text")
        stored = await scheduler.get("empty")
        assert stored is not None
        assert (stored.record.envelope.payload, stored.record.envelope.key) == (b"", b"")
        assert stored.record.envelope.headers == {"x": b""}
        await scheduler.run_until_idle()
    assert [(seen.id, seen.event) for seen in bench.seen] == [
        ("empty", b""),
        ("null", b"null"),
        ("none", Tick(0, None)),
        ("text", Tick(0, "")),
    ]
    assert keys == [b"", None]


# --- down, deaf and for long ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_r23_down_over_midnight_and_for_days(bench: Bench) -> None:
    start = datetime(2030, 5, 1, 23, 0, tzinfo=UTC)
    set_clock(bench.clock, start)
    async with bench.scheduler(dispatch=False) as scheduler:
        for hours in (0.5, 1, 2, 30, 100):
            await scheduler.schedule(Tick(), delay=timedelta(hours=hours), id=f"once {hours}")
        await scheduler.schedule(Tick(), every=Cron("30 0 * * *"), id="coalesced")
        await scheduler.schedule(Tick(), every=Every("1d", missed="all"), id="all")
        await scheduler.schedule(Tick(), every=Every("1h", missed="skip"), id="skipped")
    await bench.clock.advance(timedelta(days=5, minutes=10))
    up = bench.clock.now()
    async with bench.serving() as scheduler:
        await asyncio.sleep(60)
        due = {name: await scheduler.get(name) for name in ("coalesced", "all", "skipped")}
    counts = Counter(bench.ids)
    assert counts == Counter({f"once {hours}": 1 for hours in (0.5, 1, 2, 30, 100)} | {"coalesced": 1, "all": 5})
    assert all(up <= seen.at <= up + timedelta(seconds=3) for seen in bench.seen)
    assert [seen.due for seen in bench.seen if seen.id == "all"] == [start + timedelta(days=n) for n in range(1, 6)]
    assert {name: snapshot and snapshot.record.due_ms for name, snapshot in due.items()} == {
        "coalesced": int(datetime(2030, 5, 7, 0, 30, tzinfo=UTC).timestamp() * 1000),
        "all": int((start + timedelta(days=6)).timestamp() * 1000),
        "skipped": int((start + timedelta(days=5, hours=1)).timestamp() * 1000),
    }


class DeafStore(PassingStore):
    """A store from which no wake-up arrives: `wait` ends by its time alone."""

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[str]) -> AsyncIterator[Work]:
        async with self._store.work(worker, lanes) as work:

            async def wait(*, until_ms: int | None) -> None:
                poll_ms = self._store.traits.safety_poll_ms
                left_ms = poll_ms if until_ms is None else until_ms - self._store.now_ms()
                await asyncio.sleep(min(max(left_ms, 1), poll_ms) / 1000)

            work.wait = wait  # type: ignore[method-assign]
            yield work


@pytest.mark.asyncio
async def test_r29_with_every_wake_up_lost_it_is_on_time_within_the_safety_poll(bench: Bench) -> None:
    store = DeafStore(bench.store())
    async with bench.serving(store) as scheduler:
        await bench.clock.advance("5s")  # it sleeps, and knows of nothing
        for n in range(10):
            await scheduler.schedule(Tick(n), delay=timedelta(milliseconds=300 * n))
            await bench.clock.advance("150ms")
        await scheduler.run_until_idle()
    poll = timedelta(milliseconds=store.traits.safety_poll_ms, seconds=0.05)
    assert len(bench.seen) == 10
    assert all(seen.due <= seen.at <= seen.due + poll for seen in bench.seen)


@pytest.mark.asyncio
async def test_r32_a_payload_lives_as_long_as_its_schedule(bench: Bench) -> None:
    event, headers = Tick(7, "x" * 100_000), {"trace": bytes(range(256))}
    async with bench.scheduler(dispatch=False) as scheduler:
        far = await scheduler.schedule(event, delay="3650d", id="far", headers=headers, key=b"k")
        await scheduler.schedule(b"\x00" * 200_000, delay="3650d", to="handler:raw", id="raw")
    await bench.clock.advance("3649d")
    async with bench.scheduler() as scheduler:  # housekeeping looks at it on the way
        await asyncio.sleep(60)
        found = await scheduler.get("far")
        assert found is not None
        assert (found.record.envelope.headers, found.record.envelope.key) == (headers, b"k")
    await bench.clock.advance("1d")
    scheduler, seen_headers = bench.serving(), list[object]()

    @scheduler.handler(name="raw")
    async def handle_raw(event: bytes, context: Context) -> None:
        seen_headers.append(dict(context.headers))
        bench.note(event, context)

    async with scheduler:
        await scheduler.run_until_idle()
    assert {seen.id: seen.event for seen in bench.seen} == {"far": event, "raw": b"\x00" * 200_000}
    assert all(seen.at >= far.due for seen in bench.seen)
