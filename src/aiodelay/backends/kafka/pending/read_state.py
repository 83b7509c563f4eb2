"""`ReadState`: how far a partition was read, and the standing record of each key (see `precedence.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from aiodelay.backends.kafka.records import Read
from aiodelay.backends.kafka.watermark import Watermark
from aiodelay.core.values import Cancel, Put, PutBack

from .far_index import FarIndex
from .precedence import Precedence, Seen

__all__ = ["Asked", "ReadState"]


class Asked(Struct, gc=False):
    """A user's request to the owner: a put that counts only if no message of its id is stored, or a cancel.

    Attributes:
        offset: The offset of the request.
        what: The request.
        is_over: Whether a user has put or cancelled the message after the request. If so, the request is void.
        is_decided: Whether the owner has decided the request and made a change.
    """

    offset: int
    what: Put | PutBack | Cancel
    is_over: bool = False
    is_decided: bool = False


class ReadState(Struct, eq=False):
    """The state of a partition, as far as its records were read.

    Attributes:
        far: The far messages, of which little more than the offset is known.
        read_to: Everything below this offset has been read.
        standings: The facts about each near key. The key of an ended message is removed once no owner can have missed
            the end.
        hidden: Keys whose standing record Kafka's cleaner would drop.
        bad: Records that cannot be decoded, each with the reason, by key.
        left: Keys of messages that can neither leave nor become dead letters, with the planned time of their next
            attempt. Their records stand, but the table does not have them.
        over: Keys with a standing message that the owner must end.
        asked: Requests to the owner, by key, in their order. The owner decides a request once it has read the end of
            the request before.
        kept_at: Offsets of the records of pauses, features and dead letters.
        raised: Ids of messages whose revision differs from the revision in their record.
        mark: The newest watermark of an owner.
        ended_at: The offset at which the last message ended.
        partitions: The number of partitions of the topic, as its first owner recorded it.
        features: The features in use, each with the version of aiodelay that switched it on.
        near_until_ms: Messages that are due later are far.
        edge_ms: No message in `far` is due before this time.
    """

    far: FarIndex
    read_to: int = 0
    standings: dict[bytes, Precedence] = field(default_factory=dict)
    hidden: dict[bytes, None] = field(default_factory=dict)
    bad: dict[bytes, tuple[Read, str]] = field(default_factory=dict)
    left: dict[bytes, int] = field(default_factory=dict)
    over: dict[bytes, None] = field(default_factory=dict)
    asked: dict[bytes, list[Asked]] = field(default_factory=dict)
    kept_at: dict[bytes, int] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)
    mark: Watermark = Watermark()
    ended_at: int = -1
    partitions: int | None = None
    features: Mapping[str, str] = field(default_factory=dict)
    near_until_ms: int = 1 << 62
    edge_ms: int = 0

    def stands(self, key: bytes) -> bool:
        """Say whether a near key has a standing message, or a record that must be written again."""
        standing = self.standings.get(key)
        return standing is not None and (standing.seen.is_put or standing.hidden_at is not None)

    def standing(self, key: bytes) -> Precedence | None:
        """Return the facts about a key, near or far."""
        standing = self.standings.get(key)
        if standing is None and (row := self.far.find(key)) is not None:
            return Precedence(Seen(row.offset, is_put=True, read_to=None if row.is_users else row.offset))
        return standing

    @property
    def has_ended(self) -> bool:
        """Whether a message has ended since the last watermark."""
        return self.ended_at >= self.mark.read_to
