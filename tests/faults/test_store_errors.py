"""L4, S2: a store fails a thousand times, in allowed and forbidden ways, and the dispatcher survives."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from aiodelay import Context, OutcomeUnknownError, Scheduler, StoreUnavailableError
from aiodelay.core.values import Query
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import Fault, FaultyStore, Injection, Step

pytestmark = pytest.mark.asyncio

ERRORS = 1_000
STEPS: Sequence[Step] = ("apply", "claim", "settle", "renew", "tidy")
MAY: Sequence[Fault] = ("unavailable", "request_lost", "reply_lost")
LOOPS = {"aiodelay dispatcher", "aiodelay group commit", "aiodelay housekeeping", "aiodelay lease book"}
ALL = 1_000_000


class Scene:
    """A scheduler on a store that fails at random, what callers were told, and what the handler saw."""

    def __init__(self, clock: VirtualClock, seed: int = 0) -> None:
        random.seed(seed)  # the pauses between attempts
        self.clock = clock
        self.memory = MemoryStore(clock=clock, journal=ALL)
        self.store = FaultyStore(self.memory, seed=seed)
        self.scheduler = Scheduler(self.store, clock=clock)
        self.injected: list[Injection] = []
        self.stored: set[str] = set()
        self.doubtful: set[str] = set()
        self.refused: set[str] = set()
        self.runs: Counter[str] = Counter()
        takes = random.Random(seed)

        @self.scheduler.handler(name="work", concurrency=100)
        async def work(payload: bytes, context: Context) -> None:
            self.runs[context.id] += 1
            await asyncio.sleep(takes.choice((0, 0.1, 0.1, 20)))  # 20 s: longer than a lease, so it is renewed

    @property
    def hits(self) -> int:
        return sum(each.hits for each in self.injected)

    def inject(self, faults: Sequence[Fault], probability: float) -> None:
        """Have each call of any step fail in one of these ways, with this probability each."""
        self.injected = [self.store.inject(fault, *STEPS, times=None, probability=probability) for fault in faults]

    async def schedule(self, message_id: str, delay_s: float = 1) -> None:
        try:
            await self.scheduler.schedule(b"", to="handler:work", delay=f"{delay_s:.3f}s", id=message_id)
        except OutcomeUnknownError:
            self.doubtful.add(message_id)
        except StoreUnavailableError:
            self.refused.add(message_id)
        else:
            self.stored.add(message_id)

    async def schedule_until(self, errors: int) -> None:
        """Schedule ten messages a second until the store has failed so often."""
        chance, number = random.Random(1), 0
        async with asyncio.TaskGroup() as tasks:
            while self.hits < errors:
                tasks.create_task(self.schedule(f"m{number}", chance.uniform(0, 10)))
                number += 1
                await asyncio.sleep(0.1)

    async def come_to_rest(self) -> None:
        """End all faults, and let pass the longest lease, the longest run and the longest pause."""
        self.store.heal()
        await asyncio.sleep(120)

    async def lapses(self) -> Counter[str]:
        return Counter(each.id for each in await self.memory.journal(limit=ALL) if each.event == "lapsed")

    async def assert_well(self) -> None:
        """Nothing is lost, nothing stuck, every loop runs, and new work is done on time."""
        assert self.scheduler._running is not None
        assert self.scheduler._running.subscriptions.in_flight == 0
        assert {task.get_name() for task in asyncio.all_tasks()} >= LOOPS
        assert not await self.memory.search(Query(limit=ALL))
        assert self.runs.keys() >= self.stored
        assert not self.runs.keys() & self.refused
        assert self.runs.keys() <= self.stored | self.doubtful
        tidied = self.store.calls["tidy"]
        await self.schedule("afterwards", 10)
        await asyncio.sleep(9)
        assert "afterwards" not in self.runs
        await asyncio.sleep(1.001)
        assert self.runs["afterwards"] == 1
        await asyncio.sleep(30)
        assert self.store.calls["tidy"] > tidied
        assert self.scheduler._running.subscriptions.in_flight == 0


@pytest.mark.parametrize("seed", range(4))
async def test_l4_a_thousand_random_store_errors_leave_the_dispatcher_alive(clock: VirtualClock, seed: int) -> None:
    scene = Scene(clock, seed)
    scene.inject(MAY, 0.12)
    async with scene.scheduler:
        await scene.schedule_until(ERRORS)
        assert set(scene.store.calls) >= set(STEPS)
        await scene.come_to_rest()
        await scene.assert_well()
        lapses = await scene.lapses()
    assert scene.hits >= ERRORS
    assert len(scene.stored) > 400
    twice = {message_id: runs - 1 for message_id, runs in scene.runs.items() if runs > 1}
    assert all(runs <= lapses[message_id] for message_id, runs in twice.items()), "twice, and no lease lapsed"


async def test_l4_a_store_that_fails_more_often_than_not_is_outlived(clock: VirtualClock) -> None:
    scene = Scene(clock)
    scene.inject(MAY, 0.3)  # two of three calls fail
    async with scene.scheduler:
        await scene.schedule_until(ERRORS)
        await scene.come_to_rest()
        await scene.assert_well()
        lapses = await scene.lapses()
    assert all(runs - 1 <= lapses[message_id] for message_id, runs in scene.runs.items())


@pytest.mark.parametrize("step", STEPS)
async def test_l4_a_store_that_raises_what_it_may_not_stops_no_loop(
    clock: VirtualClock, step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(clock)
    async with scene.scheduler:
        injected = scene.store.inject("crash", step, times=4)
        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(scene.schedule(f"m{number}"))
        await asyncio.sleep(120)
        assert injected.hits == 4
        await scene.assert_well()
    assert len(scene.stored) == 101
    assert "InjectedBugError" in caplog.text
    assert set(scene.runs.values()) == {1}


async def test_l4_random_bugs_of_a_store_among_its_errors(clock: VirtualClock) -> None:
    scene = Scene(clock, seed=7)
    scene.inject((*MAY, "crash", "repeat"), 0.1)
    async with scene.scheduler:
        await scene.schedule_until(ERRORS)
        await scene.come_to_rest()
        await scene.assert_well()
        lapses = await scene.lapses()
    # After a bug, the loop does not know which claim to repeat: those leases lapse.
    assert all(runs - 1 <= lapses[message_id] for message_id, runs in scene.runs.items())


@pytest.mark.parametrize("fault", MAY)
async def test_a_claim_whose_reply_was_lost_is_repeated_and_nothing_lapses(clock: VirtualClock, fault: Fault) -> None:
    scene = Scene(clock)
    async with scene.scheduler:
        await asyncio.gather(*(scene.schedule(f"m{number}", 5) for number in range(60)))
        injected = scene.store.inject(fault, "claim", times=3)
        await asyncio.sleep(6)
        assert injected.hits == 3
        assert sorted(scene.runs.values()) == [1] * 60, "no later than the pauses, and each once"
        await scene.come_to_rest()
        await scene.assert_well()
    assert not await scene.lapses()


async def test_a_claim_that_got_no_answer_before_closing_is_claimed_again_by_the_next(clock: VirtualClock) -> None:
    scene = Scene(clock)
    async with scene.scheduler:
        await scene.schedule("m")
        scene.store.inject("reply_lost", "claim", times=None)
        await asyncio.sleep(2)
    assert not scene.runs
    scene.store.heal()
    async with scene.scheduler:
        await scene.come_to_rest()
        await scene.assert_well()
    assert scene.runs["m"] == 1
