"""Rows that cannot be messages: the first one ends the write, and the error names id, column and allowed values."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from aiodelay.core.spread import spread_ms_of
from aiodelay.core.values import After, At
from aiodelay.errors import InputError
from aiodelay.spark.composing import parts_of, puts_of
from aiodelay.spark.write_settings import WriteSettings
from tests.support.bad_inputs import BAD_MESSAGES, MISSING
from tests.support.clear_errors import assert_no_secret

NOW_MS = 1_800_000_000_000
GOOD = {"id": "m", "due_at": 5_000_000, "payload": b"x"}
TYPES = {
    "id": pa.string(),
    "due_at": pa.timestamp("us", "UTC"),
    "payload": pa.binary(),
    "to": pa.string(),
    "type": pa.string(),
    "encoding": pa.string(),
    "key": pa.binary(),
    "headers": pa.map_(pa.string(), pa.binary()),
    "version": pa.int64(),
    "expires_at": pa.timestamp("us", "UTC"),
    "late": pa.string(),
    "rule": pa.string(),
    "trace": pa.map_(pa.string(), pa.string()),
}


def settings(columns: tuple[str, ...], **changed: str | int | None) -> WriteSettings:
    given: dict[str, Any] = {
        "store": "redis://host",
        "namespace": "default",
        "to": "redis-list:orders",
        "conflict": "insert",
        "rate": 0,
        "concurrency": None,
        "batch_rows": 500,
        "max_payload": 100,
        "timezone": None,
        "patience_ms": 1000,
        "columns": columns,
    }
    return WriteSettings(**given | changed)


def batch_of(*rows: dict[str, Any], types: dict[str, pa.DataType] = TYPES) -> pa.RecordBatch:
    names = list(rows[0])
    return pa.record_batch([pa.array([row[name] for row in rows], types[name]) for name in names], names)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"id": None}, "id is null; allowed: 1 to 255 bytes"),
        ({"id": ""}, "id is empty"),
        ({"id": "é" * 128}, "256 bytes long"),
        ({"id": "a\nb"}, "no control characters"),
        ({"id": "a\u2028b"}, "no control characters"),
        ({"id": "a~1700000000000"}, "names an occurrence of a series"),
        ({"due_at": None}, "due_at of message 'b' is null"),
        ({"due_at": -1_000_000}, "due_at of message 'b' is before 1970"),
        ({"due_at": (NOW_MS + 3651 * 86_400_000) * 1000}, "due_at of message 'b' is 3651d ahead"),
        ({"payload": b"x" * 101}, "payload of message 'b' is 101 bytes"),
        ({"payload": None}, "payload of message 'b' is null, and the key is null too"),
        ({"payload": None, "encoding": "json"}, "payload of message 'b' is null"),
        ({"payload": b"x", "encoding": "null"}, "payload of message 'b' is 1 bytes with the encoding 'null'"),
        ({"encoding": "xml"}, "encoding of message 'b' is 'xml'"),
        ({"to": "orders"}, "to of message 'b' is 'orders'"),
        ({"to": "handler:a b"}, "the handler name in to= of message 'b' is 'a b'"),
        ({"type": "a b"}, "type of message 'b' is 'a b'"),
        ({"key": b"x" * 16_385}, "key of message 'b' is 16385 bytes long"),
        ({"headers": {"a b": b""}}, "header name of message 'b' is 'a b'"),
        ({"headers": {"a": None}}, "value of header 'a' of message 'b' is None"),
        ({"late": "often"}, "late of message 'b' is 'often'"),
        ({"late": "drop"}, "late of message 'b' is given without expires_at"),
        ({"expires_at": 5_000_000}, "late of message 'b' is missing or 'deliver', but expires_at is given"),
        ({"rule": "10m"}, "rule of message 'b' is '10m'"),
        ({"rule": '{"interval": "soon"}'}, "of message 'b' is 'soon'"),
        ({"trace": {"traceparent": None}}, "trace of message 'b' is a map with a null value"),
    ],
)
def test_a_row_that_is_no_message_is_named(bad: dict[str, Any], told: str) -> None:
    good = GOOD | dict.fromkeys(bad.keys() - GOOD.keys())
    batch = batch_of(good, good | {"id": "b"} | bad)
    with pytest.raises(InputError) as found:
        puts_of(batch, settings(tuple(batch.schema.names)), NOW_MS)
    assert told in str(found.value)


def row_of(change: dict[str, Any]) -> dict[str, Any] | None:
    """Return a change of a JSON message as a change of a row; None if no row can be changed so."""
    fields = {name: value for name, value in change.items() if value is not MISSING}
    match fields:
        case {"id": str() as given}:
            row: dict[str, Any] = {"id": given}
        case {"payload": str() as given, **others} if not others:
            row = {"payload": given.encode()}
        case {"key": str() as given}:
            row = {"key": given.encode()}
        case {"headers": dict() as given} if all(isinstance(value, str) for value in given.values()):
            row = {"headers": {name: value.encode() for name, value in given.items()}}
        case {"every": dict() as given}:
            row = {"rule": json.dumps(given)}
        case _:
            return None
    return row


ROWS = [(row, error, allowed) for change, error, _, allowed in BAD_MESSAGES if (row := row_of(change)) is not None]


def test_most_kinds_of_bad_messages_are_bad_rows_too() -> None:
    assert {name for row, *_ in ROWS for name in row} == {"id", "payload", "key", "headers", "rule"}


@pytest.mark.parametrize(("bad", "error", "allowed"), ROWS)
def test_a_bad_message_is_refused_as_a_row_for_the_same_reason(bad: dict[str, Any], error: str, allowed: str) -> None:
    good = GOOD | dict.fromkeys(bad.keys() - GOOD.keys())
    batch = batch_of(good, good | {"id": "b"} | bad)
    with pytest.raises(InputError) as found:
        puts_of(batch, settings(tuple(batch.schema.names), max_payload=262_144), NOW_MS)
    assert (type(found.value).__name__, allowed in found.value.allowed) == (error, True), str(found.value)
    assert_no_secret(found.value)


def test_a_rule_with_a_spread_has_the_place_of_its_id() -> None:
    rule = '{"cron": "0 9 * * *", "spread": "5m"}'
    batch = batch_of(GOOD | {"rule": rule}, GOOD | {"id": "b", "rule": rule})
    first, second = puts_of(batch, settings(tuple(batch.schema.names)), NOW_MS)
    assert first.envelope.rule == {"c": "0 9 * * *", "z": "UTC", "w": 300_000, "d": spread_ms_of("m", 300_000)}
    assert second.envelope.rule is not None
    assert second.envelope.rule["d"] == spread_ms_of("b", 300_000)


@pytest.mark.parametrize("version", [None, -1])
def test_newer_needs_a_version_in_every_row(version: int | None) -> None:
    batch = batch_of(GOOD | {"version": 1}, GOOD | {"id": "b", "version": version})
    with pytest.raises(InputError, match="version of message 'b'"):
        puts_of(batch, settings(tuple(batch.schema.names), conflict="newer"), NOW_MS)


def test_a_row_without_a_destination_takes_the_default_or_is_named() -> None:
    batch = batch_of(GOOD | {"to": None}, GOOD | {"id": "b", "to": "handler:check"})
    puts = puts_of(batch, settings(tuple(batch.schema.names)), NOW_MS)
    assert [(each.envelope.lane, each.envelope.address) for each in puts] == [("redis-list", "orders"), ("check", "")]
    with pytest.raises(InputError, match="to of message 'm' is null"):
        puts_of(batch, settings(tuple(batch.schema.names), to=None), NOW_MS)


@pytest.mark.parametrize(
    ("local", "instant"),
    [
        ("2026-01-01T12:00:00", "2026-01-01T11:00:00"),
        ("2026-03-29T02:30:00", "2026-03-29T01:00:00"),
        ("2026-10-25T02:30:00", "2026-10-25T01:30:00"),
    ],
)
def test_a_local_time_that_is_twice_or_never_is_the_later_instant(local: str, instant: str) -> None:
    types = TYPES | {"due_at": pa.timestamp("us")}
    given = pa.scalar(local).cast(pa.timestamp("us")).value
    expected = pa.scalar(instant).cast(pa.timestamp("ms")).value
    batch = batch_of(GOOD | {"due_at": given}, types=types)
    (put,) = puts_of(batch, settings(tuple(batch.schema.names), timezone="Europe/Paris"), NOW_MS)
    assert not isinstance(put.due, After)
    assert put.due == At(expected)


def test_a_due_time_is_rounded_up_so_that_nothing_is_early() -> None:
    batch = batch_of(*(GOOD | {"due_at": us} for us in (5_000_000, 5_000_001, 5_000_999)))
    puts = puts_of(batch, settings(tuple(batch.schema.names)), NOW_MS)
    assert [each.due for each in puts] == [At(5_000), At(5_001), At(5_001)]


def test_text_is_taken_as_utf8_and_broken_text_is_named() -> None:
    types = TYPES | {"payload": pa.string(), "key": pa.string()}
    batch = batch_of(GOOD | {"payload": "größe", "key": "ä"}, types=types)
    (put,) = puts_of(batch, settings(tuple(batch.schema.names)), NOW_MS)
    assert (put.envelope.payload, put.envelope.key) == ("größe".encode(), "ä".encode())
    broken = batch_of(GOOD).set_column(0, "id", pa.array([b"\xff"], pa.binary()).view(pa.string()))
    with pytest.raises(InputError, match="column 'id' is not UTF-8"):
        puts_of(broken, settings(tuple(broken.schema.names)), NOW_MS)


def test_a_batch_is_cut_by_rows_and_by_bytes() -> None:
    small = batch_of(*[GOOD] * 1_200)
    assert [part.num_rows for part in parts_of(small, 500)] == [500, 500, 200]
    large = batch_of(*[GOOD | {"payload": b"x" * 400_000}] * 5)
    assert [part.num_rows for part in parts_of(large, 500)] == [2, 2, 1]
    assert list(parts_of(small.slice(0, 0), 500)) == []
