"""A sink's subscription beside the dispatch loop: it tells the store when to transfer messages, and how many."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiodelay.core.values import Again, Lane, Record, Settlement, Transferred
from aiodelay.engine.backoff import Backoff
from aiodelay.errors import StoreError, UnsupportedByStoreError
from aiodelay.ports import Sink, Transferring

from . import settling
from .runners import Runners

__all__ = ["TransferSubscription"]

log: logging.Logger = logging.getLogger("aiodelay.sinks")


@dataclass(slots=True, kw_only=True)
class TransferSubscription:
    """Transfers one sink's messages as they become due.

    Args:
        sink: The sink.
        moves: The store's transfer into this sink.
        runners: The task in which the transfer runs.
        now_ms: The store's time, for series.
        on_change: Called after each call of the store.
        on_refused: Called when the store no longer transfers messages into the sink. The loop then ends.
    """

    sink: Sink
    moves: Transferring
    runners: Runners
    now_ms: Callable[[], int]
    on_change: Callable[[], None]
    on_refused: Callable[[TransferSubscription], Awaitable[None]]
    in_flight: int = 0
    is_draining: bool = False
    _blocked: dict[str, str] = field(default_factory=dict)

    @property
    def lane(self) -> Lane:
        """The sink's name."""
        return self.sink.name

    def drain(self) -> None:
        """Begin no further move. The call under way may still be answered."""
        self.is_draining = True
        self.moves.wake()

    def stop(self) -> None:
        """Stop waiting for the call under way. A move is atomic: it has happened or it has not."""
        self.drain()
        for task in self.runners.tasks:
            task.cancel()

    def close(self) -> None:
        """Stop waiting, also between two tries. Messages that were not moved are still in the store."""
        for task in self.runners.tasks:
            task.cancel()

    def start(self) -> None:
        """Start the loop that transfers messages until drained. No error of the store ends the loop."""
        self.runners.start(self._run(), f"aiodelay transfer {self.lane}")

    async def _run(self) -> None:
        backoff, what = Backoff(), f"moving messages of {self.lane}"
        series: list[Settlement] = []
        while not self.is_draining:
            self.moves.clear()
            try:
                transferred = await self._transfer(series)
                if transferred is None:
                    await self.on_refused(self)
                    return
                backoff.succeeded(log, what)
                series = [self._settlement(record) for record in transferred.series]
                await self._sleep(transferred)
            except StoreError as error:
                await backoff.failed(log, what, error)
            except (Exception, CancelledError) as error:  # noqa: BLE001 - the loop must not end, least of all silently
                await backoff.failed(log, what, error, is_bug=True)

    async def _transfer(self, series: list[Settlement]) -> Transferred | None:
        """Transfer messages. Return None if the store no longer transfers messages into the sink."""
        self.in_flight = 1
        try:
            transferred = await self.moves.transfer(self.sink.limits, series)
        except UnsupportedByStoreError as error:
            log.warning("%s: %s; its messages are claimed and sent instead", self.lane, error)
            return None
        finally:
            self.in_flight = 0
            self.on_change()
        for address, reason in transferred.changed.items():
            self._note(address, reason)
        return transferred

    async def _sleep(self, transferred: Transferred) -> None:
        next_ms = transferred.next_due_ms
        if not self.is_draining and (next_ms is None or next_ms > transferred.now_ms):
            await self.moves.wait(until_ms=next_ms)

    def _settlement(self, record: Record) -> Settlement:
        """Return the settlement of a due occurrence. It has no claim, so its due time is used as the token."""
        now, token = self.now_ms(), record.due_ms
        settlement = settling.by_policy(record, token, now) or settling.done(record, token, now)
        if isinstance(settlement, Again):
            log.error("%s: series %s waits for a worker that can read it: %s", self.lane, record.id, settlement.error)
        return settlement

    def _note(self, address: str, reason: str) -> None:
        """Log once when a destination takes nothing, and once when it takes messages again."""
        before = self._blocked.pop(address, "")
        if reason:
            self._blocked[address] = reason
        if reason and not before:
            log.warning("%s:%s takes nothing (%s); its messages wait in the store", self.lane, address, reason)
        elif before and not reason:
            log.warning("%s:%s takes messages again", self.lane, address)
