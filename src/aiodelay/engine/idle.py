"""`IdleWait`: the wait of `Scheduler.run_until_idle`. It ends when the served lanes hold only recurring messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from aiodelay.core.durations import format_duration
from aiodelay.core.values import Query, Snapshot
from aiodelay.errors import ClosedError, StoreDamagedError, StoreUnavailableError
from aiodelay.ports import Store

from .subscriptions import Subscriptions

__all__ = ["IdleWait"]

log: logging.Logger = logging.getLogger("aiodelay")

PENDING_POLL_S = 0.5
"""The shortest pause between two reads of the store. The longest is the store's safety poll."""
LOG_WAIT_S, MOST_COUNTED = 1.0, 1000
"""How long `run_until_idle` waits before it logs a long wait, and the most messages that it counts for the log."""


class IdleWait:
    """Waits until the served lanes hold only recurring messages, and no message is in flight.

    Args:
        store: The scheduler's store.
        subscriptions: The subscriptions of the scheduler.
        drain_ms: A wait for a due time further ahead than this is logged.
        is_closing: A function that returns whether the scheduler is being closed.
    """

    def __init__(
        self, store: Store, subscriptions: Subscriptions, drain_ms: int, is_closing: Callable[[], bool]
    ) -> None:
        self._store, self._subscriptions, self._drain_ms, self._is_closing = store, subscriptions, drain_ms, is_closing
        self._loop = asyncio.get_running_loop()

    async def wait(self) -> None:
        """Return when the scheduler is idle. While the store does not answer, ask it again, as the loops do.

        Raises:
            ClosedError: The scheduler is being closed.
            StoreDamagedError: Another program has overwritten the store's data.
        """
        logs_from_s, has_logged = self._loop.time() + LOG_WAIT_S, False
        with self._subscriptions.watch() as changed:
            while True:
                changed.clear()  # before the checks below: a change from here on ends the wait
                if self._is_closing():
                    raise ClosedError("scheduler", "closed")
                pause_s = PENDING_POLL_S
                if not self._subscriptions.in_flight:
                    try:
                        pending = await self._pending(most=1)
                        if not pending:
                            return
                        if self._loop.time() >= logs_from_s:
                            has_logged = has_logged or await self._log_long_wait(pending[0])
                            pause_s = self._pause_s(pending[0])
                    except StoreDamagedError:
                        raise
                    except StoreUnavailableError as error:
                        log.debug("run_until_idle() asks again: %s", error)
                await changed.wait(pause_s)

    def _pause_s(self, first: Snapshot) -> float:
        """Return the pause before the next read of the store, which another process may change meanwhile."""
        left_s = (first.next_attempt_ms - self._store.now_ms()) / 1000
        return min(max(left_s, PENDING_POLL_S), self._store.traits.safety_poll_ms / 1000)

    async def _pending(self, *, most: int) -> Sequence[Snapshot]:
        """Return messages of the served lanes, earliest first, without recurring messages."""
        found: list[Snapshot] = []
        query = Query(lanes=tuple(self._subscriptions.lanes()), limit=100)
        while query.lanes and len(found) < most:
            page = await self._store.search(query)
            if not page:
                break
            found += [snapshot for snapshot in page if snapshot.record.envelope.rule is None]
            query = Query(lanes=query.lanes, limit=100, after=(page[-1].next_attempt_ms, page[-1].record.id))
        return found[:most]

    async def _log_long_wait(self, first: Snapshot) -> bool:
        """Log a wait that is longer than `drain`; return whether it was logged."""
        left_ms = first.next_attempt_ms - self._store.now_ms()
        if left_ms <= self._drain_ms:
            return False
        n = len(await self._pending(most=MOST_COUNTED))
        counted = f"{n} or more messages" if n == MOST_COUNTED else f"{n} message{'s' if n > 1 else ''}"
        due = format_duration(left_ms // 1000 * 1000)
        log.warning("run_until_idle() is waiting for %s; the next is due in %s", counted, due)
        return True
