"""`Backoff`: the waits of a loop whose calls of the store fail.

The waits grow up to a limit. Of several failures in a row, only the first is logged.
"""

from __future__ import annotations

import asyncio
import logging

from aiodelay.core.backoff import pause_s
from aiodelay.errors import StoreTooNewError

__all__ = ["Backoff", "is_cancelled", "is_stray"]

FIRST_S, CAP_S = 0.05, 2.0
TOLD_AGAIN_S = 60.0
"""Seconds until the log repeats that a newer version wrote the store's data."""


class Backoff:
    """Counts the failures in a row, and waits after each failure."""

    __slots__ = ("_failures", "_told_s")

    def __init__(self) -> None:
        self._failures = 0
        self._told_s: float | None = None  # when the log last named data of a newer version, in this row of failures

    async def failed(self, log: logging.Logger, what: str, error: BaseException, *, is_bug: bool = False) -> None:
        """Log the first failure in a row, and wait before the next try.

        The wait is 50 ms at first and doubles up to 2 s; up to half of it is taken off at random. Data of a newer
        version are logged as an error, and again once a minute, because only an upgrade helps.

        Args:
            log: The log of the loop.
            what: A description of the call, for the log.
            error: The error of the call.
            is_bug: Whether the error was not expected. Such an error is always logged, with its traceback.

        Raises:
            CancelledError: `error` is a cancellation of this task.
        """
        if isinstance(error, asyncio.CancelledError) and not is_stray(error):
            raise error
        if is_bug:
            log.error("%s failed unexpectedly; trying again", what, exc_info=error)
        elif isinstance(error, StoreTooNewError):
            self._tell_too_new(log, what, error)
        elif not self._failures:
            log.warning("%s failed: %s; trying again", what, error)
        wait_s = pause_s(self._failures, first_s=FIRST_S, longest_s=CAP_S)
        self._failures += 1
        await asyncio.sleep(wait_s)

    def _tell_too_new(self, log: logging.Logger, what: str, error: StoreTooNewError) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._told_s is None or now_s >= self._told_s + TOLD_AGAIN_S:
            log.error("%s failed: %s", what, error)
            self._told_s = now_s

    def succeeded(self, log: logging.Logger, what: str) -> None:
        """Log that a row of failures is over."""
        if self._failures:
            log.warning("%s works again after %d failures", what, self._failures)
            self._failures, self._told_s = 0, None


def is_cancelled() -> bool:
    """Return whether this task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_stray(error: BaseException) -> bool:
    """Return whether a cancellation was not meant for this task, but escaped from another task of a store or sink."""
    return isinstance(error, asyncio.CancelledError) and not is_cancelled()
