"""The memory store beyond the conformance suite: its data do not pile up, and its URL options work."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay.core.values import LEASE_MS, After, Cancel, Conflict, Demand, Done, Envelope, Late, Put, Query
from aiodelay.errors import ConfigurationError
from aiodelay.memory import MemoryStore, open_store
from aiodelay.testing.clock import VirtualClock, VirtualLoop

LANE = "lane"
HOUR_MS = 3_600_000
POLL_MS = MemoryStore.traits.safety_poll_ms


def put(number: int, message_id: str, due: After, **options: object) -> Put:
    envelope = Envelope(message_id, LANE, "address", payload=b"p")
    return Put(number.to_bytes(8, "big"), envelope, due, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("late", [Late.deliver(), Late.drop("1h")], ids=["in its lane", "in the order of lateness"])
def test_what_a_replaced_message_leaves_behind_is_swept(late: Late) -> None:
    clock = VirtualClock()

    async def play() -> None:
        store = MemoryStore(clock=clock)
        for number in range(10_000):
            await store.apply([put(number, "m", After(HOUR_MS), late=late)])
        assert len(store._table.lanes[LANE]._waiting._heap) < 2000
        assert len(store._table.expiring._heap) < 2000

    asyncio.run(play())


def test_what_is_held_and_cancelled_leaves_nothing_behind() -> None:
    async def play() -> None:
        store = MemoryStore(clock=VirtualClock())
        await store.pause(LANE, "address")
        async with store.work("w", (LANE,)) as work:
            for number in range(10):
                await store.apply([put(2 * number, "m", After(0)), Cancel((2 * number + 1).to_bytes(8, "big"), "m")])
                await store.apply([put(100 + number, "n", After(0))])
                await work.claim({LANE: Demand(1)}, request=f"{number}", lease_ms=LEASE_MS)
        assert len(store._table.lanes[LANE]._parked["address"]) == 1

    asyncio.run(play())


def test_claims_let_others_run_in_between() -> None:
    async def play() -> None:
        store, turns = MemoryStore(clock=VirtualClock()), list[int]()
        async with store.work("w", (LANE,)) as work:
            for number in range(3):
                asyncio.get_running_loop().call_soon(turns.append, number)
                await work.claim({LANE: Demand(1)}, request=f"{number}", lease_ms=LEASE_MS)
                assert turns == list(range(number + 1))

    asyncio.run(play())


def test_all_that_is_remembered_is_forgotten_in_time() -> None:
    clock = VirtualClock()

    async def play() -> None:
        store = MemoryStore(clock=clock)
        async with store.work("w", (LANE,)) as work:
            for number in range(20):
                conflict = Conflict.newer(number) if number % 2 else Conflict.replace()
                await store.apply([put(number, f"m{number % 5}", After(0), conflict=conflict)])
                await store.apply([Cancel((100 + number).to_bytes(8, "big"), "nobody")])
                claimed = await work.claim({LANE: Demand(1)}, request=f"{number}", lease_ms=LEASE_MS)
                await work.settle([Done(c.record.id, c.record.revision, c.token) for c in claimed.claims])
                clock.move(1000)
            clock.move(30 * HOUR_MS)
            await work.tidy((), limit=500)
        remembered = (store._table.answers.by_op, store._table.answers.revisions, store._table.answers.versions)
        assert [len(each._values) for each in remembered] == [0, 0, 0]
        assert (store._table.entries, store._table.leased, store._table.lanes[LANE].messages) == ({}, {}, 0)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("until_ms", "waited_ms"), [(None, POLL_MS), (300, 300), (2 * POLL_MS, POLL_MS), (0, 0), (-5, 0)]
)
def test_a_wait_lasts_until_its_time_or_the_safety_poll(until_ms: int | None, waited_ms: int) -> None:
    async def play() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = VirtualClock(loop)
        async with MemoryStore(clock=clock).work("w", (LANE,)) as work:
            start = clock.now_ms()
            await work.wait(until_ms=None if until_ms is None else start + until_ms)
            return clock.now_ms() - start

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(play()) == waited_ms


def test_data_stays_with_the_object() -> None:
    async def play() -> None:
        store = MemoryStore(clock=VirtualClock())
        async with store:
            await store.apply([put(1, "m", After(0))])
        async with store:
            assert await store.get("m") is not None

    asyncio.run(play())


def test_a_url_opens_a_store_of_its_own() -> None:
    one, other = (open_store("memory://?journal=10", namespace="n", clock=None) for _ in range(2))
    assert one is not other
    assert one.name == "memory://"


@pytest.mark.parametrize("url", ["memory://?journal=-1", "memory://?journal=x", "memory://?journals=1"])
def test_a_wrong_option_is_named(url: str) -> None:
    with pytest.raises(ConfigurationError, match="journal"):
        open_store(url, namespace="", clock=None)


@pytest.mark.parametrize("first", ["claim", "tidy"])
@pytest.mark.asyncio
async def test_b1_no_lease_lapses_because_the_event_loop_was_blocked(clock: VirtualClock, first: str) -> None:
    store = MemoryStore(clock=clock)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    async with store, store.work("w", [LANE]) as work:
        await store.apply([put(1, "m", After(0))])
        (claim,) = (await work.claim({LANE: Demand(1)}, request="1", lease_ms=LEASE_MS)).claims
        loop._jump(LEASE_MS / 1000 + 2)
        if first == "claim":
            other: asyncio.Task[object] = asyncio.create_task(
                work.claim({LANE: Demand(1)}, request="2", lease_ms=LEASE_MS)
            )
        else:
            other = asyncio.create_task(work.tidy([LANE], limit=10))
        for _ in range(10):
            await asyncio.sleep(0)  # the holder may need several turns to settle
        assert await work.settle([Done("m", claim.record.revision, claim.token)]) == ["settled"]
        await other
        assert not await store.search(Query())
