"""F5, R1, S2: every operation is cancelled at its first suspension, at its second, and so on to the last one.

Cancelled in two ways: while it waits, and when what it waits for has just been answered, so that the answer is lost.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import types
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import aclosing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import pytest

from aiodelay import CancelOutcome, Context, Message, RescheduleOutcome, Scheduler
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Query, State
from aiodelay.engine.sending import schedule_many
from aiodelay.memory import MemoryStore
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from tests.support.disks import IN_MEMORY
from tests.support.waiting import PATIENCE_S

Strike: TypeAlias = Literal["waiting", "answered"]
STRIKES: tuple[Strike, ...] = ("waiting", "answered")
MOST = 500
"""No operation here suspends so often: a sweep that gets there would never end."""


# --- the driver -------------------------------------------------------------------------------------------


class Striker:
    """Runs a coroutine, and cancels its task at the `at`-th suspension."""

    def __init__(self, at: int, strike: Strike) -> None:
        self.at, self.strike = at, strike
        self.suspensions = 0

    @property
    def has_struck(self) -> bool:
        return self.suspensions >= self.at

    async def run(self, operation: Coroutine[Any, Any, None]) -> None:
        await self._step(operation)

    @types.coroutine
    def _step(self, operation: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        step: Callable[[Any], Any] = operation.send
        value: Any = None
        try:
            while True:
                awaited = step(value)
                self.suspensions += 1
                if self.suspensions == self.at:
                    self._hit(awaited)
                try:
                    value, step = (yield awaited), operation.send
                except BaseException as error:  # noqa: BLE001 - handed on to whom it is meant for
                    value, step = error, operation.throw
        except StopIteration:
            return
        finally:
            operation.close()

    def _hit(self, awaited: asyncio.Future[object] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if awaited is None or self.strike == "waiting":
            task.cancel()
        else:
            awaited.add_done_callback(lambda _: task.cancel())  # before the task's own callback, which wakes it


class World:
    """A store, a scheduler on it, and what is known of the messages."""

    def __init__(self, path: Path | None, loop: VirtualLoop) -> None:
        self.clock = VirtualClock(loop)
        self.store = MemoryStore(clock=self.clock) if path is None else SqliteStore(path, clock=self.clock)
        self.scheduler = self.new_scheduler()
        self.tried: set[str] = set()
        self.stored: set[str] = set()
        self.gone: set[str] = set()
        self.ended: Counter[str] = Counter()

    def new_scheduler(self) -> Scheduler:
        return Scheduler(self.store, clock=self.clock, drain="2s")

    async def schedule(self, message_id: str, delay: str = "60s") -> None:
        self.tried.add(message_id)
        await self.scheduler.schedule(b"", to="handler:work", id=message_id, delay=delay)
        self.stored.add(message_id)

    def serve(self, scheduler: Scheduler, takes_s: float = 0) -> None:
        @scheduler.handler(name="work", concurrency=1000)
        async def work(payload: bytes, context: Context) -> None:
            await asyncio.sleep(takes_s)
            self.ended[context.id] += 1

    async def judge(self) -> None:
        """Deliver with a fresh scheduler what is stored: what was promised, once, and nothing else."""
        async with self.store:
            found = await self.store.search(Query(limit=10_000))
        assert not [each for each in found if each.state is State.IN_FLIGHT]
        before, left = set(self.ended), {each.record.id for each in found}
        fresh = self.new_scheduler()
        self.serve(fresh)
        async with fresh:
            await asyncio.sleep(150)  # the due times, and a lease that nobody settled
            assert fresh._running is not None
            assert fresh._running.subscriptions.in_flight == 0
            assert not await self.store.search(Query(limit=10))
        assert set(self.ended) == before | left
        assert self.stored - self.gone <= set(self.ended) <= self.tried - self.gone
        assert set(self.ended.values()) <= {1}


Operation: TypeAlias = Callable[[World], Coroutine[Any, Any, None]]
Hook: TypeAlias = Callable[[World], Awaitable[None]]


async def nothing(world: World) -> None:
    pass


class Sweep:
    """Plays an operation in one world after another, and notes what loops complain about."""

    def __init__(self, folder: Path, strike: Strike) -> None:
        self._folder, self._timing = folder, strike
        self._complaints: list[dict[str, Any]] = []

    def play(self, kind: str, operation: Operation, *, opened: bool, before: Hook = nothing) -> int:
        """Play it until it is not reached any more.

        Args:
            kind: The store.
            operation: What is cancelled.
            opened: Inside the scheduler's block, after `before`.
            before: Prepares.

        Returns:
            How often it suspends when nothing strikes.
        """
        most = 0
        for at in count(1):
            assert at < MOST
            striker = Striker(at, self._timing)
            path = None if kind == "memory" else self._folder / f"{at}.db"
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                runner.run(self._play(path, operation, striker, before if opened else None))
            if not striker.has_struck:
                break
            most = at
        gc.collect()
        assert not self._complaints
        return most

    async def _play(self, path: Path | None, operation: Operation, striker: Striker, before: Hook | None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.set_exception_handler(lambda _, context: self._complaints.append(context))
        world = World(path, loop)
        if before is None:
            await self._strike(striker, operation(world))
        else:
            async with world.scheduler:
                await before(world)
                tasks = asyncio.all_tasks()
                await self._strike(striker, operation(world))
                assert asyncio.all_tasks() <= tasks, f"tasks left at {striker.strike} {striker.at}"
                await world.schedule("after", "5s")  # it is as usable as before
        assert asyncio.all_tasks() == {asyncio.current_task()}, f"tasks left at {striker.strike} {striker.at}"
        assert world.scheduler._running is None
        await self._threads_end()
        try:
            await world.judge()
        except BaseException as error:
            error.add_note(f"cancelled at suspension {striker.at}, {striker.strike}")
            raise

    async def _strike(self, striker: Striker, operation: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(striker.run(operation), name="operation")
        await asyncio.wait([task])
        if task.cancelled():
            assert striker.has_struck
        elif (error := task.exception()) is not None:
            error.add_note(f"cancelled at suspension {striker.at}, {striker.strike}")
            raise error

    async def _threads_end(self) -> None:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("aiodelay")]
        for thread in ours:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} goes on"


@pytest.fixture(params=STRIKES)
def sweep(request: pytest.FixtureRequest) -> Iterator[Sweep]:
    with TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as folder:
        yield Sweep(Path(folder), request.param)


KINDS = pytest.mark.parametrize("kind", ["memory", "sqlite"])


# --- calls on an open scheduler ---------------------------------------------------------------------------


@KINDS
def test_f5_schedule(sweep: Sweep, kind: str) -> None:
    assert sweep.play(kind, lambda world: world.schedule("m"), opened=True) >= 1


@KINDS
def test_f5_many_calls_that_share_a_round_trip(sweep: Sweep, kind: str) -> None:
    """One of them is cancelled: the others are as safe as ever."""

    async def operate(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(world.schedule(f"n{number}"))
            await world.schedule("m")

    assert sweep.play(kind, operate, opened=True) >= 2


@KINDS
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk", [50, pytest.param(MAX_CLAIM_MESSAGES, marks=pytest.mark.nightly)])
def test_f5_schedule_many(sweep: Sweep, monkeypatch: pytest.MonkeyPatch, kind: str, is_async: bool, chunk: int) -> None:
    """Of more chunks than are on their way at once."""
    monkeypatch.setattr("aiodelay.engine.sending.schedule_many.MAX_CLAIM_MESSAGES", chunk)
    n = chunk * (schedule_many.CHUNKS_AT_ONCE + 1) + chunk // 5
    messages = [Message(b"", to="handler:work", delay="60s", id=f"m{number}") for number in range(n)]

    async def slowly() -> AsyncGenerator[Message, None]:
        for number, message in enumerate(messages):
            if number % (chunk * 4 // 5) == 0:
                await asyncio.sleep(0.001)
            yield message

    async def operate(world: World) -> None:
        confirmed = 0

        def progress(stored: int) -> None:
            nonlocal confirmed
            confirmed = stored

        world.tried.update(message.id for message in messages if message.id is not None)
        try:
            async with aclosing(slowly()) as source:
                await world.scheduler.schedule_many(source if is_async else messages, progress=progress)
            world.stored |= world.tried
        finally:
            assert isinstance(world.store, MemoryStore | SqliteStore)
            found = await world.store.search(Query(limit=10_000))
            assert len(found) >= confirmed

    assert sweep.play(kind, operate, opened=True) >= 2


@KINDS
def test_f5_cancel(sweep: Sweep, kind: str) -> None:
    async def operate(world: World) -> None:
        world.stored.discard("m")  # from here on it may be gone
        assert await world.scheduler.cancel("m") is CancelOutcome.CANCELLED
        world.gone.add("m")

    assert sweep.play(kind, operate, opened=True, before=lambda world: world.schedule("m")) >= 1


@KINDS
def test_f5_reschedule(sweep: Sweep, kind: str) -> None:
    async def operate(world: World) -> None:
        assert await world.scheduler.reschedule("m", delay="30s") is RescheduleOutcome.RESCHEDULED

    assert sweep.play(kind, operate, opened=True, before=lambda world: world.schedule("m")) >= 1


# --- handlers ---------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("takes_s", [0.5, 1000])
def test_f5_remove_handler(sweep: Sweep, kind: str, takes_s: float) -> None:
    """Within the drain time the run ends by itself; else it is cancelled, and its message goes back."""

    async def before(world: World) -> None:
        world.serve(world.scheduler, takes_s)
        await world.schedule("m", "1s")
        await asyncio.sleep(1.2)
        assert world.scheduler._running is not None
        assert world.scheduler._running.subscriptions.in_flight == 1

    async def operate(world: World) -> None:
        await world.scheduler.remove_handler("work")

    assert sweep.play(kind, operate, opened=True, before=before) >= 1


# --- the whole life ---------------------------------------------------------------------------------------


@KINDS
def test_f5_a_whole_life(sweep: Sweep, kind: str) -> None:
    async def operate(world: World) -> None:
        world.serve(world.scheduler, 0.5)
        async with world.scheduler:
            for number in range(3):
                await world.schedule(f"m{number}", f"{1 + number}s")
            await asyncio.sleep(3.2)  # m2 is being delivered when the block ends
        assert world.scheduler._running is None

    assert sweep.play(kind, operate, opened=False) >= 4


@KINDS
def test_f5_messages(sweep: Sweep, kind: str) -> None:
    """What was taken and not settled goes back."""

    async def operate(world: World) -> None:
        async with world.scheduler, aclosing(aiter(world.scheduler.messages("work"))) as messages:
            for number in range(3):
                await world.schedule(f"m{number}", "1s")
            async for message in messages:
                with message:
                    await asyncio.sleep(0.5)
                    world.ended[message.context.id] += 1
                if len(world.ended) == 3:
                    break

    assert sweep.play(kind, operate, opened=False) >= 4


@KINDS
def test_f5_run(sweep: Sweep, kind: str) -> None:
    async def operate(world: World) -> None:
        world.serve(world.scheduler, 0.5)
        async with world.scheduler:
            await world.schedule("m", "1s")
        try:
            async with asyncio.timeout(1.2):  # in the midst of a run
                await world.scheduler.run()
        except TimeoutError:
            pass

    assert sweep.play(kind, operate, opened=False) >= 4
