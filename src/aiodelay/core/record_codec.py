"""Encoding and decoding of records.

docs/formats.md describes the format, and `record_format` declares its fields. tests/unit/test_record_format.py has
sample bytes for each format version. Readers skip unknown body keys, and refuse a newer format version.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, Literal

import msgspec

from aiodelay.errors import RecordFormatError

from .event_codecs import first_line
from .record_format import FIELDS, FORMAT_VERSION, PREFIX, body_keys
from .values import NO_HEADERS, NO_TRACE, Envelope, Lane, LateAction, Record

__all__ = [
    "decode_columns",
    "decode_record",
    "decode_trace",
    "encode_body",
    "encode_record",
    "encode_trace",
    "numbers_at",
    "storable_text",
    "storable_texts",
]

# --- records ----------------------------------------------------------------------------------------------

_PREFIX = struct.Struct(PREFIX.format)
_PREFIX_READ = struct.Struct(">BBQQIHBB8s")  # the same bytes; each number of 6 bytes is read together with a neighbour
_PREFIX_SIZE, _FLAGS_AT = PREFIX.size, PREFIX.places["flags"].at
_VERSION_SIZE, _VERSIONED_SIZE = PREFIX.places["version"].size, PREFIX.places["version"].end
_U48, _U16 = (1 << 48) - 1, (1 << 16) - 1
_RECURRING, _ALONE, _NO_RETRY, _HAS_VERSION = (
    PREFIX.flags[name].mask for name in ("rule", "alone", "no_retry", "version")
)
_LATE_SHIFT, _LATE_MASK = PREFIX.flags["late"].shift, PREFIX.flags["late"].mask >> PREFIX.flags["late"].shift
_DELIVER = LateAction.DELIVER  # looking up a member of an enum takes as long as making a record
_MOST_ATTEMPTS = 65_535
_body_encoder = msgspec.msgpack.Encoder()


class _UsualBody(msgspec.Struct, omit_defaults=True, gc=False):
    """The keys of `_Body` that messages have while they wait.

    msgspec writes the map of a struct with up to 15 fields with 1 byte for the number of keys, which scripts expect of
    most records. For more fields it takes 3 bytes, even if most fields are left out.
    """

    p: bytes = b""
    k: bytes | None = None
    h: dict[str, bytes] = {}
    c: bytes | dict[str, str] = {}
    t: str = ""
    e: Literal["", "json", "msgpack", "null"] = ""
    a: str = ""
    r: dict[str, str | int] | None = None
    l: tuple[int, ...] = ()  # noqa: E741 - the documented key
    f: str | None = None
    g: str | None = None
    j: tuple[str, ...] = ()
    b: str | None = None
    d: int | None = None
    w: int | None = None


class _Body(_UsualBody, omit_defaults=True, gc=False):
    """The MessagePack map after the prefix. If a key is absent, its field has the default value."""

    i: bytes | None = None
    m: int | None = None


_read_body = msgspec.msgpack.Decoder(_Body).decode


def encode_record(record: Record, lane_number: int) -> bytes:
    """Write a record without its id: the fixed prefix, then the body.

    Args:
        record: The record to write.
        lane_number: The number of the record's lane in the store's table of lanes, 0 to 65535.
    """
    envelope = record.envelope
    prefix = _PREFIX.pack(
        FORMAT_VERSION,
        _flags(record),
        lane_number,
        record.revision.to_bytes(6, "big"),
        record.due_ms.to_bytes(6, "big"),
        record.expires_ms.to_bytes(6, "big"),
        min(record.attempt, _MOST_ATTEMPTS),
        record.lapses,
        record.kills,
        record.op,
    )
    version = b"" if envelope.version is None else envelope.version.to_bytes(_VERSION_SIZE, "big")
    body = encode_body(
        envelope,
        record.live,
        record.first_error,
        record.last_error,
        earlier_errors=record.earlier_errors,
        traceback=record.traceback,
        put_due_ms=record.put_due_ms,
        debounced_ms=record.debounced_ms,
        appended=record.appended,
        appended_due_ms=record.appended_due_ms,
    )
    return prefix + version + body


def encode_body(
    envelope: Envelope,
    live: tuple[int, ...] = (),
    first_error: str | None = None,
    last_error: str | None = None,
    *,
    earlier_errors: tuple[str, ...] = (),
    traceback: str | None = None,
    put_due_ms: int | None = None,
    debounced_ms: int | None = None,
    appended: bytes | None = None,
    appended_due_ms: int | None = None,
) -> bytes:
    """Write only the body of a record: the MessagePack map, without the prefix."""
    body = _UsualBody(
        p=envelope.payload,
        k=envelope.key,
        h=dict(envelope.headers) if envelope.headers else {},
        c=_written_trace(envelope.trace) if envelope.trace else {},
        t=envelope.type,
        e=envelope.encoding,
        a=envelope.address,
        r=None if envelope.rule is None else dict(envelope.rule),
        l=live,
        f=storable_text(first_error),
        g=storable_text(last_error),
        j=storable_texts(earlier_errors) if earlier_errors else (),
        b=storable_text(traceback),
        d=put_due_ms,
        w=debounced_ms,
    )
    if appended is not None:
        body = _Body(**msgspec.structs.asdict(body), i=appended, m=appended_due_ms)
    return _body_encoder.encode(body)


def storable_text(text: str | None) -> str | None:
    """Replace characters that UTF-8 cannot hold. Otherwise an error's text could make its message unstorable."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def storable_texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Replace characters that UTF-8 cannot hold, in each text."""
    return tuple(text.encode("utf-8", "backslashreplace").decode() for text in texts)


_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_TRACEPARENT_BYTES = 25
_trace_decoder = msgspec.msgpack.Decoder(bytes | dict[str, str])


def encode_trace(trace: Mapping[str, str]) -> bytes:
    """Return a trace context in the form that a record's body contains."""
    return msgspec.msgpack.encode(_written_trace(trace))


def decode_trace(written: bytes) -> Mapping[str, str]:
    """Return the trace context from a record's body; an empty trace context if the bytes cannot be read."""
    try:
        return _read_trace(_trace_decoder.decode(written))
    except ValueError:
        return NO_TRACE


def _written_trace(trace: Mapping[str, str]) -> bytes | dict[str, str]:
    """Return the stored form of a trace context.

    Most trace contexts hold only a W3C `traceparent`, a text of hexadecimal digits. Only the bytes that these digits
    stand for are stored, which takes about a third of the space.
    """
    found = _TRACEPARENT.fullmatch(trace.get("traceparent", "")) if len(trace) == 1 else None
    return bytes.fromhex("".join(found.groups())) if found else dict(trace)


def _read_trace(written: bytes | dict[str, str]) -> Mapping[str, str]:
    if isinstance(written, dict):
        return written or NO_TRACE
    known, trace = _last_traceparent[0]
    if written != known:
        if len(written) != _TRACEPARENT_BYTES:
            raise ValueError(f"a trace context has {len(written)} bytes, not {_TRACEPARENT_BYTES}")
        text = written.hex()
        trace = {"traceparent": f"00-{text[:32]}-{text[32:48]}-{text[48:]}"}
        _last_traceparent[0] = written, trace
    return trace


_last_traceparent: list[tuple[bytes, Mapping[str, str]]] = [(b"", NO_TRACE)]
"""The trace context that was read last. Messages that were scheduled together have the same one."""


def _flags(record: Record) -> int:
    return (
        (_RECURRING if record.envelope.rule is not None else 0)
        | (_ALONE if record.alone else 0)
        | (_NO_RETRY if record.no_retry else 0)
        | (record.late << _LATE_SHIFT)
        | (_HAS_VERSION if record.envelope.version is not None else 0)
    )


def decode_record(data: bytes, *, message_id: str, lane: Callable[[int], Lane]) -> Record:
    """Read a record that `encode_record` wrote, in this or an older format version.

    Args:
        data: The bytes of the record.
        message_id: The id under which the record is stored.
        lane: A function that returns the name of the lane with a number. If no lane has the number, the function
            raises `LookupError`.

    Raises:
        RecordFormatError: The record is cut short, damaged, or of a newer format.
    """
    if len(data) < _PREFIX_SIZE or data[0] != FORMAT_VERSION:
        raise RecordFormatError(_problem_of_prefix(data))
    _, flags, lane_revision, due_expires, expires, attempt, lapses, kills, op = _PREFIX_READ.unpack_from(data)
    number = lane_revision >> 48
    version_end = _VERSIONED_SIZE if flags & _HAS_VERSION else _PREFIX_SIZE
    try:
        body = _read_body(data[version_end:])
        late = LateAction(flags >> _LATE_SHIFT & _LATE_MASK) if flags else _DELIVER
        trace = _read_trace(body.c) if body.c else NO_TRACE
        lane_name = lane(number)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordFormatError(f"it is damaged ({first_line(error)})") from None
    except LookupError:
        raise RecordFormatError(f"no lane has the number {number}") from None
    version = int.from_bytes(data[_PREFIX_SIZE:version_end], "big") if flags & _HAS_VERSION else None
    envelope = Envelope(  # positional arguments, here and below: keyword arguments take 1.5 times as long
        message_id,
        lane_name,
        body.a,
        body.t,
        body.e,
        body.p,
        body.k,
        body.h or NO_HEADERS,
        trace,
        version,
        body.r,
    )
    return Record(
        envelope,
        lane_revision & _U48,
        due_expires >> 16,
        op,
        (due_expires & _U16) << 32 | expires,
        late,
        attempt,
        lapses,
        kills,
        flags & _ALONE != 0,
        flags & _NO_RETRY != 0,
        body.l,
        body.f,
        body.g,
        body.j,
        body.b,
        body.d,
        body.w,
        body.i,
        body.m,
    )


_KEYS: Mapping[str, str] = body_keys(FIELDS)
_NUMBERS = {name: place for name, place in PREFIX.places.items() if place.type in ("u16", "u48")}
"""The numbers of the prefix that `numbers_at` reads."""
_HAS_NO_VERSION = bytes(each for each in range(256) if not each & _HAS_VERSION)


def decode_columns(values: Sequence[bytes], at: int, wanted: Collection[str]) -> dict[str, Sequence[Any]]:
    """Read fields of many records that `encode_record` wrote, several times as fast as one record at a time.

    Args:
        values: At least one value. Each value holds one record.
        at: The position in each value at which its record begins.
        wanted: Fields of a record. `lane` is returned as its number.

    Raises:
        RecordFormatError: A wanted field of at least one record cannot be read.
    """
    try:
        if set(map(itemgetter(at), values)) != {FORMAT_VERSION}:
            raise RecordFormatError("at least one record has another format")
        flags = bytes(map(itemgetter(at + _FLAGS_AT), values))
        found: dict[str, Sequence[Any]] = {
            name: numbers_at(values, at + place.at, place.size) for name, place in _NUMBERS.items() if name in wanted
        }
        if "late" in wanted:
            found["late"] = [each >> _LATE_SHIFT & _LATE_MASK for each in flags]
        if "version" in wanted:
            found["version"] = _versions(values, at + _PREFIX_SIZE, flags)
        if names := tuple(name for name in _KEYS if name in wanted):
            found |= _body_columns(values, at + _PREFIX_SIZE, flags, names)
    except (IndexError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordFormatError(f"at least one record is damaged ({first_line(error)})") from None
    return {name: found[name] for name in wanted}


def numbers_at(values: Sequence[bytes], at: int, size: int) -> array[int]:
    """Read the big-endian number of `size` bytes (2 or 6) that is at the same position in each value.

    Raises:
        ValueError: A value is too short.
    """
    gap = bytes(8 - size if size > 2 else 0)
    joined = gap + gap.join([value[at : at + size] for value in values])
    if len(joined) != len(values) * (size + len(gap)):
        raise ValueError("cut short")
    numbers = array("q" if gap else "H", joined)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _versions(values: Sequence[bytes], at: int, flags: bytes) -> Sequence[int | None]:
    if not flags.translate(None, _HAS_NO_VERSION):
        return [None] * len(values)
    return [
        int.from_bytes(value[at : at + _VERSION_SIZE], "big") if each & _HAS_VERSION else None
        for value, each in zip(values, flags, strict=True)
    ]


def _body_columns(values: Sequence[bytes], at: int, flags: bytes, names: tuple[str, ...]) -> dict[str, Sequence[Any]]:
    read = _reader_of(names)
    versioned = len(flags.translate(None, _HAS_NO_VERSION))
    if versioned in (0, len(flags)):
        end = at + _VERSION_SIZE * (versioned > 0)
        bodies = [read(value[end:]) for value in values]
    else:
        ends = (at + _VERSION_SIZE if each & _HAS_VERSION else at for each in flags)
        bodies = [read(value[end:]) for value, end in zip(values, ends, strict=True)]
    found: dict[str, Sequence[Any]] = {name: list(map(attrgetter(_KEYS[name]), bodies)) for name in names}
    if "trace" in found:
        found["trace"] = [_read_trace(each) if each else NO_TRACE for each in found["trace"]]
    return found


@cache
def _reader_of(names: tuple[str, ...]) -> Callable[[bytes], Any]:
    """Return a decoder that reads these fields of a body and skips all other fields."""
    keys = {_KEYS[name] for name in names}
    fields = [(each.name, each.type, _default_of(each)) for each in msgspec.structs.fields(_Body) if each.name in keys]
    return msgspec.msgpack.Decoder(msgspec.defstruct("_SomeOfBody", fields, gc=False)).decode


def _default_of(field: msgspec.structs.FieldInfo) -> Any:  # noqa: ANN401 - of any type
    has_one = field.default is not msgspec.NODEFAULT
    return field.default if has_one else msgspec.field(default_factory=field.default_factory)


def _problem_of_prefix(data: bytes) -> str:
    if data and data[0] != FORMAT_VERSION:
        return f"format {data[0]} is not known; the newest known format is {FORMAT_VERSION}"
    return f"{len(data)} bytes are shorter than the prefix of {_PREFIX_SIZE}"
