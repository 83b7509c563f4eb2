"""`ClockCheck`: compares the clock of a store with the times at which brokers append records to topics."""

from __future__ import annotations

import logging

from aiodelay.backends.clock_skew import warn_of_skew
from aiodelay.ports.clock import Clock

__all__ = ["ClockCheck"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

PAUSE_MS = 60_000
"""The shortest time between two warnings."""


class ClockCheck:
    """Warns, at most once a minute, if a broker's clock and the clock of the store differ.

    The clocks of the processes decide when messages are due, and no process sees the clock of another one. All of them
    see the clocks of the brokers.

    Args:
        name: The name of the store, for the log.
        clock: The clock of the store.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._quiet_until_ms = 0

    def now_ms(self) -> int:
        """Return the time of the store's clock, for `compare`."""
        return self._clock.now_ms()

    def compare(self, asked_ms: int, appended_ms: int) -> None:
        """Compare the time at which a broker has just appended records with the time of the request.

        Args:
            asked_ms: The time of the store's clock before the request.
            appended_ms: The time of the broker's clock; negative if the topic keeps the times of producers.
        """
        nearest_ms = min(max(appended_ms, asked_ms), self._clock.now_ms())
        skew_ms, now_ms = appended_ms - nearest_ms, self._clock.monotonic_ms()
        if appended_ms < 0 or now_ms < self._quiet_until_ms:
            return
        if warn_of_skew(log, self._name, "broker", skew_ms):
            self._quiet_until_ms = now_ms + PAUSE_MS
