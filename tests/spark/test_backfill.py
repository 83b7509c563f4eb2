"""Backfill: which rows become messages, which do not and why, and what a store has afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aiodelay.spark.jobs.checking import Rules, accepted, judged, rejected
from aiodelay.spark.jobs.mapping import given, read_mapping
from aiodelay.timeunits import MAX_HORIZON_MS

NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000
ROW = "n INT, id STRING, due BIGINT, payload BINARY, to STRING, type STRING, encoding STRING, key BINARY, "
ROW += "headers MAP<STRING, BINARY>, version BIGINT"
GOOD: Mapping[str, Any] = {
    "id": "a",
    "due": NOW_MS + DAY_MS,
    "payload": b"{}",
    "to": "redis-list:orders",
    "type": None,
    "encoding": None,
    "key": None,
    "headers": None,
    "version": 0,
}
MAP = read_mapping(
    "id=id,due_at=timestamp_millis(due),payload=payload,to=to,type=type,encoding=encoding,key=key,headers=headers"
)
WITH_VERSION = {**MAP, "version": "version"}

BAD: list[tuple[str, str, Any]] = [
    ("id", "missing", None),
    ("id", "empty", ""),
    ("id", "too_long", "é" * 128),
    ("id", "control_characters", "a\nb"),
    ("id", "control_characters", "a\x9f"),
    ("id", "control_characters", "a\u2028"),
    ("id", "control_characters", "a\n"),
    ("id", "reserved", "a~1800000000"),
    ("due", "missing", None),
    ("due", "past_due", NOW_MS - 1),
    ("due", "too_soon", NOW_MS + 59_999),
    ("due", "too_far", NOW_MS + MAX_HORIZON_MS + 1),
    ("payload", "missing", None),
    ("payload", "too_large", b"x" * 1001),
    ("to", "missing", None),
    ("to", "no_destination", "orders"),
    ("to", "no_destination", "Redis:orders"),
    ("to", "no_destination", "handler:a b"),
    ("to", "no_destination", "handler:"),
    ("to", "empty", "redis-list:"),
    ("to", "too_long", "redis-list:" + "é" * 128),
    ("to", "control_characters", "redis-list:a\tb"),
    ("type", "no_type_name", "a b"),
    ("type", "no_type_name", ""),
    ("encoding", "unknown", "xml"),
    ("key", "too_long", b"k" * 16_385),
    ("headers", "too_many", {f"h{i}": b"" for i in range(65)}),
    ("headers", "bad_name", {"a b": b""}),
    ("headers", "reserved", {"Aiodelay-x": b""}),
    ("headers", "missing", {"a": None}),
    ("headers", "too_large", {"a": b"x" * 16_384}),
]
FINE: list[tuple[str, Any]] = [
    ("id", "é" * 127 + "a"),
    ("id", "a~180000000"),
    ("id", "a~b1800000000"),
    ("id", " "),
    ("due", NOW_MS + 60_000),
    ("due", NOW_MS + MAX_HORIZON_MS),
    ("payload", b""),
    ("payload", b"x" * 1000),
    ("to", "handler:Remind"),
    ("to", "kafka:a:b"),
    ("to", "redis-list:" + "é" * 127),
    ("type", "Remind"),
    ("encoding", ""),
    ("encoding", "msgpack"),
    ("key", b"k" * 16_384),
    ("headers", {f"h{i}": b"" for i in range(64)}),
    ("headers", {"a": b"x" * 16_383}),
]


def rows_of(spark: SparkSession, *changes: Mapping[str, Any]) -> DataFrame:
    rows = [{"n": n, **GOOD, **change} for n, change in enumerate(changes)]
    names = [part.split()[0] for part in ROW.replace("MAP<STRING, BINARY>", "MAP").split(",")]
    return spark.createDataFrame([tuple(row[name.strip()] for name in names) for row in rows], ROW)


def verdicts(frame: DataFrame, rules: Rules, mapping: Mapping[str, str] = MAP) -> list[tuple[str | None, str | None]]:
    """The field and the reason of each row, in the order of their number, which stands in the headers' place."""
    rows = judged(given(frame, mapping), rules)
    return [(row["field"], row["reason"]) for row in rows.collect()]


def test_rows_are_judged_as_a_scheduler_would(spark: SparkSession) -> None:
    changes = [{"id": f"row-{n}", field: value} for n, (field, _, value) in enumerate(BAD)]
    changes += [{"id": f"fine-{n}", field: value} for n, (field, value) in enumerate(FINE)]
    rules = Rules(now_ms=NOW_MS, min_lead_ms=60_000, max_payload=1000)
    frame = rows_of(spark, *changes)
    found = judged(given(frame.drop("n"), MAP), rules)
    told = {(row["reason"], row["field"], str(row["id"]), row["payload"], str(row["to"])) for row in found.collect()}
    assert sorted((reason, field) for reason, field, *_ in told if reason) == sorted(
        (reason, {"due": "due_at"}.get(field, field)) for field, reason, _ in BAD
    )
    assert len([1 for reason, *_ in told if reason is None]) == len(FINE)
    stored = accepted(found, rules)
    assert stored.columns == ["id", "due_at", "payload", "to", "type", "encoding", "key", "headers"]
    assert stored.count() == len(FINE)
    assert rejected(found).columns == [*stored.columns, "reason", "field"]
