"""Records of a schedules topic, written and read: golden bytes, records of plain clients, bad records."""

from __future__ import annotations

import zlib
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from aiodelay import Late, Message
from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.murmur2 import murmur2, murmur2_of_each
from aiodelay.core.transitions import NO_OP, delivery_id
from aiodelay.core.validation import RESERVED_HEADERS
from aiodelay.core.values import ATTEMPTED, CONTINUED, DeadLetter, Envelope, LateAction, Record
from aiodelay.errors import InputError, RecordFormatError
from aiodelay.kafka.records import Kind

NOON = datetime(2030, 1, 1, 12, 0, 0, 1000, tzinfo=UTC)
NOON_MS = 1_893_499_200_001
PLAIN = [("scheduler-epoch", b"1893499201"), ("scheduler-target-topic", b"online-videos")]

FULL = Record(
    Envelope(
        "vid1-online",
        "kafka",
        "online-videos",
        "video.online",
        "json",
        b'{"id":1}',
        b"vid1",
        {"caller": b"\xff\x00", "empty": b""},
        {"traceparent": "00-1-2-01"},
        7,
        {"c": "0 9 * * mon", "z": "Europe/Paris"},
    ),
    revision=1_700_000_000_000,
    due_ms=NOON_MS,
    op=bytes(range(8)),
    expires_ms=NOON_MS + 60_000,
    late=LateAction.DEAD_LETTER,
    attempt=3,
    lapses=1,
    kills=2,
    no_retry=True,
    live=(5, 6),
    first_error="ValueError: é",
    last_error="",
)


# --- golden: what format 1 wrote once is read for ever ----------------------------------------------------


def test_a_message_is_three_headers_and_ours() -> None:
    message = Message(b"up", at=NOON, id="vid1-online", to="kafka:online-videos", key=b"vid1", headers={"a": b"\xff"})
    assert records.encode(message) == (
        b"vid1-online",
        b"up",
        [
            ("scheduler-epoch", b"1893499201"),  # rounded up: an old reader is not early
            ("scheduler-target-topic", b"online-videos"),
            ("scheduler-target-key", b"vid1"),
            ("aiodelay-due-ms", b"1893499200001"),
            ("aiodelay-format", b"1"),
            ("a", b"\xff"),
        ],
    )


def test_an_owners_record_of_format_1() -> None:
    assert records.encode_record(FULL, read_to=42, place_ms=NOON_MS + 5000) == (
        b"vid1-online",
        b'{"id":1}',
        [
            ("scheduler-epoch", b"1893499201"),
            ("scheduler-target-topic", b"online-videos"),
            ("scheduler-target-key", b"vid1"),
            ("aiodelay-due-ms", b"1893499200001"),
            ("aiodelay-format", b"1"),
            ("aiodelay-op", b"0001020304050607"),
            ("aiodelay-late", b"dead_letter"),
            ("aiodelay-expires-ms", b"1893499260001"),
            ("aiodelay-attempt", b"3"),
            ("aiodelay-lapses", b"1"),
            ("aiodelay-kills", b"2"),
            ("aiodelay-no-retry", b"1"),
            ("aiodelay-version", b"7"),
            ("aiodelay-type", b"video.online"),
            ("aiodelay-encoding", b"json"),
            ("aiodelay-rule", b'{"c":"0 9 * * mon","z":"Europe/Paris"}'),
            ("aiodelay-trace", b'{"traceparent":"00-1-2-01"}'),
            ("aiodelay-live", b"[5,6]"),
            ("aiodelay-first-error", "ValueError: é".encode()),
            ("aiodelay-last-error", b""),
            ("aiodelay-from", b"42"),
            ("aiodelay-revision", b"1700000000000"),
            ("aiodelay-place-ms", b"1893499205001"),
            ("caller", b"\xff\x00"),
            ("empty", b""),
        ],
    )


def test_tombstones_of_format_1() -> None:
    assert records.encode_cancel(b"m") == (b"m", None, [])
    ended = (b"m", None, [("aiodelay-from", b"42"), ("aiodelay-outcome", b"delivered")])
    assert records.encode_end(b"m", read_to=42, outcome="delivered") == ended


def test_what_is_remembered_of_format_1() -> None:
    memory = records.Memory([("0001020304050607", "cancelled", 5, 6, 7)], (8, 9))
    wire = records.encode_end(b"m", read_to=1, outcome="ended", memory=memory)
    text = b'{"answers":[["0001020304050607","cancelled",5,6,7]],"version":[8,9]}'
    assert wire.headers[2:] == [("aiodelay-memory", text)]
    assert records.memory_of(wire.headers) == memory
    assert records.memory_of([("aiodelay-memory", b"[")]) is None


def test_a_dead_letter_of_format_1() -> None:
    letter = DeadLetter(FULL, "attempts_exhausted", 77)
    wire = records.encode_dead(letter)
    assert wire.key == b"\x00aiodelay/dead/1700000000000/vid1-online"
    assert wire.headers[:2] == [("aiodelay-dead-reason", b"attempts_exhausted"), ("aiodelay-dead-at-ms", b"77")]
    assert wire.value is not None
    assert records.glance(*wire).kind is Kind.DEAD
    assert records.decode_dead(wire.key, wire.value, wire.headers) == letter
    assert records.dead_key_of(wire.key) == letter.key


def test_a_delivered_record() -> None:
    wire = records.delivered(
        FULL.envelope, delivery_id(FULL), FULL.attempt + 1, now_ms=NOON_MS + 1999, schedules="schedules"
    )
    assert wire == (
        b"vid1",
        b'{"id":1}',
        [
            ("caller", b"\xff\x00"),
            ("empty", b""),
            ("traceparent", b"00-1-2-01"),
            ("scheduler-timestamp", b"1893499202"),
            ("aiodelay-attempt", b"4"),
            ("scheduler-topic", b"schedules"),
            ("scheduler-key", b"vid1-online"),
            ("aiodelay-delivery-id", b"vid1-online/1700000000000/1893499200001"),
            ("aiodelay-type", b"video.online"),
            ("aiodelay-encoding", b"json"),
        ],
    )


# --- there and back ---------------------------------------------------------------------------------------


def read(wire: records.Wire, written_ms: int = 0) -> Record:
    assert wire.key is not None
    assert wire.value is not None
    return records.decode(wire.key, wire.value, wire.headers, written_ms=written_ms)


def test_what_an_owner_writes_is_read_as_it_was() -> None:
    wire = records.encode_record(FULL, read_to=42, place_ms=9)
    assert read(wire) == FULL
    assert records.glance(*wire) == records.Glance(Kind.PUT, 9, 42)


names = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=20)
ids = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=60)
headers = st.dictionaries(
    names.filter(lambda name: not name.lower().startswith(("aiodelay-", "scheduler-"))), st.binary()
)
envelopes = st.builds(
    Envelope,
    ids,
    st.just("kafka") | names,
    names,
    names,
    st.sampled_from(["", "json", "msgpack"]),
    st.binary(),
    st.none() | st.binary(),
    headers,
    st.dictionaries(names, names),
    st.none() | st.integers(0, 2**63 - 1),
)
moments = st.integers(0, 2**45)


@given(
    envelopes,
    st.tuples(moments, moments),
    st.binary(min_size=8, max_size=8),
    st.sampled_from(LateAction),
    st.none() | ids,
)
def test_every_record_is_read_as_it_was(
    envelope: Envelope, times: tuple[int, int], op: bytes, late: LateAction, error: str | None
) -> None:
    revision, due_ms = times
    record = Record(envelope, revision, due_ms, op, due_ms + 1 if late else 0, late, last_error=error)
    assert read(records.encode_record(record, read_to=0)) == record
    assume(envelope.lane != records.SINK or records.is_topic(envelope.address))
    new = replace(record, last_error=None)
    assert read(records.encode_record(new), written_ms=revision) == new


def test_headers_that_an_older_version_stored_replace_no_destination() -> None:
    headers = dict.fromkeys(RESERVED_HEADERS, b"1") | {"x": b"1"}
    wire = records.encode_record(Record(Envelope("m", "kafka", "orders", headers=headers), 0, 1_893_456_000_000, NO_OP))
    assert wire.key is not None
    read = records.decode(wire.key, b"", wire.headers, written_ms=1)
    assert (read.envelope.address, read.due_ms, read.envelope.key) == ("orders", 1_893_456_000_000, None)
    assert read.envelope.headers == {"x": b"1"}


@given(st.binary(min_size=1, max_size=255).filter(lambda key: not key.startswith(records.RESERVED)))
def test_any_key_has_an_id_and_the_id_leads_back_to_it(key: bytes) -> None:
    assert records.key_of(records.id_of(key)) == key


@pytest.mark.parametrize("key", [b"series~1893499200001", b"\x00aio", b"a\nb", b"\xff\xfe", b"\x00"])
def test_keys_that_are_no_ids_of_ours(key: bytes) -> None:
    assert records.id_of(key) == f"\x00{key.hex()}"
    assert records.key_of(records.id_of(key)) == key


def test_an_occurrence_stands_beside_its_series_in_the_same_partition() -> None:
    key = records.key_of("report~1893499200001")
    assert key == b"\x00aiodelay/again/1893499200001/report"
    assert records.id_of(key) == "report~1893499200001"
    assert records.partition_of(key, 97) == records.partition_of(b"report", 97)


# --- plain clients ----------------------------------------------------------------------------------------


def test_three_headers_are_enough() -> None:
    headers = [*PLAIN, ("scheduler-target-key", b"vid1")]
    assert records.glance(b"k", b"v", headers) == records.Glance(Kind.PUT, 1_893_499_201_000, lane="kafka")
    record = records.decode(b"k", b"v", headers, written_ms=77)
    assert record == Record(
        Envelope("k", "kafka", "online-videos", payload=b"v", key=b"vid1"), 77, 1_893_499_201_000, NO_OP
    )


def test_our_ms_win_over_their_seconds() -> None:
    assert records.glance(b"k", b"v", [*PLAIN, ("aiodelay-due-ms", b"5")]).place_ms == 5


def test_a_null_payload_can_be_scheduled_and_an_empty_one_stays_empty() -> None:
    message = Message(None, at=NOON, id="m", to="kafka:t", key=b"k")
    wire = records.encode(message)
    assert wire.value == b""  # null would be a tombstone
    record = read(wire)
    assert records.delivered(record.envelope, "m/1/2", 1, now_ms=0).value is None
    empty = read(records.encode(Message(b"", at=NOON, id="m", to="kafka:t")))
    assert records.delivered(empty.envelope, "m/1/2", 1, now_ms=0).value == b""


def test_a_tombstone_cancels_with_and_without_headers() -> None:
    assert records.glance(b"k", None, []) == records.Glance(Kind.END)
    assert records.glance(b"k", None, PLAIN) == records.Glance(Kind.END)
    assert records.glance(b"k", None, [("aiodelay-from", b"3")]) == records.Glance(Kind.END, 0, 3)


def test_of_what_is_delivered_nothing_schedules_again() -> None:
    trace = {**FULL.envelope.trace, CONTINUED: "1", f"{ATTEMPTED}traceparent": "00-3-4-01"}
    wire = records.delivered(replace(FULL.envelope, trace=trace), "m/1/2", 1, now_ms=0, schedules="schedules")
    assert records.glance(*wire).kind is Kind.BAD
    assert not {CONTINUED, f"{ATTEMPTED}traceparent"} & {name for name, _ in wire.headers}
    names = {name for name, _ in records.user_headers(wire.headers)}
    assert names == {"caller", "empty", "traceparent"}


def test_state_that_a_user_writes_does_not_count() -> None:
    forged = [*PLAIN, ("aiodelay-attempt", b"9"), ("aiodelay-no-retry", b"1")]
    record = records.decode(b"k", b"v", forged, written_ms=0)
    assert (record.attempt, record.no_retry) == (0, False)


# --- bad records: (b) of the plan -------------------------------------------------------------------------

BAD: dict[str, tuple[bytes | None, list[tuple[str, bytes | None]], str]] = {
    "no key": (None, list(PLAIN), "it has no key"),
    "no headers": (b"k", [], "it has no header scheduler-target-topic"),
    "no time": (b"k", [("scheduler-target-topic", b"t")], "it has no header scheduler-epoch"),
    "no target": (b"k", [("scheduler-epoch", b"1")], "it has no header scheduler-target-topic"),
    "a time of letters": (b"k", [*PLAIN, ("scheduler-epoch", b"soon")], "header scheduler-epoch is 'soon', not"),
    "a negative time": (b"k", [*PLAIN, ("scheduler-epoch", b"-1")], "header scheduler-epoch is '-1', not"),
    "an endless time": (b"k", [*PLAIN, ("scheduler-epoch", b"9" * 5000)], "header scheduler-epoch is '999"),
    "no text as time": (b"k", [*PLAIN, ("scheduler-epoch", None)], "header scheduler-epoch is null"),
    "milliseconds as seconds": (b"k", [*PLAIN, ("scheduler-epoch", b"1893499200001")], "it counts seconds"),
    "a later format": (b"k", [*PLAIN, ("aiodelay-format", b"7")], "its format is 7, and this version reads"),
    "a reserved key": (b"\x00aiodelay/other", list(PLAIN), "its key is reserved"),
    "an empty key": (b"", list(PLAIN), "its key has 0 bytes"),
    "a long key": (b"k" * 256, list(PLAIN), "its key has 256 bytes"),
    "a bad place": (b"k", [*PLAIN, ("aiodelay-from", b"x")], "header aiodelay-from is 'x'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_seen_at_once_and_never_raise(name: str) -> None:
    key, headers, problem = BAD[name]
    seen = records.glance(key, b"v", headers)
    assert seen.kind is Kind.BAD
    assert problem in seen.problem


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (("aiodelay-op", b"zz"), "aiodelay-op is not 16 hexadecimal digits"),
        (("aiodelay-op", b"00"), "aiodelay-op is not 16 hexadecimal digits"),
        (("aiodelay-rule", b"{"), "aiodelay-rule is not JSON"),
        (("aiodelay-rule", b"[" * 100_000), "aiodelay-rule is not JSON"),
        (("aiodelay-trace", b"[]"), "aiodelay-trace is not a JSON object"),
        (("aiodelay-trace", b'{"traceparent":1}'), "aiodelay-trace is not an object of texts"),
        (("aiodelay-encoding", b"pickle"), "its encoding 'pickle' is unknown"),
        (("aiodelay-version", b"1.5"), "aiodelay-version is '1.5'"),
        (("scheduler-target-topic", b"\xff"), "scheduler-target-topic is '.', which is not a topic's name"),
        (("scheduler-target-topic", b""), "scheduler-target-topic is '', which is not a topic's name"),
        (("scheduler-target-topic", b"a topic"), "scheduler-target-topic is 'a topic', which is not"),
        (("scheduler-target-topic", b"__consumer_offsets"), "'__consumer_offsets', which is not a topic's name"),
        (("scheduler-target-topic", b"x" * 250), "which is not a topic's name"),
    ],
)
def test_what_is_bad_inside_is_found_when_it_is_read(header: tuple[str, bytes], problem: str) -> None:
    with pytest.raises(RecordFormatError, match=problem):
        records.decode(b"k", b"v", [*PLAIN, header], written_ms=0)


read_names = [
    *records.HEADER.values(), records.EPOCH, records.TARGET_TOPIC, records.READ_TO, records.PLACE, records.NULL,
    records.FORMAT_HEADER,
]  # fmt: skip
any_headers = st.lists(
    st.tuples(st.sampled_from(read_names), st.none() | st.binary() | st.sampled_from([b"1", b"{}", b"[]"]))
)


@given(st.none() | st.binary(), st.none() | st.binary(), any_headers)
def test_nothing_that_may_stand_in_a_topic_breaks_a_reader(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    seen = records.glance(key, value, headers)
    if seen.kind is Kind.PUT:
        assert key is not None
        assert value is not None
        with suppress(RecordFormatError):
            records.decode(key, value, headers, written_ms=0)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"event": "text"}, "event is a str; allowed: bytes, or None"),
        ({"event": None}, "event is None, and key is None too"),
        ({"id": None}, "id is missing"),
        ({"id": "a\nb"}, "id is"),
        ({"at": None}, "at is missing"),
        ({"at": datetime(2030, 1, 1)}, "at is"),  # noqa: DTZ001 - naive is what is refused
        ({"to": "redis-list:x"}, "to is 'redis-list:x'; allowed: 'kafka:<topic>'"),
        ({"headers": {"aiodelay-from": b"1"}}, "reserved"),
    ],
)
def test_encode_refuses_before_anything_is_sent(changed: dict[str, Any], problem: str) -> None:
    message = replace(Message(b"", at=NOON, id="m", to="kafka:t"), **changed)
    with pytest.raises(InputError, match=problem):
        records.encode(message)


def test_encode_writes_the_late_policy() -> None:
    wire = records.encode(Message(b"", at=NOON, id="m", to="kafka:t", late=Late.drop("15m")))
    record = read(wire)
    assert (record.late, record.expires_ms) == (
        LateAction.DROP,
        NOON_MS + 15 * 60_000,
    )


# --- partitions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hashed"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536), (b"abc", 479470107)],
)
def test_murmur2_is_that_of_javas_own_tests(key: bytes, hashed: int) -> None:
    for partitions in (1, 3, 12, 1000):
        assert records.partition_of(key, partitions) == (hashed & 0x7FFFFFFF) % partitions


@pytest.mark.parametrize("n", [1, 7, 8, 500])
@pytest.mark.parametrize("length", [*range(1, 41), 255, 256, 257, 300])
def test_murmur2_of_many_keys_at_once_is_that_of_each_key(length: int, n: int) -> None:
    keys = {
        ((n + i) * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big").ljust(length, b"\xff")[:length] for i in range(n)
    }
    keys |= {b"", b"a", bytes(length), b"\xff" * length}
    assert murmur2_of_each(keys) == {key: murmur2(key) for key in keys}


def test_murmur2_is_not_crc32() -> None:
    keys = [b"%d" % i for i in range(100)]
    assert any(records.partition_of(key, 12) != zlib.crc32(key) % 12 for key in keys)
