"""The care for the claims of a process whose event loop is blocked. The thread of the pulse does this work."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident

from aiodelay.core.values import Renewal, RenewOutcome
from aiodelay.engine.observer import Observer
from aiodelay.errors import StoreError
from aiodelay.ports.clock import SystemClock
from aiodelay.ports.pulse import Pulse

from . import settling
from .lease_book import Held, LeaseBook, current_settlement, note_outcomes, note_renewal

__all__ = ["BLOCKED_MS", "BlockedLoop", "Ticks"]

log: logging.Logger = logging.getLogger("aiodelay.pulse")

BLOCKED_MS = 1_000
"""An event loop that has not run for this time is blocked."""


class Ticks:
    """Notices that an event loop is blocked. Another thread asks the loop to tick, and measures the silence.

    Create the object in the event loop.
    """

    def __init__(self) -> None:
        self._loop, self._thread_id = asyncio.get_running_loop(), get_ident()
        self._clock = SystemClock()
        self._asked_ms: int | None = None  # when the thread asked for the tick that has not come yet

    def ask(self) -> None:
        """Ask for a tick, unless one is still to come."""
        if self._asked_ms is None:
            self._asked_ms = self._clock.monotonic_ms()
            self.call(self._tick)

    def call(self, callback: Callable[[], object]) -> None:
        """Call a function in the event loop, unless the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def silence_ms(self) -> int:
        """Return how long the event loop has not run, as far as is known; 0 if it has ticked."""
        asked_ms = self._asked_ms
        return 0 if asked_ms is None else self._clock.monotonic_ms() - asked_ms

    def stack(self) -> str:
        """Return the calls in which the thread of the event loop is now, the last call at the end."""
        frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - a documented function of Python
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _tick(self) -> None:
        self._asked_ms = None


class BlockedLoop:
    """Renews and ends the claims of a lease book while the event loop is blocked.

    A thread calls this object. The event loop may go on at any time. `Outgoing.lock` decides who makes the next call. A
    call that the loop has under way is repeated with the same tokens, so it does not matter which of the two calls the
    store carries out first.

    Args:
        book: The lease book.
        pulse: Makes the calls, with a connection of its own.
        take_unbegun: A function that takes messages of the book from their handlers, if their runs have not begun.
        call: Calls a function in the event loop.
        observer: Receives the end of each claim that is given back.
    """

    def __init__(
        self,
        book: LeaseBook,
        pulse: Pulse,
        take_unbegun: Callable[[], Sequence[Held]],
        call: Callable[[Callable[[], object]], object],
        observer: Observer | None,
    ) -> None:
        self._book, self._pulse, self._take_unbegun = book, pulse, take_unbegun
        self._call, self._observer = call, observer

    def relieve(self) -> bool:
        """Give back messages whose runs have not begun, and make the next call. Return whether there is more to do."""
        answered: list[tuple[Held, Renewal, RenewOutcome]] = []
        self._give_back()
        try:
            with self._book.outgoing.lock:
                answered = self._renew()
                return bool(answered) or self._settle()
        except StoreError as error:
            log.debug("a call for a blocked event loop failed: %r", error)
            return False
        finally:
            self._call(partial(self._book.renewed, answered))  # after the lock is free: this wakes the book

    def _give_back(self) -> None:
        for held in self._take_unbegun():
            settlement = settling.release(held.claim.record, held.claim.token)
            held.settlement = settlement
            self._book.outgoing.ended.append(held)
            if self._observer is not None:
                self._call(partial(self._observer.settled, held, settlement))

    def _renew(self) -> list[tuple[Held, Renewal, RenewOutcome]]:
        """Renew leases. Trials are left out: the heartbeat keeps their suspects."""
        tried = set(self._book.suspects())
        claims = [held for held in self._book.held() if not held.is_lost and held.claim.record.id not in tried]
        due = self._book.renewals_due(sorted(claims, key=lambda held: held.renew_at_ms))
        outcomes = self._pulse.renew([renewal for _, renewal in due]) if due else ()
        answered = [(*each, outcome) for each, outcome in zip(due, outcomes, strict=True)]
        for held, renewal, outcome in answered:
            if outcome is RenewOutcome.LOST:
                held.is_lost = True
            else:
                note_renewal(held, renewal, outcome)
        self._book.outgoing.unanswered = []
        return answered

    def _settle(self) -> bool:
        batch = self._book.outgoing.unsettled()
        if batch:
            outcomes = self._pulse.settle([current_settlement(held) for held in batch])
            note_outcomes(list(zip(batch, outcomes, strict=True)))
        return bool(batch)
