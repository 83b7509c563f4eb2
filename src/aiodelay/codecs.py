"""How events become bytes, and how a record becomes bytes.

The record's format is described in docs/formats.md; `model.FIELDS` is its one table, golden bytes per format version
are in tests/unit/test_record_format.py. Readers skip body keys they do not know and refuse a newer format version.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from .errors import CodecError, RecordFormatError
from .model import FORMAT_VERSION, NO_HEADERS, NO_TRACE, Envelope, Lane, LateAction, Record

__all__ = [
    "JSON",
    "MESSAGEPACK",
    "Codec",
    "JsonCodec",
    "MessagePackCodec",
    "codec_named",
    "decode_record",
    "encode_record",
]


class Codec(Protocol):
    """Writes events of any type that `msgspec` or pydantic knows, and reads them back typed."""

    @property
    def encoding(self) -> Literal["json", "msgpack"]:
        """What an envelope's `encoding` says of payloads written by it."""
        ...

    def encode(self, event: object) -> bytes:
        """Write an event.

        Raises:
            CodecError: Its type, or something inside it, cannot be written.
        """
        ...

    def decoder(self, type_: type[Any]) -> Callable[[bytes], Any]:
        """Return a function that reads one type and raises `msgspec.ValidationError` or `ValueError`."""
        ...


def _write_model(value: object) -> object:
    """Let pydantic models through (`enc_hook`)."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"{type(value).__qualname__} cannot be written")
    return dump(mode="json")


def _read_model(type_: type[Any], value: object) -> object:
    """Read pydantic models (`dec_hook`)."""
    validate = getattr(type_, "model_validate", None)
    if validate is None:
        raise TypeError(f"{type_.__qualname__} cannot be read")
    return validate(value)


class JsonCodec:
    """JSON: the default, readable everywhere."""

    encoding: Literal["json"] = "json"

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder(enc_hook=_write_model)

    def encode(self, event: object) -> bytes:
        """Write an event; see `Codec`."""
        return _encoded(self._encoder.encode, event, self.encoding)

    def decoder(self, type_: type[Any]) -> Callable[[bytes], Any]:
        """Return a function that reads one type; see `Codec`."""
        return msgspec.json.Decoder(type_, dec_hook=_read_model).decode


class MessagePackCodec:
    """MessagePack: smaller and faster, with bytes as they are."""

    encoding: Literal["msgpack"] = "msgpack"

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_write_model)

    def encode(self, event: object) -> bytes:
        """Write an event; see `Codec`."""
        return _encoded(self._encoder.encode, event, self.encoding)

    def decoder(self, type_: type[Any]) -> Callable[[bytes], Any]:
        """Return a function that reads one type; see `Codec`."""
        return msgspec.msgpack.Decoder(type_, dec_hook=_read_model).decode


def _encoded(encode: Callable[[object], bytes], event: object, encoding: str) -> bytes:
    try:
        return encode(event)
    except RecursionError:
        problem = "refers to itself"
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"cannot be written as {encoding} ({type(error).__name__}: {_first_line(error)})"
    raise CodecError(
        "event", f"a {type(event).__qualname__} that {problem}", "dataclass, msgspec.Struct, pydantic model"
    )


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:120]


JSON, MESSAGEPACK = JsonCodec(), MessagePackCodec()


def codec_named(encoding: str) -> Codec:
    """Return the codec for an envelope's encoding.

    Raises:
        RecordFormatError: The encoding is not known.
    """
    if encoding == "json":
        return JSON
    if encoding == "msgpack":
        return MESSAGEPACK
    raise RecordFormatError(f"unknown encoding {encoding[:20]!r}")


# --- records ----------------------------------------------------------------------------------------------

_PREFIX = struct.Struct(">BBHHIHIHIHBB8s")  # u48 as u16 and u32
_RECURRING, _ALONE, _NO_RETRY, _HAS_VERSION = 1, 2, 4, 32
_LATE_SHIFT, _LATE_MASK = 3, 3
_body_encoder = msgspec.msgpack.Encoder()


class _Body(msgspec.Struct, omit_defaults=True, gc=False):
    """The MessagePack map after the prefix; what is absent has its default."""

    p: bytes = b""
    k: bytes | None = None
    h: dict[str, bytes] = {}
    c: dict[str, str] = {}
    t: str = ""
    e: Literal["", "json", "msgpack"] = ""
    a: str = ""
    r: dict[str, str | int] | None = None
    l: tuple[int, ...] = ()  # noqa: E741 - the documented key
    f: str | None = None
    g: str | None = None


_body_decoder = msgspec.msgpack.Decoder(_Body)


def encode_record(record: Record, lane_number: int) -> bytes:
    """Write a record: fixed prefix, then body; the id is not part of it.

    Args:
        record: What to write.
        lane_number: The number of its lane in the store's table of lanes, 0 to 65535.
    """
    envelope = record.envelope
    flags = (
        (_RECURRING if envelope.rule is not None else 0)
        | (_ALONE if record.alone else 0)
        | (_NO_RETRY if record.no_retry else 0)
        | record.late << _LATE_SHIFT
        | (_HAS_VERSION if envelope.version is not None else 0)
    )
    prefix = _PREFIX.pack(
        FORMAT_VERSION,
        flags,
        lane_number,
        *divmod(record.revision, 1 << 32),
        *divmod(record.due_ms, 1 << 32),
        *divmod(record.expires_ms, 1 << 32),
        min(record.attempt, 65_535),
        record.lapses,
        record.kills,
        record.op,
    )
    if envelope.version is not None:
        prefix += envelope.version.to_bytes(8, "big")
    body = _Body(
        envelope.payload,
        envelope.key,
        dict(envelope.headers),
        dict(envelope.trace),
        envelope.type,
        envelope.encoding,
        envelope.address,
        None if envelope.rule is None else dict(envelope.rule),
        record.live,
        record.first_error,
        record.last_error,
    )
    return prefix + _body_encoder.encode(body)


def decode_record(data: bytes, *, message_id: str, lane: Callable[[int], Lane]) -> Record:
    """Read a record that `encode_record` wrote, in this or an older format version.

    Args:
        data: The record.
        message_id: The id it stands under.
        lane: Gives a lane's name by its number.

    Raises:
        RecordFormatError: It is cut short, damaged, or of a newer format.
    """
    if data[:1] and data[0] > FORMAT_VERSION:
        raise RecordFormatError(f"format {data[0]} is newer than {FORMAT_VERSION}, the newest known")
    if len(data) < _PREFIX.size:
        raise RecordFormatError(f"{len(data)} bytes are shorter than the prefix of {_PREFIX.size}")
    (version, flags, number, r_high, r_low, d_high, d_low, e_high, e_low, attempt, lapses, kills, op) = (
        _PREFIX.unpack_from(data)
    )
    if version < 1:
        raise RecordFormatError("format 0 has never been written")
    start = _PREFIX.size + (8 if flags & _HAS_VERSION else 0)
    try:
        body = _body_decoder.decode(memoryview(data)[start:])
        late = LateAction(flags >> _LATE_SHIFT & _LATE_MASK)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordFormatError(f"damaged body ({_first_line(error)})") from None
    try:
        lane_name = lane(number)
    except LookupError:
        raise RecordFormatError(f"no lane has the number {number}") from None
    envelope = Envelope(
        message_id,
        lane_name,
        body.a,
        body.t,
        body.e,
        body.p,
        body.k,
        body.h or NO_HEADERS,
        body.c or NO_TRACE,
        int.from_bytes(data[_PREFIX.size : start], "big") if flags & _HAS_VERSION else None,
        body.r,
    )
    return Record(
        envelope,
        r_high << 32 | r_low,
        d_high << 32 | d_low,
        op,
        e_high << 32 | e_low,
        late,
        attempt,
        lapses,
        kills,
        bool(flags & _ALONE),
        bool(flags & _NO_RETRY),
        body.l,
        body.f,
        body.g,
    )
