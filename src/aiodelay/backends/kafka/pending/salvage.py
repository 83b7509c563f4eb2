"""`salvaged`: makes a message from the bytes and headers of a record that cannot be decoded, for a dead letter."""

from __future__ import annotations

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.records import Read
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import Envelope, Record

__all__ = ["is_without_topic", "salvaged"]


def salvaged(read: Read, problem: str) -> Record:
    """Return a message with the bytes and headers of a record that cannot be decoded, and with the problem."""
    assert read.key is not None
    headers = dict(records.user_headers(read.headers))
    envelope = Envelope(records.id_of(read.key), records.SINK, payload=read.value or b"", headers=headers)
    written_ms = max(read.timestamp, 0)
    return Record(envelope, written_ms, written_ms, NO_OP, last_error=problem)


def is_without_topic(envelope: Envelope) -> bool:
    """Say whether an envelope has no topic, because its record could not be decoded."""
    return envelope.lane == records.SINK and not envelope.address
