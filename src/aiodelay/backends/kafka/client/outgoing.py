"""Records to write, and the result of each batch."""

from __future__ import annotations

from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from msgspec import Struct

__all__ = ["Outgoing", "Written"]

_BATCH_HEADER, _RECORD_OVERHEAD, _RECORD_FIELDS = 61, 21, 3
"""Three sizes in bytes: the header of a batch; the most that a record has besides key, value and headers, as aiokafka
estimates it; and what the first record of a batch really has besides these three and its length.
"""


class Outgoing(Struct, frozen=True, gc=False):
    """A record to write.

    If `partition` is None, the key selects the partition as in Java's producer. If the key is None too, the producer
    selects any partition.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    partition: int | None = None

    @property
    def size(self) -> int:
        """The approximate number of bytes of the record."""
        size: int = DefaultRecordBatchBuilder.estimate_size_in_bytes(self.key, self.value, self.headers)
        return size

    @property
    def batch_size(self) -> int:
        """The bytes of a batch with this record alone. The topic's `max.message.bytes` limits them."""
        body = self.size - _BATCH_HEADER - _RECORD_OVERHEAD + _RECORD_FIELDS
        return _BATCH_HEADER + -(-(body << 1).bit_length() // 7) + body


class Written(NamedTuple):
    """The result of one batch.

    Attributes:
        indices: The positions of the batch's records in the list of records to write.
        error: The reason why the batch was not written, or may not have been written. None = the batch was written.
        offset: The offset of the batch's first record. -1 = unknown.
        in_doubt: Whether the batch may have been written in spite of the error.
        partition: The partition of the batch; -1 = the batch was not sent.
        appended_ms: The time of the broker's clock when it appended the batch; -1 = the topic keeps the times of
            producers, or the batch was not written.
    """

    indices: list[int]
    error: Exception | None
    offset: int = -1
    in_doubt: bool = False
    partition: int = -1
    appended_ms: int = -1
