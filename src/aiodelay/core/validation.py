"""Checks of callers' arguments before anything is sent. Each error names the field, the value and the allowed values.

docs/reference.md, "Limits", lists the limits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from aiodelay.errors import (
    ConfigurationError,
    HeaderError,
    MessageIdError,
    PayloadTooLargeError,
    ScheduleTimeError,
    TargetError,
    TargetNotAllowedError,
    cut,
    kind_of,
    shortened,
)

from .durations import Duration, check_horizon, parse_duration, to_epoch_ms
from .transitions import occurrence_of
from .values import NO_HEADERS, After, At, Envelope

__all__ = [
    "HANDLER_TARGET",
    "MAX_ADDRESS_BYTES",
    "MAX_HEADERS",
    "MAX_HEADER_BYTES",
    "MAX_HEADER_NAME",
    "MAX_ID_BYTES",
    "MAX_KEY_BYTES",
    "RESERVED_HEADERS",
    "Targets",
    "check_count",
    "check_flag",
    "check_headers",
    "check_id",
    "check_instance",
    "check_key",
    "check_letters_id",
    "check_namespace",
    "check_payload_size",
    "check_type_name",
    "due_of",
    "listed",
    "split_target",
    "to_of",
]

T = TypeVar("T")

MAX_ID_BYTES = 255
MAX_KEY_BYTES = 16_384
MAX_HEADERS = 64
MAX_HEADER_NAME = 128
MAX_HEADER_BYTES = 16_384
MAX_ADDRESS_BYTES = 255
HANDLER_TARGET = "handler"
"""The sink name in `to="handler:<type name>"`: a handler takes the message.

Callers need this form for an event given as bytes. Programs in other languages need it too.
"""
RESERVED_HEADER_PREFIX = "aiodelay-"
RESERVED_HEADERS = (
    *("scheduler-epoch", "scheduler-target-topic", "scheduler-target-key"),
    *("scheduler-timestamp", "scheduler-key", "scheduler-topic"),
)
"""The headers by which any Kafka client schedules a message, and the headers that a delivery to Kafka adds.

A message must not have them: in a Kafka store, they would replace its destination and its due time.
"""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HEADER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SINK_NAME = re.compile(r"[a-z][a-z0-9.+-]{0,63}")
_TYPE_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f:{}]{1,128}")
_HEADER_NAMES = f"1 to {MAX_HEADER_NAME} characters of A-Z a-z 0-9 . _ -"
_NO_CONTROL = "no control characters or line breaks"
_UTF8 = "text that can be written as UTF-8 (no lone surrogates)"


def _plain(text: str) -> str:
    """Return a plain `str` with the same characters, because members of an enum and other subclasses are not stored."""
    return text if type(text) is str else str.__str__(text)


def _utf8_length(text: str) -> int | None:
    """Return the length of a text in bytes of UTF-8; None if the text cannot be written as UTF-8."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def check_letters_id(message_id: object) -> str:
    """Return a checked id by which dead letters are looked up.

    The id may break the rules for ids: a record of another program may have such an id.

    Raises:
        MessageIdError: The id is not text, or not valid UTF-8.
    """
    return _id_and_length(message_id)[0]


def _id_and_length(message_id: object) -> tuple[str, int]:
    if not isinstance(message_id, str):
        raise MessageIdError("id", kind_of(message_id), "a str")
    message_id = _plain(message_id)
    length = _utf8_length(message_id)
    if length is None:
        raise MessageIdError("id", shortened(message_id), _UTF8)
    return message_id, length


def check_id(message_id: object, *, may_be_occurrence: bool = False) -> str:
    """Return a caller's message id after a check of its form.

    Args:
        message_id: 1 to 255 bytes of UTF-8.
        may_be_occurrence: Whether the id of an occurrence of a series is allowed too. Stores make such ids.

    Raises:
        MessageIdError: The id is not text, empty, too long, of the reserved form, or has control characters.
    """
    message_id, length = _id_and_length(message_id)
    if not message_id:
        raise MessageIdError("id", "empty", f"1 to {MAX_ID_BYTES} bytes of UTF-8")
    if length > MAX_ID_BYTES:
        raise MessageIdError(
            "id", f"{length} bytes long ({shortened(message_id)})", f"1 to {MAX_ID_BYTES} bytes of UTF-8"
        )
    if _CONTROL.search(message_id):
        raise MessageIdError("id", shortened(message_id), _NO_CONTROL)
    if not may_be_occurrence and occurrence_of(message_id) is not None:
        allowed = "an id that does not end in '~' and ten or more digits; this ending names an occurrence of a series"
        raise MessageIdError("id", shortened(message_id), allowed)
    return message_id


def check_key(key: object) -> bytes | None:
    """Return a message key after a check of its type and size.

    Raises:
        HeaderError: The key is not bytes, or is too long.
    """
    if key is None:
        return None
    if not isinstance(key, bytes):
        raise HeaderError("key", kind_of(key), "bytes or None")
    if len(key) > MAX_KEY_BYTES:
        raise HeaderError("key", f"{len(key)} bytes long", f"at most {MAX_KEY_BYTES} bytes")
    return b"".join((key,))


def check_headers(headers: object) -> Mapping[str, bytes]:
    """Return a checked copy of a caller's headers. Since it is a copy, no later change can bypass the check.

    Raises:
        HeaderError: A header is wrong. The error names the header and the fault, never the value of the header.
    """
    if not isinstance(headers, Mapping):
        raise HeaderError("headers", kind_of(headers), "a mapping of str to bytes")
    checked: dict[str, bytes] = {}
    total = 0
    for given, value in headers.items():
        if len(checked) == MAX_HEADERS:
            raise HeaderError(
                "headers", f"a mapping with {max(len(headers), MAX_HEADERS + 1)} headers", f"at most {MAX_HEADERS}"
            )
        name = _checked_header_name(given)
        if not isinstance(value, bytes):
            raise HeaderError(f"value of header {name!r}", kind_of(value), "bytes")
        checked[name] = b"".join((value,))
        total += len(name) + len(value)
    if total > MAX_HEADER_BYTES:
        raise HeaderError("headers", f"a mapping of {total} bytes", f"at most {MAX_HEADER_BYTES} bytes")
    return checked or NO_HEADERS


def _checked_header_name(name: object) -> str:
    if not isinstance(name, str):
        raise HeaderError("header name", shortened(name), _HEADER_NAMES)
    return _known_header_name(_plain(name))


@lru_cache(maxsize=1024)  # programs use few names, each many times; a refused name is not kept
def _known_header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise HeaderError("header name", shortened(name), _HEADER_NAMES)
    if name.lower().startswith(RESERVED_HEADER_PREFIX):
        raise HeaderError(f"header {name!r}", "reserved", f"names that do not begin with {RESERVED_HEADER_PREFIX!r}")
    if name in RESERVED_HEADERS:
        raise HeaderError(f"header {name!r}", "reserved", f"names except {', '.join(RESERVED_HEADERS)}")
    return name


def check_payload_size(payload: bytes, most: int) -> None:
    """Refuse an encoded event that is too large.

    Raises:
        PayloadTooLargeError: The payload exceeds the scheduler's `max_payload`.
    """
    if len(payload) > most:
        raise PayloadTooLargeError("payload", f"{len(payload)} bytes", f"at most {most} bytes (setting max_payload)")


def check_namespace(namespace: object) -> str:
    """Return a namespace after a check of its form.

    Raises:
        ConfigurationError: The namespace does not have the required form.
    """
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise ConfigurationError("namespace", shortened(namespace), "1 to 64 characters of A-Z a-z 0-9 . _ -")
    return _plain(namespace)


def check_type_name(name: object, setting: str) -> str:
    """Return an event's stable type name after a check of its form.

    Raises:
        ConfigurationError: The name does not have the required form.
    """
    if not isinstance(name, str) or not _TYPE_NAME.fullmatch(name) or _utf8_length(name) is None:
        allowed = "1 to 128 characters without spaces, control characters, ':', '{' or '}'"
        raise ConfigurationError(setting, shortened(name), allowed)
    return _plain(name)


def split_target(to: object, *, field: str = "to") -> tuple[str, str]:
    """Return the sink's name and the address of a destination `<sink>:<address>`.

    Raises:
        TargetError: The text does not have the required form.
    """
    if not isinstance(to, str):
        raise TargetError(field, kind_of(to), _target_form(field))
    return _split_target(_plain(to), field)


def _target_form(field: str) -> str:
    return f"'<{'source' if field == 'source' else 'sink'}>:<address>', such as 'redis-list:orders'"


@lru_cache(maxsize=1024)  # programs use few destinations, each many times
def _split_target(to: str, field: str) -> tuple[str, str]:
    sink, colon, address = to.partition(":")
    if not colon or not _SINK_NAME.fullmatch(sink) or not address:
        raise TargetError(field, shortened(to), _target_form(field))
    length = _utf8_length(address)
    if length is None:
        raise TargetError(field, shortened(to), _UTF8)
    if length > MAX_ADDRESS_BYTES:
        raise TargetError(field, f"an address of {length} bytes", f"at most {MAX_ADDRESS_BYTES} bytes")
    if _CONTROL.search(address):
        raise TargetError(field, shortened(to), _NO_CONTROL)
    return sink, address


class Targets:
    """The destinations to which messages may be scheduled: all, or a list of destinations and prefixes ending in `*`.

    Attributes:
        allowed: The allowed destinations; None = all.

    Raises:
        ConfigurationError: An entry does not have the required form.
    """

    def __init__(self, allowed: Collection[str] | None) -> None:
        self.allowed: tuple[str, ...] | None = None
        entries = () if allowed is None else listed(allowed, "allowed_targets", "['kafka:orders.*']")
        for entry in entries:
            if not isinstance(entry, str) or ":" not in entry or "*" in entry[:-1]:
                raise ConfigurationError(
                    "allowed_targets", shortened(entry), "'<sink>:<address>', or the beginning of such a text and '*'"
                )
        if allowed is not None:
            self.allowed = entries
        self._exact = frozenset(entry for entry in entries if not entry.endswith("*"))
        self._prefixes = tuple(entry[:-1] for entry in entries if entry.endswith("*"))

    def check(self, to: str) -> None:
        """Refuse a destination that is not allowed.

        Raises:
            TargetNotAllowedError: The destination is not allowed. The error names it.
        """
        if self.allowed is None or to in self._exact or to.startswith(self._prefixes):
            return
        named = cut(", ".join(self.allowed) or "nothing", 300)
        raise TargetNotAllowedError("to", shortened(to), f"destinations in the setting allowed_targets: {named}")


def listed(value: object, setting: str, example: str) -> tuple[Any, ...]:
    """Return the items of a setting that is a collection. A single text is refused, not split into characters.

    Raises:
        ConfigurationError: The value is a text, or cannot be iterated over.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigurationError(setting, shortened(value), f"a collection, such as {example}")
    return tuple(value)


def check_instance(value: object, class_: type[T], setting: str) -> T:
    """Return a value after a check of its class.

    Raises:
        ConfigurationError: The value is not an instance of the class.
    """
    if not isinstance(value, class_):
        raise ConfigurationError(setting, kind_of(value), f"a {class_.__qualname__}")
    return value


def check_count(value: object, setting: str, least: int, most: int) -> int:
    """Return a number after a check of its type and range.

    Raises:
        ConfigurationError: The value is not a whole number from `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(setting, shortened(value), f"an integer from {least} to {most}")
    return value


def check_flag(value: object, setting: str) -> bool:
    """Return a setting that is True or False. Text is refused, since even "false" would count as true.

    Raises:
        ConfigurationError: The value is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(setting, shortened(value), "True or False")
    return value


def due_of(at: datetime | None, delay: Duration | None, now_ms: int, *, fields: str = "at, delay") -> At | After:
    """Return when a message is due. Exactly one of `at` and `delay` must be given.

    Args:
        at: An instant.
        delay: A duration from now.
        now_ms: The store's time, in epoch milliseconds.
        fields: The names of all arguments of which exactly one must be given, for the error.

    Raises:
        ScheduleTimeError: Both or none are given. Or the value is naive, negative, not finite, or more than 3,650
            days ahead.
    """
    if (at is None) == (delay is None):
        got = "missing" if at is None else "given as more than one argument"
        raise ScheduleTimeError(fields, got, "exactly one of them")
    if delay is not None:
        delay_ms = parse_duration(delay, field="delay")
        check_horizon(now_ms + delay_ms, now_ms, "delay")
        return After(delay_ms)
    assert at is not None
    at_ms = to_epoch_ms(at, field="at")
    check_horizon(at_ms, now_ms, "at")
    return At(at_ms)


def to_of(envelope: Envelope) -> str:
    """Return a message's destination in the form of `to=`; without a sink, `handler:<type name>`."""
    return f"{envelope.lane}:{envelope.address}" if envelope.address else f"{HANDLER_TARGET}:{envelope.lane}"
