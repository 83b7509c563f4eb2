"""`FeedPart`: one partition of a source's topic, with the records that were read, given out, ended and committed."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias

from aiokafka import TopicPartition

from .offsets import Offsets

__all__ = ["FeedPart", "FeedRecord"]

FeedRecord: TypeAlias = Any
"""aiokafka's `ConsumerRecord`."""

MOST_AHEAD = 2_000
"""Most records between the first record that has not ended and the last record that was read."""
MOST_IN_ID = 100
"""Most characters of a topic's name in message ids."""
_OFFSET = attrgetter("offset")


class FeedPart:
    """One partition of a topic, while this member owns it.

    Args:
        place: The partition.
        topic_id: The id of the topic when this member took the partition over.
        start: The offset at which reading begins.
        committed: The offset that the group has committed.
    """

    place: Any
    topic_id: str
    offsets: Offsets
    committed: int | None
    committing: int | None
    in_flight: int

    is_lost: bool = False
    """Whether another member owns the partition now. That member reads the records again that have not ended."""
    is_checked: bool = True
    """Whether it was checked, since the last assignment, that no other member has committed an offset here."""

    def __init__(self, place: TopicPartition, topic_id: str, start: int, committed: int | None) -> None:
        self.place, self.topic_id, self.offsets = place, topic_id, Offsets(start)
        self.committed, self.committing = committed, committed
        self.in_flight = 0
        self._returned: list[FeedRecord] = []
        self._unclaimed: deque[FeedRecord] = deque()
        self._id_begins = f"{place.topic[:MOST_IN_ID]}/{place.partition}/"
        self._begun_at = start

    def id_of(self, offset: int) -> str:
        """Return the beginning of the id of the message at an offset."""
        return f"{self._id_begins}{offset}"

    @property
    def ready(self) -> int:
        """The number of records that may be given out."""
        return len(self._returned) + len(self._unclaimed)

    @property
    def is_wanted(self) -> bool:
        """Whether the reader should read more of this partition."""
        return not self._unclaimed and len(self.offsets) < MOST_AHEAD

    @property
    def to_commit(self) -> int | None:
        """The offset to commit, or None if there is nothing new to commit."""
        ended_to = self.offsets.ended_to
        return ended_to if ended_to != self.committed and ended_to > self._begun_at else None

    def read(self, found: Sequence[FeedRecord]) -> None:
        """Take in records that were just read."""
        for each in found:
            self.offsets.read(each.offset)
        self._unclaimed += found

    def take(self) -> FeedRecord:
        """Give out the first record."""
        self.in_flight += 1
        return self._returned.pop(0) if self._returned else self._unclaimed.popleft()

    def take_back(self, read: FeedRecord) -> None:
        """Take a record back, to give it out again."""
        self.in_flight -= 1
        insort(self._returned, read, key=_OFFSET)

    def end(self, read: FeedRecord) -> None:
        """Note that a record has ended."""
        self.in_flight -= 1
        self.offsets.end(read.offset)

    def is_own(self, committed: int | None) -> bool:
        """Say whether the group's committed offset is this member's own. Then no other member has committed since."""
        return committed in (self.committed, self.committing)
