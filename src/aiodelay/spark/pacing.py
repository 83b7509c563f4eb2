"""The rate limit of tasks. With it, a bulk load leaves room for the schedulers that use the same store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiodelay.ports import StoreTraits

__all__ = ["Pacer", "rows_at_once"]

LEAST_CALLS_A_SECOND: Final = 10


class Pacer:
    """Limits one task to its part of a rate.

    Args:
        rate: Rows a second; 0 = no limit.
        now_s: A monotonic clock in seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        rate: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._rate, self._now_s, self._sleep = rate, now_s, sleep
        self._free_s = now_s()

    async def take(self, rows: int) -> None:
        """Wait until these rows may be sent.

        A task waits before it sends rows, not after. So many small tasks, one after the other, also keep to the rate.
        Time in which no rows were sent does not allow more rows later.
        """
        if not self._rate:
            return
        now_s = self._now_s()
        self._free_s = max(self._free_s, now_s) + rows / self._rate
        await self._sleep(self._free_s - now_s)


def rows_at_once(rate: float, most: int, traits: StoreTraits) -> int:
    """Return the number of rows in one call of a task.

    With a rate, calls are small and evenly spread, because a scheduler of the same store may have to wait for a call.

    Args:
        rate: Rows a second of the task; 0 = no limit.
        most: Most rows of a call.
        traits: The traits of the store.
    """
    return max(min(int(rate / LEAST_CALLS_A_SECOND), traits.paced_rows, most), 1) if rate else most
