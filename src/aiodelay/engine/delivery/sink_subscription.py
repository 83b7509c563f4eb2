"""A sink's subscription in the dispatch loop: it sends claimed batches and settles each outcome."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from aiodelay.core.backoff import pause_s
from aiodelay.core.retry import GiveUp, Retry
from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import (
    Again,
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
from aiodelay.engine.backoff import is_cancelled
from aiodelay.engine.observer import Observer
from aiodelay.errors import SinkUnavailableError
from aiodelay.ports import Sink

from . import settling
from .dead_letter_hooks import DeadLetterHooks
from .lease_book import Held, LeaseBook
from .runners import Runners

__all__ = ["SinkRefusal", "SinkSubscription"]

log: logging.Logger = logging.getLogger("aiodelay.sinks")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
NO_REASON = "the sink gave no reason"
"""The error text of a refusal without a reason. Without a text, the journal would say that no attempt failed."""


@dataclass(slots=True, kw_only=True, eq=False)
class SinkSubscription:
    """Sends one sink's messages.

    Args:
        sink: An open sink.
        retry: The retry policy for messages that the sink refused.
        runners: The tasks in which the messages are sent.
        now_ms: The store's time.
        on_free: Called when demand has grown.
        observer: Receives each batch and sends it.
        hooks: Receive each message that is given up.
    """

    sink: Sink
    retry: Retry
    runners: Runners
    now_ms: Callable[[], int]
    on_free: Callable[[], None]
    observer: Observer | None = None
    hooks: DeadLetterHooks | None = None
    in_flight: int = 0
    is_draining: bool = False
    _bytes: int = 0
    _failures: int = 0
    _resuming: asyncio.TimerHandle | None = None
    _sends: dict[asyncio.Task[None], list[Held]] = field(default_factory=dict)
    _refusing: dict[str, int] = field(default_factory=dict)
    """Blocked addresses, with the number of batches that each has refused in a row."""
    ahead: ClassVar[None] = None

    @property
    def lane(self) -> Lane:
        """The sink's name."""
        return self.sink.name

    def demand(self) -> Demand:
        """Return how many more messages and bytes the sink can take now."""
        limits = self.sink.limits
        bytes_left = limits.max_bytes - self._bytes
        if self.is_draining or self._resuming is not None or (self.in_flight and bytes_left <= 0):
            return Demand(0)
        return Demand(max(0, limits.messages - self.in_flight), bytes_left)

    def deliver(self, claimed: Sequence[Held]) -> None:
        """Take claims, no more than were requested, and send their messages as one batch.

        While the subscription drains, give the claims back.
        """
        batch = list(claimed)
        self.in_flight += len(batch)
        self._bytes += sum(held.claim.record.envelope.size for held in batch)
        if self.is_draining:
            self._release(batch)
            return
        task = self.runners.start(self._send(batch), f"aiodelay sink {self.lane}")
        self._sends[task] = batch
        task.add_done_callback(self._sends.pop)

    def give_back(self) -> None:
        """Give nothing back: each message is already being sent."""

    def take_unbegun(self, book: LeaseBook) -> Sequence[Held]:
        """Take nothing out: each message is already being sent."""
        del book
        return ()

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        """Forget a settled message, so that another message can be requested."""
        if not held.is_freed:
            self.in_flight -= 1
            self._bytes -= held.claim.record.envelope.size
        held.is_freed = True
        if self.hooks is not None:
            self.hooks.settled(held, outcome)

    def lost(self, held: Held) -> None:
        """Do nothing: a send cannot be undone. A later settlement of the message has no effect."""

    def drain(self) -> None:
        """Request no more messages."""
        self.is_draining = True
        if self._resuming is not None:
            self._resuming.cancel()

    def stop(self) -> None:
        """Cancel the sends under way. Their messages go back to the store."""
        self.drain()
        for task in self._sends:
            task.cancel()

    def close(self) -> None:
        """Abandon sends that did not stop. The leases of their messages lapse."""
        for held in (held for batch in self._sends.values() for held in batch if held.settlement is None):
            text = "sink %s: message %s is sent again when its lease ends: the send did not stop in time"
            log.error(text, self.lane, held.claim.record.id)
            held.book.forget(held)

    async def _send(self, batch: list[Held]) -> None:
        now = self.now_ms()
        ready = [held for held in batch if not self._settled_unsent(held, now)]
        deliveries = [_delivery(held.claim, now) for held in ready]
        try:
            if ready:
                await self._send_and_settle(ready, deliveries)
        except asyncio.CancelledError:
            self._release(ready)
            raise
        except SinkUnavailableError as error:
            self._release(ready)
            self._pause(error)

    async def _send_and_settle(self, ready: list[Held], deliveries: list[Delivery]) -> None:
        try:
            if self.observer is None:
                outcomes = await self.sink.send(deliveries)
            else:
                outcomes = await self.observer.send(self.sink, ready, deliveries)
            settlements = [self._settlement(*each) for each in zip(ready, outcomes, strict=True)]
        except SinkUnavailableError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled() and (self.is_draining or isinstance(error, asyncio.CancelledError)):
                raise asyncio.CancelledError from error
            await self._send_apart(ready, deliveries, error)
            return
        self._failures = 0
        self._note_addresses(ready, outcomes)
        for held, settlement in zip(ready, settlements, strict=True):
            held.book.settle(held, settlement)

    async def _send_apart(self, ready: list[Held], deliveries: list[Delivery], error: BaseException) -> None:
        """Send a batch's messages one by one, so that a message that breaks the batch fails alone."""
        if len(ready) == 1:
            failed = Failed(settling.error_text(error))
            raised = type(error), error, settling.users_traceback(error)
            log.error(
                "sink %s raised an error for message %s: %s",
                self.lane,
                ready[0].claim.record.id,
                failed.error,
                exc_info=raised,
            )
            traceback = settling.traceback_text(error)
            ready[0].book.settle(ready[0], self._settlement(ready[0], failed, traceback))
            return
        while ready:
            await self._send_and_settle(ready[:1], deliveries[:1])
            del ready[:1], deliveries[:1]

    def _note_addresses(self, sent: list[Held], outcomes: Sequence[SendOutcome]) -> None:
        """Count refusals. Log once when an address takes nothing, and once when it takes messages again."""
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

    def _settled_unsent(self, held: Held, now: int) -> bool:
        held.began_ms, record = now, held.claim.record
        settlement = settling.without_running(record, held.claim.token, now)
        if isinstance(settlement, Again) and settlement.error is not None:
            log.error(
                "sink %s: series %s waits for a worker that can read it: %s", self.lane, record.id, settlement.error
            )
        if held.is_unwanted or not held.book.may_begin():
            settlement = settling.release(record, held.claim.token)
        if settlement is not None:
            held.book.settle(held, settlement)
        return settlement is not None

    def _release(self, batch: list[Held]) -> None:
        for held in batch:
            held.book.settle(held, settling.release(held.claim.record, held.claim.token))

    def _pause(self, error: SinkUnavailableError) -> None:
        """Request no messages for a while, longer after each failure.

        If several batches were under way, their failures count as one failure.
        """
        if self._resuming is not None or self.is_draining:
            return
        if not self._failures:
            log.warning("%s; its messages wait in the store", error)
        wait_s = _pause_s(self._failures)
        self._failures += 1
        self._resuming = asyncio.get_running_loop().call_later(wait_s, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self.on_free()

    def _settlement(self, held: Held, outcome: SendOutcome, traceback: str | None = None) -> Settlement:
        record, token, began_ms = held.claim.record, held.claim.token, held.began_ms
        if isinstance(outcome, Sent):
            return settling.done(record, token, began_ms)
        if isinstance(outcome, NotTaken):
            due_ms = self.now_ms() + int(1000 * _pause_s(self._refusing.get(record.envelope.address, 0)))
            reason = settling.kept(outcome.reason or NO_REASON)
            return settling.again(record, token, began_ms, due_ms=due_ms, attempt=record.attempt, error=reason)
        attempt, error = record.attempt + 1, settling.kept(str(outcome.error) or NO_REASON)
        decision = self.retry.decide(attempt, SinkRefusal(error), random.random()) if outcome.retryable else None
        if decision is None or isinstance(decision, GiveUp):
            reason = outcome.reason if decision is None else decision.reason
            log.error("sink %s: message %s is given up after attempt %d: %s", self.lane, record.id, attempt, error)
            return settling.dead(
                record, token, began_ms, reason=reason, attempt=attempt, error=error, traceback=traceback
            )
        due_ms = self.now_ms() + decision.delay_ms
        return settling.again(record, token, began_ms, due_ms=due_ms, attempt=attempt, error=error)


class SinkRefusal(Exception):  # noqa: N818 - never raised: the retry policy's decision takes an exception
    """A sink's refusal, as the argument of a retry decision."""


def _pause_s(failures: int) -> float:
    """Return the seconds to wait after a failure that this many failures in a row preceded."""
    return pause_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)


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
