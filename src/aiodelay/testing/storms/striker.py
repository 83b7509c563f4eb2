"""`Striker`: strikes one run of a test with the faults of a plan.

The faults strike in the scheduler's middleware, and between the scheduler and its store.
"""

from __future__ import annotations

import asyncio
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import (
    Again,
    Claim,
    Claimed,
    Dead,
    Demand,
    Done,
    Lane,
    Message,
    Record,
    Renewal,
    RenewOutcome,
    Scheduled,
    Settlement,
    SettleOutcome,
    State,
)
from aiodelay.errors import OutcomeUnknownError
from aiodelay.ports import Store, Work
from aiodelay.scheduler import Context, Scheduler
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.forwarding import ForwardingStore, ForwardingWork
from aiodelay.testing.kit import kit_of
from aiodelay.testing.loop import VirtualLoop

from .plan import CommandStep, Fault, Place, Plan, Step

__all__ = ["Striker"]

T = TypeVar("T")
MOST_STRIKES = 2
"""The most faults that strike the deliveries of one message. A message that ends three processes is given up."""
POLL_MS = 1_000
_ACTIONS: Mapping[CommandStep, str] = {
    "schedule": "stored",
    "cancel": "cancelled",
    "reschedule": "rescheduled",
    "fire": "fired",
}
"""The verb that error texts use for each command."""
_Token = tuple[str, int, int]
"""The id and the revision of a message, and the token of a claim on it."""

_run_of: ContextVar[str] = ContextVar("run of the message", default="")
"""The message whose handler runs; "" = no handler runs."""


class Striker:
    """Strikes one run of a test with the faults of a plan.

    Args:
        plan: The faults.
        scheduler: The scheduler under test.
        clock: Its clock.
        faults: The list to which each fault that strikes is added.
        strikes_test: Whether commands that no handler gives may lose their replies too.
    """

    def __init__(
        self, plan: Plan, scheduler: Scheduler, clock: VirtualClock, faults: list[Fault], *, strikes_test: bool
    ) -> None:
        self._plan, self._scheduler, self._clock, self._strikes_test = plan, scheduler, clock, strikes_test
        self._faults = faults
        self._visits: Counter[tuple[Step, str]] = Counter()
        self._generated: Counter[str] = Counter()
        self._strikes: Counter[str] = Counter()
        self._lost: set[str] = set()
        self._names: dict[str, str] = {}
        self._claims: dict[str, Claim] = {}
        self._claims_by_token: dict[_Token, Claim] = {}
        self._begun: set[int] = set()
        self._cut: set[int] = set()
        self._struck_ids: set[str] = set()
        self._behind_ms = 0
        self._patience_ms = 0

    def store(self, store: Store) -> Store:
        """Return a store whose claims and settlements are struck."""
        return _StormStore(store, self)

    def _name_of(self, record: Record) -> str:
        return self._names.get(record.id) or f"{record.envelope.type or record.envelope.lane} {record.id!r}"

    def _fault(self, step: Step, message: str) -> Fault | None:
        """Come to a step, and return the fault that strikes there. A settlement has the number of its run."""
        if step != "settle":
            self._visits[step, message] += 1
        return self._plan.fault(Place(step, message, self._visits["run" if step == "settle" else step, message]))

    def _fault_of(self, step: Step, record: Record) -> Fault | None:
        name = self._name_of(record)
        fault = self._fault(step, name)
        if fault is None or self._strikes[name] >= MOST_STRIKES:
            return None
        self._strikes[name] += 1
        return fault

    def _note(self, fault: Fault, *ids: str) -> None:
        self._faults.append(fault)
        self._struck_ids.update(ids)
        self._patience_ms = max(self._patience_ms, self._clock.monotonic_ms() + 2 * fault.ms + 3_600_000)

    # --- commands -------------------------------------------------------------------------------------------

    async def around_schedule(
        self, message: Message, call_next: Callable[[Message], Awaitable[Scheduled]]
    ) -> Scheduled:
        """Schedule a message, or lose the request or the reply."""
        named = self._named(message)
        assert named.id is not None
        return await self._carry_out("schedule", named.id, partial(call_next, named))

    def strike_changes(self, scheduler: Scheduler) -> None:
        """Let the calls of `cancel`, `reschedule` and `fire` lose their requests or replies."""
        scheduler.cancel = self._struck("cancel", scheduler.cancel)  # type: ignore[method-assign]
        scheduler.reschedule = self._struck("reschedule", scheduler.reschedule)  # type: ignore[method-assign]
        scheduler.fire = self._struck("fire", scheduler.fire)  # type: ignore[method-assign]

    def _struck(self, step: CommandStep, command: Callable[..., Awaitable[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
        async def struck(message_id: str, **options: Any) -> T:  # noqa: ANN401 - the options of the command
            return await self._carry_out(step, message_id, partial(command, message_id, **options))

        return struck

    async def _carry_out(self, step: CommandStep, message_id: str, command: Callable[[], Awaitable[T]]) -> T:
        """Carry out a command, or lose the request or the reply."""
        runner = _run_of.get()
        fault = self._fault(step, self._names.get(message_id, repr(message_id)))
        if fault is None or not self._may_lose(runner):
            self._lost.discard("")
            return await command()
        self._lost.add(runner)
        self._note(fault)
        answer = await command() if fault.kind == "reply_lost" else None

        async def again() -> T:
            return await command() if answer is None else answer

        raise OutcomeUnknownError(message_id, f"the storm: {fault.kind.replace('_', ' ')}", again, _ACTIONS[step])

    def _may_lose(self, runner: str) -> bool:
        """Return whether a reply may be lost: one reply for each handled message, and no two in a row for the test."""
        return runner not in self._lost and (bool(runner) or self._strikes_test)

    def _named(self, message: Message) -> Message:
        """Give a message a name for the report. If it has no id, give it an id that is the same in each run."""
        type_name = type(message.event).__name__ if message.to is None else message.to
        if message.id is not None:
            self._names[message.id] = f"{type_name} {message.id!r}"
            return message
        self._generated[type_name] += 1
        generated = f"{len(self._names):032x}"
        self._names[generated] = f"{type_name} no. {self._generated[type_name]}"
        return structs.replace(message, id=generated)

    # --- runs -----------------------------------------------------------------------------------------------

    async def around_run(self, context: Context, call_next: Callable[[Context], Awaitable[object]]) -> object:
        """Run a handler, or cut its run at an await."""
        first, *others = (self._claims[each.delivery_id] for each in context.messages)
        claims = [first, *others]
        self._begun.update(map(id, claims))
        for claim in others:
            self._visits["run", self._name_of(claim.record)] += 1
        _run_of.set(self._name_of(first.record))
        fault = self._fault_of("run", first.record)
        if fault is None:
            return await call_next(context)
        run = _CutRun(fault.awaits)
        try:
            return await run.drive(_awaited(call_next(context)))
        except BaseException:
            if not run.is_cut:
                raise
            return None
        finally:
            if run.is_cut:
                self._note(fault, *(claim.record.id for claim in claims))
                self._cut.update(map(id, claims))

    # --- claims and settlements -----------------------------------------------------------------------------

    async def delivered(self, work: Work, claim: Claim) -> bool:
        """Return whether a claimed message is delivered now. If not, it has gone back to the store."""
        record = claim.record
        if record.envelope.lane in self._scheduler.sinks:
            return True
        self._claims[delivery_id(record)] = claim
        self._claims_by_token[record.envelope.id, record.revision, claim.token] = claim
        fault = self._fault_of("claim", record)
        if fault is None or (fault.kind == "late" and record.envelope.rule is not None):
            return True
        self._note(fault, record.id)
        if fault.kind == "late":
            await work.settle([self._again(record, claim.token, fault.ms)])
            return False
        step_ms = fault.ms if fault.kind == "clock_forward" else -fault.ms
        self._clock.step(timedelta(milliseconds=step_ms))
        self._behind_ms -= min(step_ms, 0)
        return True

    def _again(self, record: Record, token: int, delay_ms: int) -> Again:
        due_ms = self._clock.now_ms() + delay_ms
        return Again(record.envelope.id, record.revision, token, due_ms, record.attempt)

    def settlement(self, settlement: Settlement) -> Settlement | None:
        """Return the settlement that reaches the store instead of this settlement; None if none reaches it."""
        claim = self._claims_by_token.get((settlement.id, settlement.revision, settlement.token))
        if id(claim) in self._cut:
            return None
        if claim is None or not _ends_run(settlement, claim.record):
            return settlement
        record = claim.record
        if id(claim) not in self._begun:  # a program has taken the message from `messages()`
            self._visits["run", self._name_of(record)] += 1
        fault = self._fault_of("settle", record)
        if fault is None:
            return settlement
        self._note(fault, record.id)
        if fault.kind == "crash" or record.envelope.rule is not None:
            return None
        return self._again(record, settlement.token, fault.ms)

    def renews(self, renewal: Renewal) -> None:
        """Remember the new token of a claim."""
        claim = self._claims_by_token.get((renewal.id, renewal.revision, renewal.token))
        if claim is not None:
            self._claims_by_token[renewal.id, renewal.revision, renewal.to] = claim

    # --- the end --------------------------------------------------------------------------------------------

    async def calm_down(self) -> bool:
        """Let the time pass by which the clock was set back, and wait for struck messages that are due.

        Return whether there was anything to wait for. This is an idle hook of the clock.
        """
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        wait_ms, self._behind_ms = self._behind_ms or self._wait_ms(), 0
        await loop.pass_time(wait_ms)
        return wait_ms > 0

    def _wait_ms(self) -> int:
        now = self._clock.now_ms()
        if not self._scheduler.served() or self._clock.monotonic_ms() > self._patience_ms:
            return 0
        struck = [
            each
            for each in kit_of(self._scheduler).messages()
            if each.record.id in self._struck_ids and each.record.due_ms <= now and each.state is not State.OVERDUE
        ]
        return (
            max(min((each.next_attempt_ms for each in struck), default=now - POLL_MS) - now, POLL_MS) if struck else 0
        )


class _StormStore(ForwardingStore):
    def __init__(self, store: Store, striker: Striker) -> None:
        super().__init__(store)
        self._striker = striker

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open the dispatching role, with faults."""
        async with self._store.work(worker, lanes) as work:
            yield _StormWork(work, self._striker)


class _StormWork(ForwardingWork):
    """A worker's view of the store, struck by faults."""

    def __init__(self, work: Work, striker: Striker) -> None:
        super().__init__(work)
        self._striker = striker

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        claimed = await self._work.claim(demand, request=request, lease_ms=lease_ms)
        claims = [claim for claim in claimed.claims if await self._striker.delivered(self._work, claim)]
        return structs.replace(claimed, claims=claims)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        sent = [self._striker.settlement(settlement) for settlement in settlements]
        answers = iter(await self._work.settle([settlement for settlement in sent if settlement is not None]))
        return [SettleOutcome.SETTLED if settlement is None else next(answers) for settlement in sent]

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        for renewal in renewals:
            self._striker.renews(renewal)
        return await self._work.renew(renewals)


class _CutRun:
    """Drives a coroutine, and cancels it at an await. Its cleanup runs, as its memory survives the fault too.

    Args:
        awaits: The number of awaits that the coroutine gets over before.
    """

    def __init__(self, awaits: int) -> None:
        self._left, self.is_cut = awaits, False

    @types.coroutine
    def drive(self, coroutine: Coroutine[Any, Any, object]) -> Generator[Any, Any, object]:
        try:
            awaited = coroutine.send(None)
            while True:
                if self._left == 0 and not self.is_cut:
                    self.is_cut = True
                    if not isinstance(awaited, asyncio.Future) or not awaited.cancel():
                        awaited = coroutine.throw(asyncio.CancelledError())
                        continue
                self._left -= 1
                try:
                    value = yield awaited
                except BaseException as error:  # noqa: BLE001 - the coroutine gets it, as it would from a plain await
                    awaited = coroutine.throw(error)
                else:
                    awaited = coroutine.send(value)
        except StopIteration as end:
            return end.value
        finally:
            coroutine.close()


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _ends_run(settlement: Settlement, record: Record) -> bool:
    """Return whether a settlement follows a run that counts, not a message that is given back."""
    if isinstance(settlement, Done):
        return settlement.outcome == "delivered"
    return isinstance(settlement, Again | Dead) and settlement.attempt > record.attempt
