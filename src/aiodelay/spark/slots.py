"""The decisions of the engine, as pure functions: the slot of a record, the valid record of an id, the output.

A *slot* is an interval of due times; its name is its end in epoch ms. The engine delivers no message of a slot before
the end of the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.records import Headers, Kind
from aiodelay.backends.kafka.topics.intake import DEAD_FROM, DEAD_TIMESTAMP
from aiodelay.core.transitions import delivery_id, is_late
from aiodelay.core.values import LateAction
from aiodelay.errors import RecordFormatError, shortened

from .producing import dead_reason

__all__ = ["WAS_DUE", "Entry", "Given", "Output", "Placed", "Slots", "newest", "output"]

WAS_DUE: Final = "aiodelay-was-due-ms"
"""Header of a record that replaces or cancels a message: the due time that the id had before, epoch ms."""
NO_SLOT: Final = 0
"""The slot of entries that do not wait. This slot is always over."""
_MOST_MS: Final = (1 << 48) - 1


class Given(NamedTuple):
    """A record of a schedules topic."""

    key: bytes | None
    value: bytes | None
    topic: str
    partition: int
    offset: int
    written_ms: int
    headers: Headers


class Entry(NamedTuple):
    """One entry of a slot.

    Attributes:
        id: The id of the message.
        seq: The offset of the record. Of all entries of an id, the entry with the highest offset is valid.
        due_ms: The due time in this slot, epoch ms; None for a dead letter.
        wire: The encoded record, for `output`; None if the message was cancelled or has moved to another slot.
    """

    id: str
    seq: int
    due_ms: int | None
    wire: bytes | None


class Placed(NamedTuple):
    """An entry, and the shard and the slot in which it waits."""

    shard: int
    slot_ms: int
    entry: Entry


class Output(NamedTuple):
    """A record to write. If `due_ms` is None, the record is a dead letter."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    due_ms: int | None


class _Wire(msgspec.Struct, array_like=True, gc=False):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    written_ms: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Wire).decode


class Slots(msgspec.Struct, frozen=True):
    """The division of time into slots, and of ids into shards.

    Attributes:
        slot_ms: Length of a slot.
        shards: Number of lists over which the entries of a slot are spread.
    """

    slot_ms: int
    shards: int

    def end_of(self, due_ms: int) -> int:
        """Return the slot of a due time: the first end of a slot at or after it."""
        return -(-due_ms // self.slot_ms) * self.slot_ms

    def place(self, given: Given) -> list[Placed]:
        """Return the entries for a record: the message in its slot, and an entry that ends the id in its earlier slot.

        Without an earlier due time or without a message, there is only one entry.
        A record that cannot be scheduled becomes a dead letter with the reason in its headers.
        """
        shard = crc32(given.key or b"") % self.shards
        try:
            entries = _entries(given)
        except RecordFormatError as error:
            return [Placed(shard, NO_SLOT, _dead(given, error.problem))]
        # If both entries have the same slot, the entry of the message stays, because it comes last.
        slots = {self.end_of(entry.due_ms or 0): entry for entry in entries}
        return [Placed(shard, slot_ms, entry) for slot_ms, entry in slots.items()]


def _entries(given: Given) -> list[Entry]:
    """Return the entry that ends the earlier due time, if any, and then the entry of the message, if any.

    Raises:
        RecordFormatError: The engine cannot schedule the record. The error has the reason.
    """
    key, value, headers = given.key, given.value, given.headers
    glance = records.glance(key, value, headers)
    if glance.kind is Kind.BAD:
        raise RecordFormatError(glance.problem)
    if key is None or not records.is_plain(key) or glance.read_to is not None:
        raise RecordFormatError("a Kafka store wrote this record: an engine cannot use the topic of a Kafka store")
    message_id, was_due_ms = records.id_of(key), _was_due(headers)
    left = [] if was_due_ms is None else [Entry(message_id, given.offset, was_due_ms, None)]
    if value is None:
        if not left:
            raise RecordFormatError(f"the record cancels a message, but has no header {WAS_DUE}: its slot is unknown")
        return left
    record = records.decode(key, value, headers, written_ms=given.written_ms)
    if record.envelope.lane != records.SINK:
        lane = shortened(record.envelope.lane)
        raise RecordFormatError(f"the message is for {lane}, but an engine delivers only to topics")
    if record.envelope.rule is not None:
        raise RecordFormatError("the message is recurring, but an engine delivers a message once")
    wire = _encode(_Wire(key, value, [*headers], given.written_ms))
    return [*left, Entry(message_id, given.offset, record.due_ms, wire)]


def _was_due(headers: Headers) -> int | None:
    text = dict(headers).get(WAS_DUE, b"")
    if text == b"":
        return None
    if text is None or not text.isdigit() or len(text) > 15 or int(text) > _MOST_MS:
        got = "null" if text is None else shortened(text.decode(errors="replace"))
        raise RecordFormatError(f"header {WAS_DUE} is {got}, not a whole number from 0 to {_MOST_MS}")
    return int(text)


def _dead(given: Given, problem: str) -> Entry:
    origin = [
        (DEAD_FROM, f"{given.topic}/{given.partition}/{given.offset}".encode()),
        (DEAD_TIMESTAMP, b"%d" % given.written_ms),
    ]
    headers = [*given.headers, dead_reason(problem), *origin]
    return Entry("", given.offset, None, _encode(_Wire(given.key, given.value, headers, given.written_ms)))


def newest(entries: Iterable[Entry]) -> list[tuple[int | None, bytes]]:
    """Return the due time and the record of each message to write.

    The newest entry of an id is valid. If this entry ends the id, there is nothing to write for the id.
    """
    dead = list[tuple[int | None, bytes]]()
    found = dict[str, Entry]()
    for entry in entries:
        message_id, seq, due_ms, wire = entry
        if due_ms is None:
            dead.append((None, wire or b""))
        elif message_id not in found or seq >= found[message_id][1]:
            found[message_id] = entry
    return [(due_ms, wire) for _, _, due_ms, wire in found.values() if wire is not None] + dead


def output(due_ms: int | None, wire: bytes, *, now_ms: int, schedules: str, dead: str) -> Output | None:
    """Return the record to write for a due entry; None if the message has expired and its `late` policy is `drop`.

    Args:
        due_ms: The due time; None for a dead letter.
        wire: The encoded record of the entry.
        now_ms: The current time, epoch ms.
        schedules: The topic from which the record comes.
        dead: The topic for dead letters.
    """
    given = _decode(wire)
    headers = [(name, value or b"") for name, value in given.headers]
    if due_ms is None:
        return Output(dead, given.key, given.value, headers, None)
    record = records.decode(given.key or b"", given.value or b"", given.headers, written_ms=given.written_ms)
    if is_late(record, now_ms):
        if record.late is LateAction.DROP:
            return None
        return Output(dead, given.key, given.value, [*headers, dead_reason("the message has expired")], None)
    wired = records.delivered(record.envelope, delivery_id(record), 1, now_ms=now_ms, schedules=schedules)
    return Output(record.envelope.address, *wired, due_ms)
