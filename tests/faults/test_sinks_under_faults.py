"""F34, F35: a sink is slow, down, or always broken by one message. Other handlers and sinks are not affected."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from aiodelay import Context, Message, Retry, Scheduler
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore
from tests.support.sinks import BadSink

LEASE_S = 15
MOST_LATE_S = 1


class Scene:
    """A bad sink, a good sink and a handler on one scheduler; each is sent a message a second for two minutes."""

    SECONDS = 120

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.bad, self.good = BadSink(), BadSink()
        self.good.name = "good"
        self.store = FaultyStore(MemoryStore(clock=clock))
        self.scheduler = Scheduler(
            self.store,
            sinks=[self.bad, self.good],
            clock=clock,
            retry=Retry(attempts=3, first="1s", factor=1, jitter=0),
        )
        self.handled: dict[str, float] = {}

        @self.scheduler.handler(name="work")
        async def work(payload: bytes, context: Context) -> None:
            self.handled[context.id] = context.lateness.total_seconds()

    async def fill(self) -> None:
        """Schedule everything."""
        await self.scheduler.schedule_many(
            Message(b"", delay=f"{second}s", to=to, id=f"{to.split(':')[0]}-{second}")
            for second in range(self.SECONDS)
            for to in ("bad:x", "good:x", "handler:work")
        )

    def assert_others_were_on_time(self) -> None:
        """The good sink and the handler got everything, once, at its time (L3)."""
        assert len(self.handled) == len(self.good.taken) == self.SECONDS
        lateness = [*self.handled.values(), *(each.lateness_ms / 1000 for each in self.good.taken)]
        assert max(lateness) <= MOST_LATE_S


@pytest.fixture
def scene(clock: VirtualClock) -> Scene:
    return Scene(clock)


@pytest.mark.asyncio
async def test_f34_a_slow_sink_holds_up_nobody_and_its_leases_are_renewed(scene: Scene) -> None:
    scene.bad.takes_s = 4 * LEASE_S
    async with scene.scheduler as scheduler:
        await scene.fill()
        await asyncio.sleep(scene.SECONDS + 1)
        scene.assert_others_were_on_time()
        assert scene.store.calls["renew"] > 0
        most = scene.bad.limits.messages
        counts = await scheduler.counts()
        assert counts["bad"].in_flight <= most
        await scheduler.run_until_idle()
    taken = Counter(each.envelope.id for each in scene.bad.taken)
    assert len(taken) == scene.SECONDS
    assert set(taken.values()) == {1}, "a lease that is renewed brings no duplicate"
    assert {each.attempt for each in scene.bad.taken} == {1}


@pytest.mark.asyncio
async def test_f34_a_sink_that_is_down_costs_no_attempt_and_holds_up_nobody(scene: Scene) -> None:
    scene.bad.is_down = True
    async with scene.scheduler as scheduler:
        await scene.fill()
        await asyncio.sleep(scene.SECONDS + 1)
        scene.assert_others_were_on_time()
        assert scene.bad.sends < 40, "it is asked less and less often"
        assert not scene.bad.taken
        scene.bad.is_down = False
        await asyncio.sleep(40)
        assert len(scene.bad.taken) == scene.SECONDS
        assert {each.attempt for each in scene.bad.taken} == {1}
        order = [each.due_ms for each in scene.bad.taken]
        assert order == sorted(order), "oldest first after an outage"
        assert [letter async for letter in scheduler.dead_letters()] == []


@pytest.mark.parametrize("how", ["raises", "refuses"])
@pytest.mark.asyncio
async def test_f35_a_message_that_a_sink_can_never_take_ends_as_a_dead_letter_alone(scene: Scene, how: str) -> None:
    if how == "raises":
        scene.bad.breaks_at = "bad-7"
    else:
        scene.bad.refuses = "bad-7"
    async with scene.scheduler as scheduler:
        await scene.fill()
        await scheduler.schedule_many(Message(b"", delay="7s", to="bad:x", id=f"beside-{i}") for i in range(10))
        await asyncio.sleep(scene.SECONDS + 1)
        scene.assert_others_were_on_time()
        letters = [letter async for letter in scheduler.dead_letters()]
    assert [(letter.record.id, letter.reason) for letter in letters] == [("bad-7", "attempts_exhausted")]
    assert letters[0].record.attempt == 3
    assert ("ValueError" if how == "raises" else "not this one") in (letters[0].record.last_error or "")
    taken = Counter(each.envelope.id for each in scene.bad.taken)
    assert len(taken) == scene.SECONDS - 1 + 10
    assert set(taken.values()) == {1}
    assert max(each.lateness_ms for each in scene.bad.taken) <= MOST_LATE_S * 1_000, "its neighbours do not wait (L5)"


@pytest.mark.asyncio
async def test_f34_a_slow_sink_is_given_what_it_asked_for_and_no_more(scene: Scene) -> None:
    """Back-pressure: what it did not ask for waits in the store, where it can still be cancelled."""
    scene.bad.takes_s = 3_600
    async with scene.scheduler as scheduler:
        await scheduler.schedule_many(Message(b"", delay="1s", to="bad:x", id=f"m-{i}") for i in range(100))
        await asyncio.sleep(10)
        counts = await scheduler.counts()
        assert (counts["bad"].in_flight, counts["bad"].overdue) == (20, 80)
        cancelled = [await scheduler.cancel(f"m-{i}") for i in range(100)]
        assert Counter(cancelled) == {"cancelled": 80, "in_flight": 20}
        await scheduler.run_until_idle()
    assert len(scene.bad.taken) == 20
