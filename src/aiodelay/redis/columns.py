"""Many values of `msg` as columns: decoded field by field rather than record by record."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from aiodelay.codecs import decode_columns
from aiodelay.errors import RecordFormatError
from aiodelay.model import Snapshot, State
from aiodelay.scanning import Columns, columns_of_messages

from .keys import text_of
from .reading import Lanes, lane_number, read_anyhow

__all__ = ["Known", "columns_of", "ids_of", "snapshot_of"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

PLACED, HEAD, PLACED_HEAD = 0x80, 6, 12
TEXT = b"\x02"
DUE_ONLY = frozenset({"id", "due_ms"})
_SCHEDULED, _OVERDUE = State.SCHEDULED.value, State.OVERDUE.value


class Known:
    """What was known of a namespace when a part of it was begun to be read.

    Args:
        lanes: Their names by number.
        held: Members of `holds`, and addresses that take nothing, in the same form.
    """

    def __init__(self, lanes: Lanes, held: Collection[bytes]) -> None:
        self.lanes = lanes
        self._held = frozenset(held)

    @property
    def any_held(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def holds(self, lane_number: int, address: str) -> bool:
        """Whether a lane is held, or this address of it."""
        number = b"%d" % lane_number
        return number in self._held or b"%b:%b" % (number, address.encode()) in self._held


def ids_of(members: Sequence[bytes]) -> list[str]:
    """Return the ids that stand as these."""
    try:
        return [each[1:].decode() if each[:1] == TEXT else text_of(each) for each in members]
    except UnicodeDecodeError:
        return list(map(text_of, members))


def columns_of(
    members: Sequence[bytes], values: Sequence[bytes], wanted: Collection[str], known: Known, now_ms: int
) -> Columns:
    """Return messages that are not in flight as columns; of one that cannot be read what can be salvaged.

    Args:
        members: Their ids, as they stand.
        values: Of `msg`, one each.
        wanted: Names of `aiodelay.scanning`.
        known: What holds and lanes are called.
        now_ms: The server's time.
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
    starts = [HEAD if value[0] < PLACED else PLACED_HEAD for value in values]
    if DUE_ONLY.issuperset(wanted):
        return {name: ids_of(members) if name == "id" else _dues(values, starts) for name in wanted}
    fields = {*wanted} - {"id", "place_ms", "state"} | {"due_ms"}
    if "state" in wanted and known.any_held:
        fields |= {"lane", "address"}
    found = decode_columns(values, starts, fields)
    found["place_ms"] = [
        due_ms if at == HEAD else int.from_bytes(value[HEAD:PLACED_HEAD], "big")
        for due_ms, at, value in zip(found["due_ms"], starts, values, strict=True)
    ]
    if "state" in wanted:
        found["state"] = _states(found, known, now_ms)
    if "lane" in wanted:
        found["lane"] = list(map(known.lanes.name, found["lane"]))
    if "id" in wanted:
        found["id"] = ids_of(members)
    return {name: found[name] for name in wanted}


def _dues(values: Sequence[bytes], starts: Sequence[int]) -> Sequence[int]:
    """Return due times; 0 of what is cut short."""
    packed = [value[at + 10 : at + 16] for value, at in zip(values, starts, strict=True)]
    dues = array("q", b"".join([b"\0\0" + each if len(each) == 6 else bytes(8) for each in packed]))
    if sys.byteorder == "little":
        dues.byteswap()
    return dues


def _states(found: dict[str, Sequence[Any]], known: Known, now_ms: int) -> Sequence[str]:
    states = [_OVERDUE if place_ms <= now_ms else _SCHEDULED for place_ms in found["place_ms"]]
    if not known.any_held:
        return states
    return [
        State.HELD.value if known.holds(lane, address) else state
        for state, lane, address in zip(states, found["lane"], found["address"], strict=True)
    ]


def snapshot_of(member: bytes, value: bytes, known: Known, now_ms: int, *, is_leased: bool = False) -> Snapshot:
    """Return a message as it stands; of one that cannot be read what can be salvaged, with a warning."""
    record, place_ms, problem = read_anyhow(member, value, known.lanes)
    if problem:
        log.warning("message %r cannot be read: %s", record.id, problem)
    if is_leased:
        state = State.IN_FLIGHT
    elif known.holds(lane_number(value), record.envelope.address):
        state = State.HELD
    else:
        state = State.OVERDUE if place_ms <= now_ms else State.SCHEDULED
    return Snapshot(record, state, place_ms)
