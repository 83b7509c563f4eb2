"""`Session`: how far an owner has come since it took a partition over, and whether it may dispatch.

The lock is the producer's epoch. A session begins by taking a new epoch, so that Kafka refuses everything that an
earlier owner still sends. The session then writes a barrier record and reads the partition up to this barrier.

Until then, the index must not be trusted: an owner that was fenced off and has come back may have missed deliveries.
Membership of the group only decides who should try to own the partition.

This module is pure: tests/stateful/test_kafka_models.py plays two owners that do not know of each other.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["Session"]


class Session(Struct, frozen=True, gc=False):
    """The progress of a session.

    Attributes:
        read_to: Everything below this offset has been read.
        barrier: Offset of the session's own barrier; None = the barrier is not written yet.
    """

    read_to: int = 0
    barrier: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the owner may dispatch: it has read its own barrier."""
        return self.barrier is not None and self.read_to > self.barrier

    def with_barrier(self, offset: int) -> Session:
        """Return the session with its barrier written at an offset."""
        return replace(self, barrier=offset)

    def with_read(self, read_to: int) -> Session:
        """Return the session with everything below an offset read."""
        return replace(self, read_to=max(self.read_to, read_to))
