"""`FeedPart`: one partition of a topic from which a handler takes records: read, given out, ended, and committed."""

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
"""Most records to read ahead of the first record that has not ended."""
MOST_IN_ID = 100
"""Most characters of a topic's name that message ids repeat."""
_OFFSET = attrgetter("offset")


class FeedPart:
    """One partition of a topic, as long as this member owns it.

    Args:
        place: The partition.
        topic_id: The id that the topic had when this member came to own the partition.
        start: The offset from which it is read.
        committed: The offset that the group has committed.
    """

    place: Any
    topic_id: str
    offsets: Offsets
    committed: int | None
    committing: int | None
    in_flight: int

    is_lost: bool = False
    """Another member owns the partition, and reads the records again that have not ended."""
    is_checked: bool = True
    """The committed offset is known to be this member's."""

    def __init__(self, place: TopicPartition, topic_id: str, start: int, committed: int | None) -> None:
        self.place, self.topic_id, self.offsets = place, topic_id, Offsets(start)
        self.committed, self.committing = committed, committed
        self.in_flight = 0
        self._returned: list[FeedRecord] = []
        self._unclaimed: deque[FeedRecord] = deque()
        self._id_begins = f"{place.topic[:MOST_IN_ID]}/{place.partition}/"
        self._begun_at = start

    def id_of(self, offset: int) -> str:
        """Return how the id of the message at an offset begins."""
        return f"{self._id_begins}{offset}"

    @property
    def ready(self) -> int:
        """How many records may be given out."""
        return len(self._returned) + len(self._unclaimed)

    @property
    def is_wanted(self) -> bool:
        """Whether the reader is to read more of it."""
        return not self._unclaimed and len(self.offsets) < MOST_AHEAD

    @property
    def to_commit(self) -> int | None:
        """The offset to commit, if any."""
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
        """Have a record given out again."""
        self.in_flight -= 1
        insort(self._returned, read, key=_OFFSET)

    def end(self, read: FeedRecord) -> None:
        """Note that a record has ended."""
        self.in_flight -= 1
        self.offsets.end(read.offset)

    def is_own(self, committed: int | None) -> bool:
        """Say whether a committed offset shows that nobody else can have owned the partition since."""
        return committed in (self.committed, self.committing)
