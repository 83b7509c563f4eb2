"""`simulate`: run schedulers on one store, on a simulated loop, and return the history of what they did.

One seed chooses the order of the tasks, the commands, the faults of the network between each process and the store, and
the ends of processes. Time is virtual. So a run takes milliseconds, and the same seed makes the same run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

import msgspec

from aiodelay import Conflict, Context, Received, Retry, Scheduler
from aiodelay.core.values import (
    Claimed,
    Command,
    Demand,
    Lane,
    Outcome,
    Query,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    SourcePosition,
    State,
    Tidied,
    Unknown,
)
from aiodelay.errors import ClosedError, StoreUnavailableError
from aiodelay.handlers.context import RunContext
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store, Work
from aiodelay.sqlite import SqliteStore
from aiodelay.testing import history as h
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import Fault, FaultyStore, Step
from aiodelay.testing.forwarding import ForwardingStore, ForwardingWork
from aiodelay.testing.history.events import E

from .observed import FailurePoints, ObservedStore
from .producing import Producer
from .simulated_sqlite import SimulatedSqlite, ThreadlessLoop

__all__ = ["LANES", "simulate"]

T = TypeVar("T")
LANES = ("work", "pull", "batch")
FAULTS: tuple[Fault, ...] = ("unavailable", "request_lost", "reply_lost", "delay", "late_reply", "repeat", "hang")
STEPS: tuple[Step, ...] = ("apply", "claim", "settle", "renew", "tidy")
STORM_S = 60.0
"""The time with faults."""
LONGEST_S = 20.0
"""The longest delay of a request or an answer."""
CALM_S = 1800
"""The longest time until everything has been delivered after the faults have stopped."""


def simulate(seed: int, path: Path | None = None) -> list[h.Event]:
    """Run the processes with the faults of a seed. Return the history, in the order of the events.

    Args:
        seed: The seed.
        path: A path at which no file exists: the processes share a SQLite file. None: they share a memory store.
    """
    loop = ThreadlessLoop(seed)
    state, log = random.getstate(), logging.getLogger("aiodelay")
    random.seed(seed)
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(_Simulation(seed, loop, path).run())
    finally:
        random.setstate(state)
        log.setLevel(level)


class _SimulatedHistory(h.History):
    """The events of one process, with virtual times. After the end of the process, it writes nothing."""

    def __init__(self, simulation: _Simulation, process: str) -> None:
        self._simulation, self.process, self.is_dead = simulation, process, False
        self._calls = count(1)

    def stamp(self, event: E) -> E:
        event.process = event.process or self.process
        event.at_ns, event.wall_ms = self._simulation.now_ns(), self._simulation.clock.now_ms()
        return event

    def write(self, event: h.Event) -> None:
        if self.is_dead:
            return
        if not (isinstance(event, h.Claiming) and event.process):  # A claim has the time at which it was asked.
            self.stamp(event)
        self._simulation.events.append(event)


class _Network(ForwardingStore):
    """The way from one process to the store. A request may arrive after its caller has given it up."""

    def __init__(self, store: Store, chance: random.Random, tasks: asyncio.TaskGroup) -> None:
        super().__init__(store)
        self._chance, self._tasks = chance, tasks
        self.late_probability = 0.0
        self.is_cut = False

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Carry out a request.

        Raises:
            StoreUnavailableError: The process is cut off, or the request arrives late.
        """
        if self.is_cut:
            raise StoreUnavailableError(self.name, "cut off")
        if self._chance.random() < self.late_probability:
            self._tasks.create_task(self._arrive_late(request))
            raise StoreUnavailableError(self.name, "the request arrives late")
        return await request()

    async def _arrive_late(self, request: Callable[[], Awaitable[object]]) -> None:
        await asyncio.sleep(_seconds(self._chance))
        if not self.is_cut:
            with contextlib.suppress(StoreUnavailableError, ClosedError):  # nobody waits for the answer
                await request()

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        try:
            return await self.call(lambda: self._store.apply(commands, source=source))
        except StoreUnavailableError as error:
            return [Unknown(str(error))] * len(commands)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        async with self._store.work(worker, lanes) as work:
            yield _NetworkWork(work, self)


class _NetworkWork(ForwardingWork):
    def __init__(self, work: Work, network: _Network) -> None:
        super().__init__(work)
        self._network = network

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        return await self._network.call(lambda: self._work.claim(demand, request=request, lease_ms=lease_ms))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return await self._network.call(lambda: self._work.settle(settlements))

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return await self._network.call(lambda: self._work.renew(renewals))

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        return await self._network.call(lambda: self._work.tidy(lanes, limit=limit))


class _Process:
    """One process: a scheduler with its own way to the store, which handles messages and gives commands."""

    def __init__(self, simulation: _Simulation, name: str) -> None:
        self._simulation, self._chance = simulation, simulation.chance
        self.history = _SimulatedHistory(simulation, name)
        self._network = _Network(simulation.new_store(), self._chance, simulation.tasks)
        self._faulty = FaultyStore(self._network, seed=self._chance.randrange(1_000_000))
        observed = ObservedStore(self._faulty, self.history, FailurePoints(None, lambda: None))
        self._scheduler = Scheduler(
            observed, clock=simulation.clock, retry=Retry(attempts=20, first="200ms", factor=1), drain="5s"
        )
        self._scheduler._options = msgspec.structs.replace(self._scheduler._options, lease_ms=simulation.lease_ms)
        self._scheduler.add_handler(self._handle, name="work", concurrency=3)
        self._scheduler.add_handler(self._handle_batch, name="batch", batch=4, batch_wait="200ms", concurrency=2)
        self.producer = Producer(self._scheduler, self.history)
        self._pulls: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        await self._scheduler.__aenter__()
        self._pulls = [self._simulation.tasks.create_task(self._pull())]
        self.history.write(h.Process(what="ready"))

    def begin_faults(self) -> None:
        """Switch on faults of some kinds."""
        self._network.late_probability = self._chance.choice((0.0, 0.0, 0.05))
        for fault in FAULTS:
            if self._chance.random() < 0.4:
                steps = [step for step in STEPS if self._chance.random() < 0.5] or ["settle"]
                self._faulty.inject(
                    fault,
                    *steps,
                    times=1 if fault == "hang" else None,
                    after=self._chance.randrange(20) if fault == "hang" else 0,
                    probability=1.0 if fault == "hang" else self._chance.choice((0.02, 0.1, 0.3)),
                    lasting=f"{_seconds(self._chance):.3f}s",
                )

    async def outage(self) -> None:
        """Let the store be away for a while."""
        kinds: tuple[Fault, ...] = ("unavailable", "request_lost", "reply_lost")
        self._faulty.heal()
        self._faulty.inject(self._chance.choice(kinds), *STEPS, times=None)
        await asyncio.sleep(_seconds(self._chance) * 2)
        self._faulty.heal()

    def end_faults(self) -> None:
        self._network.late_probability = 0.0
        self._faulty.heal()

    async def kill(self) -> None:
        """End the process: nothing of it reaches the store or the history any more."""
        self.history.write(h.Process(what="killed"))
        self.history.write(h.Process(what="ended", code=-9))
        self.history.is_dead = self._network.is_cut = True
        self._faulty.heal()
        await self.close()

    async def close(self) -> None:
        await self._scheduler.__aexit__(None, None, None)
        await asyncio.wait(self._pulls)

    # --- handlers -------------------------------------------------------------------------------------------

    async def _handle(self, payload: bytes, context: Context) -> None:
        await self._run([(payload, context)], "work")

    async def _handle_batch(self, payloads: list[bytes], context: Context) -> None:
        await self._run(list(zip(payloads, context.messages, strict=True)), "batch")

    async def _pull(self) -> None:
        async def take(message: Received[bytes]) -> None:
            with contextlib.suppress(RuntimeError), message as payload:
                await self._run([(payload, message.context)], "pull")

        async with asyncio.TaskGroup() as tasks:
            with contextlib.suppress(ClosedError):  # the process has ended before it has subscribed
                async for message in self._scheduler.messages("pull", concurrency=3):
                    tasks.create_task(take(message))

    async def _run(self, messages: Sequence[tuple[bytes, RunContext[Scheduler]]], lane: str) -> None:
        for payload, context in messages:
            digest = h.digest_of(payload, context.key, context.headers)
            self.history.write(h.RunStarted(id=context.id, lane=lane, digest=digest, **_run_of(context)))
        result: Literal["ok", "failed", "cancelled"] = "failed"
        try:
            await asyncio.sleep(self._chance.choice((0, 0, 0.01, 0.5, self._simulation.lease_ms / 500)))
            if self._simulation.has_faults and self._chance.random() < 0.25:
                raise RuntimeError("as the seed says")
            result = "ok"
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            for _, context in messages:
                self.history.write(h.RunEnded(result=result, **_run_of(context)))


class _RunOf(TypedDict):
    delivery_id: str
    attempt: int
    token: int


def _run_of(context: RunContext[Scheduler]) -> _RunOf:
    return _RunOf(delivery_id=context.delivery_id, attempt=context.attempt, token=context._claim.token)


class _Simulation:
    """All processes of one run."""

    def __init__(self, seed: int, loop: ThreadlessLoop, path: Path | None) -> None:
        self._loop, self.chance = loop, random.Random(seed)
        self.clock = VirtualClock(loop)
        self._path, self._sqlite = path, SimulatedSqlite(loop, self.chance)
        self._memory = MemoryStore(clock=self.clock)
        self._store = self.new_store()
        self.events: list[h.Event] = []
        self.lease_ms = self.chance.choice((2_000, 15_000))
        self.has_faults = False
        self._last_ns = 0
        self._names = count(1)

    def now_ns(self) -> int:
        """Return a time that is later than all times before."""
        self._last_ns = max(self._last_ns + 1, self._loop.elapsed_us * 1000)
        return self._last_ns

    def new_store(self) -> Store:
        """Return the store of one more process."""
        return self._memory if self._path is None else SqliteStore(self._path, clock=self.clock)

    async def run(self) -> list[h.Event]:
        with self._sqlite.installed():
            async with self._store:
                return await self._run()

    async def _run(self) -> list[h.Event]:
        async with asyncio.TaskGroup() as self.tasks:
            processes = [await self._started() for _ in range(2)]
            self.has_faults = True
            self._sqlite.probability = 0.0 if self._path is None else self.chance.choice((0.0, 0.02, 0.1))
            for process in processes:
                process.begin_faults()
            async with asyncio.timeout(STORM_S * 20), asyncio.TaskGroup() as storm:
                storm.create_task(self._disturb(processes))
                for _ in range(3):
                    storm.create_task(self._give_commands(processes))
            self.has_faults, self._sqlite.probability = False, 0.0
            for process in processes:
                process.end_faults()
            await self._settle()
            for process in processes:
                await process.close()
        history = _SimulatedHistory(self, "judge")
        history.write(await self._final())
        return sorted(self.events, key=lambda event: event.at_ns)

    async def _started(self) -> _Process:
        process = _Process(self, f"process-{next(self._names)}")
        await process.open()
        return process

    async def _disturb(self, processes: list[_Process]) -> None:
        """End processes and start others, and let the store be away."""
        ends = self._loop.time() + STORM_S
        while (left_s := ends - self._loop.time()) > 0:
            await asyncio.sleep(min(left_s, self.chance.uniform(1, 20)))
            i = self.chance.randrange(len(processes))
            if self.chance.random() < 0.5:
                killed = processes[i]
                killing = self.tasks.create_task(killed.kill())
                await asyncio.sleep(_seconds(self.chance))
                processes[i] = await self._started()
                processes[i].begin_faults()
                await killing
            else:
                await processes[i].outage()
                processes[i].begin_faults()

    async def _give_commands(self, processes: list[_Process]) -> None:
        for n in range(12):
            await asyncio.sleep(self.chance.uniform(0, STORM_S / 12))
            producer, chosen = self.chance.choice(processes).producer, self.chance.random()
            number = self.chance.randrange(12)
            lane = LANES[number % len(LANES)]
            message_id, payload = f"m{number}", f"{number} {n} {chosen}".encode()
            delay_ms = self.chance.randrange(self.chance.choice((500, 15_000)))
            if chosen < 0.65:
                conflict = Conflict.keep() if chosen < 0.1 else Conflict.replace()
                await producer.schedule(message_id, payload, delay_ms=delay_ms, lane=lane, conflict=conflict)
            elif chosen < 0.85:
                await producer.cancel(message_id)
            else:
                await producer.reschedule(message_id, self.clock.now_ms() + delay_ms)

    async def _settle(self) -> None:
        """Wait until the last request has arrived and the store is empty, or for `CALM_S`."""
        await asyncio.sleep(LONGEST_S)
        for _ in range(CALM_S):
            if not await self._store.search(Query(limit=1)):
                return
            await asyncio.sleep(1)

    async def _final(self) -> h.Final:
        left = await self._store.search(Query(limit=1000))
        pending = [
            h.PendingNote(each.record.id, each.record.revision, str(each.state), each.next_attempt_ms) for each in left
        ]
        letters = await self._store.dead_letters(limit=1000)
        dead: list[tuple[str, int, str]] = [(each.record.id, each.record.revision, each.reason) for each in letters]
        leases = sum(each.state is State.IN_FLIGHT for each in left)
        return h.Final(now_ms=self.clock.now_ms(), pending=pending, dead=dead, leases=leases)


def _seconds(chance: random.Random) -> float:
    """Return a duration from 1 ms to `LONGEST_S`; short durations are as likely as long ones."""
    return float(0.001 * (1000 * LONGEST_S) ** chance.random())
