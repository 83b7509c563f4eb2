"""`Waiters`: the workers and transfers of this process that wait for messages."""

from __future__ import annotations

from aiodelay.core.dict_table.table import Workers
from aiodelay.core.wakeup import WakeUp

__all__ = ["Waiters"]


class Waiters:
    """The workers and transfers that wait for messages of any partition of the store."""

    workers: Workers

    def __init__(self) -> None:
        self.workers = Workers()
        self.transfers: set[WakeUp] = set()

    def wake(self) -> None:
        """End every wait."""
        self.workers.wake()
        for transfer in self.transfers:
            transfer.set()
