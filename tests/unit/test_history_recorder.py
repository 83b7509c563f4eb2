"""`record`: what a scheduler does is in its history, and the checker understands it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aiodelay import Every, Late, Later, Retry, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, CancelOutcome, DeadKey, DeadLetter, Envelope, Put, Scheduled
from aiodelay.errors import ClosedError, OutcomeUnknownError
from aiodelay.memory import MemoryStore
from aiodelay.model import Conflict
from aiodelay.testing import VirtualClock, assert_delivered, on_virtual_time
from aiodelay.testing import history as h
from aiodelay.testing.faults import FaultyStore
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

TRIED_TWICE = Retry(attempts=2, first="10ms", jitter=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


@pytest.fixture
def shop(tmp_path: Path) -> Scheduler:
    """A scheduler whose handlers do all that a handler may do."""
    scheduler = Scheduler(f"sqlite:///{tmp_path / 'shop.db'}", sinks=["stdout:"], retry=TRIED_TWICE)
    put_off: set[bytes] = set()

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> Later | None:
        if payload == b"broken":
            raise RuntimeError("as told")
        if payload == b"later" and payload not in put_off:
            put_off.add(payload)
            return Later("10ms")
        return None

    @scheduler.handler(name="plain")
    def plain(payload: bytes) -> None: ...

    @scheduler.handler(name="batched", batch=4, batch_wait="5ms")
    async def batched(payloads: list[bytes]) -> None:
        if b"broken" in payloads:
            raise RuntimeError("as told")

    return scheduler


async def recorded(shop: Scheduler, path: Path, body: Callable[[], Awaitable[None]]) -> h.Report:
    """Run a body in an open and recorded scheduler, and check the history."""
    with h.History(path, "shop") as history:
        h.record(shop, history)
        async with shop:
            await body()
            await shop.run_until_idle()
            history.write(await h.content_of(shop.store))
    report = h.check_file(path)
    print("\n".join(report.lines()))
    return report


def runs(path: Path, message_id: str) -> list[str]:
    """Return the results of the runs of a message."""
    return [attempt.result for attempt in h.Story(h.read(path)).attempts if attempt.start.id == message_id]


async def test_each_kind_of_run_is_recorded_with_its_result(shop: Scheduler, path: Path) -> None:
    async def body() -> None:
        for lane in ("work", "plain", "batched"):
            for what in ("done", "broken", "later"):
                await shop.schedule(what.encode(), to=f"handler:{lane}", id=f"{lane} {what}", delay="0s")
        await shop.schedule(b"out", to="stdout:a", id="out", delay="0s")

    report = await recorded(shop, path, body)
    report.verify()
    assert runs(path, "work done") == runs(path, "plain done") == runs(path, "batched done") == ["ok"]
    assert runs(path, "out") == ["ok"]
    attempts = h.Story(h.read(path)).attempts
    assert all(each.lease is not None and each.start.token == each.lease.note.token for each in attempts)
    assert runs(path, "work later") == ["failed", "ok"]
    assert runs(path, "work broken") == runs(path, "batched broken") == ["failed", "failed"]


async def test_messages_that_a_program_takes_are_recorded(shop: Scheduler, path: Path) -> None:
    async def body() -> None:
        async def take() -> None:
            async for message in shop.messages("pulled", concurrency=1):
                try:
                    with message as payload:
                        assert payload != b"broken"
                except AssertionError:
                    continue

        taking = asyncio.create_task(take())
        for what in ("done", "broken"):
            await shop.schedule(what.encode(), to="handler:pulled", id=what, delay="0s")
        await until(lambda: runs(path, "broken") == ["failed", "failed"] and runs(path, "done") == ["ok"], "all runs")
        taking.cancel()

    (await recorded(shop, path, body)).verify()


async def test_the_claims_of_a_repeated_request_count_from_its_first_call(path: Path, clock: VirtualClock) -> None:
    """Another process cancels a message between the two calls. The store had claimed it at the first call."""
    memory = MemoryStore(clock=clock)
    store = FaultyStore(memory)
    worker = Scheduler(store, clock=clock)

    @worker.handler(name="work")
    async def work(payload: bytes) -> None: ...

    with h.History(path, "worker", clock=clock) as first, h.History(path, "other", clock=clock) as second:
        h.record(worker, first)
        other = Scheduler(memory, clock=clock, dispatch=False)
        h.record(other, second)
        async with worker, other:
            await other.schedule(b"", to="handler:work", id="m", delay="1s")
            store.inject("reply_lost", "claim", times=None)
            await asyncio.sleep(4)  # longer than the longest pause between two calls
            assert await other.cancel("m") == CancelOutcome.IN_FLIGHT
            store.heal()
            await asyncio.sleep(5)
    h.check_file(path).verify()
    assert runs(path, "m") == ["ok"]


async def test_each_command_is_recorded_with_its_answer(shop: Scheduler, path: Path) -> None:
    async def letters() -> list[DeadLetter]:
        return [letter async for letter in shop.dead_letters()]

    async def body() -> None:
        for message_id in ("kept", "replaced", "cancelled", "moved", "fired"):
            await shop.schedule(message_id.encode(), to="handler:work", id=message_id, delay="1h")
        await shop.schedule(b"other", to="handler:work", id="replaced", delay="1h")
        await shop.schedule(b"other", to="handler:work", id="kept", delay="1h", conflict=Conflict.keep())
        await shop.cancel("cancelled")
        await shop.cancel("unknown")
        await shop.reschedule("moved", delay="1ms")
        await shop.fire("fired")
        await shop.schedule(b"broken", to="handler:work", id="dead", delay="0s")
        await until(lambda: runs(path, "dead") == ["failed", "failed"], "its runs")
        await until(letters, "its dead letter")
        await shop.redrive(*await letters())
        await until(lambda: len(runs(path, "dead")) == 4, "its runs after the redrive")
        await until(letters, "its other dead letter")
        assert await shop.purge(*await letters()) == 1
        await shop.schedule(b"broken", to="handler:work", id="other dead", delay="0s")
        await until(letters, "the dead letter of the other message")
        assert await shop.purge(*await letters(), DeadKey("unknown", 1)) == 1
        for message_id in ("kept", "replaced"):
            await shop.fire(message_id)

    report = await recorded(shop, path, body)
    report.verify()
    answers = {(each.call.op, each.call.id): each.answer for each in h.Story(h.read(path)).operations}
    assert answers["schedule", "replaced"] == "replaced"
    assert answers["schedule", "kept"] == "kept"
    assert answers["cancel", "cancelled"] == "cancelled"
    assert answers["cancel", "unknown"] == "not_found"
    assert answers["reschedule", "moved"] == "rescheduled"
    assert answers["redrive", "dead"] == "stored"
    assert answers["purge", "dead"] == "purged"
    assert answers["purge", "other dead"] == answers["purge", "unknown"] == ""  # one of the two was deleted
    assert runs(path, "dead") == ["failed"] * 4


async def test_the_repetition_of_a_command_is_recorded_with_its_answer(path: Path, clock: VirtualClock) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    shop = Scheduler(store, clock=clock, store_timeout="1s", dispatch=False)
    with h.History(path, "shop", clock=clock) as history:
        h.record(shop, history)
        async with shop:
            store.inject("request_lost", "apply", times=None)
            with pytest.raises(OutcomeUnknownError) as first:
                await shop.schedule(b"", to="handler:work", id="m", delay="1h")
            with pytest.raises(OutcomeUnknownError) as second:
                await first.value.retry()
            store.heal()
            scheduled = await second.value.retry()
            assert isinstance(scheduled, Scheduled)
            assert await shop.cancel("m") == CancelOutcome.CANCELLED
            store.inject("request_lost", "apply", times=None)
            with pytest.raises(OutcomeUnknownError) as cancelling:
                await shop.cancel("m")
            store.heal()
            assert await cancelling.value.retry() == CancelOutcome.NOT_FOUND
    put, _, cancel = h.Story(h.read(path)).operations
    assert (put.outcome, put.answer, put.revision, put.due_ms) == ("ok", "stored", scheduled.revision, scheduled.due_ms)
    assert (cancel.outcome, cancel.answer) == ("ok", "not_found")


async def test_messages_that_an_intake_stores_are_recorded(path: Path, clock: VirtualClock) -> None:
    store = MemoryStore(clock=clock)
    worker = Scheduler(store, clock=clock)

    @worker.handler(name="work")
    async def work(payload: bytes) -> None: ...

    with h.History(path, "worker", clock=clock) as history:
        h.record(worker, history)
        async with worker:
            puts = [Put(new_op(), Envelope("m", "work", "", payload=b"x"), After(1_000))]
            with worker.around_intake("requests", 0)(puts) as taken:
                await store.apply(taken)
            await clock.advance("1m")
    h.check_file(path).verify()
    assert runs(path, "m") == ["ok"]


async def test_series_late_messages_and_joined_messages_break_no_rule(shop: Scheduler, path: Path) -> None:
    async def body() -> None:
        await shop.schedule(b"series", to="handler:work", id="series", every=Every("100ms"))
        await shop.schedule(b"broken", to="handler:work", id="broken series", every=Every("100ms"))
        past = datetime.now(UTC) - timedelta(hours=1)
        await shop.schedule(b"late", to="handler:work", id="late", late=Late.drop("1s"), at=past)
        for item in (b"1", b"2"):
            await shop.schedule(item, to="handler:plain", id="joined", delay="20ms", conflict=Conflict.append())
        await until(lambda: len(runs(path, "series")) > 1 and len(runs(path, "broken series")) > 2, "occurrences")
        for series in ("series", "broken series"):  # otherwise an occurrence may be due in the end
            await shop.cancel(series)

    report = await recorded(shop, path, body)
    report.verify()
    assert runs(path, "late") == []


async def test_an_open_scheduler_cannot_be_recorded(shop: Scheduler, path: Path) -> None:
    async with shop:
        with h.History(path) as history, pytest.raises(ClosedError, match="open already"):
            h.record(shop, history)


async def test_the_end_of_virtual_time_ends_the_recording(shop: Scheduler, path: Path, clock: VirtualClock) -> None:
    for is_recorded in (True, False):
        with on_virtual_time(shop, clock):
            history = h.History(path, "shop", clock=clock)
            if is_recorded:
                h.record(shop, history)
            async with shop:
                await shop.schedule(b"done", to="handler:work", id="done", delay="1h")
                await clock.advance("2h")
            history.close()
            assert_delivered(shop, b"done", times=1)
    assert runs(path, "done") == ["ok"]


async def test_a_closed_history_takes_nothing(path: Path) -> None:
    history = h.History(path)
    for _ in range(2):
        history.close()
    with pytest.raises(ClosedError, match="history is closed; close it after the scheduler"):
        history.write(h.Blocked())
