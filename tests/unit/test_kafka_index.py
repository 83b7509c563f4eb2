"""What is pending in a partition, while changes of it are being written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, product

from aiodelay.kafka.client import Outgoing
from aiodelay.kafka.index import Index, Read
from aiodelay.kafka.records import encode_cancel, encode_end, encode_record
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


# --- what is far ------------------------------------------------------------------------------------------

FAR_MS, HORIZON_MS = 100_000, 10_000
DUES = NOW, NOW + FAR_MS
STEPS = [
    *(("put", due_ms, 0, goes_back) for due_ms in DUES for goes_back in (False, True)),
    *(("put again", due_ms, unread, False) for due_ms in DUES for unread in range(3)),
    ("cancel", NOW, 0, False),
    *(("end", NOW, unread, False) for unread in range(3)),
]
"""What is written; when it is due; of an owner's, how many records it had not read; whether what is far goes back."""


def read_by(steps: Sequence[tuple[str, int, int, bool]], *, ahead_ms: int) -> Index:
    """Read a log in which users and owners have written; bring near in the end what is far."""
    index = Index(clock=VirtualClock(), name="t/0", claims=count(1))
    index.look_ahead(NOW + ahead_ms)
    log: list[Read] = []
    read_to = 0
    for offset, (what, due_ms, unread, goes_back) in enumerate(steps):
        read_to = max(read_to, offset - unread)
        record = Record(Envelope("m", "kafka", "t", payload=b"%d" % offset), 0, due_ms, NO_OP)
        wire = {
            "put": encode_record(record),
            "put again": encode_record(record, read_to=read_to),
            "cancel": encode_cancel(b"m"),
            "end": encode_end(b"m", read_to=read_to, outcome="delivered"),
        }[what]
        log.append(Read(offset, NOW + offset, *wire))
        index.read(log[-1])
        if goes_back:
            index.put_off()
    for each in log:
        if each.value is not None:
            index.come_near(each)
    return index


def test_what_stands_does_not_depend_on_what_is_held_whole() -> None:
    for steps in product(STEPS, repeat=3):
        whole, noted = read_by(steps, ahead_ms=FAR_MS), read_by(steps, ahead_ms=HORIZON_MS)
        found = [
            {key: (entry.record.envelope.payload, entry.place_ms) for key, entry in index._entries.items()}
            for index in (whole, noted)
        ]
        assert found[0] == found[1], steps
        assert (whole._hidden, whole._standings) == (noted._hidden, noted._standings), steps
        assert not noted.far


def test_the_mark_stops_at_what_is_far() -> None:
    clock = VirtualClock()
    index = Index(clock=clock, name="t/0", claims=count(1))
    index.look_ahead(NOW + HORIZON_MS)
    index.read(put(0, b"far", due_ms=NOW + HORIZON_MS + 1))
    index.read(Read(1, NOW, *encode_cancel(b"other")))
    clock.move(FAR_MS)  # and nobody has looked at what is far
    mark = index.next_mark()
    assert mark is not None
    assert mark.read_to == 2
    assert not mark.covers(0, NOW + HORIZON_MS + 1)
