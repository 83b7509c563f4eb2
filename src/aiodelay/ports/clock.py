"""`Clock` and `SystemClock`: the only module of the package that reads a clock of the machine."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time in whole milliseconds. Stores and the engine take a clock, so that tests can replace the clock."""

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down.

        The wall clock may step forwards or backwards between two calls. Compare it with due times, which machines
        share. Never measure a duration with it.
        """
        ...

    def monotonic_ms(self) -> int:
        """Return ms since some fixed instant, rounded down; the value never decreases.

        Use it for intervals and timeouts of this process. Another process cannot interpret the value.
        """
        ...

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant, for a timer; negative if the instant has passed.

        The result is finer than a difference of whole milliseconds, which could make a timer sleep up to 1 ms too long.
        """
        ...


class SystemClock:
    """The clocks of this machine. The object has no state, so threads and loops may share it."""

    __slots__ = ()

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return ms of the monotonic clock, rounded down; the value never decreases."""
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant; negative if the instant has passed."""
        return (at_ms * 1_000_000 - time.time_ns()) / 1_000_000_000
