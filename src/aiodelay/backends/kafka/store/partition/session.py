"""A session: what must have happened before a partition's messages may be dispatched, and what ends it.

The lock is the producer's epoch: a session begins by taking a new one, so that nothing an earlier owner still sends is
taken; then it writes a barrier under it, and reads the partition through that barrier. What the index held before is
worth nothing until then: an owner that was fenced, and came back, may have missed deliveries. Group membership only
says who should try.

Pure: tests/stateful/test_kafka_models.py plays two owners that know nothing of each other.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

__all__ = ["Session"]


class Session(Struct, frozen=True, gc=False):
    """How far a session is.

    Attributes:
        read_to: Everything below this offset has been read.
        barrier: Offset of the session's own barrier; None: not written yet.
    """

    read_to: int = 0
    barrier: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may dispatch."""
        return self.barrier is not None and self.read_to > self.barrier

    def with_barrier(self, offset: int) -> Session:
        """Return the session once its barrier is in the log."""
        return replace(self, barrier=offset)

    def with_read(self, read_to: int) -> Session:
        """Return the session once everything below an offset has been read."""
        return replace(self, read_to=max(self.read_to, read_to))
