"""The elements of a list: what another process, in any language, reads of a message.

Three MessagePack values in a row: the id as binary, the record's prefix as binary, its body as a map; docs/formats.md
has them byte by byte. The body has one key more than the record's, its last: `q`, when the element was pushed.
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
_read_parts = msgspec.msgpack.Decoder(tuple[bytes, bytes, msgspec.Raw]).decode


class ForeignElementError(RecordFormatError):
    """Another program has pushed the element."""


class Element(msgspec.Struct, frozen=True, gc=False):
    """A list's element, read: the record, and when it was pushed, epoch ms (None: it does not say)."""

    record: Record
    pushed_ms: int | None


def encode_element(delivery: Delivery) -> bytes:
    """Write what a list holds of a message, save for the 8 bytes of the time at which it is pushed, at its end."""
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
    """Write the same of a record, with its errors; of a series, its occurrence."""
    if record.envelope.rule is not None:
        record = as_occurrence(record)
    written = encode_record(record, 0)
    size = _SIZE if record.envelope.version is None else _VERSIONED_SIZE
    body = bytes([written[size] + 1]) + written[size + 1 :]  # a map of at most 15 keys: one byte says how many
    return _bin(member_of(record.id)) + _bin(written[:size]) + body + PUSHED


def _bin(data: bytes) -> bytes:
    size = len(data)
    return (b"\xc4" + size.to_bytes(1, "big") if size < 256 else b"\xc5" + size.to_bytes(2, "big")) + data


def decode_element(element: bytes, *, lane: str) -> Element:
    """Read a list's element.

    Args:
        element: As it stands in the list.
        lane: Of whom it is to be handled by: the number in the prefix is of a store that may not be ours.

    Raises:
        ForeignElementError: It is not three MessagePack values as described.
        RecordFormatError: It is of a newer format, or damaged.
    """
    try:
        member, prefix, body = _read_parts(b"\x93" + element)  # as a list of three
    except msgspec.MsgspecError:
        raise ForeignElementError("it is not three MessagePack values") from None
    has_version = len(prefix) > _FLAGS_AT and prefix[_FLAGS_AT] & _HAS_VERSION
    if not member or len(prefix) != (_VERSIONED_SIZE if has_version else _SIZE):
        raise ForeignElementError("it does not begin with an id and a record's prefix")
    record = decode_record(prefix + bytes(body), message_id=text_of(member), lane=lambda number: lane)
    if record.envelope.rule is not None:
        raise RecordFormatError("it recurs: a list holds single occurrences")
    pushed_ms = int.from_bytes(element[_PUSHED_MS], "big") if element[_PUSHED_KEY] == PUSHED else None
    return Element(replace(record, envelope=replace(record.envelope, address="")), pushed_ms)
