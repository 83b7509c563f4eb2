"""Codecs that write events as JSON or MessagePack, and read them back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import msgspec

from aiodelay.errors import CodecError, RecordFormatError, kind_of

__all__ = ["JSON", "MESSAGEPACK", "Codec", "JsonCodec", "MessagePackCodec", "codec_named", "first_line"]


class Codec(Protocol):
    """Writes events of any type that `msgspec` or pydantic knows, and reads them back as that type."""

    @property
    def encoding(self) -> Literal["json", "msgpack"]:
        """The value of an envelope's `encoding` for payloads of this codec."""
        ...

    def encode(self, event: object) -> bytes:
        """Write an event.

        Raises:
            CodecError: The event's type, or a value inside it, cannot be written.
        """
        ...

    def decoder(self, type_: type[Any]) -> Callable[[bytes], Any]:
        """Return a function that reads payloads of one type.

        The function raises `msgspec.ValidationError` or `ValueError` for any other payload.
        """
        ...


class _UnwritableError(TypeError):
    """A value inside an event cannot be written. aiodelay wrote the error text, which shows no value."""


def _write_model(value: object) -> object:
    """Convert a pydantic model for msgspec (`enc_hook`)."""
    try:
        dump = getattr(value, "model_dump", None)
        if dump is not None:
            return dump(mode="json")
        problem = f"holds {kind_of(value)}"
    except Exception as error:  # noqa: BLE001 - a model's own serializers may raise anything, with values in the text
        problem = f"holds {kind_of(value)} whose model_dump raises {type(error).__name__}"
    raise _UnwritableError(problem)


def _read_model(type_: type[Any], value: object) -> object:
    """Make a pydantic model for msgspec (`dec_hook`)."""
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
    """MessagePack: smaller and faster than JSON. It stores bytes without a text encoding."""

    encoding: Literal["msgpack"] = "msgpack"

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_write_model)

    def encode(self, event: object) -> bytes:
        """Write an event; see `Codec`."""
        return _encoded(self._encoder.encode, event, self.encoding)

    def decoder(self, type_: type[Any]) -> Callable[[bytes], Any]:
        """Return a function that reads one type; see `Codec`."""
        return msgspec.msgpack.Decoder(type_, dec_hook=_read_model).decode


_KNOWN_PROBLEMS = ("Only dicts with", "can't serialize ints")  # error texts of msgspec that contain no value


def _encoded(encode: Callable[[object], bytes], event: object, encoding: str) -> bytes:
    try:
        payload = encode(event)
    except Exception as error:  # noqa: BLE001 - encoding runs code of the event's own types
        problem = _problem(error) + _in_field(encode, event)
    else:
        if encoding == "msgpack" or b"null" not in payload or not _holds_nan(event):
            return payload
        problem = "holds a float that is not finite, which JSON lacks"
    raise CodecError(  # raised outside the `except`, so that no chained exception holds a value
        "event",
        f"{kind_of(event)} that {problem}",
        f"an event that {encoding} can hold: values, lists and dicts of values, models",
    )


def _in_field(encode: Callable[[object], bytes], event: object) -> str:
    """Return words that name the first field that cannot be written; an empty text if each field can be written."""
    for name in _field_names(event):
        try:
            encode(getattr(event, name))
        except Exception:  # noqa: BLE001 - encoding runs code of the event's own types
            return f" in field {name!r}"
    return ""


def _field_names(event: object) -> Iterable[str]:
    class_ = type(event)
    if dataclasses.is_dataclass(class_):
        return [each.name for each in dataclasses.fields(class_)]
    named = [getattr(class_, name, ()) for name in ("__struct_fields__", "model_fields")]
    return [*named[0], *named[1], *(each.name for each in getattr(class_, "__attrs_attrs__", ()))]


def _problem(error: Exception) -> str:
    """Return why an event cannot be written. The text contains no value of the event."""
    match error:
        case _UnwritableError():
            return str(error)
        case RecursionError():
            return "refers to itself, or is nested too deeply"
        case UnicodeEncodeError():
            return "holds text with a lone surrogate"
        case TypeError() | OverflowError() if str(error).startswith(_KNOWN_PROBLEMS):
            return f"cannot be written ({error})"
    return f"raises {type(error).__name__}"


def _holds_nan(event: object) -> bool:
    """Return whether an event contains a NaN or an infinity, which JSON would write as null."""
    values = [msgspec.to_builtins(event, enc_hook=_write_model)]
    while values:
        value = values.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return True
        if isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            values.extend(value)
    return False


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, at most 120 characters."""
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
