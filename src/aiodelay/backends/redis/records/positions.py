"""`ShardPosition`: how far a shard has stored the messages of a source, as the values of the hash `src` have it.

With one shard, the value is the position as decimal digits. Two words may follow it, with a space before each:

- `cut=<number>@<position>`: reading of the source has gone back `number` times, the last time to this position.
- `moved=<position>,<position>,...`: the positions of the former shards of a namespace that was moved to another number
  of shards, if the former shards had different positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from .shards import shard_of

__all__ = ["ShardPosition", "carried", "current"]

_CUT, _MOVED = "cut=", "moved="


class ShardPosition(Struct, frozen=True):
    """How far a shard has stored the messages of a source.

    Attributes:
        position: The shard has stored its messages up to this position.
        cuts: How many times reading has gone back, because the source had lost its end.
        since: The position from which reading went on the last time.
        moved: The positions that former shards had, for each former number of shards.
    """

    position: int
    cuts: int = 0
    since: int = 0
    moved: tuple[tuple[int, ...], ...] = ()

    @property
    def text(self) -> str:
        """The value of the hash `src`."""
        words = [f"{self.position}"]
        if self.cuts:
            words.append(f"{_CUT}{self.cuts}@{self.since}")
        words += [_MOVED + ",".join(map(str, each)) for each in self.moved]
        return " ".join(words)

    @classmethod
    def of(cls, text: str) -> ShardPosition:
        """Return the position that a value of the hash `src` has."""
        position, *words = text.split(" ")
        found = cls(int(position))
        for word in words:
            if word.startswith(_CUT):
                cuts, _, since = word.removeprefix(_CUT).partition("@")
                found = replace(found, cuts=int(cuts), since=int(since))
            elif word.startswith(_MOVED):
                former = tuple(map(int, word.removeprefix(_MOVED).split(",")))
                found = replace(found, moved=(*found.moved, former))
        return found

    def has(self, message_id: str, position: int) -> bool:
        """Return whether the shard has stored a message, or a former shard had.

        Args:
            message_id: The id of the message.
            position: The position after the message.
        """
        return position <= self.position or any(
            position <= each[shard_of(message_id, len(each))] for each in self.moved
        )

    def at(self, position: int) -> ShardPosition:
        """Return a later position. Positions of former shards that it has passed are left out."""
        return replace(self, position=position, moved=tuple(each for each in self.moved if max(each) > position))

    def back_at(self, position: int) -> ShardPosition:
        """Return an earlier position, from which reading goes on because the source has lost its end."""
        return ShardPosition(position, self.cuts + 1, position)


def current(found: Sequence[ShardPosition | None]) -> list[ShardPosition]:
    """Return the positions of all shards after the last time that reading went back; [] if no shard has a position.

    A shard that has not gone back yet, because the process that moved the shards ended, counts as having gone back.
    A shard without a position has that of the others: no shard gets messages before all shards have a position.
    """
    known = [each for each in found if each is not None]
    if not known:
        return []
    newest = max(known, key=lambda each: each.cuts)
    after = [
        each if each is None or each.cuts == newest.cuts else ShardPosition(newest.since, newest.cuts, newest.since)
        for each in found
    ]
    begin = min(each.position for each in after if each is not None)
    return [ShardPosition(begin, newest.cuts, newest.since) if each is None else each for each in after]


def carried(positions: Sequence[ShardPosition]) -> ShardPosition:
    """Return the position of all new shards of a namespace that is moved to another number of shards.

    The new position is the smallest one. The messages that former shards have stored after it follow from `moved`.

    Args:
        positions: The current positions of the former shards.
    """
    former = {len(positions): [each.position for each in positions]}
    for vector in (vector for each in positions for vector in each.moved):
        others = former.setdefault(len(vector), list(vector))
        former[len(vector)] = [max(pair) for pair in zip(vector, others, strict=True)]
    least = min(positions, key=lambda each: each.position)
    return replace(least, moved=tuple(tuple(each) for each in former.values())).at(least.position)
