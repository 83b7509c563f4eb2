"""`StallWatch`: notices a transaction that stays open. Nobody can read the partition beyond it."""

from __future__ import annotations

import logging

from .ownership import Ownership

__all__ = ["StallWatch"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

OPEN_S = 5.0
"""An open transaction counts as a stall after this time."""


class StallWatch:
    """Watches the open transaction of a partition.

    Args:
        ownership: Takes the reason why the partition does not serve.
    """

    is_stalled: bool

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._offset: int | None = None
        self._since_s = 0.0
        self.is_stalled = False
        """Whether a transaction has been open for longer than `OPEN_S`."""

    def note(self, offset: int | None, now_s: float) -> None:
        """Note the offset of the open transaction; None = no transaction is open."""
        if offset != self._offset:
            if self.is_stalled:
                self._ownership.why, self.is_stalled = "", False
            self._offset, self._since_s = offset, now_s
        elif offset is not None and now_s - self._since_s > OPEN_S and not self.is_stalled:
            self.is_stalled = True
            self._ownership.why = f"a transaction is open at offset {offset}, and nothing after it can be read"
            hint = "kafka-transactions.sh shows which producer has opened the transaction"
            log.warning("%s: %s (%s)", self._ownership.name, self._ownership.why, hint)
