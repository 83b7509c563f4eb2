"""Which record of a key stands: the one rule by which a schedules topic is read, by its owner and by everyone else.

Anyone may write a key at any time (a *user's* record: a put or a cancel), and Kafka compares nothing before it
appends. So what an *owner* writes about a key (a tombstone when it has ended, a put when it is to be tried again) says
how far its writer had read, `read_to`, and counts only if no user's record of that key stands at `read_to` or later.
An owner's record that does not count is ignored by every reader; but the cleaner knows nothing of this and will drop
the user's record below it, so the owner writes that one again before `min.compaction.lag.ms` has passed.

Within a partition `read_to` never falls: one session at a time, one transaction at a time, and a session begins by
reading all that is there. So nothing but the newest record of a key need be kept, and of cancels only those that an
owner may not have read yet.

Pure: tests/stateful/test_kafka_models.py plays all interleavings of writers, owners, crashes and the cleaner with it.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Precedence", "Seen", "after", "is_forgettable", "is_unread"]


class Seen(Struct, frozen=True, gc=False):
    """What of a record decides whether it stands.

    Attributes:
        offset: Its place in the partition.
        is_put: It holds a message; otherwise it is a cancel or a tombstone.
        read_to: Of an owner's record: its writer had read everything below this offset. None: a user's record.
    """

    offset: int
    is_put: bool
    read_to: int | None = None


class Precedence(Struct, frozen=True, gc=False):
    """What is known of a key.

    Attributes:
        seen: Its record that stands.
        hidden_at: Offset of the first owner's record after it that does not count and hides it from the cleaner: it is
            to be written again. None: it is not hidden.
    """

    seen: Seen
    hidden_at: int | None = None


def after(standing: Precedence | None, seen: Seen) -> Precedence:
    """Return how a key stands after its next record; None stands for a key of which nothing need be known."""
    if standing is None or seen.read_to is None or not is_unread(standing.seen, seen.read_to):
        return Precedence(seen)
    if standing.hidden_at is not None:
        return standing
    return Precedence(standing.seen, seen.offset)


def is_forgettable(standing: Precedence, read_to: int) -> bool:
    """Say whether a key need not be remembered once an owner has read everything below `read_to`."""
    return not standing.seen.is_put and standing.hidden_at is None and not is_unread(standing.seen, read_to)


def is_unread(seen: Seen, read_to: int) -> bool:
    """Say whether this is a user's record that the owner had not read."""
    return seen.read_to is None and seen.offset >= read_to
