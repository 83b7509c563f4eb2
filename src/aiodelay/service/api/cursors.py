"""Values of URL parameters: the cursor of the next page, times and filters.

A *place* is the position at which the next page begins. A cursor is a place as text for a URL.
"""

from __future__ import annotations

import base64
import binascii
from typing import TypeVar

import msgspec

from aiodelay.core.durations import to_epoch_ms
from aiodelay.core.validation import check_type_name
from aiodelay.core.values import State
from aiodelay.errors import InputError, cut
from aiodelay.operations.json_shapes import read_time
from aiodelay.operations.queries import DEAD_REASONS, DeadFilter, Filter

from .models import DeadFilterIn, FilterIn

__all__ = ["dead_filter_of", "filter_of", "read_cursor", "write_cursor"]

P = TypeVar("P", bound=tuple[object, ...])
MOST = 1 << 62
"""A number larger than any time or revision, and small enough for a database to compare."""


def write_cursor(place: tuple[object, ...] | None) -> str | None:
    """Return the cursor of a place; None if there is no next page."""
    return None if place is None else base64.urlsafe_b64encode(msgspec.msgpack.encode(place)).decode().rstrip("=")


def read_cursor(text: str | None, type_: type[P]) -> P | None:
    """Return the place that a cursor of `write_cursor` holds.

    Raises:
        InputError: `write_cursor` cannot have returned this text.
    """
    if text is None:
        return None
    try:
        padded = text + "=" * (-len(text) % 4)
        place: P | None = msgspec.msgpack.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=type_)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        place = None
    if place is None or any(isinstance(part, int) and abs(part) > MOST for part in place):
        raise InputError("after", repr(cut(text)), "the `after` of the previous page")
    return place


def _ms(text: str | None, field: str) -> int | None:
    at = read_time(text, field)
    return None if at is None else to_epoch_ms(at, field=field)


def filter_of(given: FilterIn) -> Filter:
    """Return the filter of messages that a request gives.

    Raises:
        InputError: A value of the filter is wrong.
    """
    states = [each.value for each in State]
    if given.state is not None and given.state not in states:
        raise InputError("state", repr(cut(given.state)), ", ".join(states))
    return Filter(
        tuple(check_type_name(lane, "lane") for lane in given.lane),
        _ms(given.due_from, "due_from"),
        _ms(given.due_to, "due_to"),
        None if given.state is None else State(given.state),
        given.address,
        given.type,
        given.text,
    )


def dead_filter_of(given: DeadFilterIn) -> DeadFilter:
    """Return the filter of dead letters that a request gives.

    Raises:
        InputError: A value of the filter is wrong.
    """
    if given.reason is not None and given.reason not in DEAD_REASONS:
        raise InputError("reason", repr(cut(given.reason)), ", ".join(DEAD_REASONS))
    return DeadFilter(
        tuple(check_type_name(lane, "lane") for lane in given.lane),
        given.reason,
        _ms(given.dead_from, "dead_from"),
        _ms(given.dead_to, "dead_to"),
        given.text,
        given.error,
    )
