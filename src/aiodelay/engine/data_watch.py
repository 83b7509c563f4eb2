"""`DataWatch`: raises an alarm when a store's data are deleted or replaced while the store is open."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from aiodelay.core.values import Alarm
from aiodelay.errors import StoreError
from aiodelay.ports import Identified
from aiodelay.ports.clock import Clock

from .backoff import is_stray
from .housekeeping import tell

__all__ = ["DataWatch"]

log: logging.Logger = logging.getLogger("aiodelay.store")

CHECK_S = ANSWER_S = 5.0
"""The interval between two checks, and the longest wait for an answer. So an alarm comes within 10 s of a loss."""


class DataWatch:
    """Asks a store again and again whether its data are still there.

    If the data are gone, the watch raises the alarm `vanished`. When the data are back, it ends the alarm.

    Args:
        store: An open store.
        clock: Measures how long the data have been gone.
        on_alarm: Called with the alarm, and again when it is over. Its exceptions are logged.
    """

    def __init__(self, store: Identified, clock: Clock, on_alarm: Callable[[Alarm], object] | None) -> None:
        self._store, self._clock, self._on_alarm = store, clock, on_alarm
        self._seen_ms = clock.monotonic_ms()
        self.vanished: str = ""
        """The last answer's description of the loss of the store's data; "" while the data are there."""

    async def run(self) -> None:
        """Ask about every 5 s, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S * random.uniform(0.8, 1.0))
            await self._check()

    async def _check(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                vanished = await self._store.vanished()
        except (StoreError, TimeoutError) as error:  # no answer: housekeeping raises the alarm `store` for that
            log.debug("the store did not say whether its data are there: %r", error)
        except (Exception, asyncio.CancelledError) as error:
            if not isinstance(error, Exception) and not is_stray(error):
                raise
            log.exception("a check of the store's data failed unexpectedly; the next check follows")
        else:
            self._judge(vanished)

    def _judge(self, vanished: str) -> None:
        before, self.vanished = self.vanished, vanished
        now_ms = self._clock.monotonic_ms()
        if vanished and not before:
            alarm = Alarm("vanished", "", now_ms - self._seen_ms, reason=vanished)
            log.error("%s", alarm)
            tell(alarm, self._on_alarm)
        elif before and not vanished:
            over = Alarm("vanished", "", 0, is_over=True)
            log.warning("%s", over)
            tell(over, self._on_alarm)
        if not vanished:
            self._seen_ms = now_ms
