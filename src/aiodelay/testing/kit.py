"""`on_virtual_time`: move a program's own scheduler to a memory store, a virtual clock and recording sinks.

The fixture `scheduler` uses `on_virtual_time`. `Kit` records the deliveries for `assert_scheduled` and
`assert_delivered`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from aiodelay.backends.memory import MemoryStore
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.rules import Rules
from aiodelay.core.table import Table
from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import DeadLetter, Delivery, Done, Query, Record, Settlement, SettleOutcome, Snapshot, State
from aiodelay.errors import AiodelayError, ConfigurationError
from aiodelay.ports import Store
from aiodelay.ports.clock import Clock
from aiodelay.scheduler import Scheduler

from .clock import VirtualClock
from .faults import FaultyStore
from .loop import VirtualLoop
from .sinks import RecordingSink

__all__ = ["Kit", "StillInFlightError", "kit_of", "on_clock", "on_virtual_time", "sink_of", "store_of"]

T = TypeVar("T")
IN_FLIGHT_LIMIT_S = 3600.0
"""If no handler ends for this number of virtual seconds, `advance()` gives up."""
OVERDUE_LIMIT_S = 60.0
"""The longest time, in virtual seconds, that `advance()` waits for a store or sink that does not work."""
ALL = 1_000_000_000

_kits: WeakKeyDictionary[Scheduler, Kit] = WeakKeyDictionary()


class StillInFlightError(AiodelayError):
    """`clock.advance()` cannot return, because a handler waits for something that does not happen.

    Attributes:
        deliveries: The ids of the messages in flight.
        waited_s: The virtual seconds for which no handler has ended.
    """

    deliveries: tuple[str, ...]
    waited_s: float

    def __init__(self, deliveries: tuple[str, ...], waited_s: float) -> None:
        super().__init__(deliveries, waited_s)
        self.deliveries, self.waited_s = deliveries, waited_s

    def __str__(self) -> str:
        return (
            f"no attempt has ended for {self.waited_s:g} s of virtual time; in flight: {', '.join(self.deliveries)}; "
            "if a handler waits for the test, let time pass with asyncio.sleep() instead of clock.advance()"
        )


class _NotingRules(Rules[Entry]):
    """Store rules that record the error of each failed attempt, by delivery id and attempt number."""

    def __init__(self, table: Table[Entry]) -> None:
        super().__init__(table)
        self.failures: dict[tuple[str, int], str] = {}

    def settle(self, settlement: Settlement, now: int) -> SettleOutcome:
        row = self.table.find(settlement.id)
        outcome = super().settle(settlement, now)
        if row is not None and outcome is SettleOutcome.SETTLED and not isinstance(settlement, Done):
            record, error = row.record, settlement.error
            if settlement.attempt > record.attempt and error is not None:
                self.failures[delivery_id(record), settlement.attempt] = error
        return outcome


class _NotingStore(MemoryStore):
    """A memory store that records the error of each failed attempt."""

    _rules_type = _NotingRules

    @property
    def failures(self) -> dict[tuple[str, int], str]:
        """The errors of failed attempts, by delivery id and attempt number."""
        assert isinstance(self._rules, _NotingRules)
        return self._rules.failures


class Kit:
    """The store, the sinks, the clock and the recorded deliveries of a scheduler on virtual time."""

    scheduler: Scheduler
    clock: Clock

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.memory: _NotingStore = _NotingStore(clock=clock)
        self.store: FaultyStore = FaultyStore(self.memory)
        self.sinks: dict[str, RecordingSink] = {
            name: sink if isinstance(sink, RecordingSink) else RecordingSink(name, limits=sink.limits, check=sink.check)
            for name, sink in scheduler.sinks.items()
        }
        self._sent_before = {name: len(sink.deliveries) for name, sink in self.sinks.items()}
        self._runs: list[Delivery] = []
        if isinstance(clock, VirtualClock):
            clock.add_idle_hook(self._settle)

    # --- what happened ------------------------------------------------------------------------------------

    def note_run(self, record: Record, lateness_ms: int) -> None:
        """Record a run of a handler. The scheduler calls this right before the run begins."""
        self._runs.append(
            Delivery(
                record.envelope,
                delivery_id(record),
                record.due_ms,
                record.revision,
                record.attempt + 1,
                lateness_ms,
            )
        )

    def deliveries(self) -> list[Delivery]:
        """Return the attempts of handlers and sinks, by time."""
        sent = [each for name, sink in self.sinks.items() for each in sink.deliveries[self._sent_before[name] :]]
        return sorted(self._runs + sent, key=lambda each: each.due_ms + each.lateness_ms)

    def failure(self, delivery: Delivery) -> str | None:
        """Return the error of a failed attempt; None if the attempt did not fail."""
        return self.memory.failures.get((delivery.delivery_id, delivery.attempt))

    def messages(self) -> list[Snapshot]:
        """Return all messages of the store, by the time of their next attempt."""
        return list(_at_once(self.memory.search(Query(limit=ALL))))

    def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters, oldest first."""
        return list(_at_once(self.memory.dead_letters(limit=ALL)))

    # --- advance ------------------------------------------------------------------------------------------

    async def _settle(self) -> bool:
        """Wait until all due messages have settled. Return whether there was anything to wait for.

        If nothing changes for `OVERDUE_LIMIT_S`, the store or a sink does not work: stop waiting for overdue messages.
        """
        loop = asyncio.get_running_loop()
        if _kits.get(self.scheduler) is not self or not isinstance(loop, VirtualLoop):
            return False
        has_waited = False
        with self.scheduler.watch() as changed:
            while limit_s := self._limit_s():
                changed.clear()
                if not await changed.wait(limit_s):
                    self._check_in_flight()
                    return has_waited
                await loop.pass_time(0)
                has_waited = True
        return has_waited

    def _limit_s(self) -> float:
        """Return the longest wait for a change, in seconds; 0 if there is nothing to wait for."""
        if self.scheduler.in_flight:
            return IN_FLIGHT_LIMIT_S
        lanes = tuple(self.scheduler.served())
        if not lanes:
            return 0
        due = _at_once(self.memory.search(Query(lanes, to_ms=self.memory.now_ms() + 1, limit=ALL)))
        return OVERDUE_LIMIT_S if any(message.state is State.OVERDUE for message in due) else 0

    def _check_in_flight(self) -> None:
        if self.scheduler.in_flight:
            ids = tuple(each.record.id for each in self.messages() if each.state is State.IN_FLIGHT)
            raise StillInFlightError(ids, IN_FLIGHT_LIMIT_S)


def on_virtual_time(scheduler: Scheduler, clock: VirtualClock) -> AbstractContextManager[Scheduler]:
    """Move a scheduler to an empty memory store, virtual time and recording sinks, for the length of the block.

    The scheduler stays the same object, with its handlers and settings, so code that imports it needs no change. The
    end of the block removes the handlers that were added inside the block, and all messages. This function does not
    open the scheduler.

    Args:
        scheduler: A scheduler that is not open.
        clock: The fixture `clock`, or a `VirtualClock` of the loop that will run.

    Raises:
        ClosedError: The scheduler is open.
    """
    return on_clock(scheduler, clock)


@contextmanager
def on_clock(
    scheduler: Scheduler, clock: Clock, *, around_store: Callable[[Store], Store] = lambda store: store
) -> Iterator[Scheduler]:
    """Move a scheduler as `on_virtual_time` does, with a clock of any type.

    Args:
        scheduler: A scheduler that is not open.
        clock: The clock of the scheduler and its store.
        around_store: Returns the store that the scheduler uses, around the store of the kit.
    """
    kit = Kit(scheduler, clock)
    with scheduler.moved_to(around_store(kit.store), kit.sinks, clock, kit.note_run):
        before = _kits.get(scheduler)
        _kits[scheduler] = kit
        try:
            yield scheduler
        finally:
            del _kits[scheduler]
            if before is not None:
                _kits[scheduler] = before


def kit_of(scheduler: Scheduler) -> Kit:
    """Return the kit of a scheduler on virtual time.

    Raises:
        ConfigurationError: The scheduler is not on virtual time.
    """
    kit = _kits.get(scheduler)
    if kit is None:
        raise ConfigurationError(
            "scheduler", "not on virtual time", "the fixture 'scheduler', or a scheduler in 'with on_virtual_time()'"
        )
    return kit


def store_of(scheduler: Scheduler) -> FaultyStore:
    """Return the store of a scheduler on virtual time, so that a test can inject faults.

    Raises:
        ConfigurationError: The scheduler is not on virtual time.
    """
    return kit_of(scheduler).store


def sink_of(scheduler: Scheduler, name: str) -> RecordingSink:
    """Return the recording sink that replaces the scheduler's sink of this name.

    Raises:
        ConfigurationError: The scheduler is not on virtual time, or has no sink of this name.
    """
    sinks = kit_of(scheduler).sinks
    if name not in sinks:
        raise ConfigurationError("sink", repr(name), ", ".join(sinks) or "none: the scheduler has no sinks")
    return sinks[name]


def _at_once(answer: Coroutine[Any, Any, T]) -> T:
    """Return the answer of a memory store without an event loop: a memory store never waits."""
    try:
        answer.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    answer.close()
    raise AssertionError("a memory store has waited, but must answer at once")
