"""Defects that comparable systems had, each repeated by one numbered test on a real Redis.

The same numbers are used in the other files of this folder: 15 to 18, 20 to 22, 24 and 25 are about Kafka. A test that
would need a long time moves a clock.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any
from uuid import uuid4

import pytest
from msgspec import structs

from aiodelay import (
    CancelOutcome,
    Conflict,
    Context,
    Cron,
    DuplicateIdError,
    Message,
    MessageIdError,
    RescheduleOutcome,
    Retry,
    ScheduleOutcome,
    Scheduler,
    ScheduleTimeError,
)
from aiodelay.backends.redis import RedisStore
from aiodelay.backends.redis.connection import wakeup_listener
from aiodelay.backends.redis.connection.scripts import NAMES, script
from aiodelay.backends.redis.records.keys import DERIVED, FIXED, Keys
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Claim, Command, Demand, Done, Envelope, Outcome, Put, SettleOutcome, Stored
from aiodelay.testing.faults import FaultyStore
from tests.support.server_clock import SteppedClock
from tests.support.servers import redis_servers, serving
from tests.support.waiting import until


@dataclass
class Tick:
    n: int = 0
    text: str | None = None


@dataclass
class Seen:
    """One run of a handler."""

    id: str
    event: Any
    attempt: int
    late_s: float


class Bench:
    """A namespace of its own on a real server, and what handlers saw; time passes, and can be moved on."""

    def __init__(self, url: str) -> None:
        self.url, self.namespace = url, uuid4().hex
        self.clock = SteppedClock()
        self.seen: list[Seen] = []

    def store(self, namespace: str = "") -> RedisStore:
        """Open it as another process would."""
        return RedisStore(self.url, namespace=namespace or self.namespace, clock=self.clock)

    def serving(self, store: Any = None, *, takes_s: float = 0, **options: Any) -> Scheduler:  # noqa: ANN401
        """A scheduler whose handlers of `Tick` and of bytes note what they see."""
        scheduler = Scheduler(store or self.store())

        async def handle(event: Tick, context: Context) -> None:
            await self.note(event, context, takes_s)

        async def handle_raw(event: bytes, context: Context) -> None:
            await self.note(event, context, takes_s)

        scheduler.add_handler(handle, **options)
        scheduler.add_handler(handle_raw, name="raw")
        return scheduler

    async def note(self, event: object, context: Context, takes_s: float) -> None:
        late_s = self.clock.now_ms() / 1000 - context.due.timestamp()
        self.seen.append(Seen(context.id, event, context.attempt, late_s))
        await asyncio.sleep(takes_s)  # a run that takes real time

    @property
    def ids(self) -> list[str]:
        return [seen.id for seen in self.seen]

    def move(self, **span: float) -> None:
        """Set the store's clock."""
        self.clock.offset_ns += int(timedelta(**span).total_seconds() * 1e9)

    async def until(self, is_so: Callable[[], object]) -> None:
        await until(is_so, f"the handlers see what they should, not only {self.ids}")


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


@pytest.fixture
def bench(url: str) -> Bench:
    return Bench(url)


def in_loop(test: Callable[[Bench], Awaitable[None]]) -> Callable[[Bench], None]:
    @wraps(test)
    def run(bench: Bench) -> None:
        async def play() -> None:
            await test(bench)

        asyncio.run(play())

    return run


def safety_poll(monkeypatch: pytest.MonkeyPatch, ms: int) -> None:
    """Have stores look by themselves so often."""
    monkeypatch.setattr(RedisStore, "traits", structs.replace(RedisStore.traits, safety_poll_ms=ms))


def put(message_id: str, lane: str = "Tick", **envelope: Any) -> Put:  # noqa: ANN401
    return Put(new_op(), Envelope(message_id, lane, payload=b'{"n":1}', encoding="json", **envelope), After(0))


async def stored(store: RedisStore, *commands: Command) -> list[Outcome]:
    outcomes = list(await store.apply(commands))
    assert all(isinstance(each, Stored) for each in outcomes), outcomes
    return outcomes


# --- the dispatcher ---------------------------------------------------------------------------------------


@in_loop
async def test_r01_store_errors_and_poison_never_stop_the_loop(bench: Bench) -> None:
    store = FaultyStore(bench.store())
    faults = [store.inject(fault, step, times=2) for fault in ("unavailable", "crash") for step in ("claim", "settle")]
    async with bench.serving(store) as scheduler:
        for n in range(20):
            await scheduler.schedule(Tick(n), delay=timedelta(milliseconds=20 * n), id=f"good-{n}")
            await scheduler.schedule(b"{not json", delay="0s", to="handler:Tick", id=f"poison-{n}")
        async with asyncio.timeout(60):
            await scheduler.run_until_idle()
        letters = [letter async for letter in scheduler.dead_letters()]
    assert [fault.hits for fault in faults] == [2] * 4
    assert set(bench.ids) == {f"good-{n}" for n in range(20)}
    assert {(letter.record.id, letter.reason) for letter in letters} == {
        (f"poison-{n}", "undecodable") for n in range(20)
    }


@in_loop
async def test_r02_what_is_due_at_once_is_drained_at_once(bench: Bench) -> None:
    async with Scheduler(bench.store(), dispatch=False) as scheduler:
        await scheduler.schedule_many(Message(Tick(n), delay="0s") for n in range(1_300))
    before = time.monotonic()
    async with bench.serving(concurrency=4) as scheduler:
        await scheduler.run_until_idle()
    assert sorted(seen.event.n for seen in bench.seen) == list(range(1_300))
    assert time.monotonic() - before < 50, "650 rounds of the safety poll would be 20 minutes"


@in_loop
async def test_r03_a_lapsed_claim_neither_settles_nor_frees_the_next_ones(bench: Bench) -> None:
    async with bench.store() as store, store.work("one", ["Tick"]) as one, store.work("two", ["Tick"]) as two:
        demand = {"Tick": Demand(5)}
        await stored(store, put("a"))
        (lapsed,) = (await one.claim(demand, request="1", lease_ms=5_000)).claims
        assert (await two.claim(demand, request="1", lease_ms=5_000)).claims == []
        bench.move(seconds=6)
        (held,) = (await two.claim(demand, request="2", lease_ms=5_000)).claims
        assert list(await one.settle([Done("a", lapsed.record.revision, lapsed.token)])) == [SettleOutcome.GONE]
        assert (await one.claim(demand, request="2", lease_ms=5_000)).claims == []
        assert list(await two.settle([Done("a", held.record.revision, held.token)])) == [SettleOutcome.SETTLED]


@in_loop
async def test_r04_a_handler_outlives_its_lease_and_waiting_costs_no_attempt(bench: Bench) -> None:
    scheduler = bench.serving(takes_s=1.5, concurrency=2, retry=Retry(attempts=2))
    scheduler._options = structs.replace(scheduler._options, lease_ms=1_000)
    async with scheduler:
        for n in range(4):
            await scheduler.schedule(Tick(n), delay="0s", id=f"m{n}")
        await scheduler.run_until_idle()
        assert [letter async for letter in scheduler.dead_letters()] == []
    assert Counter(bench.ids) == Counter(f"m{n}" for n in range(4))
    assert {seen.attempt for seen in bench.seen} == {1}


@in_loop
async def test_r05_the_failure_of_the_last_attempt_is_seen(bench: Bench) -> None:
    scheduler = Scheduler(bench.store())

    @scheduler.handler(retry=Retry(attempts=3, first="10ms"))
    async def handle(event: Tick, context: Context) -> None:
        raise ConnectionError(f"refused, run {context.attempt}")

    async with scheduler:
        await scheduler.schedule(Tick(7), delay="0s", id="a")
        await scheduler.run_until_idle()
        (letter,) = [letter async for letter in scheduler.dead_letters()]
        assert (await scheduler.counts())["Tick"].dead == 1
    assert (letter.record.id, letter.reason, letter.record.attempt) == ("a", "attempts_exhausted", 3)
    assert (letter.record.first_error, letter.record.last_error) == (
        "ConnectionError: refused, run 1",
        "ConnectionError: refused, run 3",
    )
    assert letter.record.envelope.payload == b'{"n":7,"text":null}'


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
def test_r06_completion_neither_erases_nor_brings_back(bench: Bench, fails: bool) -> None:
    async def play() -> None:
        go_on = asyncio.Event()
        scheduler = Scheduler(bench.store())

        @scheduler.handler(retry=Retry(first="10ms"))
        async def handle(event: Tick, context: Context) -> None:
            await bench.note(event, context, 0)
            if event.n == 1:
                await go_on.wait()
                if fails:
                    raise ConnectionError

        async with scheduler:
            await scheduler.schedule(Tick(1), delay="0s", id="replaced")
            await scheduler.schedule(Tick(1), delay="0s", id="cancelled")
            await bench.until(lambda: len(bench.seen) == 2)
            again = await scheduler.schedule(Tick(2), delay="100ms", id="replaced")
            assert again.outcome is ScheduleOutcome.REPLACED
            assert await scheduler.cancel("cancelled") is CancelOutcome.IN_FLIGHT
            go_on.set()
            await scheduler.run_until_idle()
        assert Counter((seen.id, seen.event.n) for seen in bench.seen) == Counter(
            [("replaced", 1), ("cancelled", 1), ("replaced", 2)]
        )

    asyncio.run(play())


@pytest.mark.parametrize("fault", ["unavailable", "reply_lost", "crash"])
def test_r07_a_settlement_that_fails_costs_no_slot(bench: Bench, fault: Any) -> None:  # noqa: ANN401
    async def play() -> None:
        store = FaultyStore(bench.store())
        async with bench.serving(store, concurrency=2) as scheduler:
            struck = store.inject(fault, "settle", times=3)
            for n in range(10):
                await scheduler.schedule(Tick(n), delay="0s", id=f"m{n}")
            await scheduler.run_until_idle()
            assert struck.hits == 3
            await scheduler.schedule(Tick(), delay="0s", id="after")
            await scheduler.run_until_idle()
        assert Counter(bench.ids) == Counter([*(f"m{n}" for n in range(10)), "after"])

    asyncio.run(play())


def test_r08_a_wait_below_one_unit_of_time_is_not_a_wait_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    safety_poll(monkeypatch, ms=600_000)

    async def play() -> None:
        async with bench.serving() as scheduler:
            for microseconds in (1, 999, 1_001, 1_500, 49_999):
                await scheduler.schedule(Tick(), delay=timedelta(microseconds=microseconds))
                await bench.until(lambda: bench.seen)
                assert bench.seen.pop().late_s >= 0

    asyncio.run(play())


@in_loop
async def test_r09_close_drains_and_leaves_what_is_the_users(bench: Bench) -> None:
    store = bench.store()
    scheduler = bench.serving(store, takes_s=0.3, concurrency=3)
    async with scheduler:
        for n in range(6):
            await scheduler.schedule(Tick(n), delay="0s", id=f"m{n}")
        await bench.until(lambda: len(bench.seen) == 3)
    assert len(bench.seen) == 3, "what had begun ended; nothing else began"
    async with scheduler:  # the same scheduler and store, opened again
        await scheduler.run_until_idle()
    assert Counter(bench.ids) == Counter(f"m{n}" for n in range(6))
    assert {seen.attempt for seen in bench.seen} == {1}


# --- ids and time -----------------------------------------------------------------------------------------


@in_loop
async def test_r10_the_same_id_again_brings_its_own_payload_time_and_attempts(bench: Bench) -> None:
    scheduler = Scheduler(bench.store())

    @scheduler.handler(retry=Retry(attempts=5, first="10m", jitter=0))
    async def handle(event: Tick, context: Context) -> None:
        await bench.note(event, context, 0)
        if event.n == 1:
            raise ConnectionError

    async with scheduler:
        await scheduler.schedule(Tick(1), delay="0s", id="a", headers={"v": b"1"})
        await bench.until(lambda: bench.seen)
        async with asyncio.timeout(60):
            while (found := await scheduler.get("a")) is None or found.record.attempt == 0:
                pass
        again = await scheduler.schedule(Tick(2), delay="100ms", id="a")
        assert again.outcome is ScheduleOutcome.REPLACED
        found = await scheduler.get("a")
        assert found is not None
        assert (found.record.attempt, found.record.last_error, found.record.envelope.headers) == (0, None, {})
        await scheduler.run_until_idle()
    assert [(seen.event.n, seen.attempt) for seen in bench.seen] == [(1, 1), (2, 1)]
    assert bench.seen[1].late_s >= 0


@in_loop
async def test_r11_odd_times_and_ids(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        now = datetime.now(UTC)
        await scheduler.schedule(Tick(), at=now - timedelta(days=400), id="past")
        await scheduler.schedule(Tick(), at=datetime(1, 1, 1, tzinfo=UTC), id="first year")
        await scheduler.schedule(Tick(), at=now, id="now")
        far = await scheduler.schedule(Tick(), delay=timedelta(days=3650), id="x" * 255)
        for wrong in (timedelta(seconds=-1), timedelta(days=293 * 366), "soon", float("inf"), None):
            with pytest.raises(ScheduleTimeError):
                await scheduler.schedule(Tick(), delay=wrong, id="wrong")  # type: ignore[arg-type]
        with pytest.raises(MessageIdError):
            await scheduler.schedule(Tick(), delay="0s", id="")
        made = await scheduler.schedule(Tick(), delay="0s", id=None)
        await bench.until(lambda: len(bench.seen) == 4)
        found = await scheduler.get("x" * 255)
        assert found is not None
        assert found.record.due_ms == int(far.due.timestamp() * 1000), "exact in a score"
    assert Counter(bench.ids) == Counter(["past", "first year", "now", made.id])


async def update_at_the_firing_instant(bench: Bench, ahead_s: float) -> set[RescheduleOutcome]:
    """Schedule 60 messages so far ahead, and move each of them about when they come due; return what came of it."""
    outcomes: dict[str, RescheduleOutcome] = {}
    async with bench.serving(concurrency=3) as scheduler:
        due = datetime.now(UTC) + timedelta(seconds=ahead_s)

        async def move(n: int) -> None:
            await asyncio.sleep((due - datetime.now(UTC)).total_seconds() + (n - 30) / 1000)  # real due times
            outcomes[f"m{n}"] = await scheduler.reschedule(f"m{n}", delay="500ms")

        await scheduler.schedule_many(Message(Tick(n), at=due, id=f"m{n}") for n in range(60))
        await asyncio.gather(*(move(n) for n in range(60)))
        await scheduler.run_until_idle()
        assert await scheduler.counts() == {}
    assert Counter(bench.ids) == Counter(outcomes.keys())
    return set(outcomes.values())


@in_loop
async def test_r12_an_update_at_the_firing_instant_leaves_no_zombie(bench: Bench) -> None:
    for ahead_s in (0.5, 1, 2, 4, 8):  # a busy machine is not done with scheduling in 0.5 s: all come too late
        if len(await update_at_the_firing_instant(Bench(bench.url), ahead_s)) > 1:
            return
    raise AssertionError("never came some in time and some too late")


@in_loop
async def test_r13_a_clock_set_back_delays_and_one_set_forward_does_not_lose(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        await scheduler.schedule(Tick(), delay="1h", id="back")
        bench.move(minutes=59)
        bench.move(minutes=-20)
        await asyncio.sleep(2.2)  # longer than the safety poll: nothing may happen
        assert bench.seen == []
        bench.move(minutes=21)
        await bench.until(lambda: bench.seen)
        await scheduler.schedule(Tick(), every=Cron("0 0 * * *"), id="daily")
        midnight = datetime.fromtimestamp(bench.clock.now_ms() / 1000, UTC).replace(hour=23, minute=59, second=59)
        bench.move(seconds=midnight.timestamp() + 0.7 - bench.clock.now_ms() / 1000)
        await bench.until(lambda: "daily" in bench.ids)
    assert Counter(bench.ids) == Counter(["back", "daily"])
    assert all(seen.late_s >= 0 for seen in bench.seen)


@in_loop
async def test_r14_the_same_id_in_two_namespaces_and_in_two_lanes(bench: Bench) -> None:
    other = Bench(bench.url)
    async with bench.serving() as one, other.serving() as two:
        await one.schedule(Tick(1), delay="1h", id="a")
        assert (await two.schedule(Tick(2), delay="100ms", id="a")).outcome is ScheduleOutcome.STORED
        assert await one.cancel("a") is CancelOutcome.CANCELLED
        await one.schedule(Tick(3), delay="1h", id="b")
        assert (await one.schedule(b"4", delay="0s", to="handler:raw", id="b")).outcome is ScheduleOutcome.REPLACED
        await one.run_until_idle()
        await two.run_until_idle()
    assert [seen.event for seen in bench.seen] == [b"4"]
    assert [seen.event.n for seen in other.seen] == [2]


@in_loop
async def test_r19_empty_is_not_nothing(bench: Bench) -> None:
    async with bench.serving() as scheduler:
        await scheduler.schedule(b"", delay="50ms", to="handler:raw", id="empty", key=b"", headers={"x": b""})
        found = await scheduler.get("empty")
        assert found is not None
        envelope = found.record.envelope
        assert (envelope.payload, envelope.key, envelope.headers) == (b"", b"", {"x": b""})
        await scheduler.schedule(Tick(0, None), delay="50ms", id="none")
        await scheduler.schedule(Tick(0, ""), delay="50ms", id="text")
        await scheduler.run_until_idle()
    assert {seen.id: seen.event for seen in bench.seen} == {"empty": b"", "none": Tick(0, None), "text": Tick(0, "")}


@in_loop
async def test_r23_down_over_midnight_and_for_days(bench: Bench) -> None:
    async with Scheduler(bench.store(), dispatch=False) as scheduler:
        for hours in (0.5, 1, 2, 30, 100):
            await scheduler.schedule(Tick(), delay=timedelta(hours=hours), id=f"once {hours}")
        await scheduler.schedule(Tick(), every=Cron("30 0 * * *"), id="coalesced")
    bench.move(days=5)
    async with bench.serving() as scheduler:
        await bench.until(lambda: len(bench.seen) >= 6)
        await asyncio.sleep(0.2)  # nothing else may come
    assert Counter(bench.ids) == Counter([*(f"once {hours}" for hours in (0.5, 1, 2, 30, 100)), "coalesced"])


# --- Redis ------------------------------------------------------------------------------------------------


@in_loop
async def test_r26_who_came_first_is_told_so_and_the_others_are_told_too(bench: Bench) -> None:
    """Of calls at once with one id, each learns what became of its own: a result of NX that nobody looked at."""
    async with Scheduler(bench.store(), dispatch=False) as one, Scheduler(bench.store(), dispatch=False) as two:

        async def schedule(n: int, conflict: Conflict) -> str:
            scheduler = (one, two)[n % 2]
            try:
                answer = await scheduler.schedule(Tick(n), delay="1h", id=f"{conflict.mode}", conflict=conflict)
            except DuplicateIdError:
                return "duplicate"
            return answer.outcome.value

        kept = Counter(await asyncio.gather(*(schedule(n, Conflict.keep()) for n in range(20))))
        refused = Counter(await asyncio.gather(*(schedule(n, Conflict.error()) for n in range(20))))
        assert kept == Counter({"stored": 1, "kept": 19})
        assert refused == Counter({"stored": 1, "duplicate": 19})


@in_loop
async def test_r27_a_bulk_claim_hides_no_claimed_id(bench: Bench) -> None:
    """What is claimed and what cannot be, side by side: each is given out, kept, or seen as a dead letter."""
    async with bench.store() as store, store.work("w", ["Tick"]) as work:
        await stored(store, *(put(f"m{n}") for n in range(700)))
        for n in range(0, 700, 7):
            await store.command("HSET", Keys(bench.namespace).key("msg"), b"\x02m%d" % n, b"\x00" * 60)
        seen: list[str] = []
        for number in range(5):
            claims = (await work.claim({"Tick": Demand(500)}, request=f"{number}", lease_ms=5_000)).claims
            seen += [each.record.id for each in claims]
        letters = {each.record.id for each in await store.dead_letters(limit=500)}
        counts = (await store.counts())["Tick"]
    assert Counter(seen) == Counter(f"m{n}" for n in range(700) if n % 7)
    assert letters == {f"m{n}" for n in range(0, 700, 7)}
    assert (counts.in_flight, counts.overdue, counts.dead) == (600, 0, 100)


@in_loop
async def test_r28_thousands_at_once_are_cut_into_what_lua_can_take(bench: Bench) -> None:
    async with bench.store() as store, store.work("w", ["Tick"]) as work:
        names = [f"m{n}" for n in range(9_000)]  # more than Lua's unpack takes
        await stored(store, *(put(name) for name in names))
        claims: list[Claim] = []
        for number in range(18):
            claims += (await work.claim({"Tick": Demand(500)}, request=f"{number}", lease_ms=30_000)).claims
        assert [each.record.id for each in claims] == names
        settled = await work.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])
        assert set(settled) == {SettleOutcome.SETTLED}
        await stored(store, *(put(name) for name in names))
        assert (await store.counts())["Tick"].overdue == 9_000


def test_r29_with_every_wake_up_lost_the_safety_poll_finds_what_is_due(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How late it may be, test_seed_regressions.py asserts on virtual time."""
    safety_poll(monkeypatch, ms=300)

    async def play() -> None:
        async with bench.serving() as scheduler, Scheduler(bench.store(), dispatch=False) as other:
            (listening,) = [task for task in asyncio.all_tasks() if "wake-ups" in task.get_name()]
            listening.cancel()
            await asyncio.wait([listening])
            for n in range(3):
                await other.schedule(Tick(n), delay=timedelta(milliseconds=300 * n))
            await bench.until(lambda: len(bench.seen) == 3)
            await scheduler.run_until_idle()
        assert all(seen.late_s >= 0 for seen in bench.seen)

    asyncio.run(play())


def test_r30_a_blocking_read_that_found_nothing_hears_what_comes_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup_listener, "BLOCK_MS", 100)
    safety_poll(monkeypatch, ms=600_000)

    async def play() -> None:
        async with bench.store() as store, bench.store() as other, store.work("w", ["Tick"]) as work:
            for n in range(5):
                await asyncio.sleep(0.15)  # each time, a read has come back empty
                work.clear()
                await work.claim({"Tick": Demand(9)}, request=f"{n}", lease_ms=5_000)
                waiting = asyncio.ensure_future(work.wait(until_ms=None))
                await asyncio.sleep(0)
                await stored(other, put(f"m{n}"))
                async with asyncio.timeout(60):
                    await waiting

    asyncio.run(play())


@in_loop
async def test_r31_all_keys_are_in_one_slot_and_of_those_that_are_declared(bench: Bench) -> None:
    """Fixed keys stand in KEYS; all others begin with the same tag, and with one of the documented prefixes."""
    async with bench.serving() as scheduler:
        await scheduler.pause(Tick)
        await scheduler.schedule(Tick(), delay="0s", id="a", conflict=Conflict.newer(1))
        await scheduler.resume(Tick)
        await scheduler.run_until_idle()
        await scheduler.schedule(Tick(), delay="1h", id="b")
    async with bench.store() as store:
        cursor, names = b"0", set[bytes]()
        while True:
            cursor, found = await store.command("SCAN", cursor, "MATCH", f"*{bench.namespace}*", "COUNT", 1000)
            names.update(found)
            if cursor == b"0":
                break
    tag = Keys(bench.namespace).tag
    rest = {name.decode().removeprefix(tag) for name in names}
    assert all(name.decode().startswith(tag) for name in names)
    assert all(name in FIXED or name.startswith(DERIVED) for name in rest), rest
    for name in NAMES:
        made = set(re.findall(r"TAG \.\. '([^']*)'", script(name).text.decode()))
        assert made <= set(DERIVED), name


@in_loop
async def test_r32_a_payload_lives_as_long_as_its_schedule(bench: Bench) -> None:
    event = Tick(7, "x" * 100_000)
    async with Scheduler(bench.store(), dispatch=False) as scheduler:
        await scheduler.schedule(event, delay="3650d", id="far", headers={"trace": bytes(range(256))}, key=b"k")
    async with bench.store() as store:
        for name in ("msg", "lanes", "due:1", "meta"):
            assert await store.command("PTTL", Keys(bench.namespace).key(name)) == -1, "no key of a message expires"
    bench.move(days=3650)
    async with bench.serving() as scheduler:
        await scheduler.run_until_idle()
    assert [(seen.id, seen.event) for seen in bench.seen] == [("far", event)]
