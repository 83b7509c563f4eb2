"""So many rows a second and no more, over all tasks: a bulk load must not starve the dispatchers of a live store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiodelay.ports import StoreTraits

__all__ = ["Pacer", "rows_at_once"]

LEAST_CALLS_A_SECOND: Final = 10


class Pacer:
    """Holds one task to its part of a rate.

    Args:
        rate: Rows a second; 0 = no cap.
        now_s: A monotonic clock, seconds.
        sleep: Waits so many seconds of it.
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
        """Return when these rows may be sent.

        They are waited for before, not after: a stage of many small tasks keeps to the rate as well. Time in which
        nothing was sent is not made up for.
        """
        if not self._rate:
            return
        now_s = self._now_s()
        self._free_s = max(self._free_s, now_s) + rows / self._rate
        await self._sleep(self._free_s - now_s)


def rows_at_once(rate: float, most: int, traits: StoreTraits) -> int:
    """Return how many rows one call of a task takes.

    Under a cap calls are small, and come evenly: whoever dispatches waits behind one of them.

    Args:
        rate: Rows a second of the task; 0 = no cap.
        most: A call takes no more.
        traits: Of the store that is called.
    """
    return max(min(int(rate / LEAST_CALLS_A_SECOND), traits.paced_rows, most), 1) if rate else most
