"""Simulate trials of suspects on a memory store with a virtual clock, and measure their cost.

`python -m tests.support.trials` prints the tables of docs/decisions/0015-trials.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count, product

from msgspec.structs import replace

from aiodelay.core.ids import new_id
from aiodelay.core.transitions import (
    LONGEST_TRIAL_MS,
    NO_OP,
    SILENT_LEASES,
    SUSPECT_LAPSES,
    TRIAL_MS,
    is_suspect,
    token_counter,
    token_for,
    trial_ms,
)
from aiodelay.core.values import (
    LEASE_MS,
    MAX_LAPSES,
    After,
    Claim,
    Demand,
    Done,
    Envelope,
    Put,
    PutBack,
    Record,
    Renewal,
    RenewOutcome,
)
from aiodelay.memory import MemoryStore
from aiodelay.ports import Work
from aiodelay.testing.clock import VirtualClock

__all__ = ["RESTART_MS", "Cost", "Play", "cost_of"]

LANE = "work"
TICK_MS = 250
RESTART_MS = 1_000
BEAT_MS = LEASE_MS // 3
MOST_MS = 2 * 3_600_000
SUSPECT, NEIGHBOUR, LATE = "m", "n", "z"
"""The prefixes of the ids of suspects, of neighbours, and of late killers."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """The parameters of a simulation.

    Attributes:
        suspects: The number of messages whose process ended twice while they were in flight.
        killers: The number of suspects that end the process that runs them. They are spread over the suspects.
        processes: The number of processes that claim. A process that was ended starts again after a second.
        run_ms: The duration of the run of an innocent suspect.
        kills_after_ms: The duration of the run of a killer.
        neighbours_per_s: The number of other messages that come due per second.
        neighbour_ms: The duration of the run of such a message.
        late_killers: The number of killers that come due one after the other and have never lapsed.
        late_every_ms: The time between the due times of two late killers.
        lapses: The number of earlier lapses of the suspects.
    """

    suspects: int
    killers: int = 0
    processes: int = 1
    run_ms: int = 20_000
    kills_after_ms: int = 10
    neighbours_per_s: int = 2
    neighbour_ms: int = 100
    late_killers: int = 0
    late_every_ms: int = 20_000
    lapses: int = SUSPECT_LAPSES


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The result of a simulation.

    Attributes:
        deaths: The number of processes that were ended.
        late_ms: The longest wait of a neighbour for its first run.
        returned_ms: The longest wait of a neighbour for its next run after its process had ended.
        blamed: The number of neighbours that became suspects.
        delivered_ms: The time at which the last innocent suspect was delivered.
        over_ms: The time at which the last killer was given up.
        wrongly: The number of innocent messages that were given up.
        runs: The most runs of one innocent suspect.
    """

    deaths: int
    late_ms: int
    returned_ms: int
    blamed: int
    delivered_ms: int
    over_ms: int
    wrongly: int
    runs: int


@dataclass(eq=False)
class Held:
    """A claim: start and end of its run, end of its trial (0 = it is over), and the time of its next renewal."""

    claim: Claim
    began_ms: int
    ends_ms: int
    trial_ends_ms: int
    renew_at_ms: int

    @property
    def id(self) -> str:
        return self.claim.record.id

    def ran_since(self, ms: int) -> bool:
        return self.began_ms > ms


@dataclass(eq=False)
class Process:
    """A process that claims, renews, settles and beats, as a scheduler does."""

    work: Work
    opened: AsyncExitStack
    heard_ms: int
    held: dict[str, Held] = field(default_factory=dict)
    has_tried: bool = False

    def is_trying(self, now: int) -> bool:
        return any(is_suspect(each.claim.record) and each.ran_since(now - TRIAL_MS) for each in self.held.values())

    def max_lapses(self, now: int) -> int:
        """Return the most lapses of a message that the process may claim now, which depends on its open claims."""
        lapses = [h.claim.record.lapses for h in self.held.values() if h.ran_since(now - LONGEST_TRIAL_MS)]
        if max(lapses, default=0) >= SUSPECT_LAPSES:
            return 0
        return SUSPECT_LAPSES - 1 if any(lapses) or self.has_tried else MAX_LAPSES


class Simulation:
    """A simulation with the parameters of a `Play`, on a store."""

    def __init__(self, play: Play) -> None:
        self.play, self.clock = play, VirtualClock()
        self.store = MemoryStore(clock=self.clock)
        self.opened, self.numbers = AsyncExitStack(), count(1)
        self.start_ms = self.clock.now_ms()
        step = play.suspects / max(play.killers, 1)
        self.killers = {f"{SUSPECT}{int(number * step):03}" for number in range(play.killers)}
        self.killers |= {f"{LATE}{number:03}" for number in range(play.late_killers)}
        self.gone: list[Process] = []
        self.came_ms: dict[str, int] = {}
        self.lost_ms: dict[str, int] = {}
        self.runs: dict[str, int] = {}
        self.blamed: set[str] = set()
        self.delivered_ms: dict[str, int] = {}
        self.deaths = self.late_ms = self.returned_ms = 0

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    async def run(self) -> Cost:
        """Simulate until no suspect and no killer is left."""
        ids = [f"{SUSPECT}{number:03}" for number in range(self.play.suspects)]
        records = [Record(Envelope(each, LANE), self.now, self.now, NO_OP, lapses=self.play.lapses) for each in ids]
        await self.store.put_back([PutBack(each, self.now) for each in records])
        async with self.opened:
            processes = [await self.process() for _ in range(self.play.processes)]
            back_at = [0] * len(processes)
            while await self.is_playing():
                assert self.now - self.start_ms < MOST_MS, "it never ends"
                await self.schedule()
                await self.miss_processes()
                for i, process in enumerate(processes):
                    if self.now >= back_at[i] and await self.step(process):
                        processes[i], back_at[i] = await self.process(), self.now + RESTART_MS
                self.clock.move(TICK_MS)
            return await self.cost()

    async def is_playing(self) -> bool:
        wanted = self.play.suspects + self.play.late_killers
        return len(self.delivered_ms) + len(await self.store.dead_letters(limit=1_000)) < wanted

    async def schedule(self) -> None:
        """Schedule the neighbours and late killers that are due now."""
        passed_ms = self.now - self.start_ms
        ids = [f"{NEIGHBOUR}{passed_ms}-{i}" for i in range(self.play.neighbours_per_s) if passed_ms % 1_000 == 0]
        late, rest = divmod(passed_ms, self.play.late_every_ms)
        if rest == 0 and 0 < late <= self.play.late_killers:
            ids.append(f"{LATE}{late - 1:03}")
        self.came_ms |= dict.fromkeys(ids, self.now)
        ops = (next(self.numbers).to_bytes(8, "big") for _ in ids)
        await self.store.apply([Put(op, Envelope(each, LANE), After(0)) for op, each in zip(ops, ids, strict=True)])

    async def process(self) -> Process:
        """Start a process."""
        opened = await self.opened.enter_async_context(AsyncExitStack())
        work = await opened.enter_async_context(self.store.work(f"w{next(self.numbers)}", (LANE,)))
        return Process(work, opened, self.now)

    async def miss_processes(self) -> None:
        """Tell the store that processes have ended, after it has heard nothing from them for long."""
        silent = [each for each in self.gone if each.heard_ms + SILENT_LEASES * LEASE_MS <= self.now]
        for process in silent:
            self.gone.remove(process)
            await process.opened.aclose()

    async def step(self, process: Process) -> bool:
        """Do the next step of a process. Return whether the step ended the process."""
        await process.work.tidy((LANE,), limit=10_000)
        self.beat(process)
        await self.renew(process)
        await self.settle(process)
        if not process.is_trying(self.now):
            await self.claim(process)
        died = any(each.id in self.killers and each.ends_ms <= self.now + TICK_MS for each in process.held.values())
        if died:
            self.deaths += 1
            self.gone.append(process)
            self.lost_ms |= {each: self.now for each in process.held if each.startswith(NEIGHBOUR)}
        return died

    def beat(self, process: Process) -> None:
        tried = [each.id for each in process.held.values() if each.trial_ends_ms]
        if tried and self.now >= process.heard_ms + BEAT_MS:
            process.work.beat(tried)
            process.heard_ms = self.now

    async def claim(self, process: Process) -> None:
        max_lapses = process.max_lapses(self.now)
        demand = {LANE: Demand(500, max_lapses=max_lapses)}
        claims = (await process.work.claim(demand, request=new_id(), lease_ms=LEASE_MS)).claims
        if claims and is_suspect(claims[0].record):
            process.has_tried, process.heard_ms = True, self.now
        elif max_lapses:
            process.has_tried = False
        for claim in claims:
            self.hold(process, claim)

    def hold(self, process: Process, claim: Claim) -> None:
        record = claim.record
        self.runs[record.id] = self.runs.get(record.id, 0) + 1
        if record.id.startswith(NEIGHBOUR):
            self.note_neighbour(record)
            takes_ms = self.play.neighbour_ms
        else:
            takes_ms = self.play.kills_after_ms if record.id in self.killers else self.play.run_ms
        trial_ends_ms = self.now + trial_ms(record) if is_suspect(record) else 0
        process.held[record.id] = Held(claim, self.now, self.now + takes_ms, trial_ends_ms, self.now + BEAT_MS)

    def note_neighbour(self, record: Record) -> None:
        if is_suspect(record):
            self.blamed.add(record.id)
        if self.runs[record.id] == 1:
            self.late_ms = max(self.late_ms, self.now - self.came_ms[record.id])
        else:
            self.returned_ms = max(self.returned_ms, self.now - self.lost_ms[record.id])

    async def renew(self, process: Process) -> None:
        for held in list(process.held.values()):
            ends_trial = 0 < held.trial_ends_ms <= self.now
            if ends_trial or held.renew_at_ms <= self.now:
                record, token = held.claim.record, held.claim.token
                to = token_for(self.now + LEASE_MS, token_counter(token))
                (outcome,) = await process.work.renew([Renewal(record.id, record.revision, token, to, ends_trial)])
                if outcome is RenewOutcome.LOST:
                    del process.held[held.id]
                held.claim, held.renew_at_ms = replace(held.claim, token=to), self.now + BEAT_MS
                held.trial_ends_ms = 0 if ends_trial else held.trial_ends_ms

    async def settle(self, process: Process) -> None:
        ended = [h for h in process.held.values() if h.ends_ms <= self.now and h.id not in self.killers]
        for held in ended:
            record = held.claim.record
            await process.work.settle([Done(record.id, record.revision, held.claim.token)])
            del process.held[record.id]
            if record.id.startswith(SUSPECT):
                self.delivered_ms[record.id] = self.now

    async def cost(self) -> Cost:
        letters = await self.store.dead_letters(limit=1_000)
        given_up = {letter.record.id: letter.at_ms for letter in letters}
        innocent = [n for each, n in self.runs.items() if each.startswith(SUSPECT) and each not in self.killers]
        return Cost(
            deaths=self.deaths,
            late_ms=self.late_ms,
            returned_ms=self.returned_ms,
            blamed=len(self.blamed),
            delivered_ms=max(self.delivered_ms.values(), default=self.start_ms) - self.start_ms,
            over_ms=max(given_up.values(), default=self.start_ms) - self.start_ms,
            wrongly=len(given_up.keys() - self.killers),
            runs=max(innocent, default=0),
        )


def cost_of(play: Play) -> Cost:
    """Simulate a play. Return its cost."""
    return asyncio.run(Simulation(play).run())


# --- the tables -------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    sys.stdout.write(f"| {' | '.join(heads)} |\n| {' | '.join(['---:'] * len(heads))} |\n")
    for row in rows:
        sys.stdout.write(f"| {' | '.join(map(str, row))} |\n")
        sys.stdout.flush()
    sys.stdout.write("\n")


def seconds(ms: int) -> str:
    return f"{ms / 1000:.0f} s"


def row_of(play: Play, *values: object) -> list[object]:
    cost = cost_of(play)
    assert (cost.wrongly, cost.blamed if not play.late_killers else 0) == (0, 0)
    times = [cost.late_ms, cost.returned_ms, cost.delivered_ms, cost.over_ms]
    return [*values, cost.deaths, *map(seconds, times), cost.runs]


COSTS = ["deaths", "others late", "others again", "innocent delivered", "killers given up", "runs"]


def main() -> None:
    plays = [(s, k, p) for s, k, p in product((24, 500), range(4), (1, 4)) if k or p == 1]
    table(
        ["suspects", "killers", "processes", *COSTS],
        (row_of(Play(suspects=s, killers=k, processes=p), s, k, p) for s, k, p in plays),
    )
    slow = [(s, t, p, n) for s, t, p, n in product((24, 500), (5, 20, 50), (1, 4), (100, 20_000))]
    table(
        ["suspects", "kills after", "processes", "others run", *COSTS],
        (
            row_of(
                Play(suspects=s, killers=1, processes=p, kills_after_ms=1_000 * t, neighbour_ms=n),
                *(s, f"{t} s", p, f"{n / 1000:g} s"),
            )
            for s, t, p, n in slow
        ),
    )
    later = [(s, e, p) for s, e, p in product((1, 24), (5, 20, 40), (1, 4))]
    table(
        ["suspects", "one comes every", "processes", *COSTS],
        (
            row_of(Play(suspects=s, lapses=8, processes=p, late_killers=12, late_every_ms=1_000 * e), *(s, f"{e} s", p))
            for s, e, p in later
        ),
    )


if __name__ == "__main__":
    main()
