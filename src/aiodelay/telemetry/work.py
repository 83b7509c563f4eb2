"""Wrappers that observe a store's dispatching side: claims, settlements and transfers.

During waits and lease renewals, the instrumentation of client libraries makes no spans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from opentelemetry.trace import SpanKind

from aiodelay.core.values import (
    Claimed,
    Demand,
    Lane,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
    Transferred,
    WorkStatus,
)
from aiodelay.errors import AiodelayError
from aiodelay.ports import Feed, LocalFeed, Pulse, Pulsing, Store, Transferring, Work

from . import names
from .instruments import now_s
from .measurements import Measurements
from .tracing import NOTHING, QUIET, context_of, current_in, sampled_in

__all__ = ["ObservedFeed", "ObservedLocalFeed", "ObservedTransfer", "ObservedWork"]

MOST_LINKS = 128
"""The most links of a transfer's span. OpenTelemetry's SDK keeps no more links by default."""
SAFETY_PART = 0.7
"""A wait that lasts at least this part of the safety poll's interval counts as ended by the safety poll."""


class _ObservedPolling:
    """Common code of observed claims and observed transfers, which poll the store and wait until the next poll."""

    def __init__(self, polled: Feed | Transferring, observer: Measurements, store: Store, lane: Lane) -> None:
        self._polled, self._observer, self._store = polled, observer, store
        self._labels = {**observer.base, names.DESTINATION: lane} if lane else observer.base
        self._next_due_ms: int | None = None
        self._is_woken = False

    def _polling(self) -> AbstractContextManager[None]:
        """Return the context for a poll. Client instrumentation sees the poll only if a message is surely due."""
        is_due = self._next_due_ms is not None and self._next_due_ms <= self._store.now_ms()
        return nullcontext() if is_due else current_in(QUIET)

    def _lateness_of_head_ms(self) -> int | None:
        """Return the lateness of the earliest message, by its last known due time; None if no message is due yet."""
        if self._next_due_ms is None:
            return None
        late_ms = self._store.now_ms() - self._next_due_ms
        return late_ms if late_ms >= 0 else None

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait without spans of client instrumentation, and count the reason for which the wait ended."""
        started_s = now_s()
        with current_in(QUIET):
            await self._polled.wait(until_ms=until_ms)
        if until_ms is not None and self._store.now_ms() >= until_ms:
            reason = "due"
        elif self._is_woken:
            reason = "demand"
        elif now_s() - started_s >= SAFETY_PART * self._store.traits.safety_poll_ms / 1000:
            reason = "safety"
        else:
            reason = "earlier_head"
        self._observer.instruments.add(names.WAKEUPS, 1, {**self._labels, names.REASON: reason})

    def wake(self) -> None:
        """End the current or next wait."""
        self._is_woken = True
        self._polled.wake()

    def clear(self) -> None:
        """Forget earlier wake-ups."""
        self._is_woken = False
        self._polled.clear()

    def _took(
        self, operation: str, started_s: float, destination: str = "", error: BaseException | None = None
    ) -> None:
        labels = self._observer.labels(operation, destination)
        if error is not None:
            labels = {**labels, names.ERROR_TYPE: type(error).__qualname__}
        self._observer.instruments.record(names.OPERATION_DURATION, now_s() - started_s, labels)


class ObservedFeed(_ObservedPolling):
    """A `Feed` whose calls are observed.

    Args:
        feed: The feed that gives out claims.
        observer: The measurements that get the counts and durations.
        store: The store of the scheduler. It gives the time and the length of the safety poll.
        lane: For the feed of a source: the lane of the source. "" = the feed of a store, for all lanes.
    """

    def __init__(self, feed: Feed, observer: Measurements, store: Store, lane: Lane = "") -> None:
        super().__init__(feed, observer, store, lane)
        self._feed = feed
        self._in_doubt: set[tuple[str, int]] = set()
        """The ids and revisions of settlements whose call has failed. The store may have written these settlements."""

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Claim messages, and measure the call."""
        started_s = now_s()
        try:
            with self._polling():
                claimed = await self._feed.claim(demand, request=request, lease_ms=lease_ms)
        except AiodelayError as error:
            self._took(names.CLAIM, started_s, error=error)
            raise
        self._next_due_ms = claimed.next_due_ms
        self._took(names.CLAIM, started_s)
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """Settle claims, measure the call, and count lost leases."""
        started_s = now_s()
        try:
            outcomes = await self._feed.settle(settlements)
        except AiodelayError as error:
            self._took(names.SETTLE, started_s, error=error)
            self._in_doubt.update((each.id, each.revision) for each in settlements)
            raise
        self._took(names.SETTLE, started_s)
        self._note_settled(settlements, outcomes)
        return outcomes

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases without spans of client instrumentation, and count lost leases."""
        with current_in(QUIET):
            outcomes = await self._feed.renew(renewals)
        self._note_lost(sum(each is RenewOutcome.LOST for each in outcomes))
        return outcomes

    def beat(self, ids: Collection[str]) -> None:
        """Pass on the worker's sign of life. This call is not observed."""
        self._feed.beat(ids)

    def _note_settled(self, settlements: Sequence[Settlement], outcomes: Sequence[SettleOutcome]) -> None:
        """Count lost leases. A claim that is gone counts only if no earlier call may have settled it."""
        gone = {
            (each.id, each.revision)
            for each, outcome in zip(settlements, outcomes, strict=True)
            if outcome is SettleOutcome.GONE
        }
        self._note_lost(len(gone - self._in_doubt))
        if self._in_doubt:
            self._in_doubt.difference_update((each.id, each.revision) for each in settlements)

    def _note_lost(self, n: int) -> None:
        if n:
            self._observer.instruments.add(names.LEASES_LOST, n, self._labels)


class ObservedLocalFeed(ObservedFeed):
    """A `LocalFeed` whose calls are observed."""

    def __init__(self, feed: LocalFeed, observer: Measurements, store: Store, lane: Lane) -> None:
        super().__init__(feed, observer, store, lane)
        self._local = feed

    def claim_nowait(self, demand: Mapping[Lane, Demand], *, lease_ms: int) -> Claimed:
        """Claim messages without a wait, and measure the call."""
        started_s = now_s()
        claimed = self._local.claim_nowait(demand, lease_ms=lease_ms)
        self._next_due_ms = claimed.next_due_ms
        self._took(names.CLAIM, started_s)
        return claimed

    def settle_nowait(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome] | None:
        """Settle claims without a wait, measure the call, and count lost leases."""
        started_s = now_s()
        outcomes = self._local.settle_nowait(settlements)
        if outcomes is not None:
            self._took(names.SETTLE, started_s)
            self._note_settled(settlements, outcomes)
        return outcomes


class ObservedWork(ObservedFeed):
    """A `Work` whose calls are observed."""

    def __init__(self, work: Work, observer: Measurements, store: Store) -> None:
        super().__init__(work, observer, store)
        self._work = work

    @property
    def pulse(self) -> Pulse | None:
        """The worker's sign of life, if its store has one. Its steps are not observed."""
        return self._work.pulse if isinstance(self._work, Pulsing) else None

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Do housekeeping without spans of client instrumentation, and pass the results to the observer."""
        with current_in(QUIET):
            tidied = await self._work.tidy(lanes, limit=limit)
            await self._observer.look(tidied)
        return tidied

    def status(self) -> WorkStatus:
        """Return whether the store serves claims."""
        return self._work.status()


class ObservedTransfer(_ObservedPolling):
    """A `Transferring` whose calls are observed.

    Each call that moved messages gets a span. The span has links for the moved messages.
    """

    def __init__(self, moves: Transferring, observer: Measurements, store: Store, lane: Lane) -> None:
        super().__init__(moves, observer, store, lane)
        self._moves, self._lane = moves, observer.named(lane)

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move due messages, and measure the call."""
        traces = max(traces, MOST_LINKS if self._observer.tracing.is_on else 0)
        started_s, started_ms = now_s(), self._store.now_ms()
        late_ms = self._lateness_of_head_ms()
        try:
            with self._polling():
                transferred = await self._moves.transfer(demand, settlements, traces=traces)
        except AiodelayError as error:
            self._took(names.DELIVER, started_s, self._lane, error)
            raise
        self._next_due_ms = transferred.next_due_ms
        if transferred.moved:
            self._note(transferred, late_ms, started_s, started_ms)
        return transferred

    def _note(self, transferred: Transferred, late_ms: int | None, started_s: float, started_ms: int) -> None:
        observer, moved = self._observer, transferred.moved
        span = observer.tracing.start(
            names.DELIVER,
            self._lane,
            SpanKind.CLIENT,
            attributes=lambda: (
                {names.MESSAGE_COUNT: moved}
                if late_ms is None
                else {names.MESSAGE_COUNT: moved, names.LATENESS: late_ms / 1000}
            ),
            context=NOTHING,
            links=lambda: [link for each in transferred.traces for link in observer.tracing.creation(*each)],
            start_ns=started_ms * 1_000_000,
        )
        span.end()
        if late_ms is not None:
            sampled = sampled_in(span, context_of(span))
            observer.instruments.record(names.DELIVERY_LATENESS, late_ms / 1000, self._labels, sampled)
        observer.instruments.add(names.SENT, moved, observer.labels(names.DELIVER, self._lane))
        self._took(names.DELIVER, started_s, self._lane)
