"""Encodes and decodes the entries of a log. These entries are the entries of a Redis stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from aiodelay.backends.redis.records.elements import encode_record_element
from aiodelay.backends.redis.records.keys import text_of
from aiodelay.core.durations import from_epoch_ms
from aiodelay.core.ids import new_id
from aiodelay.core.transitions import NO_OP
from aiodelay.core.validation import check_headers, check_id, check_key
from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, NO_HEADERS, Envelope, Record
from aiodelay.errors import PayloadTypeError, RecordFormatError, TargetError, kind_of, shortened

__all__ = ["LogEntry", "LogMessage", "LogStart", "chunks", "read_entry", "read_start", "written"]

LogStart: TypeAlias = Literal["oldest", "now"] | int | datetime
"""The first entry to read: the oldest entry, the next appended entry, an index, or the first entry from a time on."""

_HEADER = b"header."
_MOST_DIGITS = 18
_OWN = b"\x01"


class LogMessage(Struct, frozen=True):
    """A message to append to a log.

    Attributes:
        payload: The payload of the message.
        key: The key of the message, like the key of a Kafka record.
        headers: The headers of the message, as for `scheduler.schedule`.
        id: The id of the message. The log ignores an id that was already appended within the last 10 minutes. None
            gives the message a new id.
    """

    payload: bytes
    key: bytes | None = None
    headers: Mapping[str, bytes] = NO_HEADERS
    id: str | None = None


class LogEntry(Struct, frozen=True, gc=False):
    """An entry of a log.

    Attributes:
        index: The number of the entry. The first entry that was ever appended has 1, and each later entry has one more.
        payload: The payload of the message.
        key: The key of the message.
        headers: The headers of the message.
        id: The id of the message. It is `<topic>/<index>` if another program has appended the entry field by field.
        at_ms: The epoch ms at which the entry was appended, by the server's clock; None = the entry has no time.
    """

    index: int
    payload: bytes
    key: bytes | None
    headers: Mapping[str, bytes]
    id: str
    at_ms: int | None

    @property
    def at(self) -> datetime | None:
        """The time in UTC at which the entry was appended, or None if the entry has no time."""
        return None if self.at_ms is None else from_epoch_ms(self.at_ms)


class _Body(Struct, gc=False):
    p: bytes = b""
    k: bytes | None = None
    h: dict[str, bytes] | None = None
    q: int | None = None


_read_parts = msgspec.msgpack.Decoder(tuple[bytes, bytes, _Body]).decode


def written(message: LogMessage | bytes, lane: str, topic: str, now_ms: int) -> tuple[str, bytes]:
    """Encode a message for the script `append`.

    Returns:
        Two values: the id that the log remembers for 10 minutes ("" = no id), and the element without the append time.

    Raises:
        InputError: The message cannot be stored.
    """
    payload: object = message.payload if isinstance(message, LogMessage) else message
    if not isinstance(payload, bytes):
        raise PayloadTypeError("payload", kind_of(payload), "bytes, or a LogMessage with bytes")
    if not isinstance(message, LogMessage):
        message = LogMessage(payload)
    key = check_key(message.key)
    headers = check_headers(message.headers) if message.headers else NO_HEADERS
    known = "" if message.id is None else check_id(message.id)
    envelope = Envelope(known or new_id(), lane, topic, payload=payload, key=key, headers=headers)
    return known, encode_record_element(Record(envelope, now_ms, now_ms, NO_OP))


def read_entry(topic: str, entry: Sequence[Any]) -> LogEntry:
    """Decode an entry of the stream. The entry has its id in the stream, then the names and values of its fields.

    Raises:
        RecordFormatError: The field `m` of the entry is not an element.
    """
    entry_id, fields = entry
    index = int(entry_id[2:])
    if len(fields) != 2 or fields[0] != b"m":
        return _plain(topic, index, fields)
    try:
        member, _, body = _read_parts(b"\x93" + fields[1])  # \x93 begins a list of three values.
    except (ValueError, RecursionError):  # ValueError: also a header whose name is not UTF-8
        raise RecordFormatError(f"entry {index} of {topic} is not three MessagePack values") from None
    # Most ids are of this kind. A call of `text_of` would take a tenth of this function's time.
    message_id = member[1:].hex() if member[:1] == _OWN else text_of(member)
    return LogEntry(index, body.p, body.k, body.h or NO_HEADERS, message_id, body.q)


def _plain(topic: str, index: int, fields: Sequence[bytes]) -> LogEntry:
    """Decode an entry that another program has appended. Such an entry has a field for each part of the message."""
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    headers = {
        name[len(_HEADER) :].decode("utf-8", "backslashreplace"): value
        for name, value in values.items()
        if name.startswith(_HEADER)
    }
    at = values.get(b"at", b"")
    return LogEntry(
        index,
        values.get(b"payload", b""),
        values.get(b"key"),
        headers or NO_HEADERS,
        f"{topic}/{index}",
        int(at) if at.isdigit() and len(at) <= _MOST_DIGITS else None,
    )


def read_start(text: str, *, field: str) -> LogStart:
    """Read the start in an address: `oldest`, `now`, an index or a time.

    Raises:
        TargetError: The text has none of these forms.
    """
    if text in ("oldest", "now"):
        return text  # type: ignore[return-value] # one of two
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and 0 < int(text) < 1 << 53:
        return int(text)
    try:
        at = datetime.fromisoformat(text.replace(" ", "+"))  # Parsing a query turns "+" into a space.
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        allowed = "oldest, now, an index from 1, or a time such as 2031-01-01T12:00:00+00:00"
        raise TargetError(field, shortened(text), allowed)
    return at


def chunks(elements: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Split elements into parts. One call to the server can append one part."""
    part: list[tuple[str, bytes]] = []
    size = 0
    for each in elements:
        size += len(each[1])
        if part and (len(part) == MAX_CLAIM_MESSAGES or size > MAX_CLAIM_BYTES):
            yield part
            part, size = [], len(each[1])
        part.append(each)
    if part:
        yield part
