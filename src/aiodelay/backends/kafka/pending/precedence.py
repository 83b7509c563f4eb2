"""The rule that decides which record of a key counts. Every reader of a schedules topic uses it, owner or not.

A *user's* record is a put or a cancel. Anyone may write one at any time, because Kafka compares nothing before it
appends. An *owner's* record is a tombstone when a message has ended, or a put when a message is tried again. An owner's
record says how far the owner had read: `read_to`. It counts only if no user's record of the same key is at `read_to` or
later. The record of a key that counts is called the *standing* record.

Every reader ignores an owner's record that does not count. Kafka's cleaner does not know this rule: it would keep that
record and drop the user's record before it. The owner therefore writes the user's record again before
`min.compaction.lag.ms` has passed.

Within a partition `read_to` never falls: there is one session and one transaction at a time, and a session begins by
reading all records. A reader therefore keeps only the standing record of each key. If this record is a cancel, the
reader keeps it only while an owner may not have read it.

This module is pure. tests/stateful/test_kafka_models.py plays all interleavings of writers, owners, crashes and the
cleaner with it.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Precedence", "Seen", "after", "is_forgettable", "is_unread"]


class Seen(Struct, frozen=True, gc=False):
    """The facts about a record that decide whether it counts.

    Attributes:
        offset: The offset of the record.
        is_put: Whether the record has a message. Otherwise it is a cancel or a tombstone.
        read_to: In an owner's record: the owner had read everything below this offset. None = a user's record.
    """

    offset: int
    is_put: bool
    read_to: int | None = None


class Precedence(Struct, frozen=True, gc=False):
    """The facts about a key that decide which of its records counts.

    Attributes:
        seen: The standing record.
        hidden_at: The offset of an owner's record that follows the standing record and does not count; if there are
            several, of the first. The cleaner would keep that record and drop the standing record, so the owner must
            write the standing record again. None = no such record.
    """

    seen: Seen
    hidden_at: int | None = None


def after(standing: Precedence | None, seen: Seen) -> Precedence:
    """Return the facts about a key after its next record. `standing` has the facts before that record; None = none."""
    if standing is None or seen.read_to is None or not is_unread(standing.seen, seen.read_to):
        return Precedence(seen)
    if standing.hidden_at is not None:
        return standing
    return Precedence(standing.seen, seen.offset)


def is_forgettable(standing: Precedence, read_to: int) -> bool:
    """Say whether an owner that has read everything below `read_to` may forget the facts about a key."""
    return not standing.seen.is_put and standing.hidden_at is None and not is_unread(standing.seen, read_to)


def is_unread(seen: Seen, read_to: int) -> bool:
    """Say whether a record is a user's record that an owner has not read, if the owner has read up to `read_to`."""
    return seen.read_to is None and seen.offset >= read_to
