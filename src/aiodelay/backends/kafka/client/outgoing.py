"""Records to write, and the result of each batch of them."""

from __future__ import annotations

from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from msgspec import Struct

__all__ = ["Outgoing", "Written"]

_BATCH_HEADER, _RECORD_OVERHEAD, _RECORD_FIELDS = 61, 21, 3
"""Bytes of a batch's header; what aiokafka adds to a record at most; and what a batch's first record has of these."""


class Outgoing(Struct, frozen=True, gc=False):
    """A record to write; `partition` None: by its key, as Java's producer, or any if it has none."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    partition: int | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        size: int = DefaultRecordBatchBuilder.estimate_size_in_bytes(self.key, self.value, self.headers)
        return size

    @property
    def batch_size(self) -> int:
        """Bytes of a batch with this record alone; a topic's `max.message.bytes` limits them."""
        body = self.size - _BATCH_HEADER - _RECORD_OVERHEAD + _RECORD_FIELDS
        return _BATCH_HEADER + -(-(body << 1).bit_length() // 7) + body


class Written(NamedTuple):
    """What became of a batch.

    Attributes:
        indices: Of its records, in what was to be written.
        error: Why it was not written, or may not have been; None: it was.
        offset: Of its first record.
        in_doubt: It may have been written.
        partition: Where it was written, or was to be; -1: it was not sent.
    """

    indices: list[int]
    error: Exception | None
    offset: int = -1
    in_doubt: bool = False
    partition: int = -1
