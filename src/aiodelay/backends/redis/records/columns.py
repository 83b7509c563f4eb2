"""Decodes many values of the key `msg` into columns, for table scans. It decodes one field of all values at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

from aiodelay.core.record_codec import decode_columns
from aiodelay.core.table_scan import Columns, columns_of_messages
from aiodelay.core.values import Snapshot, State
from aiodelay.errors import RecordFormatError

from .keys import text_of
from .layouts import PLACED_BYTE, TEXT, size_of, span
from .reading import Lanes, lane_number, read_anyhow

__all__ = [
    "PLACED_COLUMNS",
    "SEQUENCE_BYTES",
    "Known",
    "columns_of",
    "columns_of_places",
    "elsewhere_in",
    "snapshot_of",
]

log: logging.Logger = logging.getLogger("aiodelay.redis")

HEAD, PLACED_HEAD = span("VALUE", "format").start, size_of("PLACED_VALUE")
PLACE = span("PLACED_VALUE", "place")
SEQUENCE_BYTES = size_of("MEMBER")
EVEN = bytes(range(0, 256, 2))
PLACED_COLUMNS = frozenset({"id", "due_ms", "place_ms"})
"""The columns of a message that a scan knows without the record. This works if the message's place is its due time."""
_SCHEDULED, _OVERDUE = State.SCHEDULED.value, State.OVERDUE.value


class Known:
    """The lanes of a namespace, and its paused and blocked addresses, at one time during a scan.

    Args:
        lanes: The names of the lanes by number.
        held: The members of the key `holds`, and the blocked addresses in the same form.
    """

    def __init__(self, lanes: Lanes, held: Collection[bytes]) -> None:
        self.lanes = lanes
        self._held = frozenset(held)

    @property
    def any_held(self) -> bool:
        """True if any lane or address is paused or blocked."""
        return bool(self._held)

    def is_paused(self, lane_number: int, address: str) -> bool:
        """Return True if the lane, or this address of the lane, is paused or blocked."""
        number = b"%d" % lane_number
        return number in self._held or b"%b:%b" % (number, address.encode()) in self._held


def _ids_of(members: Sequence[bytes], at: int = 0) -> list[str]:
    """Decode ids. In each member, the encoded id begins at the offset `at`."""
    if set(map(itemgetter(at), members)) == {TEXT}:
        try:
            return [each[at + 1 :].decode() for each in members]
        except UnicodeDecodeError:
            pass
    return [text_of(each[at:]) for each in members]


def elsewhere_in(names: Sequence[bytes]) -> list[bool]:
    """Return a bool for each member of a lane: True if its place may differ from its due time.

    The sequence number of a member is odd if its place differs from its due time. If no place differs, return [].
    """
    try:
        last = bytes(map(itemgetter(SEQUENCE_BYTES - 1), names))
    except IndexError:  # Another program wrote a member that is too short. The caller then looks up every record.
        return [True] * len(names)
    return [each % 2 == 1 for each in last] if last.translate(None, EVEN) else []


def columns_of_places(names: Sequence[bytes], places_ms: Sequence[int], wanted: Collection[str]) -> Columns:
    """Return columns of messages whose place is their due time. The members and places are enough for these columns."""
    return {name: _ids_of(names, SEQUENCE_BYTES) if name == "id" else places_ms for name in wanted}


def columns_of(
    members: Sequence[bytes], values: Sequence[bytes], wanted: Collection[str], known: Known, now_ms: int
) -> Columns:
    """Return columns of messages that are not in flight. An unreadable message contributes its readable parts.

    Args:
        members: The encoded ids of the messages.
        values: The values of the key `msg`, one for each message.
        wanted: The names of the columns, as in `aiodelay.core.table_scan`.
        known: The lanes, and the paused and blocked addresses.
        now_ms: The server's time, in epoch ms.
    """
    try:
        return _decoded(members, values, wanted, known, now_ms)
    except (RecordFormatError, LookupError):
        return columns_of_messages(
            [snapshot_of(member, value, known, now_ms) for member, value in zip(members, values, strict=True)], wanted
        )


def _decoded(
    members: Sequence[bytes], values: Sequence[bytes], wanted: Collection[str], known: Known, now_ms: int
) -> Columns:
    fields = {*wanted} - {"id", "place_ms", "state"}
    if {"place_ms", "state"} & {*wanted}:
        fields.add("due_ms")
    if "state" in wanted and known.any_held:
        fields |= {"lane", "address"}
    places: dict[int, int] = {}
    if max(map(itemgetter(0), values)) >= PLACED_BYTE:
        places = {
            row: int.from_bytes(value[PLACE], "big") for row, value in enumerate(values) if value[0] >= PLACED_BYTE
        }
        values = [value[PLACED_HEAD - HEAD :] if value[0] >= PLACED_BYTE else value for value in values]
    found = decode_columns(values, HEAD, fields)
    if "due_ms" in fields:
        found["place_ms"] = (
            [places.get(row, due_ms) for row, due_ms in enumerate(found["due_ms"])] if places else found["due_ms"]
        )
    if "state" in wanted:
        found["state"] = _states(found, known, now_ms)
    if "lane" in wanted:
        found["lane"] = list(map(known.lanes.name, found["lane"]))
    if "id" in wanted:
        found["id"] = _ids_of(members)
    return {name: found[name] for name in wanted}


def _states(found: dict[str, Sequence[Any]], known: Known, now_ms: int) -> Sequence[str]:
    states = [_OVERDUE if place_ms <= now_ms else _SCHEDULED for place_ms in found["place_ms"]]
    if not known.any_held:
        return states
    return [
        State.HELD.value if known.is_paused(lane, address) else state
        for state, lane, address in zip(states, found["lane"], found["address"], strict=True)
    ]


def snapshot_of(member: bytes, value: bytes, known: Known, now_ms: int, *, is_leased: bool = False) -> Snapshot:
    """Return a snapshot of a message. If the message is unreadable, log a warning and return its readable parts."""
    record, place_ms, problem = read_anyhow(member, value, known.lanes)
    if problem:
        log.warning("message %r cannot be read: %s", record.id, problem)
    if is_leased:
        state = State.IN_FLIGHT
    elif known.is_paused(lane_number(value), record.envelope.address):
        state = State.HELD
    else:
        state = State.OVERDUE if place_ms <= now_ms else State.SCHEDULED
    return Snapshot(record, state, place_ms)
