"""`ShardLayout`: the number of shards of a namespace and its epoch, as the field `schema` of `meta` has them.

A namespace of one shard has the schema `1`, as it always had. A namespace of several shards has `1:<epoch>:<shards>`,
and while `aiodelay reshard` moves its messages, `1:<epoch>:moving`. The epoch grows with each move. All scripts compare
the schema with the caller's, so a process that has opened another layout changes nothing.
"""

from __future__ import annotations

from zlib import crc32

from msgspec import Struct

from aiodelay.core.features import REDIS_LAYOUT
from aiodelay.errors import StoreTooNewError

from .keys import Keys, member_of
from .layouts import OCCURRENCE, span

__all__ = ["MOST_SHARDS", "MOVED", "MOVING", "ONE_SHARD", "ShardLayout", "shard_of", "shard_of_member", "stale_layout"]

MOST_SHARDS = 64
"""The most shards of a namespace. A process has at least two connections to each shard."""
MOVING = "moving"
"""The word in the place of the number of shards while messages are moved."""
MOVED = "is being moved to another number of shards by `aiodelay reshard`"
"""The state of such a namespace, for logs and errors."""
_SERIES = span("OCCURRENCE_ID", "series")


class ShardLayout(Struct, frozen=True):
    """The layout of a namespace.

    Attributes:
        shards: The number of shards.
        epoch: The number of moves to another number of shards, plus 1. With one shard, it does not count.
        is_moving: True while messages are moved to another number of shards.
    """

    shards: int = 1
    epoch: int = 1
    is_moving: bool = False

    @property
    def schema(self) -> str:
        """The value of the field `schema`."""
        if self.is_moving:
            return f"{REDIS_LAYOUT}:{self.epoch}:{MOVING}"
        return str(REDIS_LAYOUT) if self.shards == 1 else f"{REDIS_LAYOUT}:{self.epoch}:{self.shards}"

    def keys(self, namespace: str, shard: int) -> Keys:
        """Return the keys of one shard."""
        return Keys(namespace, shard, self.schema, self.shards)

    @classmethod
    def of(cls, schema: str) -> ShardLayout | None:
        """Return the layout that a value of `schema` names; None if this version does not know the value."""
        match schema.split(":"):
            case [version] if version == str(REDIS_LAYOUT):
                return cls()
            case [version, epoch, shards] if version == str(REDIS_LAYOUT) and epoch.isdecimal():
                if shards == MOVING:
                    return cls(1, int(epoch), is_moving=True)
                return cls(int(shards), int(epoch)) if shards.isdecimal() and int(shards) > 1 else None
        return None


ONE_SHARD = ShardLayout()


def shard_of(message_id: str, shards: int) -> int:
    """Return the number of the shard that stores a message. A series and its occurrences have the same shard."""
    try:
        return shard_of_member(member_of(message_id), shards)
    except UnicodeEncodeError:  # No message can have this id; the shard says so.
        return 0


def shard_of_member(member: bytes, shards: int) -> int:
    """Return the number of the shard that stores a message with this encoded id."""
    while member[:1] == bytes([OCCURRENCE]):
        member = member[_SERIES]
    return crc32(member) % shards


def stale_layout(where: str, layout: ShardLayout) -> StoreTooNewError:
    """Return the error for a call with another layout than the namespace has now.

    Args:
        where: The name of the data, for the error.
        layout: The layout of the namespace.
    """
    if layout.is_moving:
        return StoreTooNewError(where, MOVED, "nothing to do; if `aiodelay reshard` was stopped, run it again")
    shards = "1 shard" if layout.shards == 1 else f"{layout.shards} shards"
    value = f"has {shards} now, and had another number when this process opened it"
    return StoreTooNewError(where, value, "open it again, or restart this process")
