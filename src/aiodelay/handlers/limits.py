"""Limits that code declares: of an event type with `@event`, or of a handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from uuid import UUID

from aiodelay.core.validation import check_key, listed
from aiodelay.core.values import ADDRESS, NO_LIMITS, LaneLimits, Limit, lane_limits
from aiodelay.errors import ConfigurationError, PayloadTypeError, kind_of, shortened

__all__ = ["OWN_KEY", "KeyReader", "checked_limits", "declared_limits", "key_reader"]

OWN_KEY = "key"
"""The name of a limit's key that means the `key=` given to `schedule()`, if the event has no field of this name."""
KeyReader = Callable[[object], bytes | None]
"""Returns the key of an event; None = the event has no key."""


def declared_limits(class_: type) -> LaneLimits:
    """Return the limits that `@event` has declared for a class."""
    limits: LaneLimits = class_.__dict__.get("__aiodelay_limits__", NO_LIMITS)
    return limits


def checked_limits(limit: Limit | Sequence[Limit], class_: type) -> LaneLimits:
    """Return limits for messages of a class, or of bytes, after a check of their key.

    Raises:
        ConfigurationError: An element is no `Limit`, two limits are of one kind, or the class has no such field.
    """
    limits = lane_limits([limit] if isinstance(limit, Limit) else listed(limit, "limit", "[Limit('customer', 2)]"))
    key = None if limits.each is None else limits.each.key
    if key is None or key == OWN_KEY or _has_field(class_, key):
        return limits
    allowed = f"a field of {class_.__name__}, or {OWN_KEY!r} for the key given to schedule()"
    raise ConfigurationError("limit.key", f"{key!r}, the key of sinks" if key == ADDRESS else shortened(key), allowed)


def key_reader(limits: LaneLimits, class_: type) -> KeyReader | None:
    """Return the function that gives the key of an event; None if only `key=` gives it."""
    name = None if limits.each is None else limits.each.key
    if name is None or not _has_field(class_, name):
        return None
    return lambda event: check_key(_as_bytes(getattr(event, name), name))


def _has_field(class_: type, name: str) -> bool:
    return any(name in vars(each).get("__annotations__", {}) for each in class_.__mro__)


def _as_bytes(value: object, name: str) -> bytes | None:
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str | int | UUID):
        return str(value).encode("utf-8", "surrogatepass")
    raise PayloadTypeError(
        f"event.{name}, the key of a limit", kind_of(value), "a text, an integer, a UUID, an enum or None"
    )
