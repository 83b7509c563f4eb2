"""Checks on what callers give, before anything is sent: each error names the field, the value and what is allowed.

The limits are those of docs/reference.md, "Limits".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import datetime

from .errors import (
    ConfigurationError,
    HeaderError,
    MessageIdError,
    PayloadTooLargeError,
    ScheduleTimeError,
    TargetError,
    TargetNotAllowedError,
    shortened,
)
from .model import NO_HEADERS, After, At
from .timeunits import Duration, check_horizon, parse_duration, to_epoch_ms
from .transitions import occurrence_of

__all__ = [
    "MAX_HEADERS",
    "MAX_HEADER_BYTES",
    "MAX_HEADER_NAME",
    "MAX_ID_BYTES",
    "MAX_KEY_BYTES",
    "Targets",
    "check_headers",
    "check_id",
    "check_key",
    "check_namespace",
    "check_payload_size",
    "check_type_name",
    "due_of",
    "split_target",
]

MAX_ID_BYTES = 255
MAX_KEY_BYTES = 16_384
MAX_HEADERS = 64
MAX_HEADER_NAME = 128
MAX_HEADER_BYTES = 16_384
MAX_ADDRESS_BYTES = 255
RESERVED_HEADER_PREFIX = "aiodelay-"

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HEADER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SINK_NAME = re.compile(r"[a-z][a-z0-9.+-]{0,63}")
_TYPE_NAME = re.compile(r"[^\x00-\x20\x7f:{}]{1,128}")


def _utf8_length(text: str) -> int | None:
    """Return the length in bytes, None if the text cannot be written as UTF-8."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def check_id(message_id: object) -> str:
    """Check a caller's message id.

    Raises:
        MessageIdError: Not text, empty, too long, of the reserved form, or with control characters.
    """
    if not isinstance(message_id, str):
        raise MessageIdError("id", f"a {type(message_id).__qualname__}", "a str")
    if not message_id:
        raise MessageIdError("id", "empty", f"1 to {MAX_ID_BYTES} bytes of UTF-8")
    if _CONTROL.search(message_id):
        raise MessageIdError("id", shortened(message_id), "no control characters or line breaks")
    length = _utf8_length(message_id)
    if length is None:
        raise MessageIdError("id", shortened(message_id), "text that can be written as UTF-8 (no lone surrogates)")
    if length > MAX_ID_BYTES:
        raise MessageIdError(
            "id", f"{length} bytes long ({shortened(message_id)})", f"1 to {MAX_ID_BYTES} bytes of UTF-8"
        )
    if occurrence_of(message_id) is not None:
        allowed = "an id that does not end in '~' and ten or more digits, which names an occurrence of a series"
        raise MessageIdError("id", shortened(message_id), allowed)
    return message_id


def check_key(key: object, message_id: str) -> bytes | None:
    """Check a message key.

    Raises:
        HeaderError: Not bytes, or too long.
    """
    if key is None:
        return None
    if not isinstance(key, bytes):
        raise HeaderError("key", f"a {type(key).__qualname__}", "bytes or None", message_id)
    if len(key) > MAX_KEY_BYTES:
        raise HeaderError("key", f"{len(key)} bytes long", f"at most {MAX_KEY_BYTES} bytes", message_id)
    return key


def check_headers(headers: object, message_id: str) -> Mapping[str, bytes]:
    """Check a caller's headers, and copy them.

    Raises:
        HeaderError: Names the header and what is wrong with it; never its value.
    """
    if not isinstance(headers, Mapping):
        raise HeaderError("headers", f"a {type(headers).__qualname__}", "a mapping of str to bytes", message_id)
    if not headers:
        return NO_HEADERS
    if len(headers) > MAX_HEADERS:
        raise HeaderError("headers", f"{len(headers)} of them", f"at most {MAX_HEADERS}", message_id)
    total = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            allowed = f"1 to {MAX_HEADER_NAME} of A-Z a-z 0-9 . _ -"
            raise HeaderError("header name", shortened(name), allowed, message_id)
        if name.lower().startswith(RESERVED_HEADER_PREFIX):
            raise HeaderError(f"header {name!r}", "reserved", f"names without {RESERVED_HEADER_PREFIX!r}", message_id)
        if not isinstance(value, bytes):
            raise HeaderError(f"value of header {name!r}", f"a {type(value).__qualname__}", "bytes", message_id)
        total += len(name) + len(value)
    if total > MAX_HEADER_BYTES:
        raise HeaderError("headers", f"{total} bytes together", f"at most {MAX_HEADER_BYTES} bytes", message_id)
    return dict(headers)


def check_payload_size(payload: bytes, most: int, message_id: str) -> None:
    """Check the size of an encoded event.

    Raises:
        PayloadTooLargeError: It exceeds the scheduler's `max_payload`.
    """
    if len(payload) > most:
        raise PayloadTooLargeError(
            "payload", f"{len(payload)} bytes", f"at most {most} bytes (Scheduler(max_payload=...))", message_id
        )


def check_namespace(namespace: object) -> str:
    """Check a namespace.

    Raises:
        ConfigurationError: It does not match.
    """
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise ConfigurationError("namespace", shortened(namespace), "1 to 64 of A-Z a-z 0-9 . _ -")
    return namespace


def check_type_name(name: object, setting: str) -> str:
    """Check an event's stable type name.

    Raises:
        ConfigurationError: It does not match.
    """
    if not isinstance(name, str) or not _TYPE_NAME.fullmatch(name):
        allowed = "1 to 128 characters without spaces, control characters, ':', '{' or '}'"
        raise ConfigurationError(setting, shortened(name), allowed)
    return name


def split_target(to: object, message_id: str) -> tuple[str, str]:
    """Split `<sink>:<address>`.

    Raises:
        TargetError: It is not of that form.
    """
    allowed = "'<sink>:<address>', such as 'stdout:audit'"
    if not isinstance(to, str):
        raise TargetError("to", f"a {type(to).__qualname__}", allowed, message_id)
    sink, colon, address = to.partition(":")
    if not colon or not _SINK_NAME.fullmatch(sink) or not address:
        raise TargetError("to", shortened(to), allowed, message_id)
    length = _utf8_length(address)
    if _CONTROL.search(address) or length is None:
        raise TargetError("to", shortened(to), "no control characters or line breaks", message_id)
    if length > MAX_ADDRESS_BYTES:
        raise TargetError("to", f"{length} bytes of address", f"at most {MAX_ADDRESS_BYTES} bytes", message_id)
    return sink, address


class Targets:
    """Which destinations may be scheduled to: all, or exact ones and prefixes ending in `*`.

    Raises:
        ConfigurationError: An entry is not of that form.
    """

    def __init__(self, allowed: Collection[str] | None) -> None:
        self._allowed = allowed
        if isinstance(allowed, str):
            raise ConfigurationError("allowed_targets", shortened(allowed), "a collection, such as ['kafka:orders.*']")
        for entry in allowed or ():
            if not isinstance(entry, str) or ":" not in entry or "*" in entry[:-1]:
                raise ConfigurationError(
                    "allowed_targets", shortened(entry), "'<sink>:<address>', or such a prefix ending in '*'"
                )
        self._exact = frozenset(entry for entry in allowed or () if not entry.endswith("*"))
        self._prefixes = tuple(entry[:-1] for entry in allowed or () if entry.endswith("*"))

    def check(self, to: str, message_id: str) -> None:
        """Refuse a destination that is not allowed.

        Raises:
            TargetNotAllowedError: Names it.
        """
        if self._allowed is None or to in self._exact or to.startswith(self._prefixes or ("\0",)):
            return
        raise TargetNotAllowedError("to", shortened(to), "what Scheduler(allowed_targets=...) lists", message_id)


def due_of(at: datetime | None, delay: Duration | None, now_ms: int) -> At | After:
    """Return when a message is due: exactly one of `at` and `delay` is given.

    Raises:
        ScheduleTimeError: Both or none, naive, negative, not finite, or beyond the horizon.
    """
    if (at is None) == (delay is None):
        got = "neither" if at is None else "both given"
        raise ScheduleTimeError("at, delay, every", got, "exactly one of them")
    if delay is not None:
        delay_ms = parse_duration(delay, field="delay")
        check_horizon(now_ms + delay_ms, now_ms, "delay")
        return After(delay_ms)
    assert at is not None
    at_ms = to_epoch_ms(at, field="at")
    check_horizon(at_ms, now_ms, "at")
    return At(at_ms)
