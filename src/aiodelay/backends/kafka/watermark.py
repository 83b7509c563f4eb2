"""The dispatch watermark: what a partition's owner has surely finished, so that nothing of it is delivered again.

A tombstone is not for ever: `delete.retention.ms` after it was cleaned it goes, and a replica that was away for longer,
or a reader that stood still for longer, still holds the message that it ended. So the owner writes, now and then, up to
when and up to where all has ended. What stands below that, and has no end, has come back, and is not delivered.

Pure: tests/stateful/test_kafka_models.py plays tombstones that vanish.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Watermark"]


class Watermark(Struct, frozen=True):
    """All messages that stood below an offset, and were to be delivered by some time, have ended.

    Attributes:
        until_ms: The time: their places, not only their due times, are not after it.
        read_to: The offset.
    """

    until_ms: int = -1
    read_to: int = 0

    def covers(self, offset: int, place_ms: int) -> bool:
        """Say whether a message has surely ended, though it seems to stand."""
        return offset < self.read_to and place_ms <= self.until_ms

    def is_beyond(self, other: Watermark) -> bool:
        """Say whether this one tells more than another, and nothing less."""
        return self.read_to > other.read_to and self.until_ms >= other.until_ms
