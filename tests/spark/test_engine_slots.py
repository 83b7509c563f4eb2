"""Decisions of the engine, without a JVM: the slot of a record, which record of an id counts, when to write."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime

import pytest
from aiokafka import ConsumerRecord
from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester

from aiodelay import Late, Message
from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.records import DEAD_REASON, Headers
from aiodelay.backends.kafka.topics.intake import DEAD_FROM, DEAD_TIMESTAMP
from aiodelay.spark.engine import SlotScheduler, _given
from aiodelay.spark.slots import WAS_DUE, Given, Slots
from aiodelay.spark.topic_reading import _batch

SLOTS = Slots(1000, 3)
DUE = datetime(2030, 1, 1, tzinfo=UTC)
DUE_MS = 1_893_456_000_000
Keyed = tuple[int, int]


class Engine:
    """The processor in memory: entries go to its keys as the query's grouping would send them."""

    def __init__(self) -> None:
        self._tester = TwsTester(SlotScheduler("schedules", "schedules.dead"), timeMode="ProcessingTime")
        self._offset, self.now_ms = 0, DUE_MS - 60_000
        self._tester.setProcessingTime(self.now_ms)

    def take(self, *given: Given) -> list[Row]:
        """Take in records, as one batch."""
        by_key = defaultdict[Keyed, list[Row]](list)
        for each in given:
            for shard, slot_ms, entry in SLOTS.place(each):
                by_key[shard, slot_ms].append(Row(shard=shard, slot_ms=slot_ms, **entry._asdict()))
        return [row for key, rows in by_key.items() for row in self._tester.test(key, rows)]

    def at(self, now_ms: int) -> list[Row]:
        """Let time pass; return what was given out."""
        self.now_ms = now_ms
        found: list[Row] = self._tester.setProcessingTime(now_ms)
        return found

    def pass_time_unseen(self, now_ms: int) -> None:
        """Let time pass, and no timer fire."""
        self._tester._currentProcessingTimeMs = self.now_ms = now_ms

    def put(
        self, key: str, due_ms: int, *, was_due_ms: int | None = None, value: bytes = b"v", headers: Headers = ()
    ) -> Given:
        """Return a record of etf1's form that asks for a message."""
        ours = [("scheduler-epoch", b"0"), ("scheduler-target-topic", b"out"), ("aiodelay-due-ms", b"%d" % due_ms)]
        return self._given(key, value, [*ours, *was(was_due_ms), *headers])

    def cancel(self, key: str, was_due_ms: int | None) -> Given:
        return self._given(key, None, was(was_due_ms))

    def _given(self, key: str, value: bytes | None, headers: Headers) -> Given:
        self._offset += 1
        return Given(key.encode(), value, "schedules", 0, self._offset, 1_700_000_000_000, headers)


def was(due_ms: int | None) -> list[tuple[str, bytes]]:
    return [] if due_ms is None else [(WAS_DUE, b"%d" % due_ms)]


def header(row: Row, name: str) -> bytes | None:
    found: dict[str, bytes] = dict(row.headers)
    return found.get(name)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_record_is_delivered_after_its_slot_and_not_before(engine: Engine) -> None:
    wire = records.encode(
        Message(b"text", at=DUE, id="a", to="kafka:orders", key=b"k", headers={"shop": b"7"}, late=Late.deliver())
    )
    given = Given(wire.key, wire.value, "schedules", 2, 5, 1_700_000_000_000, wire.headers)
    assert engine.take(given, engine.put("b", DUE_MS + 1)) == []
    assert engine.at(DUE_MS - 1) == []
    (row,) = engine.at(DUE_MS)
    assert (row.topic, row.key, row.value, row.due_ms) == ("orders", b"k", b"text", DUE_MS)
    assert row.headers == [
        ("shop", b"7"),
        ("scheduler-timestamp", b"%d" % (DUE_MS // 1000)),
        ("aiodelay-attempt", b"1"),
        ("scheduler-topic", b"schedules"),
        ("scheduler-key", b"a"),
        ("aiodelay-delivery-id", b"a/1700000000000/%d" % DUE_MS),
    ]
    assert engine.at(DUE_MS + 999) == []
    assert [row.due_ms for row in engine.at(DUE_MS + 1000)] == [DUE_MS + 1]
    assert [row.due_ms for row in engine.take(engine.put("late", 1_000))] == [1_000]
    assert engine.at(DUE_MS + 10_000_000) == []


def test_the_newest_of_an_id_counts_and_leaves_its_old_slot(engine: Engine) -> None:
    later, earlier = DUE_MS + 5_000, DUE_MS - 5_000
    engine.take(
        engine.put("again", DUE_MS),
        engine.put("again", DUE_MS, value=b"new"),
        engine.put("later", DUE_MS),
        engine.put("sooner", DUE_MS),
        engine.put("cancelled", DUE_MS),
        engine.put("back", DUE_MS),
        engine.put("within", DUE_MS),
    )
    engine.take(
        engine.put("later", later, was_due_ms=DUE_MS),
        engine.put("sooner", earlier, was_due_ms=DUE_MS),
        engine.cancel("cancelled", DUE_MS),
        engine.put("back", later, was_due_ms=DUE_MS),
        engine.put("within", DUE_MS - 7, was_due_ms=DUE_MS),
    )
    engine.take(engine.put("back", DUE_MS, was_due_ms=later))
    assert [header(row, "scheduler-key") for row in engine.at(earlier)] == [b"sooner"]
    found = {header(row, "scheduler-key"): (row.value, row.due_ms) for row in engine.at(DUE_MS)}
    assert found == {b"again": (b"new", DUE_MS), b"back": (b"v", DUE_MS), b"within": (b"v", DUE_MS - 7)}
    assert [header(row, "scheduler-key") for row in engine.at(later)] == [b"later"]
    assert engine.take(engine.cancel("later", later)) == []  # too late


def test_a_slot_that_is_over_and_still_stands_is_given_out_with_what_came(engine: Engine) -> None:
    """Spark reads a batch's input before it looks at timers."""
    engine.take(engine.put("a", DUE_MS), engine.put("b", DUE_MS), engine.put("c", DUE_MS))
    engine.pass_time_unseen(DUE_MS)
    (key,) = {(shard, slot) for shard, slot, _ in SLOTS.place(engine.put("a", DUE_MS))}
    same = [name for name in ("b", "c") if SLOTS.place(engine.put(name, DUE_MS))[0][:2] == key]
    found = engine.take(engine.put("a", DUE_MS, value=b"new"))
    assert {header(row, "scheduler-key"): row.value for row in found} == {
        b"a": b"new",
        **{name.encode(): b"v" for name in same},
    }
    (late,) = engine.take(engine.put("a", DUE_MS, value=b"late"))  # and nothing that was given out stays there
    assert late.value == b"late"
    rest = {header(row, "scheduler-key") for row in engine.at(DUE_MS + 1)}
    assert rest == {b"b", b"c"} - {name.encode() for name in same}


def test_what_came_too_late_is_dropped_or_a_dead_letter(engine: Engine) -> None:
    drop, bury = (
        (("aiodelay-late", action), ("aiodelay-expires-ms", b"%d" % (DUE_MS + 10)))
        for action in (b"drop", b"dead_letter")
    )
    in_time = engine.put("in time", DUE_MS, headers=drop)
    assert engine.take(in_time, engine.put("before", DUE_MS - 500, headers=drop)) == []
    assert {header(row, "scheduler-key") for row in engine.at(DUE_MS)} == {b"before", b"in time"}
    engine.at(DUE_MS + 11)
    (letter,) = engine.take(engine.put("x", DUE_MS, headers=drop), engine.put("y", DUE_MS, headers=bury))
    assert (letter.topic, letter.key, letter.value, letter.due_ms) == ("schedules.dead", b"y", b"v", None)
    assert header(letter, DEAD_REASON) == b"the message has expired"


def given(key: bytes | None = b"k", value: bytes | None = b"v", **headers: bytes | None) -> Given:
    """Return a record with these headers, their names with `_`, beside those of a schedule."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    ours: dict[str, bytes | None] = {"scheduler-epoch": b"1893456000", "scheduler-target-topic": b"out"}
    every = (ours if value is not None else {}) | named
    return Given(key, value, "schedules", 2, 5, 1_700_000_000_000, [*every.items()])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (given(key=None), "it has no key"),
        (given(key=b"x" * 256), "its key has 256 bytes, not 1 to 255"),
        (given(value=None), f"the record cancels a message, but has no header {WAS_DUE}: its slot is unknown"),
        (given(value=None, aiodelay_was_due_ms=b"soon"), f"header {WAS_DUE} is 'soon', not a whole number from 0 to"),
        (given(aiodelay_was_due_ms=b"%d" % (1 << 48)), f"header {WAS_DUE} is '281474976710656', not a whole number"),
        (given(aiodelay_was_due_ms=b"9" * 5_000), f"header {WAS_DUE} is '999999"),
        (given(aiodelay_was_due_ms=None), f"header {WAS_DUE} is null, not a whole number from 0 to"),
        (given(scheduler_epoch=b"soon"), "header scheduler-epoch is 'soon', not a whole number from 0 to"),
        (given(scheduler_target_topic=b"a b"), "header scheduler-target-topic is 'a b', which is not a topic's name"),
        (given(aiodelay_lane=b"Order"), "the message is for 'Order', but an engine delivers only to topics"),
        (given(aiodelay_trace=b'{"traceparent":1}'), "header aiodelay-trace is not an object of texts"),
        (given(aiodelay_rule=b'{"e":600000}'), "the message is recurring, but an engine delivers a message once"),
        (given(aiodelay_from=b"7"), "a Kafka store wrote this record: an engine cannot use the topic of a Kafka store"),
        (
            given(key=records.BARRIER),
            "a Kafka store wrote this record: an engine cannot use the topic of a Kafka store",
        ),
        (given(aiodelay_format=b"2"), "its format is 2, and this version reads formats up to 1"),
    ],
)
def test_a_record_that_cannot_be_scheduled_is_a_dead_letter_at_once(engine: Engine, bad: Given, reason: str) -> None:
    (letter,) = engine.take(bad, engine.put("good", DUE_MS))
    assert (letter.topic, letter.key, letter.value, letter.due_ms) == ("schedules.dead", bad.key, bad.value, None)
    assert (header(letter, DEAD_REASON) or b"").decode().startswith(reason)
    assert (header(letter, DEAD_FROM), header(letter, DEAD_TIMESTAMP)) == (b"schedules/2/5", b"1700000000000")
    assert len(letter.headers) == len(bad.headers) + 3
    assert all(isinstance(value, bytes) for _, value in letter.headers)
    assert [header(row, "scheduler-key") for row in engine.at(DUE_MS)] == [b"good"]


def test_a_producer_s_time_that_is_beyond_all_calendars_ends_nothing() -> None:
    stamps = [-1, 0, 1_700_000_000_000, 1_700_000_000_000_000_000, (1 << 63) - 1]  # the fourth is in nanoseconds
    found = [ConsumerRecord("schedules", 0, n, stamp, 0, b"k", b"v", None, 1, 1, ()) for n, stamp in enumerate(stamps)]
    assert [each.written_ms for each in _given(_batch(found))] == [0, 0, stamps[2], *[253_402_300_799_999] * 2]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_each_id_comes_once_as_it_was_asked_last(engine: Engine, seed: int) -> None:
    chance, wanted, shown = random.Random(seed), dict[str, tuple[int, bytes]](), dict[str, tuple[int, bytes]]()
    ends = range(engine.now_ms + 1_000, engine.now_ms + 60_000, 700)
    for now_ms in ends:
        for _ in range(chance.randrange(6)):
            key = f"m{chance.randrange(40)}"
            if key in shown:
                continue
            old = wanted.get(key, (None, b""))[0]
            if old is not None and chance.random() < 0.3:
                assert engine.take(engine.cancel(key, old)) == []
                del wanted[key]
                continue
            wanted[key] = chance.randrange(now_ms, ends.stop), chance.randbytes(3)
            due_ms, value = wanted[key]
            for row in engine.take(engine.put(key, due_ms, was_due_ms=old, value=value)):
                note(row, engine.now_ms, shown)
        for row in engine.at(now_ms):
            note(row, now_ms, shown)
    for row in engine.at(ends.stop + 1_000):
        note(row, ends.stop + 1_000, shown)
    assert shown == wanted


def note(row: Row, now_ms: int, shown: dict[str, tuple[int, bytes]]) -> None:
    key = (header(row, "scheduler-key") or b"").decode()
    assert row.due_ms <= now_ms
    assert key not in shown
    shown[key] = row.due_ms, row.value
