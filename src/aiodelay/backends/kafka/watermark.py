"""`Watermark`: says which messages a partition's owner has certainly finished. They are not delivered again.

A tombstone ends a message, but Kafka removes the tombstone `delete.retention.ms` after cleaning it. A replica or a
reader that was away for longer may still have the message without its end. The owner therefore writes a watermark from
time to time: an offset and a time. Every message has ended whose record is below this offset, and whose next attempt
was planned at this time or earlier. If the record of such a message is there without its tombstone, the message has
come back, and is not delivered.

This module is pure: tests/stateful/test_kafka_models.py plays tombstones that vanish.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Watermark"]


class Watermark(Struct, frozen=True):
    """Says that a message has ended if its record is before `read_to` and its attempt was planned up to `until_ms`.

    Attributes:
        until_ms: The latest planned time of a next attempt, in epoch ms. If the attempt is a retry, its planned time is
            not the due time of the message.
        read_to: The records of the messages are below this offset.
    """

    until_ms: int = -1
    read_to: int = 0

    def covers(self, offset: int, place_ms: int) -> bool:
        """Say whether a message has certainly ended, although its record is there without a tombstone."""
        return offset < self.read_to and place_ms <= self.until_ms

    def is_beyond(self, other: Watermark) -> bool:
        """Say whether this watermark covers all that the other watermark covers, and more records."""
        return self.read_to > other.read_to and self.until_ms >= other.until_ms
