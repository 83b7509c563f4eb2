"""Encodes and decodes list elements. A process in any language can read a message in this form.

An element is three MessagePack values in a row: the id as binary, the prefix of the record as binary, and the body of
the record as a map. The last key of the map is `q`, the time of the push. docs/formats.md shows every byte.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from aiodelay.core.record_codec import decode_record, encode_record
from aiodelay.core.record_format import PREFIX
from aiodelay.core.transitions import NO_OP, as_occurrence, put_due_of
from aiodelay.core.values import Delivery, Record
from aiodelay.errors import RecordFormatError

from .keys import member_of, text_of
from .layouts import PUSHED, span

__all__ = ["Element", "ForeignElementError", "decode_element", "encode_element", "encode_record_element"]

_FLAGS_AT, _HAS_VERSION = PREFIX.places["flags"].at, PREFIX.flags["version"].mask
_SIZE, _VERSIONED_SIZE = PREFIX.size, PREFIX.places["version"].end
_PUSHED_KEY, _PUSHED_MS = span("ELEMENT", "pushed_key"), span("ELEMENT", "pushed_ms")
_MOST_MEMBER = 519
"""The bytes of the longest encoded id: an occurrence whose series has a Kafka key of 255 bytes, in hexadecimal."""
_read_parts = msgspec.msgpack.Decoder(tuple[bytes, bytes, msgspec.Raw]).decode


class ForeignElementError(RecordFormatError):
    """Raised for an element that another program has pushed: it does not have the form of aiodelay's elements."""


class Element(msgspec.Struct, frozen=True, gc=False):
    """The contents of an element: the record, and the time of the push in epoch ms.

    The time is None if it is missing.
    """

    record: Record
    pushed_ms: int | None


def encode_element(delivery: Delivery) -> bytes:
    """Encode a delivery as a list element, without the time of the push. The script `push` adds the time in 8 bytes."""
    put_due_ms = put_due_of(delivery.delivery_id, delivery.due_ms)
    return encode_record_element(
        Record(
            delivery.envelope,
            delivery.scheduled_at_ms,
            delivery.due_ms,
            NO_OP,
            attempt=delivery.attempt - 1,
            put_due_ms=put_due_ms,
        )
    )


def encode_record_element(record: Record) -> bytes:
    """Encode a record as a list element, with the record's errors. For a series, encode the current occurrence."""
    if record.envelope.rule is not None:
        record = as_occurrence(record)
    written = encode_record(record, 0)
    size = _SIZE if record.envelope.version is None else _VERSIONED_SIZE
    body = bytes([written[size] + 1]) + written[size + 1 :]  # The first byte of the map is its number of keys.
    return _bin(member_of(record.id)) + _bin(written[:size]) + body + PUSHED


def _bin(data: bytes) -> bytes:
    size = len(data)
    return (b"\xc4" + size.to_bytes(1, "big") if size < 256 else b"\xc5" + size.to_bytes(2, "big")) + data


def decode_element(element: bytes, *, lane: str) -> Element:
    """Decode an element of a list.

    Args:
        element: The bytes of the element.
        lane: The lane of the handler. It replaces the lane number in the prefix, which may come from another store.

    Raises:
        ForeignElementError: The element is not three MessagePack values of this form.
        RecordFormatError: The element has a newer format, or it is damaged.
    """
    try:
        member, prefix, body = _read_parts(b"\x93" + element)  # \x93 begins a list of three values.
    except (msgspec.MsgspecError, RecursionError):
        raise ForeignElementError("it is not three MessagePack values") from None
    has_version = len(prefix) > _FLAGS_AT and prefix[_FLAGS_AT] & _HAS_VERSION
    if not 0 < len(member) <= _MOST_MEMBER or len(prefix) != (_VERSIONED_SIZE if has_version else _SIZE):
        raise ForeignElementError("it does not begin with an id and a record's prefix")
    record = decode_record(prefix + bytes(body), message_id=text_of(member), lane=lambda number: lane)
    if record.envelope.rule is not None:
        raise RecordFormatError("its message recurs, but a list holds single occurrences")
    pushed_ms = int.from_bytes(element[_PUSHED_MS], "big") if element[_PUSHED_KEY] == PUSHED else None
    return Element(replace(record, envelope=replace(record.envelope, address="")), pushed_ms)
