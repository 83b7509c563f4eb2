"""Negative controls: the checker finds each build of aiodelay that lacks one step, and finds nothing in the real one.

All builds do the same work: three processes on one store, on virtual time, under faults that a seed chooses.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aiodelay import Context, Retry, Scheduler
from aiodelay.errors import AiodelayError
from aiodelay.memory import MemoryStore
from aiodelay.testing import FaultyStore, VirtualClock
from aiodelay.testing import history as h
from tests.support.bad_builds import BUILDS, BadBuild

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

LIMITS = h.Limits(
    lateness_ms=300_000,
    p99_ms=300_000,
    lane_lateness_ms={"rare": 75_000},
    poison={"poison": "attempts_exhausted"},
    lapses=False,
    in_order={"work", "rare", "takeover"},
)
"""A flood of one lane lasts for about two minutes, and a process stands still for 40 s."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


NAMES = ("p", "q", "dying")


class Work:
    """The work of three processes on one store. One of them dies, and another one stands still for a while.

    Args:
        path: The file of the history.
        clock: The virtual clock of the loop.
        seed: Chooses messages, commands and faults.
    """

    def __init__(self, path: Path, clock: VirtualClock, seed: int) -> None:
        self.path, self.clock, self.chance = path, clock, random.Random(seed)
        self.memory, self.p_stands_still = MemoryStore(clock=clock), False
        self.stores = {name: FaultyStore(self.memory, seed=seed) for name in NAMES}
        self.histories = {name: h.History(path, name, clock=clock) for name in NAMES}
        self.schedulers = {name: self._scheduler(name) for name in NAMES}

    def _scheduler(self, name: str) -> Scheduler:
        retry = Retry(attempts=3, first="2s", factor=1, jitter=0)
        drain = "1s" if name == "dying" else "30s"
        scheduler = Scheduler(self.stores[name], clock=self.clock, retry=retry, claim_ahead=False, drain=drain)

        @scheduler.handler(name="work", concurrency=4)
        async def work(payload: bytes, context: Context) -> None:
            await asyncio.sleep(float(context.headers.get("s", b"0")))
            if context.attempt <= int(context.headers.get("fails", b"0")):
                raise RuntimeError("as told")

        @scheduler.handler(name="rare", concurrency=4)
        async def rare(payload: bytes) -> None: ...

        @scheduler.handler(name="takeover", concurrency=4)
        async def takeover(payload: bytes) -> None:
            """Run for so long in q that p settles the message in the meantime, as a zombie does."""
            await asyncio.sleep(60 if self.p_stands_still else 1)

        h.record(scheduler, self.histories[name])
        return scheduler

    async def done(self) -> h.Report:
        """Do the work, and check the history."""
        history = self.histories["p"]
        history.write(h.count_resources("baseline"))
        async with self.schedulers["p"] as p, self.schedulers["q"] as q:
            async with self.schedulers["dying"]:
                await self._commands(p)
                await self._occupy_all(p, 3, "dies")
                self.stores["dying"].inject("hang", times=None)
                self.histories["dying"].write(h.Process(what="killed"))
            self.histories["dying"].write(h.Process(what="ended", code=-9))
            await asyncio.gather(self._faults(p), self._stream(p), self._stream(q), self._quiet(p))
        history.write(h.count_resources("end"))
        history.write(await h.content_of(self.memory))
        for each in self.histories.values():
            each.close()
        return h.check_file(self.path, LIMITS)

    async def _commands(self, p: Scheduler) -> None:
        """Give each kind of command once, so that each build has its chance."""
        self.stores["p"].inject("reply_lost", "apply")
        await self._put(p, "delivered before its command is repeated", 0, "rare")
        for i in range(8):
            await self._put(p, f"late first {i}", 30 - i, "work")
            await self._put(p, f"each ms {i}", 20 + i / 1000, "rare")
        for name in ("cancelled", "replaced"):
            await self._put(p, name, 5, "work")
        await p.cancel("cancelled")
        await self._put(p, "replaced", 5, "work")
        for i in range(12):
            await self._put(p, f"replaced while it runs {i}", 0, "work", s=3)
        for i in range(8):
            await self._put(p, f"long {i}", 1, "work", s=45)
        await self._put(p, "poison", 2, "work", fails=9)
        await asyncio.sleep(2)
        for i in range(12):
            await self._put(p, f"replaced while it runs {i}", 60, "work")
        for i in range(60):  # a flood of one lane, and a message of another
            await self._put(p, f"flood {i}", 0, "work", s=15)
        await self._put(p, "rare", 1, "rare")

    async def _stream(self, scheduler: Scheduler) -> None:
        for number in range(60):
            await asyncio.sleep(self.chance.choice((0.001, 0.5, 2)))
            await self._command(scheduler, f"shared {self.chance.randrange(12)}", number)

    async def _command(self, scheduler: Scheduler, message_id: str, number: int) -> None:
        chosen = self.chance.random()
        with suppress(AiodelayError):
            if chosen < 0.6:
                lane = self.chance.choice(("work", "rare"))
                s, fails = self.chance.choice((0, 0, 1, 20)), int(self.chance.random() < 0.2)
                await self._put(scheduler, message_id, self.chance.choice((0, 0.02, 1, 3)), lane, s=s, fails=fails)
            elif chosen < 0.8:
                await scheduler.cancel(message_id)
            else:
                await scheduler.reschedule(message_id, at=self._at(self.chance.randrange(5_000) / 1_000))

    async def _faults(self, p: Scheduler) -> None:
        """Let answers be lost. Then let process p reach the store no more, for longer than its leases last."""
        self._lose_answers()
        await asyncio.sleep(10)
        self._heal()
        await self._occupy_all(p, 2, "stands still")
        self._lose_answers()
        self.p_stands_still = True
        self.histories["p"].write(h.Process(what="stopped"))
        self.stores["p"].heal()
        self.stores["p"].inject("hang", "apply", "claim", "tidy", times=None)
        self.stores["p"].inject("unavailable", "settle", "renew", times=None)
        await asyncio.sleep(40)
        self.p_stands_still = False
        self._heal()
        self.histories["p"].write(h.Process(what="continued"))

    def _lose_answers(self) -> None:
        for store in self.stores.values():
            for fault in ("reply_lost", "request_lost", "unavailable"):
                store.inject(fault, "apply", times=None, probability=0.1)
            store.inject("reply_lost", "claim", "settle", "renew", times=None, probability=0.05)

    def _heal(self) -> None:
        for name in ("p", "q"):
            self.stores[name].heal()

    async def _occupy_all(self, p: Scheduler, processes: int, until: str) -> None:
        """Give each process four messages that run for a second, and wait for half of it."""
        messages = (self._put(p, f"one {until} {i}", 0, "takeover") for i in range(4 * processes))
        await asyncio.gather(*messages)
        await asyncio.sleep(0.5)

    async def _quiet(self, p: Scheduler) -> None:
        """When all is quiet, schedule one more message, and wait until all must have ended."""
        await asyncio.sleep(900)
        await self._put(p, "after the quiet", 1, "work")
        await asyncio.sleep(400)

    async def _put(
        self, scheduler: Scheduler, message_id: str, delay_s: float, lane: str, *, s: float = 0, fails: int = 0
    ) -> None:
        headers = {"s": str(s).encode(), "fails": str(fails).encode()}
        payload = self.chance.randbytes(4)
        at = self._at(delay_s)
        await scheduler.schedule(payload, id=message_id, at=at, to=f"handler:{lane}", headers=headers)

    def _at(self, delay_s: float) -> datetime:
        return EPOCH + timedelta(milliseconds=self.clock.now_ms() + int(delay_s * 1000))


async def test_the_real_build_breaks_no_rule(tmp_path: Path, clock: VirtualClock) -> None:
    report = await Work(tmp_path / "history.jsonl", clock, seed=1).done()
    report.verify()
    assert report.undecided == {}
    assert report.duplicates > 0, "no fault had an effect"
    assert report.operations["info"] > 0


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
async def test_a_build_without_one_step_is_found_out(build: BadBuild, tmp_path: Path, clock: VirtualClock) -> None:
    with ExitStack() as stack:
        build.without(stack)
        report = await Work(tmp_path / "history.jsonl", clock, seed=1).done()
    found = [violation for violation in report.violations if violation.rule == build.rule]
    assert found, f"only {sorted({violation.rule for violation in report.violations})}"
    assert report.evidence(found[0]), found[0]


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(2, 102))
async def test_the_real_build_breaks_no_rule_with_many_seeds(tmp_path: Path, clock: VirtualClock, seed: int) -> None:
    (await Work(tmp_path / "history.jsonl", clock, seed).done()).verify()
