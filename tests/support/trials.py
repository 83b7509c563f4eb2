"""Trials of suspects, simulated: what they cost, on a memory store whose clock is moved by hand.

`python -m tests.support.trials` prints the table of docs/decisions/0015-trials.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from aiodelay.identifiers import new_id
from aiodelay.memory import MemoryStore
from aiodelay.model import LEASE_MS, Claim, Demand, Done, Envelope, PutBack, Query, Record, Renewal, RenewOutcome
from aiodelay.ports import Work
from aiodelay.testing.clock import VirtualClock
from aiodelay.transitions import LONGEST_TRIAL_MS, NO_OP, SUSPECT_LAPSES, token_counter, token_for, trial_ms

__all__ = ["Cost", "Play", "cost_of"]

LANE = "work"
TICK_MS = 250
RESTART_MS = 1_000
MOST_MS = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Play:
    """What is simulated.

    Attributes:
        suspects: Messages whose process ended twice while they were in flight.
        killers: How many of them end the process that runs them, spread over the others.
        processes: How many claim; one that was ended is started again after a second.
        run_ms: How long an innocent message runs.
        kills_after_ms: How long a killer runs.
    """

    suspects: int
    killers: int
    processes: int
    run_ms: int = 20_000
    kills_after_ms: int = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What it came to.

    Attributes:
        deaths: How many processes were ended.
        withheld_ms: Longest time for which one process, deaths aside, claimed nothing because it tried suspects.
        delivered_ms: When the last innocent message was delivered.
        over_ms: When the last killer was given up.
        wrongly: Innocent messages that were given up.
        runs: Most runs of one innocent message.
    """

    deaths: int
    withheld_ms: int
    delivered_ms: int
    over_ms: int
    wrongly: int
    runs: int


@dataclass(eq=False)
class Held:
    """A claim, and until when it runs, is tried, keeps others from being tried, and is left unrenewed."""

    claim: Claim
    ends_ms: int
    trial_ends_ms: int
    may_kill_until_ms: int
    renew_at_ms: int


@dataclass(eq=False)
class Process:
    """One that claims, renews and settles, as a scheduler does."""

    work: Work
    held: list[Held] = field(default_factory=list)
    withheld_ms: int = 0

    def is_trying(self) -> bool:
        return any(each.trial_ends_ms for each in self.held)


class Simulation:
    """A play on a store."""

    def __init__(self, play: Play) -> None:
        self.play, self.clock = play, VirtualClock()
        self.store = MemoryStore(clock=self.clock)
        self.opened, self.names = AsyncExitStack(), count()
        self.start_ms = self.clock.now_ms()
        step = play.suspects / max(play.killers, 1)
        self.killers = {f"m{int(number * step):03}" for number in range(play.killers)}
        self.runs: dict[str, int] = {}
        self.delivered_ms: dict[str, int] = {}
        self.deaths = 0

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    async def run(self) -> Cost:
        """Play until nothing is left."""
        ids = [f"m{number:03}" for number in range(self.play.suspects)]
        records = [Record(Envelope(each, LANE), self.now, self.now, NO_OP, lapses=SUSPECT_LAPSES) for each in ids]
        await self.store.put_back([PutBack(each, self.now) for each in records])
        async with self.opened:
            processes = [await self.process() for _ in range(self.play.processes)]
            back_at = [0] * len(processes)
            while await self.store.search(Query(limit=1)):
                assert self.now - self.start_ms < MOST_MS, "it never ends"
                for i, process in enumerate(processes):
                    if self.now < back_at[i]:
                        continue
                    if await self.step(process):
                        processes[i], back_at[i] = await self.process(process.withheld_ms), self.now + RESTART_MS
                self.clock.move(TICK_MS)
            return await self.cost(processes)

    async def process(self, withheld_ms: int = 0) -> Process:
        """Start a process; one that has ended is not known to have."""
        work = await self.opened.enter_async_context(self.store.work(f"w{next(self.names)}", (LANE,)))
        return Process(work, withheld_ms=withheld_ms)

    async def step(self, process: Process) -> bool:
        """Do what comes next; say whether it ended the process."""
        await process.work.tidy((LANE,), limit=1_000)
        await self.renew(process)
        await self.settle(process)
        if not process.is_trying():
            await self.claim(process)
        process.withheld_ms += TICK_MS if process.is_trying() else 0
        died = any(each.claim.record.id in self.killers and each.ends_ms <= self.now + TICK_MS for each in process.held)
        self.deaths += died
        return died

    async def claim(self, process: Process) -> None:
        demand = Demand(500, suspects=all(each.may_kill_until_ms <= self.now for each in process.held))
        claimed = await process.work.claim({LANE: demand}, request=new_id(), lease_ms=LEASE_MS)
        for claim in claimed.claims:
            record = claim.record
            self.runs[record.id] = self.runs.get(record.id, 0) + 1
            takes_ms = self.play.kills_after_ms if record.id in self.killers else self.play.run_ms
            trial_ends_ms = self.now + trial_ms(record)
            may_kill_until_ms = self.now + LONGEST_TRIAL_MS
            renew_at_ms = self.now + LEASE_MS // 3
            process.held.append(Held(claim, self.now + takes_ms, trial_ends_ms, may_kill_until_ms, renew_at_ms))

    async def renew(self, process: Process) -> None:
        kept: list[Held] = []
        for held in process.held:
            ends_trial = 0 < held.trial_ends_ms <= self.now
            if ends_trial or held.renew_at_ms <= self.now:
                record, token = held.claim.record, held.claim.token
                to = token_for(self.now + LEASE_MS, token_counter(token))
                (outcome,) = await process.work.renew([Renewal(record.id, record.revision, token, to, ends_trial)])
                if outcome is RenewOutcome.LOST:
                    continue
                held.claim, held.renew_at_ms = replace(held.claim, token=to), self.now + LEASE_MS // 3
                held.trial_ends_ms = 0 if ends_trial else held.trial_ends_ms
            kept.append(held)
        process.held = kept

    async def settle(self, process: Process) -> None:
        ended = [each for each in process.held if each.ends_ms <= self.now and each.claim.record.id not in self.killers]
        for held in ended:
            record = held.claim.record
            await process.work.settle([Done(record.id, record.revision, held.claim.token)])
            self.delivered_ms[record.id] = self.now
        process.held = [each for each in process.held if each not in ended]

    async def cost(self, processes: Sequence[Process]) -> Cost:
        letters = await self.store.dead_letters(limit=1_000)
        given_up = {letter.record.id: letter.at_ms for letter in letters}
        innocent = {each: n for each, n in self.runs.items() if each not in self.killers}
        return Cost(
            deaths=self.deaths,
            withheld_ms=max(each.withheld_ms for each in processes),
            delivered_ms=max(self.delivered_ms.values(), default=self.start_ms) - self.start_ms,
            over_ms=max(given_up.values(), default=self.start_ms) - self.start_ms,
            wrongly=len(given_up.keys() - self.killers),
            runs=max(innocent.values(), default=0),
        )


def cost_of(play: Play) -> Cost:
    """Simulate a play."""
    return asyncio.run(Simulation(play).run())


def main() -> None:
    sys.stdout.write(
        "| suspects | killers | processes | deaths | withheld | innocent delivered | killers given up | runs |\n"
    )
    sys.stdout.write("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n")
    for suspects in (24, 500):
        for killers in range(4):
            for processes in (1, 2, 4):
                cost = cost_of(Play(suspects=suspects, killers=killers, processes=processes))
                seconds = [cost.withheld_ms, cost.delivered_ms, cost.over_ms]
                cells = [
                    suspects,
                    killers,
                    processes,
                    cost.deaths,
                    *(f"{ms / 1000:.0f} s" for ms in seconds),
                    cost.runs,
                ]
                sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")


if __name__ == "__main__":
    main()
