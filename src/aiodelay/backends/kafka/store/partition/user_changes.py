"""`UserChanges`: finds users' changes to messages that an open transaction moves. The writer asks before each commit.

A user who replaces or cancels a message in time must win. Only the broker can answer: this process may not have read
the last records yet, and its reader sees nothing beyond an open transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import UNAVAILABLE, Transactions

from .batch import Batch
from .read_progress import ReadProgress
from .unread_changes import UnreadChanges

__all__ = ["MOST_OVERTAKEN", "UserChanges"]

QUESTION_S, MOST_QUESTIONS = 0.02, 3
"""The greatest age of the broker's answer at the commit. The writer asks again for an older answer, but not more often
than `MOST_QUESTIONS` in all.
"""
MOST_OVERTAKEN = 3
"""Most transactions in a row that the writer aborts because users have changed messages in them."""


class UserChanges:
    """Asks the broker for users' changes in one partition.

    Args:
        place: The partition.
        progress: The partition's index.
        unread: The committed changes that were not read back yet.
    """

    def __init__(self, place: TopicPartition, progress: ReadProgress, unread: UnreadChanges) -> None:
        self._place, self._progress, self._unread = place, progress, unread
        self._overtaken = 0

    async def last_offset(self, transactions: Transactions, batch: Batch, offsets: Sequence[int]) -> int | None:
        """Return the offset of users' last change to the messages that the open transaction moves; None = no change.

        The broker may accept a user's change after it has answered this question. Such a change does not stop the move.
        """
        for _ in range(MOST_QUESTIONS):
            asked_s = asyncio.get_running_loop().time()
            found = await self._asked(transactions, batch, offsets)
            if found is not None or asyncio.get_running_loop().time() - asked_s <= QUESTION_S:
                break
        return found

    async def _asked(self, transactions: Transactions, batch: Batch, offsets: Sequence[int]) -> int | None:
        keys = {change.key for change in batch.changes if change.targets}
        if not keys or self._overtaken >= MOST_OVERTAKEN:
            return None
        own = [
            offset for record, offset in zip(batch.outgoing, offsets, strict=True) if record.topic == self._place.topic
        ]
        try:
            found = await transactions.keys_since(self._place, self._unread.others_from(own))
        except UNAVAILABLE:
            found = {}
        if any(change.is_stale for change in batch.changes):  # the reader has read a user's change since `begin`
            return self._progress.index.state.read_to - 1
        return max((found[key] for key in keys & found.keys()), default=None)

    def note_aborted(self) -> None:
        """Note that the transaction was aborted because of a user's change."""
        self._overtaken += 1

    def note_committed(self) -> None:
        """Note that a transaction was committed."""
        self._overtaken = 0
