"""Decodes records, dead letters and journal entries in Redis. If a record is damaged, its readable parts remain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from aiodelay.core.record_codec import decode_record
from aiodelay.core.record_format import PREFIX, Place
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import DeadLetter, DeadReason, Envelope, JournalEntry, Lane, Record
from aiodelay.errors import RecordFormatError

from .keys import text_of
from .layouts import PLACED_BYTE, UNREADABLE, size_of, span

__all__ = [
    "Lanes",
    "due_and_revision",
    "features_in",
    "journal_entry",
    "lane_number",
    "lanes_in",
    "place_and_record",
    "read_anyhow",
    "read_letter",
    "read_record",
    "record_at",
]

_LANE, _REVISION, _DUE_MS = (PREFIX.places[name] for name in ("lane", "revision", "due_ms"))
_RECORD_AT, _PLACED_RECORD_AT = span("VALUE", "format").start, size_of("PLACED_VALUE")
_PLACED = bytes([PLACED_BYTE])
_PLACE = span("PLACED_VALUE", "place")
_LETTER_ID, _LETTER_REVISION = span("LETTER_KEY", "id"), span("LETTER_KEY", "revision")
_REASON_AT = span("LETTER", "reason").start
_RAW_LANE, _RAW_VALUE = span("UNREADABLE_LETTER", "lane"), span("UNREADABLE_LETTER", "value")


class Lanes:
    """The names of lanes by number, from one answer of the server.

    Use the names only for data that the caller reads from the server together with them. A server that has lost its
    data gives the lanes new numbers.
    """

    name: Callable[[int], Lane]
    """Return the name of the lane with this number. Raise `LookupError` if there is no such lane."""

    def __init__(self, numbers: Mapping[Lane, int]) -> None:
        self.name = {number: name for name, number in numbers.items()}.__getitem__


def features_in(recorded: bytes | None) -> dict[str, str]:
    """Return the features in the field `features` of `meta`: each name, with the version that switched it on."""
    return dict(each.split("=", 1) for each in (recorded or b"").decode().split())


def lanes_in(reply: Any) -> Lanes:  # noqa: ANN401 - redis-py's reply
    """Return the lanes in a reply to HGETALL for the key `lanes`."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return Lanes({name.decode("utf-8", "backslashreplace"): int(number) for name, number in pairs})


def journal_entry(number: int, entry: Mapping[bytes, bytes], lanes: Lanes) -> JournalEntry:
    """Decode the fields of an entry of the stream `journal`."""
    return JournalEntry(
        number,
        int(entry[b"at"]),
        entry[b"event"].decode(),
        text_of(entry[b"id"]),
        int(entry[b"revision"]),
        _lane_or_empty(int(entry[b"lane"]), lanes),
        int(entry[b"due"]),
        int(entry[b"attempt"]),
        entry[b"detail"].decode("utf-8", "backslashreplace"),
    )


def record_at(value: bytes) -> int:
    """Return the offset of the record in a value of `msg`."""
    return _PLACED_RECORD_AT if value[:1] >= _PLACED else _RECORD_AT


def lane_number(value: bytes) -> int:
    """Return the lane number in a value of `msg`. If the value ends too early, use the bytes that exist."""
    return _number(value, record_at(value), _LANE)


def place_and_record(value: bytes) -> tuple[int, bytes]:
    """Split a value of `msg` into two parts: the message's place in its lane in epoch ms, and its record."""
    at = record_at(value)
    is_placed = at == _PLACED_RECORD_AT
    place_ms = int.from_bytes(value[_PLACE], "big") if is_placed else _number(value, at, _DUE_MS)
    return place_ms, value[at:]


def due_and_revision(value: bytes) -> tuple[int, int]:
    """Return the due time and the revision from the start of a value of `msg`. The rest of the value may be damaged."""
    at = record_at(value)
    return _number(value, at, _DUE_MS), _number(value, at, _REVISION)


def _number(data: bytes, at: int, place: Place) -> int:
    """Return a number of the record that begins at `at`. If the data end too early, use the bytes that exist."""
    first = at + place.at
    return int.from_bytes(data[first : first + place.size], "big")


def read_record(member: bytes, value: bytes, lanes: Lanes) -> Record:
    """Decode the record in a value of `msg`.

    Raises:
        RecordFormatError: The record cannot be read.
    """
    return decode_record(value[record_at(value) :], message_id=text_of(member), lane=lanes.name)


def read_anyhow(member: bytes, value: bytes, lanes: Lanes) -> tuple[Record, int, str]:
    """Decode a value of `msg` as far as possible, even if the value is damaged.

    Returns:
        The record, the message's place in epoch ms, and a description of the damage. The description is "" if there is
        no damage. A damaged record has only its readable parts.
    """
    try:
        return read_record(member, value, lanes), place_and_record(value)[0], ""
    except RecordFormatError as error:
        due_ms, revision = due_and_revision(value)
        number = lane_number(value)
        salvaged = _salvaged(member, revision, number, value, lanes=lanes, problem=error.problem)
        return replace(salvaged, due_ms=due_ms), place_and_record(value)[0], error.problem


def read_letter(key: bytes, value: bytes, at_ms: int, lanes: Lanes) -> DeadLetter:
    """Decode a value of `dead`. An unreadable value becomes the payload, and `last_error` says why it is unreadable."""
    member, revision = key[_LETTER_ID], int.from_bytes(key[_LETTER_REVISION], "big")
    if not value or value[0] == UNREADABLE:
        number, raw = int.from_bytes(value[_RAW_LANE], "big"), value[_RAW_VALUE]
        return DeadLetter(
            _salvaged(member, revision, number, raw, lanes=lanes, problem="not a record"), "undecodable", at_ms
        )
    at = _REASON_AT + value[0]
    reason: DeadReason = value[_REASON_AT:at].decode("utf-8", "backslashreplace")  # type: ignore[assignment]
    record = value[at:]
    try:
        return DeadLetter(decode_record(record, message_id=text_of(member), lane=lanes.name), reason, at_ms)
    except RecordFormatError as error:
        number = _number(record, 0, _LANE)
        return DeadLetter(
            _salvaged(member, revision, number, record, lanes=lanes, problem=error.problem), reason, at_ms
        )


def _lane_or_empty(number: int, lanes: Lanes) -> Lane:
    """Return the name of a lane, or an empty name if somebody has deleted the names."""
    try:
        return lanes.name(number)
    except LookupError:
        return ""


def _salvaged(member: bytes, revision: int, number: int, raw: bytes, *, lanes: Lanes, problem: str) -> Record:
    envelope = Envelope(text_of(member), _lane_or_empty(number, lanes), payload=raw)
    return Record(envelope, revision, 0, NO_OP, last_error=f"cannot be read: {problem}")
