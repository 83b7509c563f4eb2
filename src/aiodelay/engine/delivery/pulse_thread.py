"""A thread that keeps the pulse of this process in its store, also while a handler blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from threading import Thread

from aiodelay.core.pulse import PULSE_MS
from aiodelay.engine.observer import Observer
from aiodelay.ports.pulse import Pulse, Step

from .blocked_loop import BLOCKED_MS, BlockedLoop, Ticks
from .lease_book import Held, LeaseBook

__all__ = ["PulseThread"]

log: logging.Logger = logging.getLogger("aiodelay.pulse")


class PulseThread:
    """Takes a step of a pulse about once a second, from its creation to `stop`. While nobody holds claims, it waits.

    While the event loop is blocked, the thread also renews and ends the claims of the lease book (see `BlockedLoop`).
    If the loop is blocked for `stuck_after_ms`, the thread stops both: others then declare this process dead.

    Args:
        pulse: The pulse of this process in its store.
        book: The lease book of the store.
        take_unbegun: A function that takes messages of the book from their handlers, if their runs have not begun. The
            thread calls it.
        stuck_after_ms: The longest time for which a blocked event loop keeps its claims.
        observer: Receives the end of each claim that the thread gives back.
        on_refused: Called in the event loop when this process needs a new incarnation.
        on_resumed: Called in the event loop after the first answer, and after a time without answers.
    """

    def __init__(
        self,
        pulse: Pulse,
        book: LeaseBook,
        *,
        take_unbegun: Callable[[], Sequence[Held]],
        stuck_after_ms: int,
        observer: Observer | None,
        on_refused: Callable[[], None],
        on_resumed: Callable[[], None],
    ) -> None:
        self._pulse, self._book, self._stuck_after_ms = pulse, book, stuck_after_ms
        self._on_refused, self._on_resumed = on_refused, on_resumed
        self._ticks = Ticks()
        self._blocked = BlockedLoop(book, pulse, take_unbegun, self._ticks.call, observer)
        self._is_stopping = self._was_refused = self._has_told = False
        self._has_left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread = Thread(target=self._run, name="aiodelay pulse", daemon=True)
        self._thread.start()

    def stop(self) -> asyncio.Future[None]:
        """End the thread. The future is done when the thread has ended.

        From then on, the store ends the claims of this process by their leases alone.
        """
        self._is_stopping = True
        self._pulse.wake()
        return self._has_left

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                wait_ms = PULSE_MS if self._is_stuck() else self._step()
            except Exception:
                log.exception("a pulse failed unexpectedly; the next pulse follows")
                wait_ms = PULSE_MS
            self._pulse.wait(wait_ms)
        try:
            self._pulse.leave()
        finally:
            self._ticks.call(self._left)

    def _step(self) -> int:
        """Take a step of the pulse, and relieve a blocked event loop. Return the time until the next step in ms."""
        tokens = [held.claim.token for held in self._book.held()]
        if tokens:
            self._ticks.ask()
        step = self._pulse.step(tokens)
        self._tell(step)
        silence_ms = self._ticks.silence_ms()
        if silence_ms >= BLOCKED_MS and self._blocked.relieve():
            return 0
        is_in_doubt = 0 < silence_ms < BLOCKED_MS
        return min(step.wait_ms, BLOCKED_MS - silence_ms) if is_in_doubt else step.wait_ms

    def _tell(self, step: Step) -> None:
        if step.is_refused and not self._was_refused:
            self._ticks.call(self._on_refused)
        if step.has_resumed:
            self._ticks.call(self._on_resumed)
        self._was_refused = step.is_refused

    def _is_stuck(self) -> bool:
        """Return whether the event loop has been blocked for too long. If so, log once where it is."""
        silence_ms = self._ticks.silence_ms()
        is_stuck = silence_ms >= self._stuck_after_ms
        if is_stuck and not self._has_told:
            text = (
                "the event loop has been blocked for %.0f s; other processes get the messages of this process now. "
                "The event loop is here:\n%s"
            )
            log.error(text, silence_ms / 1000, self._ticks.stack())
        self._has_told = is_stuck
        return is_stuck

    def _left(self) -> None:
        self._thread.join()  # the thread has nothing left to do
        self._has_left.set_result(None)
