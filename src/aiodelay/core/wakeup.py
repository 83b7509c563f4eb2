"""`WakeUp`: a signal for which one task waits, with a time limit.

A loop clears the signal, looks for work, and then waits for the signal. So it misses no signal that arrives meanwhile.
"""

from __future__ import annotations

import asyncio

__all__ = ["WakeUp"]


class WakeUp:
    """A signal that any code on the event loop may set, and for which one task waits.

    If no task waits when the signal is set, the next wait ends at once.
    """

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_set(self) -> bool:
        """Whether the next `wait` ends at once."""
        return self._is_set

    def set(self) -> None:
        """End the current or the next `wait`."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Forget earlier signals."""
        self._is_set = False

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the signal. Return True when it is set, or False after `timeout_s` seconds."""
        if self._is_set:
            return True
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(max(timeout_s, 0), _end, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        return self._is_set


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
