"""Where time comes from: the only module of the package that reads a clock of the machine."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time in whole milliseconds; a store and the code around it take one, so that tests can give another."""

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down.

        It may step forwards or backwards between two calls. Compare it with due times, which are shared between
        machines; never measure a duration with it.
        """
        ...

    def monotonic_ms(self) -> int:
        """Return ms since some fixed instant, rounded down; it never decreases.

        For intervals and timeouts of this process; it means nothing to another one.
        """
        ...

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant, for a timer; negative if it has passed.

        Finer than the difference of two whole milliseconds, which would let a timer sleep up to 1 ms too long.
        """
        ...


class SystemClock:
    """The clocks of this machine. Has no state; may be shared between threads and loops."""

    __slots__ = ()

    def now_ms(self) -> int:
        """Return the wall clock as epoch ms, rounded down."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return ms of the monotonic clock, rounded down; it never decreases."""
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until a wall clock instant; negative if it has passed."""
        return (at_ms * 1_000_000 - time.time_ns()) / 1_000_000_000
