"""A thread that keeps the pulse of this process in its store, also while a handler blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Thread

from aiodelay.core.pulse import PULSE_MS
from aiodelay.ports.pulse import Pulse, Step

__all__ = ["PulseThread"]

log: logging.Logger = logging.getLogger("aiodelay.pulse")


class PulseThread:
    """Takes a step of a pulse about once a second, from its creation to `stop`. While nobody holds claims, it waits.

    Args:
        pulse: The pulse of this process in its store.
        tokens: A function that returns the tokens of all claims that this process holds. The thread calls it.
        on_refused: Called in the event loop when this process needs a new incarnation.
        on_resumed: Called in the event loop after the first answer, and after a time without answers.
    """

    def __init__(
        self,
        pulse: Pulse,
        tokens: Callable[[], Collection[int]],
        *,
        on_refused: Callable[[], None],
        on_resumed: Callable[[], None],
    ) -> None:
        self._pulse, self._tokens = pulse, tokens
        self._on_refused, self._on_resumed = on_refused, on_resumed
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        self._has_left: asyncio.Future[None] = self._loop.create_future()
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
        was_refused = False
        while not self._is_stopping:
            try:
                step = self._pulse.step(self._tokens())
            except Exception:
                log.exception("a pulse failed unexpectedly; the next pulse follows")
                step = Step(PULSE_MS)
            if step.is_refused and not was_refused:
                self._call(self._on_refused)
            if step.has_resumed:
                self._call(self._on_resumed)
            was_refused = step.is_refused
            self._pulse.wait(step.wait_ms)
        try:
            self._pulse.leave()
        finally:
            self._call(self._left)

    def _left(self) -> None:
        self._thread.join()  # the thread has nothing left to do
        self._has_left.set_result(None)

    def _call(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(callback)
