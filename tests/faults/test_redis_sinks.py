"""F34, F35 on real servers: a sink that is slow, down, or breaks at one message; nobody else feels it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from aiodelay import Context, Message, Retry, Scheduler
from tests.support.servers import RedisServer
from tests.support.sinks import BadSink

N = 40
LEASE_MS = 600
MOST_LATE_S = 3.0
"""Of those who are not to feel anything; with what a busy machine adds."""


class Scene:
    """A bad sink, a good one and a handler on one server; each is sent 40 messages in a second."""

    def __init__(self, server: RedisServer) -> None:
        self.bad, self.good = BadSink(), BadSink()
        self.good.name = "good"
        retry = Retry(attempts=3, first="50ms", factor=1, jitter=0)
        self.scheduler = Scheduler(server.url, sinks=[self.bad, self.good], retry=retry)
        self.scheduler._options = msgspec.structs.replace(self.scheduler._options, lease_ms=LEASE_MS)
        self.handled: list[float] = []

        @self.scheduler.handler(name="work")
        async def work(payload: bytes, context: Context) -> None:
            self.handled.append(context.lateness.total_seconds())

    @asynccontextmanager
    async def filled(self) -> AsyncIterator[Scheduler]:
        async with self.scheduler as scheduler:
            await scheduler.schedule_many(
                Message(b"", delay=f"{i * 25}ms", to=to, id=f"{to.split(':')[0]}-{i}")
                for i in range(N)
                for to in ("bad:x", "good:x", "handler:work")
            )
            yield scheduler

    async def others_are_served(self) -> None:
        """The good sink and the handler get everything, once, at its time (L3)."""
        async with asyncio.timeout(20):
            while len(self.handled) < N or len(self.good.taken) < N:  # noqa: ASYNC110 - nobody says when
                await asyncio.sleep(0.02)
        assert (len(self.handled), len(self.good.taken)) == (N, N)
        assert max(*self.handled, *(each.lateness_ms / 1000 for each in self.good.taken)) <= MOST_LATE_S


def test_f34_a_slow_sink_holds_up_nobody_and_its_leases_are_renewed(server: RedisServer) -> None:
    async def play() -> None:
        scene = Scene(server)
        scene.bad.takes_s = 4 * LEASE_MS / 1000
        async with scene.filled() as scheduler:
            await scene.others_are_served()
            assert len(scene.bad.taken) < N, "it is slow"
            await scheduler.run_until_idle()
        assert Counter(each.envelope.id for each in scene.bad.taken) == Counter(f"bad-{i}" for i in range(N))
        assert {each.attempt for each in scene.bad.taken} == {1}

    asyncio.run(play())


def test_f34_a_sink_that_is_down_costs_no_attempt_and_holds_up_nobody(server: RedisServer) -> None:
    async def play() -> None:
        scene = Scene(server)
        scene.bad.is_down = True
        async with scene.filled() as scheduler:
            await scene.others_are_served()
            assert scene.bad.taken == []
            scene.bad.is_down = False
            await scheduler.run_until_idle()
            assert [letter async for letter in scheduler.dead_letters()] == []
        assert Counter(each.envelope.id for each in scene.bad.taken) == Counter(f"bad-{i}" for i in range(N))
        assert {each.attempt for each in scene.bad.taken} == {1}

    asyncio.run(play())


@pytest.mark.parametrize("how", ["raises", "refuses"])
def test_f35_a_message_that_a_sink_can_never_take_ends_as_a_dead_letter_alone(server: RedisServer, how: str) -> None:
    async def play() -> None:
        scene = Scene(server)
        if how == "raises":
            scene.bad.breaks_at = "bad-7"
        else:
            scene.bad.refuses = "bad-7"
        async with scene.filled() as scheduler:
            await scene.others_are_served()
            await scheduler.run_until_idle()
            letters = [letter async for letter in scheduler.dead_letters()]
        assert [(each.record.id, each.reason, each.record.attempt) for each in letters] == [
            ("bad-7", "attempts_exhausted", 3)
        ]
        assert Counter(each.envelope.id for each in scene.bad.taken) == Counter(f"bad-{i}" for i in range(N) if i != 7)

    asyncio.run(play())
