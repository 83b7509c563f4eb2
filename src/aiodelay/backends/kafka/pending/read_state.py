"""`ReadState`: how far a partition was read, and which records of its keys stand."""

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
    """A request that a user has left to the owner: a put that counts unless a message stands, or a cancel.

    Attributes:
        offset: Where it was read.
        what: The request.
        is_over: A user has put or cancelled the message since, and wins.
        is_decided: The owner has made a change of it.
    """

    offset: int
    what: Put | PutBack | Cancel
    is_over: bool = False
    is_decided: bool = False


class ReadState(Struct, eq=False):
    """Standing records, by their keys.

    Attributes:
        far: Messages that are only noted, since they are due late.
        read_to: Everything below this offset has been read.
        standings: Which record of a key stands; keys that have ended, and that no owner can have missed, are left out.
        hidden: Keys whose standing record the cleaner would drop.
        bad: Records that cannot be read, and why.
        over: Keys that stand, and are to be ended by the owner.
        asked: Requests to the owner.
        kept_at: Where holds and dead letters stand.
        raised: Ids of messages whose revision is not what their record says.
        mark: The newest watermark of an owner.
        ended_at: Where the last message ended.
        partitions: How many partitions the topic had when its first owner looked.
        features: The features in use, each with the version of aiodelay that switched it on.
        near_until_ms: Messages that are due later are only noted, in `far`.
        edge_ms: No message of `far` is due before this.
    """

    far: FarIndex
    read_to: int = 0
    standings: dict[bytes, Precedence] = field(default_factory=dict)
    hidden: dict[bytes, None] = field(default_factory=dict)
    bad: dict[bytes, tuple[Read, str]] = field(default_factory=dict)
    over: dict[bytes, None] = field(default_factory=dict)
    asked: dict[bytes, Asked] = field(default_factory=dict)
    kept_at: dict[bytes, int] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)
    mark: Watermark = Watermark()
    ended_at: int = -1
    partitions: int | None = None
    features: Mapping[str, str] = field(default_factory=dict)
    near_until_ms: int = 1 << 62
    edge_ms: int = 0

    def stands(self, key: bytes) -> bool:
        """Say whether a record of a near key stands, or must be written again."""
        standing = self.standings.get(key)
        return standing is not None and (standing.seen.is_put or standing.hidden_at is not None)

    def standing(self, key: bytes) -> Precedence | None:
        """Return which record of a key stands, near or far."""
        standing = self.standings.get(key)
        if standing is None and (row := self.far.find(key)) is not None:
            return Precedence(Seen(row.offset, is_put=True, read_to=None if row.is_users else row.offset))
        return standing

    @property
    def has_ended(self) -> bool:
        """Whether a message has ended since the last watermark."""
        return self.ended_at >= self.mark.read_to
