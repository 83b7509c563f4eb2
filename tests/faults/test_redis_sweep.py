"""F5, R1 on Redis: every call is cancelled at its first suspension, at its second, and so on to the last one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import pytest

from aiodelay import Context, Scheduler
from aiodelay.backends.redis.connection.pool import disconnect_all
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import token_for
from aiodelay.core.values import (
    After,
    Cancel,
    Command,
    Demand,
    Done,
    Envelope,
    Put,
    Query,
    Renewal,
    SettleOutcome,
    Stored,
)
from aiodelay.ports import Work
from aiodelay.redis import RedisStore
from tests.faults.test_cancellation_sweep import MOST, STRIKES, Strike, Striker
from tests.support.servers import RedisServer, redis_products, start
from tests.support.slow_stores import PATIENT
from tests.support.waiting import until_sync

LANE = "work"
LEASE_MS = 15_000


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


class World:
    """A namespace of its own, and one worker."""

    def __init__(self, server: RedisServer, number: int) -> None:
        self.store = RedisStore(f"{server.url}?connections=2&{PATIENT}", namespace=f"n{number}")

    async def strike(self, striker: Striker, call: Callable[[], Awaitable[object]]) -> None:
        """Make a call that is cancelled on its way."""

        async def operate() -> None:
            await call()

        if self.store._opened is not None:  # it has to connect first, and to name itself
            pool = self.store._opened.client._pool
            await disconnect_all((*pool._idle, *pool._lent))
        tasks = asyncio.all_tasks()
        task = asyncio.create_task(striker.run(operate()), name="operation")
        await asyncio.wait([task])
        assert asyncio.all_tasks() <= tasks, "tasks are left"
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


Play = Callable[[World, Striker], Awaitable[None]]


def sweep(server: RedisServer, play: Play, *, least: int) -> None:
    """Play in one world after another until nothing is struck any more."""
    numbers = count()
    complaints: list[object] = []

    async def one(strike: Strike, at: int) -> bool:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        striker = Striker(at, strike)
        try:
            async with asyncio.timeout(120):
                await play(World(server, next(numbers)), striker)
        except BaseException as error:
            error.add_note(f"cancelled at suspension {at}, {strike}")
            raise
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return striker.has_struck

    for strike in STRIKES:
        struck = 0
        while asyncio.run(one(strike, struck + 1)):
            struck += 1
            assert struck < MOST
        assert struck >= least
    assert complaints == []
    until_sync(lambda: clients_left(server) == 1, "no connection is left but the one that asks")


def clients_left(server: RedisServer) -> int:
    return server.command("CLIENT", "LIST", "TYPE", "normal").count(b" addr=")


def put(message_id: str = "m") -> Put:
    return Put(new_op(), Envelope(message_id, LANE), After(0))


async def ids(store: RedisStore) -> list[str]:
    return [each.record.id for each in await store.search(Query())]


async def end_all(store: RedisStore, work: Work) -> set[str]:
    """Deliver what is there; return what it was."""
    ended: set[str] = set()
    while claims := (await work.claim({LANE: Demand(9)}, request=new_op().hex(), lease_ms=LEASE_MS)).claims:
        done = [Done(each.record.id, each.record.revision, each.token) for each in claims]
        assert set(await work.settle(done)) == {SettleOutcome.SETTLED}
        ended |= {each.record.id for each in claims}
    assert await ids(store) == []
    return ended


@pytest.mark.parametrize("kind", ["put", "cancel"])
def test_f5_a_command_that_was_cancelled_is_repeated_with_one_effect(server: RedisServer, kind: str) -> None:
    async def play(world: World, striker: Striker) -> None:
        async with world.store as store, store.work("w", [LANE]) as work:
            if kind == "cancel":
                await store.apply([put()])
            command: Command = put() if kind == "put" else Cancel(new_op(), "m")
            await world.strike(striker, lambda: store.apply([command]))
            assert set(await ids(store)) <= {"m"}
            (outcome,) = await store.apply([command])
            assert isinstance(outcome, Stored)
            assert outcome.answer == ("stored" if kind == "put" else "cancelled")
            assert await end_all(store, work) == ({"m"} if kind == "put" else set())

    sweep(server, play, least=3)


def test_f5_a_claim_that_was_cancelled_is_repeated(server: RedisServer) -> None:
    async def play(world: World, striker: Striker) -> None:
        async with world.store as store, store.work("w", [LANE]) as work:
            await store.apply([put("a"), put("b")])
            await world.strike(striker, lambda: work.claim({LANE: Demand(9)}, request="r", lease_ms=LEASE_MS))
            claims = (await work.claim({LANE: Demand(9)}, request="r", lease_ms=LEASE_MS)).claims
            assert [each.record.id for each in claims] == ["a", "b"]
            done = [Done(each.record.id, each.record.revision, each.token) for each in claims]
            assert set(await work.settle(done)) == {SettleOutcome.SETTLED}

    sweep(server, play, least=3)


@pytest.mark.parametrize("kind", ["settle", "renew"])
def test_f5_what_ends_or_prolongs_a_claim_is_repeated(server: RedisServer, kind: str) -> None:
    async def play(world: World, striker: Striker) -> None:
        async with world.store as store, store.work("w", [LANE]) as work:
            await store.apply([put()])
            (one,) = (await work.claim({LANE: Demand(9)}, request="r", lease_ms=LEASE_MS)).claims
            done = Done("m", one.record.revision, one.token)
            renewal = Renewal("m", one.record.revision, one.token, token_for(store.now_ms() + 2 * LEASE_MS, 1))
            if kind == "settle":
                await world.strike(striker, lambda: work.settle([done]))
                assert set(await work.settle([done])) <= {SettleOutcome.SETTLED, SettleOutcome.GONE}
            else:
                await world.strike(striker, lambda: work.renew([renewal]))
                assert [str(each) for each in await work.renew([renewal])] == ["renewed"]
                assert await work.settle([Done("m", one.record.revision, renewal.to)]) == [SettleOutcome.SETTLED]
            assert await end_all(store, work) == set()

    sweep(server, play, least=3)


@pytest.mark.parametrize("kind", ["search", "counts", "tidy", "dead_letters"])
def test_f5_looking_and_tidying(server: RedisServer, kind: str) -> None:
    async def play(world: World, striker: Striker) -> None:
        async with world.store as store, store.work("w", [LANE]) as work:
            await store.apply([put()])
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "search": lambda: store.search(Query()),
                "counts": store.counts,
                "tidy": lambda: work.tidy([LANE], limit=10),
                "dead_letters": store.dead_letters,
            }
            await world.strike(striker, calls[kind])
            await calls[kind]()
            assert await end_all(store, work) == {"m"}

    sweep(server, play, least=3)


def test_f5_opening_and_closing(server: RedisServer) -> None:
    async def play(world: World, striker: Striker) -> None:
        async def open_and_close() -> None:
            async with world.store as store, store.work("w", [LANE]) as work:
                await store.apply([put()])
                await end_all(store, work)

        await world.strike(striker, open_and_close)
        async with world.store as store, store.work("w", [LANE]) as work:
            await store.apply([put("again")])
            assert "again" in {each.record.id for each in await store.search(Query())}
            await work.tidy([LANE], limit=10)

    sweep(server, play, least=10)


def test_f5_a_whole_life_of_a_scheduler(server: RedisServer) -> None:
    """What was promised is delivered, by this scheduler or the next; nothing else is, and no lease is left."""

    async def play(world: World, striker: Striker) -> None:
        tried: set[str] = set()
        stored: set[str] = set()
        ended: Counter[str] = Counter()

        def scheduler() -> Scheduler:
            scheduler = Scheduler(world.store, drain="1m")

            @scheduler.handler(name=LANE)
            async def work(payload: bytes, context: Context) -> None:
                await asyncio.sleep(0.005)  # a run that takes real time
                ended[context.id] += 1

            return scheduler

        async def live() -> None:
            async with scheduler() as own:
                for number in range(3):
                    tried.add(f"m{number}")
                    await own.schedule(b"", to=f"handler:{LANE}", id=f"m{number}", delay=f"{10 * number}ms")
                    stored.add(f"m{number}")
                await asyncio.sleep(0.015)  # two of three come due

        await world.strike(striker, live)
        async with world.store as store:  # without a dispatcher, which would claim at once
            in_flight = [each for each in await store.search(Query()) if each.state == "in_flight"]
            assert not in_flight, "a lease is left"
        async with scheduler() as heir:
            await heir.run_until_idle()
        assert stored <= ended.keys() <= tried
        assert set(ended.values()) <= {1}

    sweep(server, play, least=10)
