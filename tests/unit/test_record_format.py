"""Record format version 1: the written bytes agree with docs/formats.md and `record_format`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aiodelay.core.record_codec import decode_record, encode_record
from aiodelay.core.values import FIELDS, FORMAT_VERSION, Envelope, Field, LateAction, Record
from aiodelay.errors import RecordFormatError

DUE = 0x0123456789AB
OP = b"\x01\x02\x03\x04\x05\x06\x07\x08"
PREFIX = 34

MINIMAL = Record(Envelope("m", "lane"), 1, 2, OP)
FULL = Record(
    Envelope(
        "m",
        "lane",
        address="tópic",
        type="payment.check",
        encoding="json",
        payload=b"\x00\xff",
        key=b"",
        headers={"é": b"\xff", "empty": b""},
        trace={"traceparent": "00-1"},
        version=2**63 - 1,
    ),
    revision=DUE,
    due_ms=DUE + 1,
    op=OP,
    expires_ms=DUE + 2,
    late=LateAction.DEAD_LETTER,
    attempt=258,
    lapses=3,
    kills=2,
    alone=True,
    no_retry=True,
    first_error="first é",
    last_error="last",
)
RECURRING = Record(
    Envelope("s", "lane", payload=b"{}", encoding="msgpack", rule={"c": "0 9 * * MON", "z": "Europe/Paris"}),
    DUE,
    DUE,
    OP,
    expires_ms=DUE + 1000,
    late=LateAction.DROP,
    live=(DUE - 2, DUE - 1),
)
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACED = Record(Envelope("m", "lane", trace={"traceparent": TRACEPARENT}), 1, 2, OP)
MOVED = replace(MINIMAL, put_due_ms=DUE)
GIVEN_UP = replace(MINIMAL, first_error="a", last_error="c", earlier_errors=("a", "b é"), traceback="t\n")
NOTHING = Record(Envelope("", "lane", version=0), 0, 0, bytes(8))

# What version 1 wrote once must be read for ever: add versions, never change a line.
# Hex: format, flags, lane, revision, due, expires, attempt, lapses, kills, op; then the version if any, and the body.
GOLDEN_1 = {
    "minimal": (
        MINIMAL,
        7,
        "01 00 0007 000000000001 000000000002 000000000000 0000 00 00 0102030405060708 80",
    ),
    "full": (
        FULL,
        65_535,
        (
            "01 36 ffff 0123456789ab 0123456789ac 0123456789ad 0102 03 02 0102030405060708 "
            "7fffffffffffffff89a170c40200ffa16bc400a16882a2c3a9c401ffa5656d707479c400a16381ab7472616365706172 "
            "656e74a430302d31a174ad7061796d656e742e636865636ba165a46a736f6ea161a674c3b3706963a166a86669727374 "
            "20c3a9a167a46c617374"
        ),
    ),
    "recurring": (
        RECURRING,
        0,
        (
            "01 09 0000 0123456789ab 0123456789ab 012345678d93 0000 00 00 0102030405060708 "
            "84a170c4027b7da165a76d73677061636ba17282a163ab302039202a202a204d4f4ea17aac4575726f70652f50617269 "
            "73a16c92cf00000123456789a9cf00000123456789aa"
        ),
    ),
    "traced": (
        TRACED,
        7,
        (
            "01 00 0007 000000000001 000000000002 000000000000 0000 00 00 0102030405060708 "
            "81a163c4194bf92f3577b34da6a3ce929d0e0e473600f067aa0ba902b701"
        ),
    ),
    "given up": (
        GIVEN_UP,
        7,
        (
            "01 00 0007 000000000001 000000000002 000000000000 0000 00 00 0102030405060708 "
            "84a166a161a167a163a16a92a161a46220c3a9a162a2740a"
        ),
    ),
    "moved": (
        MOVED,
        7,
        ("01 00 0007 000000000001 000000000002 000000000000 0000 00 00 0102030405060708 81a164cf00000123456789ab"),
    ),
    "nothing": (
        NOTHING,
        1,
        "01 20 0001 000000000000 000000000000 000000000000 0000 00 00 0000000000000000 000000000000000080",
    ),
}


def read(data: bytes, message_id: str = "m") -> Record:
    return decode_record(data, message_id=message_id, lane=lambda number: "lane")


@pytest.mark.parametrize("name", GOLDEN_1)
def test_golden_bytes_of_format_1(name: str) -> None:
    record, lane_number, golden = GOLDEN_1[name]
    assert encode_record(record, lane_number).hex() == golden.replace(" ", "")
    assert read(bytes.fromhex(golden), record.id) == record


def test_version_1_is_the_newest() -> None:
    assert FORMAT_VERSION == 1


def test_the_lane_is_named_by_its_number() -> None:
    data = encode_record(MINIMAL, 513)
    assert decode_record(data, message_id="m", lane={513: "found"}.__getitem__).envelope.lane == "found"


# --- the table of fields ----------------------------------------------------------------------------------

SIZES = {"u8": 1, "u16": 2, "u48": 6, "8s": 8, "u64?:5": 8}


def value_of(record: Record, name: str) -> object:
    return getattr(record.envelope if name in Envelope.__struct_fields__ else record, name)


def test_every_field_of_a_record_is_in_the_table() -> None:
    names = {*Envelope.__struct_fields__, *Record.__struct_fields__} - {"id", "envelope"}
    assert {field.name for field in FIELDS} == names
    assert len(FIELDS) == len(names)


def test_every_field_has_one_place_at_most_in_prefix_and_body() -> None:
    bodies = [field.body for field in FIELDS if field.body is not None]
    assert len(set(bodies)) == len(bodies)
    assert all(field.prefix is not None or field.body is not None for field in FIELDS)


@pytest.mark.parametrize(
    "record", [FULL, RECURRING, MOVED, GIVEN_UP, NOTHING], ids=["full", "recurring", "moved", "dead", "nothing"]
)
def test_the_table_tells_the_layout_of_the_prefix(record: Record) -> None:
    data = encode_record(record, 513)
    expected, offset = {"lane": 513}, 2  # after format and flags
    for field in FIELDS:
        if field.prefix not in SIZES or (field.prefix == "u64?:5" and record.envelope.version is None):
            continue
        raw = data[offset : offset + SIZES[field.prefix]]
        offset += len(raw)
        value = raw if field.prefix == "8s" else int.from_bytes(raw, "big")
        assert value == expected.get(field.name, value_of(record, field.name)), field.name
    assert offset == PREFIX + (0 if record.envelope.version is None else 8)
    assert msgspec.msgpack.decode(data[offset:]) == body_of(record)


def body_of(record: Record) -> dict[str, object]:
    """What the table says of the body: values that are not the default, by their keys."""
    default = Record(Envelope("", ""), 0, 0, b"")
    body: dict[str, object] = {}
    for field in FIELDS:
        value = value_of(record, field.name)
        if field.body is not None and value != value_of(default, field.name):
            body[field.body] = list(value) if isinstance(value, tuple) else value
    return body


@pytest.mark.parametrize("field", [field for field in FIELDS if (field.prefix or "").startswith("flag")])
def test_the_table_tells_the_flags(field: Field) -> None:
    assert field.prefix is not None
    first, _, last = field.prefix.removeprefix("flag:").partition("-")
    mask = sum(1 << bit for bit in range(int(first), int(last or first) + 1))
    set_to = {"late": LateAction.DEAD_LETTER, "rule": {"e": 1}}.get(field.name, True)
    target = MINIMAL.envelope if field.name == "rule" else MINIMAL
    changed = replace(target, **{field.name: set_to})
    record = changed if isinstance(changed, Record) else replace(MINIMAL, envelope=changed)
    flags = encode_record(record, 0)[1]
    assert flags & mask
    assert flags & ~mask == 0


def test_a_version_is_flagged() -> None:
    assert encode_record(NOTHING, 0)[1] == 1 << 5
    assert len(encode_record(NOTHING, 0)) == len(encode_record(replace(NOTHING, envelope=Envelope("", "lane")), 0)) + 8


# --- round trips ------------------------------------------------------------------------------------------

texts = st.text(max_size=20)
u8, u16, u48 = st.integers(0, 255), st.integers(0, 65_535), st.integers(0, 2**48 - 1)
envelopes = st.builds(
    Envelope,
    id=texts,
    lane=st.just("lane"),
    address=texts,
    type=texts,
    encoding=st.sampled_from(["", "json", "msgpack"]),
    payload=st.binary(max_size=100),
    key=st.none() | st.binary(max_size=10),
    headers=st.dictionaries(texts, st.binary(max_size=20), max_size=3),
    trace=st.dictionaries(texts, texts, max_size=2)
    | st.from_regex(r"0[01]-[0-9a-fA]{32}-[0-9a-f]{16}-[0-9a-f]{2}\n?", fullmatch=True).map(
        lambda text: {"traceparent": text}
    ),
    version=st.none() | st.integers(0, 2**63 - 1),
    rule=st.none() | st.dictionaries(texts, texts | st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=3),
)
records = st.builds(
    Record,
    envelope=envelopes,
    revision=u48,
    due_ms=u48,
    op=st.binary(min_size=8, max_size=8),
    expires_ms=u48,
    late=st.sampled_from(LateAction),
    attempt=u16,
    lapses=u8,
    kills=u8,
    alone=st.booleans(),
    no_retry=st.booleans(),
    live=st.lists(u48, max_size=3).map(tuple),
    first_error=st.none() | texts,
    last_error=st.none() | texts,
    earlier_errors=st.lists(texts, max_size=4).map(tuple),
    put_due_ms=st.none() | u48,
    debounced_ms=st.none() | u48,
    traceback=st.none() | texts,
)
records |= st.builds(msgspec.structs.replace, records, appended=st.binary(max_size=300), appended_due_ms=u48)


@given(records, u16)
def test_every_record_is_read_back_as_it_was_written(record: Record, lane_number: int) -> None:
    seen: list[int] = []

    def lane(number: int) -> str:
        seen.append(number)
        return "lane"

    assert decode_record(encode_record(record, lane_number), message_id=record.id, lane=lane) == record
    assert seen == [lane_number]


def test_attempts_stop_at_what_the_prefix_holds() -> None:
    assert read(encode_record(replace(MINIMAL, attempt=70_000), 0)).attempt == 65_535


def test_a_record_costs_about_40_bytes() -> None:
    payload = b"x" * 200
    assert len(encode_record(replace(MINIMAL, envelope=Envelope("m", "lane", payload=payload)), 0)) - 200 <= 40


def test_a_trace_context_costs_29_bytes_and_other_parts_of_it_are_kept_as_they_are() -> None:
    assert len(encode_record(TRACED, 0)) - len(encode_record(MINIMAL, 0)) == 29
    with_state = replace(
        TRACED, envelope=replace(TRACED.envelope, trace={"traceparent": TRACEPARENT, "tracestate": "a=1"})
    )
    assert read(encode_record(with_state, 0)) == with_state


# --- readers ----------------------------------------------------------------------------------------------


@given(records, st.dictionaries(st.sampled_from(["x", "new", "zz"]), st.integers() | texts, min_size=1))
def test_body_keys_that_are_not_known_are_skipped(record: Record, unknown: dict[str, int | str]) -> None:
    unknown = {key: value for key, value in unknown.items() if isinstance(value, str) or abs(value) < 2**63}
    data = encode_record(record, 0)
    start = PREFIX + (0 if record.envelope.version is None else 8)
    body = unknown | msgspec.msgpack.decode(data[start:])
    assert read(data[:start] + msgspec.msgpack.encode(body), record.id) == record


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_format_is_refused(version: int) -> None:
    for data in (bytes([version]) + encode_record(FULL, 0)[1:], bytes([version])):
        with pytest.raises(RecordFormatError, match=f"format {version} is not known; the newest known format is 1"):
            read(data)


@pytest.mark.parametrize("record", [MINIMAL, FULL, RECURRING, NOTHING], ids=["minimal", "full", "recurring", "nothing"])
def test_a_record_cut_anywhere_is_refused(record: Record) -> None:
    data = encode_record(record, 0)
    for length in range(len(data)):
        with pytest.raises(RecordFormatError):
            read(data[:length])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data + b"\x00", id="bytes after it"),
        pytest.param(lambda data: data[:1] + bytes([data[1] | 0b11000]) + data[2:], id="late action 3"),
        pytest.param(lambda data: data[:PREFIX] + msgspec.msgpack.encode([1]), id="a list as body"),
        pytest.param(lambda data: data[:PREFIX] + msgspec.msgpack.encode({"p": 1}), id="a number as payload"),
        pytest.param(lambda data: data[:PREFIX] + msgspec.msgpack.encode({"e": "pickle"}), id="another encoding"),
        pytest.param(lambda data: data[:PREFIX] + msgspec.msgpack.encode({"h": {"a": "text"}}), id="text as header"),
        pytest.param(lambda data: data[:PREFIX] + b"\x81\xa1a\xa1\xff", id="text that is not UTF-8"),
        pytest.param(lambda data: data[:PREFIX] + b"\xc1", id="an unused MessagePack byte"),
        pytest.param(
            lambda data: data[:PREFIX] + msgspec.msgpack.encode({"c": bytes(24)}), id="a trace context cut short"
        ),
    ],
)
def test_a_damaged_record_is_refused_without_telling_its_content(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(RecordFormatError) as caught:
        read(damage(encode_record(replace(MINIMAL, envelope=Envelope("m", "lane", payload=b"secret")), 0)))
    assert "secret" not in str(caught.value)


def test_a_lane_that_nobody_knows_is_refused() -> None:
    numbers: dict[int, str] = {}
    with pytest.raises(RecordFormatError, match="no lane has the number 513"):
        decode_record(encode_record(MINIMAL, 513), message_id="m", lane=numbers.__getitem__)


@given(st.binary(max_size=80), st.booleans())
def test_garbage_is_read_or_refused_never_anything_else(garbage: bytes, has_format: bool) -> None:
    with suppress(RecordFormatError):
        read(bytes([FORMAT_VERSION] * has_format) + garbage)
