"""F15, F16, F17: the server's clock steps, or a client's clock is wrong. Due times and leases use the server's."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from aiodelay import Context, Scheduler
from aiodelay.backends.redis.connection.checks import server_time_ms
from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.store import base
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import RIGHTING_MS
from aiodelay.core.values import After, Claim, Demand, Done, Envelope, Put, SettleOutcome, State
from aiodelay.ports import Work
from aiodelay.redis import RedisStore
from tests.support.server_clock import ServerClock, SteppedClock, serving_with_clock
from tests.support.servers import redis_programs
from tests.support.slow_stores import PATIENT
from tests.support.waiting import until

HOUR_S = 3_600
STALL_MS = 60_000
"""More than any process stands still between two looks at a clock, and far less than an hour."""
LANE = "work"
requests = count(1)


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerClock]:
    with serving_with_clock(request.param.program, tmp_path) as server:
        yield server


def in_loop(test: Callable[[ServerClock], Awaitable[None]]) -> Callable[[ServerClock], None]:
    @wraps(test)
    def run(server: ServerClock) -> None:
        async def play() -> None:
            await test(server)

        asyncio.run(play())

    return run


def store_on(server: ServerClock) -> RedisStore:
    return RedisStore(f"{server.server.url}?{PATIENT}", namespace="faults", clock=server.clock)


async def put(store: RedisStore, message_id: str, due_ms: int) -> None:
    await store.apply([Put(new_op(), Envelope(message_id, LANE, payload=b"p"), After(due_ms))])


async def claim(work: Work, lease_ms: int = 15_000) -> list[Claim]:
    claimed = await work.claim({LANE: Demand(10)}, request=f"r{next(requests)}", lease_ms=lease_ms)
    return list(claimed.claims)


def ids(claims: list[Claim]) -> list[str]:
    return [each.record.id for each in claims]


def done(one: Claim) -> Done:
    return Done(one.record.id, one.record.revision, one.token)


@in_loop
async def test_f15_an_hour_back_neither_delivers_early_nor_keeps_a_lease(server: ServerClock) -> None:
    async with store_on(server) as store, store.work("a", [LANE]) as a, store.work("b", [LANE]) as b:
        await put(store, "held", 0)
        (held,) = await claim(a)
        await put(store, "soon", 200)
        server.step(-HOUR_S)
        await asyncio.sleep(0.3)  # longer than "soon" is ahead
        assert await claim(b) == [], "by the server's clock nothing is due"
        server.step(RIGHTING_MS / 1000)
        assert await claim(b) == []
        snapshot = await store.get("held")
        assert snapshot is not None
        assert snapshot.state is State.SCHEDULED, "its lease ended further ahead than any may, and nobody set it right"
        assert list(await a.settle([done(held)])) == [SettleOutcome.GONE]
        server.step(HOUR_S)
        assert ids(await claim(b)) == ["held", "soon"]


@in_loop
async def test_f15_an_hour_forward_makes_due_and_ends_leases(server: ServerClock) -> None:
    async with store_on(server) as store, store.work("a", [LANE]) as a, store.work("b", [LANE]) as b:
        await put(store, "held", 0)
        await put(store, "later", HOUR_S * 1000 - 1)
        await put(store, "much later", HOUR_S * 1000 + 60_000)
        (held,) = await claim(a)
        assert await claim(b) == []
        server.step(HOUR_S)
        assert list(await a.settle([done(held)])) == [SettleOutcome.SETTLED], "nobody else has taken it"
        assert ids(await claim(b)) == ["later"]


class Runs:
    """A scheduler with one handler that takes its time, and when it ran by the server's clock."""

    def __init__(self, server: ServerClock, takes_s: float = 0, **settings: Any) -> None:  # noqa: ANN401
        self.scheduler = Scheduler(store_on(server), **settings)
        self.started: list[str] = []
        self.ended: list[str] = []

        @self.scheduler.handler(name=LANE)
        async def work(payload: bytes, context: Context) -> None:
            assert server.now_ms() >= int(context.delivery_id.rsplit("/", 1)[1]), "early (S1)"
            self.started.append(context.id)
            await asyncio.sleep(takes_s)  # a run that takes real time
            self.ended.append(context.id)

    async def until(self, runs: int) -> None:
        await until(lambda: len(self.ended) >= runs, f"{runs} runs have ended")


@in_loop
async def test_f17_a_sleeping_dispatcher_notices_a_step_within_the_safety_poll(server: ServerClock) -> None:
    runs = Runs(server)
    async with runs.scheduler as scheduler:
        await scheduler.schedule(b"", to=f"handler:{LANE}", delay="30m", id="m")
        await asyncio.sleep(0.2)  # the dispatcher goes to sleep
        server.step(HOUR_S)
        await runs.until(1)
        await scheduler.run_until_idle()
        server.step(-HOUR_S)
        await scheduler.schedule(b"", to=f"handler:{LANE}", delay="100ms", id="n")
        await runs.until(2)
        await scheduler.run_until_idle()
    assert runs.ended == ["m", "n"]


@pytest.mark.parametrize(
    ("step_s", "takes_s", "most_runs"),
    [(HOUR_S, 2, 2), (-HOUR_S, 7, 1)],  # the second: longer than it takes to renew a lease
    ids=["forwards", "backwards"],
)
def test_f15_a_step_forwards_costs_at_most_one_more_run_each_and_one_backwards_none(
    server: ServerClock, step_s: int, takes_s: int, most_runs: int
) -> None:
    async def play() -> None:
        runs = Runs(server, takes_s=takes_s)
        async with runs.scheduler as scheduler:
            for number in range(5):
                await scheduler.schedule(b"", to=f"handler:{LANE}", delay="0s", id=f"m{number}")
            await until(lambda: len(runs.started) == 5, "all run")
            server.step(step_s)
            await scheduler.schedule(b"", to=f"handler:{LANE}", delay="0s", id="wakes it")
            await runs.until(6)
            async with asyncio.timeout(60):
                await scheduler.run_until_idle()
            assert await scheduler.counts() == {}
        assert set(runs.ended) == {"m0", "m1", "m2", "m3", "m4", "wakes it"}
        assert max(runs.started.count(each) for each in runs.started) <= most_runs

    asyncio.run(play())


@pytest.mark.parametrize("wrong_s", [HOUR_S, -HOUR_S], ids=["fast", "slow"])
def test_f16_a_client_whose_clock_is_wrong_goes_by_that_of_the_server(server: ServerClock, wrong_s: int) -> None:
    async def play() -> None:
        runs = Runs(server, clock=SteppedClock(wrong_s))
        async with runs.scheduler as scheduler:
            scheduled = await scheduler.schedule(b"", to=f"handler:{LANE}", delay="1s", id="m")
            assert abs(scheduled.due.timestamp() * 1000 - server.now_ms() - 1000) < STALL_MS
            assert runs.started == []
            await runs.until(1)

    asyncio.run(play())


def test_f15_a_server_whose_clock_is_off_is_told_of(
    server: ServerClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_late(client: Client) -> float:
        server_ms = await server_time_ms(client)
        time.sleep(0.6)  # this process stands still  # noqa: ASYNC251
        return server_ms

    async def play() -> None:
        with monkeypatch.context() as late:
            late.setattr(base, "server_time_ms", read_late)
            async with store_on(server):
                assert caplog.messages == []
        server.step(HOUR_S)
        async with store_on(server) as store:
            assert abs(store.now_ms() - server.now_ms()) < STALL_MS

    asyncio.run(play())
    if server.clock is None:
        (told,) = caplog.messages
        found = re.search(r"the server's clock is (\d+) ms ahead of the local clock", told)
        assert found is not None, told
        assert HOUR_S * 1000 - STALL_MS < int(found[1]) <= HOUR_S * 1000 + 1
