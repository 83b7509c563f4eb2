"""Bad builds of aiodelay: each lacks one step on which a promise rests. The checker must notice each of them.

The steps are those of the rulebook, of the claims and of the engine. Memory, SQLite and Kafka share the rulebook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

from aiodelay.backends.memory import store as memory
from aiodelay.backends.memory.store import MemoryStore
from aiodelay.core import rules as rulebook
from aiodelay.core import transitions
from aiodelay.core.dict_table.claims import DictClaiming, LaneHeads
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.table import Workers
from aiodelay.core.fair_share import FairShare
from aiodelay.core.rules import Rules
from aiodelay.core.values import (
    Cancel,
    Command,
    Done,
    Outcome,
    Put,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.engine.delivery import settling
from aiodelay.engine.delivery.lease_book import Held
from aiodelay.engine.delivery.run_settlements import RunSettlements
from aiodelay.engine.sending.group_commit import GroupCommit

__all__ = ["BUILDS", "BadBuild"]

AnyRules = Rules[Entry]


class BadBuild(NamedTuple):
    """A build without one step.

    Attributes:
        rule: The rule that the build breaks. It may break others too.
        without: Removes the step, until the stack is closed.
    """

    rule: str
    without: Callable[[ExitStack], None]


def replacing(owner: object, name: str, make: Callable[[Any], Any]) -> Callable[[ExitStack], None]:
    """Return what replaces a function by one that is made from it."""

    def remove(stack: ExitStack) -> None:
        stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))

    return remove


# --- the rulebook -----------------------------------------------------------------------------------------


def any_token(settle: Callable[..., SettleOutcome]) -> Callable[..., SettleOutcome]:
    def settled(self: AnyRules, settlement: Settlement, now: int) -> SettleOutcome:
        row = self.table.find(settlement.id)
        token = row.token if row is not None and row.token else settlement.token
        return settle(self, replace(settlement, token=token), now)

    return settled


def blind_end(settle: Callable[..., SettleOutcome]) -> Callable[..., SettleOutcome]:
    """End whatever is stored under the id, as a tombstone without a condition does."""

    def settled(self: AnyRules, settlement: Settlement, now: int) -> SettleOutcome:
        outcome, row = settle(self, settlement, now), self.table.find(settlement.id)
        if outcome is SettleOutcome.SUPERSEDED and isinstance(settlement, Done) and row is not None and not row.token:
            self.end(row, now)
        return outcome

    return settled


def ended_comes_back(end: Callable[..., None]) -> Callable[..., None]:
    """Answer `settled`, and put the message back into its lane, due again in ten minutes."""
    return lambda self, row, now: self.table.move(row, row.record, now + 600_000)


def cancels_nothing(cancel: Callable[..., Outcome]) -> Callable[..., Outcome]:
    def cancelled(self: AnyRules, command: Cancel, row: Entry | None, now: int) -> Outcome:
        if row is None or row.token:
            return cancel(self, command, row, now)
        return Stored("cancelled", row.record.revision, row.record.due_ms)

    return cancelled


def keeps_the_old(put: Callable[..., Outcome]) -> Callable[..., Outcome]:
    def stored(self: AnyRules, command: Put, row: Entry | None, now: int) -> Outcome:
        if row is None or row.token:
            return put(self, command, row, now)
        return Stored("replaced", row.record.revision + 1, row.record.due_ms)

    return stored


def other_bytes(record_of: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(put: Put, due_ms: int, revision: int) -> Any:  # noqa: ANN401 - a Record
        envelope = replace(put.envelope, payload=put.envelope.payload + b"!")
        return record_of(replace(put, envelope=envelope), due_ms, revision)

    return recorded


# --- claims -----------------------------------------------------------------------------------------------


def one_ms_early(first_due: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, lanes, now: first_due(self, lanes, now + 1)


def without_return(stack: ExitStack) -> None:
    """Do not return lapsed claims, and claim again when the next message is due."""

    def next_by_lane(self: DictClaiming, lanes: Collection[str], now: int) -> dict[str, int | None]:
        return {lane: self._order.next_due_ms([lane], now) for lane in lanes}

    stack.enter_context(patch.object(DictClaiming, "return_lapsed", lambda *_: 0))
    stack.enter_context(patch.object(DictClaiming, "_next_by_lane", next_by_lane))


def starving(stack: ExitStack) -> None:
    """Give out the messages of other lanes only while no message of `work` is due. Then claim again after a second."""
    first_due, next_due_ms = LaneHeads.first_due, LaneHeads.next_due_ms

    def first(self: LaneHeads, lanes: Sequence[str], now: int) -> Entry | None:
        busy = "work" not in lanes and first_due(self, ["work"], now) is not None
        return None if busy else first_due(self, lanes, now)

    def next_ms(self: LaneHeads, lanes: Iterable[str], now: int) -> int | None:
        found = next_due_ms(self, lanes, now)
        return None if found is None else found if found > now else now + 1_000

    stack.enter_context(patch.object(LaneHeads, "first_due", first))
    stack.enter_context(patch.object(LaneHeads, "next_due_ms", next_ms))


def latest_first(take: Callable[..., list[Entry]]) -> Callable[..., list[Entry]]:
    return lambda self: take(self)[::-1]


def asleep(stack: ExitStack) -> None:
    """Remove the wake-ups and the safety poll: a process sleeps until the time that it knew."""

    async def wait(self: Any, *, until_ms: int | None) -> None:  # noqa: ANN401 - the memory store's `Work`
        await asyncio.sleep(1_000_000 if until_ms is None else max(self._clock.seconds_until(until_ms), 0))

    stack.enter_context(patch.object(Workers, "wake", lambda self: None))
    stack.enter_context(patch.object(memory._MemoryWork, "wait", wait))


# --- the engine -------------------------------------------------------------------------------------------


def acknowledged_in_any_case(send: Callable[..., Any]) -> Callable[..., Any]:
    """Acknowledge a batch of commands without awaiting that the store has taken them."""

    async def sent(self: GroupCommit, batch: list[Any]) -> None:
        for waiting in batch:
            future, waiting.future = waiting.future, asyncio.get_running_loop().create_future()
            if not future.done():
                future.set_result([_stored(command, self) for command in waiting.commands])
        await send(self, batch)

    return sent


def _stored(command: Command, commit: GroupCommit) -> Outcome:
    now = commit._clock.now_ms()
    answer = {Put: "stored", Cancel: "cancelled"}.get(type(command), "rescheduled")
    return Stored(answer, now, now)  # type: ignore[arg-type]


def failures_are_done(after_failure: Callable[..., Settlement]) -> Callable[..., Settlement]:
    def settled(self: RunSettlements, held: Held, error: BaseException) -> Settlement:
        record = held.claim.record
        return settling.done(record, held.claim.token, self._now_ms())

    return settled


def tried_for_ever(after_failure: Callable[..., Settlement]) -> Callable[..., Settlement]:
    def settled(self: RunSettlements, held: Held, error: BaseException) -> Settlement:
        record, now = held.claim.record, self._now_ms()
        return settling.again(record, held.claim.token, now, due_ms=now + 1_000, attempt=record.attempt + 1, error="")

    return settled


def leaking(stack: ExitStack) -> None:
    """Leave a task behind when the store is closed."""
    left: list[asyncio.Task[None]] = []

    async def close(self: MemoryStore, *exc_info: object) -> None:
        left.append(asyncio.create_task(asyncio.sleep(1_000_000)))

    def end() -> None:
        for task in left:
            if not task.get_loop().is_closed():
                task.cancel()

    stack.callback(end)
    stack.enter_context(patch.object(MemoryStore, "__aexit__", close))


def repeated_blindly(known_answer: Callable[..., Outcome | None]) -> Callable[..., Outcome | None]:
    """Carry out a command again if it comes twice, as a client does that repeats commands without an op."""
    return lambda answers, command, row, now: None


BUILDS: dict[str, BadBuild] = {
    "no check of the token": BadBuild("S7", replacing(Rules, "settle", any_token)),
    "a blind tombstone": BadBuild("S2", replacing(Rules, "settle", blind_end)),
    "commands repeated without an op": BadBuild("S8", replacing(rulebook, "known_answer", repeated_blindly)),
    "no return of lapsed claims": BadBuild("L1", without_return),
    "acknowledged without awaiting the store": BadBuild(
        "S2", replacing(GroupCommit, "_send", acknowledged_in_any_case)
    ),
    "early by a millisecond": BadBuild("S1", replacing(LaneHeads, "first_due", one_ms_early)),
    "lost wake-ups, and no safety poll": BadBuild("L2", asleep),
    "settled messages that stay": BadBuild("S6", replacing(Rules, "_end_claimed", ended_comes_back)),
    "cancels without effect": BadBuild("S5", replacing(Rules, "cancel", cancels_nothing)),
    "replacements without effect": BadBuild("S4", replacing(Rules, "put", keeps_the_old)),
    "failed runs that count as delivered": BadBuild(
        "S3", replacing(RunSettlements, "after_failure", failures_are_done)
    ),
    "renewals without effect": BadBuild("B1", replacing(Rules, "renew", lambda _: lambda *_: RenewOutcome.RENEWED)),
    "changed bytes": BadBuild("S8", replacing(transitions, "record_of", other_bytes)),
    "the latest first": BadBuild("S9", replacing(FairShare, "take", latest_first)),
    "a lane that starves": BadBuild("L3", starving),
    "poison that is tried for ever": BadBuild("L5", replacing(RunSettlements, "after_failure", tried_for_ever)),
    "a task left behind": BadBuild("R1", leaking),
}
