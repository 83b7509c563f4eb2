"""`OffsetCommits`: commits the offsets of records that have ended, for one member of a group.

An offset is committed up to the first record that has not ended. Only a member of the group's current generation
commits, and only for partitions in which no other member has committed an offset since this member took them over. If
another member has, the records of the partition are read again from that member's offset.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError
from aiokafka.structs import OffsetAndMetadata

from aiodelay.backends.kafka.client import CLOSE_S, UNAVAILABLE, log_failure, reason_of
from aiodelay.core.wakeup import WakeUp

from .feed_part import FeedPart
from .feed_reader import NOTE, FeedReader
from .group import Group

__all__ = ["OffsetCommits"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

COMMIT_S = 0.1
"""Pause between commits."""


class OffsetCommits:
    """Commits the offsets of one member.

    Args:
        reader: Has the partitions and their records.
        group: The group.
        on_new_topic: Called when the topic was deleted and created again.
    """

    def __init__(self, reader: FeedReader, group: Group, on_new_topic: Callable[[], None]) -> None:
        self._reader, self._group, self._on_new_topic = reader, group, on_new_topic
        self.may_commit = False
        """Whether the group has assigned partitions to this member, and is not taking them away now."""
        self._moved = WakeUp()
        self._committing = asyncio.Lock()

    def note_end(self) -> None:
        """Note that records have ended."""
        self._moved.set()

    async def run(self) -> None:
        """Commit the offsets of ended records at intervals, until cancelled, also after errors."""
        while True:
            await self._moved.wait()
            self._moved.clear()  # before the commit: a record that ends from here on causes another commit
            await self.commit()
            await asyncio.sleep(COMMIT_S)

    async def commit(self) -> None:
        """Commit offsets up to the first record that has not ended. `run` repeats a commit that fails."""
        async with self._committing:
            if not (self.may_commit and self._has_to_commit):
                return
            place, parts = next(iter(self._reader.parts)), dict[FeedPart, int]()
            try:
                await self._check_parts()
                if not await self._is_same_topic(place):
                    return
                for part in self._reader.parts.values():
                    if part.is_checked and (offset := part.to_commit) is not None:
                        parts[part] = part.committing = offset
                if not parts:
                    return
                note = NOTE + self._reader.topic_id
                try:
                    await self._group.commit({part.place: OffsetAndMetadata(to, note) for part, to in parts.items()})
                finally:
                    self._reader.commits_ended += 1
            except CommitFailedError:
                self._moved.set()  # a rebalance is going on; try again after it
            except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
                self._moved.set()
                what = f"{self._reader.name}, group {self._group.name}: offsets are not committed"
                log_failure(log, what, reason_of(error), error, UNAVAILABLE)
            else:
                for part, offset in parts.items():
                    part.committed = offset

    @property
    def _has_to_commit(self) -> bool:
        return any(part.to_commit is not None for part in self._reader.parts.values())

    async def _check_parts(self) -> None:
        """Check after a rebalance in which partitions the group's committed offset is still this member's own."""
        assigned, parts = self._reader.assigned, [part for part in self._reader.parts.values() if not part.is_checked]
        if not parts:
            return
        found = await self._group.committed([part.place for part in parts])
        if assigned is self._reader.assigned:
            for part in parts:
                part.is_checked = part.is_own(found[part.place].offset if part.place in found else None)

    async def _is_same_topic(self, place: TopicPartition) -> bool:
        """Say whether the topic is still the same. If it was created again, have the reader take over the new topic."""
        if await self._group.topic_id(place) == self._reader.topic_id:
            return True
        self._reader.find_topic_again()
        self._on_new_topic()
        return False

    async def finish(self) -> None:
        """Commit the offsets of all ended records. During a rebalance, try again after it. Give up after `CLOSE_S`."""
        await self.commit()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._has_to_commit:
                    await asyncio.sleep(COMMIT_S)
                    await self.commit()
