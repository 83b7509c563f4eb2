"""`Patience`: opening tries again, up to a time limit, while a store, sink or source does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiodelay.core.backoff import pause_s
from aiodelay.core.durations import format_duration
from aiodelay.errors import (
    OutcomeUnknownError,
    SinkUnavailableError,
    StoreBusyError,
    StoreDamagedError,
    StoreUnavailableError,
)

__all__ = ["Patience"]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("aiodelay")

LONGEST_PAUSE_S = 2.0
MAY_PASS = (StoreUnavailableError, StoreBusyError, OutcomeUnknownError, SinkUnavailableError)
"""Errors that may be over at the next attempt. All others, and `StoreDamagedError`, end the opening at once."""


class Patience:
    """Repeats attempts that fail because a store, sink or source does not answer.

    Args:
        timeout_ms: How long to repeat an attempt, counted from the start of the first attempt; 0 = do not repeat it.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._loop = asyncio.get_running_loop()
        self.reason: str = ""
        """The reason why the last attempt failed; "" while no attempt is being repeated."""

    async def answered(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt that succeeds.

        The time limit does not interrupt an attempt under way: the attempt succeeds, or ends by its own timeouts. A
        cancellation ends the attempt at once.

        Args:
            what: A description of the attempt for the log, such as `opening redis://host`.
            attempt: Makes one attempt. If it raises, it leaves nothing open.

        Raises:
            StoreUnavailableError, StoreBusyError, OutcomeUnknownError, SinkUnavailableError: The last attempt failed.
        """
        began_s, failures = self._loop.time(), 0
        try:
            while True:
                try:
                    result = await attempt()
                except StoreDamagedError:
                    raise
                except MAY_PASS as error:
                    left_s = began_s + self._timeout_ms / 1000 - self._loop.time()
                    if left_s <= 0:
                        raise
                    self._failed(what, error, failures)
                else:
                    self._succeeded(what, failures, self._loop.time() - began_s)
                    return result
                await asyncio.sleep(min(pause_s(failures, longest_s=LONGEST_PAUSE_S), left_s))
                failures += 1
        finally:
            self.reason = ""

    def _failed(self, what: str, error: Exception, failures: int) -> None:
        self.reason = str(error)
        if not failures:
            log.warning("%s failed: %s; trying again for up to %s", what, error, format_duration(self._timeout_ms))

    def _succeeded(self, what: str, failures: int, took_s: float) -> None:
        if failures:
            log.info("%s succeeded after %d failures in %.1f s", what, failures, took_s)
