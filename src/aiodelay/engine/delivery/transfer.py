"""A transferred sink's place beside the dispatch loop: the store moves its messages, this says when and how many."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass, field

from aiodelay.core.values import Lane, Record, Settlement, Transferred
from aiodelay.engine.backoff import Backoff
from aiodelay.errors import StoreError
from aiodelay.ports import Sink, Transferring

from . import settling
from .runners import Runners

__all__ = ["TransferSubscription"]

log: logging.Logger = logging.getLogger("aiodelay.sinks")


@dataclass(slots=True, kw_only=True)
class TransferSubscription:
    """Has one sink's messages moved as they become due.

    Args:
        sink: Where to.
        moves: The store's moving of its messages.
        runners: Where the moving goes on.
        now_ms: The store's time, for series.
        on_change: Called after each move.
    """

    sink: Sink
    moves: Transferring
    runners: Runners
    now_ms: Callable[[], int]
    on_change: Callable[[], None]
    in_flight: int = 0
    is_draining: bool = False
    _blocked: dict[str, str] = field(default_factory=dict)

    @property
    def lane(self) -> Lane:
        """The sink's name."""
        return self.sink.name

    def drain(self) -> None:
        """Move nothing more once the call under way has been answered."""
        self.is_draining = True
        self.moves.wake()

    def stop(self) -> None:
        """Wait for the call under way no longer: a move is done, or is not."""
        self.drain()
        for task in self.runners.tasks:
            task.cancel()

    def close(self) -> None:
        """Wait for nothing more, such as a pause between two tries; what was not moved is in the store."""
        for task in self.runners.tasks:
            task.cancel()

    def start(self) -> None:
        """Move messages until drained; no error of the store ends this."""
        self.runners.start(self._run(), f"aiodelay transfer {self.lane}")

    async def _run(self) -> None:
        backoff, what = Backoff(), f"moving messages of {self.lane}"
        series: list[Settlement] = []
        while not self.is_draining:
            self.moves.clear()
            try:
                transferred = await self._transfer(series)
                backoff.succeeded(log, what)
                series = [self._settlement(record) for record in transferred.series]
                await self._sleep(transferred)
            except StoreError as error:
                await backoff.failed(log, what, error)
            except (Exception, CancelledError) as error:  # noqa: BLE001 - a loop that stopped and told nobody is the worst of faults
                await backoff.failed(log, what, error, is_bug=True)

    async def _transfer(self, series: list[Settlement]) -> Transferred:
        self.in_flight = 1
        try:
            transferred = await self.moves.transfer(self.sink.limits, series)
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
        """Say how a due occurrence ends; its due time stands for the token of a lease."""
        now, token = self.now_ms(), record.due_ms
        return settling.by_policy(record, token, now) or settling.done(record, token, now)

    def _note(self, address: str, reason: str) -> None:
        """Tell once that a destination takes nothing, and once that it does again."""
        before = self._blocked.pop(address, "")
        if reason:
            self._blocked[address] = reason
        if reason and not before:
            log.warning("%s:%s takes nothing (%s); its messages wait in the store", self.lane, address, reason)
        elif before and not reason:
            log.warning("%s:%s takes messages again", self.lane, address)
