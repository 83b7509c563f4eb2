"""F34, F35 on real servers: a sink is slow, down, or broken by one message. No other sink waits for it.

How late the others are, test_sinks_under_faults.py asserts on virtual time, where no busy machine adds to it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from aiodelay import Message, Retry, Scheduler
from aiodelay.core.values import Delivery, SendOutcome
from aiodelay.redis import RedisStore
from tests.support.long_leases import LongLeases
from tests.support.servers import RedisServer
from tests.support.sinks import BadSink
from tests.support.slow_stores import PATIENT
from tests.support.waiting import until

N = 40
BELIEVED_MS = 1_000
"""The leases for the scheduler. Those of the store last 15 s, so that no busy machine lets one lapse."""


class SlowSink(BadSink):
    """Ends no send before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.released.set()

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await self.released.wait()
        return await super().send(deliveries)


class Scene:
    """A bad sink, a good one and a handler on one server; each is sent 40 messages in a second."""

    def __init__(self, server: RedisServer) -> None:
        self.bad, self.good = SlowSink(), BadSink()
        self.good.name = "good"
        retry = Retry(attempts=3, first="50ms", factor=1, jitter=0)
        self.store = LongLeases(RedisStore(f"{server.url}?{PATIENT}"), BELIEVED_MS)
        self.scheduler = Scheduler(self.store, sinks=[self.bad, self.good], retry=retry)
        self.scheduler._options = msgspec.structs.replace(self.scheduler._options, lease_ms=BELIEVED_MS)
        self.handled = 0

        @self.scheduler.handler(name="work")
        async def work(payload: bytes) -> None:
            self.handled += 1

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
        """The good sink and the handler get everything, once (L3)."""
        await until(lambda: self.handled >= N and len(self.good.taken) >= N, "the others have got everything")
        assert (self.handled, len(self.good.taken)) == (N, N)


def test_f34_a_slow_sink_holds_up_nobody_and_its_leases_are_renewed(server: RedisServer) -> None:
    async def play() -> None:
        scene = Scene(server)
        scene.bad.released.clear()
        scene.bad.takes_s = 2 * BELIEVED_MS / 1000
        async with scene.filled() as scheduler:
            await scene.others_are_served()
            assert scene.bad.taken == []
            scene.bad.released.set()
            await scheduler.run_until_idle()
        assert scene.store.outcomes["renew renewed"] >= scene.bad.limits.messages, "a batch was on its way for long"
        assert scene.store.outcomes.keys() == {"settle settled", "renew renewed"}, scene.store.outcomes
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
