"""`Watermark`: says which messages a partition's owner has certainly finished. They are not delivered again.

A tombstone ends a message, but Kafka removes the tombstone `delete.retention.ms` after cleaning it. A replica or a
reader that was away for longer may still have the message without its end. The owner therefore writes a watermark from
time to time: an offset and a time up to which every message has ended. A message that is below both, but has no end,
has come back, and is not delivered.

This module is pure: tests/stateful/test_kafka_models.py plays tombstones that vanish.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Watermark"]


class Watermark(Struct, frozen=True):
    """The statement that messages have ended: all below an offset whose next attempt was planned up to a time.

    Attributes:
        until_ms: The latest planned time of a next attempt that the statement covers. For a retry, this is not the due
            time of the message.
        read_to: The offset below which the statement covers messages.
    """

    until_ms: int = -1
    read_to: int = 0

    def covers(self, offset: int, place_ms: int) -> bool:
        """Say whether a message has certainly ended, although its record is there without a tombstone."""
        return offset < self.read_to and place_ms <= self.until_ms

    def is_beyond(self, other: Watermark) -> bool:
        """Say whether this watermark covers all that the other watermark covers, and more records."""
        return self.read_to > other.read_to and self.until_ms >= other.until_ms
