"""A version that was replaced while it was claimed: the answer to a cancel, and that it does not begin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from aiodelay import CancelOutcome, Context, Every, Retry, ScheduleOutcome, Scheduler
from aiodelay.core.values import Claimed, Delivery, Demand, Lane, RenewOutcome, SendOutcome, Sent, State
from aiodelay.memory import MemoryStore
from aiodelay.ports import Work
from tests.faults.programs.holder import LANE, Plan
from tests.support.judging import url_of
from tests.support.kafka import new_name
from tests.support.processes import Crew, Worker
from tests.support.servers import Found, redis_products
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


@dataclass
class Order:
    version: str


class SlowStore(MemoryStore):
    """Claims, and answers only when told to; the claims before the `n`-th that gives something out are not slow."""

    def __init__(self, n: int = 1) -> None:
        super().__init__()
        self._left = n
        self.has_claimed, self.may_answer = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        async with super().work(worker, lanes) as work:
            claim = work.claim

            async def claim_slowly(demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
                claimed = await claim(demand, request=request, lease_ms=lease_ms)
                self._left -= bool(claimed.claims)
                if claimed.claims and self._left <= 0:
                    self.has_claimed.set()
                    await self.may_answer.wait()
                return claimed

            work.claim = claim_slowly  # type: ignore[method-assign]
            yield work


class RecordingSink:
    """Notes the payloads that it is given."""

    name, limits = "sink", Demand(10)

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        self.sent += [each.envelope.payload for each in deliveries]
        return [Sent()] * len(deliveries)


async def test_s4_a_claim_whose_answer_comes_after_the_replacement_does_not_begin() -> None:
    store, began = SlowStore(), list[str]()
    scheduler = Scheduler(store)

    @scheduler.handler(concurrency=2)
    async def take(order: Order) -> None:
        began.append(order.version)

    async with scheduler, asyncio.timeout(60):
        await scheduler.schedule(Order("old"), delay="0s", id="m")
        await store.has_claimed.wait()
        replaced = await scheduler.schedule(Order("new"), delay="1h", id="m")
        assert (replaced.outcome, replaced.is_older_in_flight) == (ScheduleOutcome.REPLACED, True)
        assert await scheduler.cancel("m") is CancelOutcome.IN_FLIGHT
        await scheduler.schedule(Order("newest"), delay="0s", id="m")
        store.may_answer.set()
        await until(lambda: "newest" in began, "the newest version runs")
    assert began == ["newest"]


async def test_s4_a_claim_whose_answer_comes_after_the_replacement_is_not_sent() -> None:
    store, sink = SlowStore(), RecordingSink()
    async with Scheduler(store, sinks=[sink]) as scheduler, asyncio.timeout(60):
        await scheduler.schedule(b"old", to="sink:there", delay="0s", id="m")
        await store.has_claimed.wait()
        assert (await scheduler.schedule(b"new", to="sink:there", delay="0s", id="m")).is_older_in_flight
        store.may_answer.set()
        await until(lambda: b"new" in sink.sent, "the new version is sent")
    assert sink.sent == [b"new"]


@pytest.mark.parametrize("how", ["replaced", "cancelled"])
async def test_s4_a_retry_claimed_before_its_series_is_replaced_or_cancelled_does_not_begin(how: str) -> None:
    store, began = SlowStore(n=2), list[tuple[bytes, str]]()
    scheduler = Scheduler(store, retry=Retry(first="1ms"))

    @scheduler.handler(name="work", concurrency=2)
    async def work(payload: bytes, context: Context) -> None:
        began.append((payload, context.id))
        if payload == b"old":
            raise ConnectionError

    async with scheduler, asyncio.timeout(60):
        await scheduler.schedule(b"old", to="handler:work", every=Every("1h"), id="s")
        await scheduler.fire("s")
        await store.has_claimed.wait()
        if how == "replaced":
            replaced = await scheduler.schedule(b"new", to="handler:work", every=Every("2h"), id="s")
            assert replaced.is_older_in_flight
        assert await scheduler.cancel("s") is CancelOutcome.IN_FLIGHT
        await scheduler.schedule(b"last", to="handler:work", delay="0s", id="s")
        store.may_answer.set()
        await until(lambda: began[-1][0] == b"last", "the last version runs")
    assert began == [(b"old", "s"), (b"last", "s")]


async def test_s4_a_message_that_waits_for_who_iterates_is_not_given_to_it_once_it_is_replaced() -> None:
    async with Scheduler("memory://") as scheduler, asyncio.timeout(60):
        for payload in (b"first", b"old"):
            await scheduler.schedule(payload, to="handler:work", delay="0s", id=payload.decode())
        seen = list[bytes]()
        async for message in scheduler.messages("work", concurrency=2):
            with message as payload:
                seen.append(payload)
                if payload == b"first":
                    await until(lambda: is_in_flight(scheduler, "old"), "the next one is claimed")
                    replaced = await scheduler.schedule(b"new", to="handler:work", delay="0s", id="old")
                    assert replaced.is_older_in_flight
            if payload == b"new":
                break
    assert seen == [b"first", b"new"]


async def is_in_flight(scheduler: Scheduler, message_id: str) -> bool:
    found = await scheduler.get(message_id)
    return found is not None and found.state is State.IN_FLIGHT


@pytest.mark.parametrize("url", ["memory://", "sqlite:///delay.db"])
async def test_s5_a_cancel_tells_of_a_replaced_version_until_it_has_ended(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scheduler, has_begun, may_end = Scheduler(url), asyncio.Event(), asyncio.Event()
    ended = list[str]()

    @scheduler.handler(concurrency=2)
    async def take(order: Order) -> None:
        has_begun.set()
        await may_end.wait()
        ended.append(order.version)

    async def is_over() -> bool:
        return ended == ["1", "4"] and await scheduler.get("last") is None

    async with scheduler, asyncio.timeout(60):
        await scheduler.schedule(Order("1"), delay="0s", id="m")
        await has_begun.wait()
        assert (await scheduler.schedule(Order("2"), delay="1h", id="m")).is_older_in_flight
        assert await scheduler.cancel("m") is CancelOutcome.IN_FLIGHT
        await scheduler.schedule(Order("3"), delay="1h", id="m")
        may_end.set()
        await scheduler.schedule(Order("4"), delay="0s", id="last")
        await until(is_over, "the last one was settled, and so was the first")
        assert await scheduler.cancel("m") is CancelOutcome.CANCELLED


# --- another process --------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", *redis_products(), "kafka"], ids=lambda found: getattr(found, "name", found))
def plan(request: pytest.FixtureRequest, tmp_path: Path, shared_redis: Callable[[Found], str]) -> Plan:
    """A store that processes can share."""
    if request.param == "sqlite":
        return Plan(url_of(tmp_path / "delay.db"), "default")
    if request.param == "kafka":
        bootstrap = request.getfixturevalue("kafka")
        return Plan(f"kafka://{bootstrap}/{new_name('schedules')}?create_topic=true&partitions=1", "default")
    return Plan(shared_redis(request.param), new_name("held"))


@pytest.fixture
def holder(plan: Plan, tmp_path: Path) -> Iterator[Worker]:
    """Another process, which takes one message and holds the claims on the next ones meanwhile."""
    with Crew(tmp_path) as crew:
        yield crew.start("holder", plan, name="holder")


async def test_s4_another_process_does_not_begin_what_was_replaced_or_cancelled_since_it_claimed_it(
    plan: Plan, holder: Worker
) -> None:
    """It knows by its next renewal; the test prints how long that took."""

    async def said(start: str) -> str:
        return await asyncio.to_thread(holder.line, start)

    async with Scheduler(plan.store, namespace=plan.namespace, dispatch=False) as scheduler:
        await scheduler.schedule(b"first", to=f"handler:{LANE}", delay="0s", id="first")
        assert await said("begun") == "first"
        for each in ("replaced", "cancelled", "both"):
            await scheduler.schedule(b"old", to=f"handler:{LANE}", delay="0s", id=each)
            assert await said("claimed") == each
        replaced = await scheduler.schedule(b"new", to=f"handler:{LANE}", delay="0s", id="replaced")
        assert replaced.is_older_in_flight or plan.store.startswith("kafka:")  # where only the owner knows
        in_flight = CancelOutcome.RECORDED if plan.store.startswith("kafka:") else CancelOutcome.IN_FLIGHT
        assert await scheduler.cancel("cancelled") is in_flight
        await scheduler.schedule(b"new", to=f"handler:{LANE}", delay="1h", id="both")
        assert await scheduler.cancel("both") is in_flight
        changed_ms = time.time_ns() // 1_000_000
        outcomes = RenewOutcome.SUPERSEDED, RenewOutcome.CANCELLED, RenewOutcome.SUPERSEDED
        after_ms = max([int(await said(f"renewed {outcome.value}")) for outcome in outcomes]) - changed_ms
        print(f"{plan.store.partition(':')[0]}: the other process knew {after_ms} ms after the commands")
        holder.tell("go on")
        assert await said("begun") == "new"
