"""A store's dispatching side, observed; what waits or keeps leases is kept out of clients' instrumentation."""

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
from aiodelay.ports import Feed, Store, Transferring, Work

from . import names
from .instruments import now_s
from .measurements import Measurements
from .tracing import NOTHING, QUIET, current_in

__all__ = ["ObservedFeed", "ObservedTransfer", "ObservedWork"]

MOST_LINKS = 128
"""Most links of a span for what a store moves by itself: OpenTelemetry's SDK keeps no more, unless told otherwise."""
SAFETY_PART = 0.7
"""A wait that lasts this part of the safety poll's time was ended by that."""


class _Looking:
    """What claims and moves have in common: they look, and wait until they look again."""

    def __init__(self, looks: Feed | Transferring, observer: Measurements, store: Store, lane: Lane) -> None:
        self._looks, self._observer, self._store = looks, observer, store
        self._labels = {**observer.base, names.DESTINATION: lane} if lane else observer.base
        self._next_due_ms: int | None = None
        self._is_woken = False

    def _looking(self) -> AbstractContextManager[None]:
        """Let clients' instrumentation see a look that surely finds something, and no other."""
        is_due = self._next_due_ms is not None and self._next_due_ms <= self._store.now_ms()
        return nullcontext() if is_due else current_in(QUIET)

    def _lateness_of_head_ms(self) -> int | None:
        """Return how late the head is, if it is due: by when it was last seen to come due."""
        if self._next_due_ms is None:
            return None
        late_ms = self._store.now_ms() - self._next_due_ms
        return late_ms if late_ms >= 0 else None

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait, unseen; count why it ended."""
        started_s = now_s()
        with current_in(QUIET):
            await self._looks.wait(until_ms=until_ms)
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
        self._looks.wake()

    def clear(self) -> None:
        """Forget wake-ups so far."""
        self._is_woken = False
        self._looks.clear()

    def _took(
        self, operation: str, started_s: float, destination: str = "", error: BaseException | None = None
    ) -> None:
        labels = self._observer.labels(operation, destination)
        if error is not None:
            labels = {**labels, names.ERROR_TYPE: type(error).__qualname__}
        self._observer.instruments.record(names.OPERATION_DURATION, now_s() - started_s, labels)


class ObservedFeed(_Looking):
    """`Feed`, observed.

    Args:
        feed: What gives out claims.
        observer: Is told.
        store: The scheduler's: its time, and its safety poll.
        lane: Of a source: whom it is for; "" = a store's, for all.
    """

    def __init__(self, feed: Feed, observer: Measurements, store: Store, lane: Lane = "") -> None:
        super().__init__(feed, observer, store, lane)
        self._feed = feed

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Claim."""
        started_s = now_s()
        try:
            with self._looking():
                claimed = await self._feed.claim(demand, request=request, lease_ms=lease_ms)
        except AiodelayError as error:
            self._took(names.CLAIM, started_s, error=error)
            raise
        self._next_due_ms = claimed.next_due_ms
        self._took(names.CLAIM, started_s)
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """Settle."""
        started_s = now_s()
        try:
            outcomes = await self._feed.settle(settlements)
        except AiodelayError as error:
            self._took(names.SETTLE, started_s, error=error)
            raise
        self._took(names.SETTLE, started_s)
        self._note_lost(sum(each is SettleOutcome.GONE for each in outcomes))
        return outcomes

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew, unseen."""
        with current_in(QUIET):
            outcomes = await self._feed.renew(renewals)
        self._note_lost(sum(each is RenewOutcome.LOST for each in outcomes))
        return outcomes

    def beat(self, ids: Collection[str]) -> None:
        """Tell that this process lives, unseen."""
        self._feed.beat(ids)

    def _note_lost(self, n: int) -> None:
        if n:
            self._observer.instruments.add(names.LEASES_LOST, n, self._labels)


class ObservedWork(ObservedFeed):
    """`Work`, observed."""

    def __init__(self, work: Work, observer: Measurements, store: Store) -> None:
        super().__init__(work, observer, store)
        self._work = work

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Keep house, unseen, and let the observer look."""
        with current_in(QUIET):
            tidied = await self._work.tidy(lanes, limit=limit)
            await self._observer.look(tidied)
        return tidied

    def status(self) -> WorkStatus:
        """Say whether claims are served."""
        return self._work.status()


class ObservedTransfer(_Looking):
    """`Transferring`, observed: a span for each move that moved something, with links for messages that it moved."""

    def __init__(self, moves: Transferring, observer: Measurements, store: Store, lane: Lane) -> None:
        super().__init__(moves, observer, store, lane)
        self._moves, self._lane = moves, observer.named(lane)

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move."""
        traces = max(traces, MOST_LINKS if self._observer.tracing.is_on else 0)
        started_s, started_ms = now_s(), self._store.now_ms()
        late_ms = self._lateness_of_head_ms()
        try:
            with self._looking():
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
        attributes: dict[str, str | int | float] = {names.MESSAGE_COUNT: moved}
        if late_ms is not None:
            attributes[names.LATENESS] = late_ms / 1000
            observer.instruments.record(names.DELIVERY_LATENESS, late_ms / 1000, self._labels)
        observer.tracing.start(
            names.DELIVER,
            self._lane,
            SpanKind.CLIENT,
            attributes=attributes,
            context=NOTHING,
            links=[link for each in transferred.traces for link in observer.tracing.creation(*each)],
            start_ns=started_ms * 1_000_000,
        ).end()
        observer.instruments.add(names.SENT, moved, observer.labels(names.DELIVER, self._lane))
        self._took(names.DELIVER, started_s, self._lane)
