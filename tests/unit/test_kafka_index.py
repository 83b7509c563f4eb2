"""What is pending in a partition, while changes of it are being written."""

from __future__ import annotations

from itertools import count

from aiodelay.kafka.client import Outgoing
from aiodelay.kafka.index import Index, Read
from aiodelay.kafka.records import encode_record
from aiodelay.model import Demand, Envelope, LateAction, Record
from aiodelay.testing.clock import VirtualClock
from aiodelay.transitions import NO_OP

ALL = Demand(100)
NOW = VirtualClock().now_ms()


def put(offset: int, payload: bytes, *, due_ms: int = NOW, expires_ms: int = 0) -> Read:
    """A user's record, as it is read."""
    late = LateAction.DROP if expires_ms else LateAction.DELIVER
    record = Record(Envelope("m", "kafka", "t", payload=payload), 0, due_ms, NO_OP, expires_ms, late)
    return Read(offset, NOW, *encode_record(record))


def moving(index: Index) -> list[bytes]:
    """Decide to move what is due; return the payloads."""
    due = index.due("kafka", ALL, {"t"})
    for key, entry in due.entries:
        index.move(key, entry, Outgoing("t", None, b"", []), index.now_ms())
    return [entry.record.envelope.payload for _, entry in due.entries]


def test_a_new_version_is_moved_only_once_the_end_of_the_one_before_was_read() -> None:
    index = Index(clock=VirtualClock(), name="t/0", claims=count(1))
    index.read(put(0, b"old"))
    assert moving(index) == [b"old"]
    (ending,) = index.changes
    index.read(put(1, b"new"))
    assert moving(index) == []
    (wire,) = ending.wires()
    index.read(Read(2, NOW, *wire))
    index.written(ending)
    assert moving(index) == [b"new"]


def test_a_session_that_ends_tells_of_every_change_also_of_two_of_one_key() -> None:
    clock = VirtualClock()
    index = Index(clock=clock, name="t/0", claims=count(1))
    index.read(put(0, b"old"))
    moving(index)
    index.read(put(1, b"new", expires_ms=NOW + 1000))
    clock.move(5000)
    moving(index)  # which ends the new one: it is late
    begun = list(index.changes)
    assert len(begun) == 2
    assert index.give_back() == begun
    assert index.give_back() == []
