"""A sink's place in the dispatch loop: batches go out as they come, each outcome is settled."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiodelay.errors import SinkUnavailableError, cut
from aiodelay.model import (
    Claim,
    Delivery,
    Demand,
    Failed,
    Lane,
    NotTaken,
    SendOutcome,
    Sent,
    Settlement,
    SettleOutcome,
)
from aiodelay.ports import Sink
from aiodelay.retry import GiveUp, Retry
from aiodelay.transitions import delivery_id

from . import settling
from .leases import Held, LeaseBook

__all__ = ["SinkSubscription"]

log = logging.getLogger("aiodelay.sinks")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0


@dataclass(slots=True, kw_only=True)
class SinkSubscription:
    """Sends one sink's messages.

    Args:
        sink: An open sink.
        retry: When a message that the sink refused is sent again.
        book: Where claims are settled.
        tasks: Owns the sends.
        now_ms: The store's time.
        on_free: Called when demand has grown.
    """

    sink: Sink
    retry: Retry
    book: LeaseBook
    tasks: asyncio.TaskGroup
    now_ms: Callable[[], int]
    on_free: Callable[[], None]
    in_flight: int = 0
    is_draining: bool = False
    _bytes: int = 0
    _failures: int = 0
    _is_paused: bool = False
    _sends: set[asyncio.Task[None]] = field(default_factory=set)
    _refusing: dict[str, int] = field(default_factory=dict)
    """Addresses that take nothing, with how many batches they have refused in a row."""

    @property
    def lane(self) -> Lane:
        return self.sink.name

    def demand(self) -> Demand:
        """Return how many more messages, and bytes, the sink can take now."""
        if self.is_draining or self._is_paused:
            return Demand(0)
        limits = self.sink.limits
        return Demand(max(0, limits.messages - self.in_flight), max(0, limits.max_bytes - self._bytes))

    def deliver(self, claims: Sequence[Claim]) -> None:
        """Take claims, no more than were requested, and send them as one batch; give them back if it is draining."""
        self.in_flight += len(claims)
        batch = self.book.add(claims, self)
        self._bytes += sum(claim.record.envelope.size for claim in claims)
        if self.is_draining:
            self._release(batch)
            return
        task = self.tasks.create_task(self._send(batch), name=f"aiodelay sink {self.lane}")
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    def settled(self, held: Held, outcome: SettleOutcome) -> None:
        self.in_flight -= 1
        self._bytes -= held.claim.record.envelope.size

    def lost(self, held: Held) -> None:
        """A send cannot be taken back; its settlement will find the lease gone."""

    def drain(self) -> None:
        """Take nothing more."""
        self.is_draining = True

    def stop(self) -> None:
        """Cancel sends that are under way; their messages go back to the store."""
        self.drain()
        for task in self._sends:
            task.cancel()

    async def _send(self, batch: list[Held]) -> None:
        ready = [held for held in batch if not self._settled_unsent(held)]
        now = self.now_ms()
        deliveries = [_delivery(held.claim, now) for held in ready]
        try:
            if ready:
                await self._send_and_settle(ready, deliveries)
        except asyncio.CancelledError:
            self._release(ready)
            if not self.is_draining:
                raise
        except SinkUnavailableError as error:
            self._release(ready)
            self._pause(error)

    async def _send_and_settle(self, ready: list[Held], deliveries: list[Delivery]) -> None:
        try:
            outcomes = await self.sink.send(deliveries)
        except SinkUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - the offender alone shall pay for what a sink raises
            await self._send_apart(ready, deliveries, error)
            return
        self._failures = 0
        self._note_addresses(ready, outcomes)
        for held, outcome in zip(ready, outcomes, strict=True):
            self.book.settle(held, self._settlement(held, outcome))

    async def _send_apart(self, ready: list[Held], deliveries: list[Delivery], error: Exception) -> None:
        """Send a batch's messages one by one, so that the one that breaks it breaks itself alone."""
        if len(ready) == 1:
            log.error("sink %s raised for %s: %s", self.lane, ready[0].claim.record.id, settling.error_text(error))
            self.book.settle(ready[0], self._settlement(ready[0], Failed(settling.error_text(error))))
            return
        while ready:
            await self._send_and_settle(ready[:1], deliveries[:1])
            del ready[:1], deliveries[:1]

    def _note_addresses(self, sent: list[Held], outcomes: Sequence[SendOutcome]) -> None:
        """Count refusals, and tell once that an address takes nothing, and once that it does again."""
        reasons: dict[str, str] = {}
        for held, outcome in zip(sent, outcomes, strict=True):
            address = held.claim.record.envelope.address
            if isinstance(outcome, NotTaken):
                reasons[address] = outcome.reason
            elif address in self._refusing and isinstance(outcome, Sent):
                del self._refusing[address]
                log.warning("%s:%s takes messages again", self.lane, address)
        for address, reason in reasons.items():
            before = self._refusing.get(address, 0)
            self._refusing[address] = before + 1
            if not before:
                log.warning("%s:%s takes nothing (%s); its messages wait in the store", self.lane, address, reason)

    def _settled_unsent(self, held: Held) -> bool:
        record = held.claim.record
        settlement = settling.without_running(record, held.claim.token, self.now_ms())
        if settlement is not None:
            self.book.settle(held, settlement)
        return settlement is not None

    def _release(self, batch: list[Held]) -> None:
        for held in batch:
            if held.settlement is None:
                self.book.settle(held, settling.release(held.claim.record, held.claim.token))

    def _pause(self, error: SinkUnavailableError) -> None:
        """Ask for nothing for a while, longer each time."""
        if not self._failures:
            log.warning("%s; its messages wait in the store", error)
        pause_s = _pause_s(self._failures)
        self._failures += 1
        self._is_paused = True
        asyncio.get_running_loop().call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        self.on_free()

    def _settlement(self, held: Held, outcome: SendOutcome) -> Settlement:
        record, token, now = held.claim.record, held.claim.token, self.now_ms()
        if isinstance(outcome, Sent):
            return settling.done(record, token, now)
        if isinstance(outcome, NotTaken):
            due_ms = now + int(1000 * _pause_s(self._refusing.get(record.envelope.address, 1) - 1))
            return settling.again(
                record,
                token,
                now,
                due_ms=due_ms,
                attempt=record.attempt,
                error=cut(outcome.reason, settling.ERROR_LIMIT),
            )
        attempt = record.attempt + 1
        decision = (
            self.retry.decide(attempt, SinkRefusal(outcome.error), random.random()) if outcome.retryable else None
        )
        if decision is None or isinstance(decision, GiveUp):
            reason = "not_retryable" if decision is None else decision.reason
            return settling.dead(record, token, now, reason=reason, attempt=attempt, error=outcome.error)
        return settling.again(record, token, now, due_ms=now + decision.delay_ms, attempt=attempt, error=outcome.error)


class SinkRefusal(Exception):  # noqa: N818 - stands for a sink's refusal in a retry decision, never raised
    """What a sink refused."""


def _pause_s(failures: int) -> float:
    """Return how long to ask for nothing after so many failures before this one: longer each time."""
    longest: float = min(FIRST_PAUSE_S * 2 ** min(failures, 10), LONGEST_PAUSE_S)
    return longest * random.uniform(0.5, 1)


def _delivery(claim: Claim, now_ms: int) -> Delivery:
    record = claim.record
    return Delivery(
        record.envelope,
        delivery_id(record),
        record.due_ms,
        record.revision,
        record.attempt + 1,
        max(now_ms - record.due_ms, 0),
    )
