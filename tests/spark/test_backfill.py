"""Backfill: which rows become messages, which do not and why, and the content of the store afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay import AiodelayError, CancelOutcome, ConfigurationError, Scheduler
from aiodelay.core.durations import MAX_HORIZON_MS
from aiodelay.core.validation import check_headers, check_id, check_key, check_type_name, split_target
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.jobs import backfill
from aiodelay.spark.jobs.checking import Rules, accepted, judged, rejected
from aiodelay.spark.jobs.mapping import given, mapped, read_mapping
from aiodelay.spark.jobs.sources import read_source
from aiodelay.spark.summary import Summary
from aiodelay.spark.write_settings import NO_COLUMNS

NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000
ROW = "n INT, id STRING, due BIGINT, payload BINARY, to STRING, type STRING, encoding STRING, key BINARY, "
ROW += "headers MAP<STRING, BINARY>, version BIGINT"
GOOD: Mapping[str, Any] = {
    "n": 0,
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
    ("to", "no_destination", "handler:a\u2003b"),
    ("to", "no_destination", "handler:"),
    ("to", "empty", "redis-list:"),
    ("to", "too_long", "redis-list:" + "é" * 128),
    ("to", "control_characters", "redis-list:a\tb"),
    ("type", "no_type_name", "a b"),
    ("type", "no_type_name", "a\xa0b"),
    ("type", "no_type_name", ""),
    ("encoding", "unknown", "xml"),
    ("encoding", "null", "null"),
    ("key", "too_long", b"k" * 16_385),
    ("headers", "too_many", {f"h{i}": b"" for i in range(65)}),
    ("headers", "bad_name", {"a b": b""}),
    ("headers", "reserved", {"Aiodelay-x": b""}),
    ("headers", "reserved", {"scheduler-key": b""}),
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
    rows = [{**GOOD, **change} for change in changes]
    return spark.createDataFrame([tuple(row.values()) for row in rows], ROW).drop("n")


def test_rows_are_judged_by_their_fields(spark: SparkSession) -> None:
    changes = [{"n": n, "id": f"row-{n}", field: value} for n, (field, _, value) in enumerate(BAD)]
    changes += [{"n": n, "id": f"fine-{n}", field: value} for n, (field, value) in enumerate(FINE)]
    rules = Rules(now_ms=NOW_MS, min_lead_ms=60_000, max_payload=1000)
    found = judged(given(rows_of(spark, *changes), MAP), rules).persist()
    told = Counter((row["field"], row["reason"]) for row in found.collect())
    good = told.pop((None, None))
    assert told == Counter(({"due": "due_at"}.get(field, field), reason) for field, reason, _ in BAD)
    assert good == len(FINE)
    stored = accepted(found, rules)
    assert stored.columns == ["id", "due_at", "payload", "to", "type", "encoding", "key", "headers"]
    assert stored.count() == len(FINE)
    assert rejected(found).columns == [*stored.columns, "reason", "field"]


CORE: Mapping[str, Callable[[Any], object]] = {
    "id": check_id,
    "to": lambda to: check_type_name(parts[1], "to") if (parts := split_target(to))[0] == "handler" else parts,
    "type": lambda name: check_type_name(name, "type"),
    "key": check_key,
    "headers": check_headers,
}


def test_the_core_judges_alike() -> None:
    for field, value in FINE:
        if field in CORE:
            CORE[field](value)
    for field, _, value in BAD:
        if field in CORE and value is not None:
            with pytest.raises(AiodelayError):
                CORE[field](value)


def test_of_rows_with_one_id_the_same_are_one_and_others_none(spark: SparkSession) -> None:
    later = NOW_MS + 2 * DAY_MS
    changes: list[dict[str, Any]] = [
        {"id": "same"},
        {"id": "same"},
        {"id": "two dues"},
        {"id": "two dues", "due": later},
        {"id": "two headers", "headers": {"a": b"1"}},
        {"id": "two headers", "headers": {"a": b"2"}},
        {"id": "two fields", "type": "json"},
        {"id": "two fields", "encoding": "json"},
        {"id": "versions", "version": 1},
        {"id": "versions", "version": 3, "due": later},
        {"id": "versions", "version": 3, "due": later},
        {"id": "bad versions", "version": 2},
        {"id": "bad versions", "version": 2, "due": later},
        {"id": "bad versions", "version": 1},
        {"id": "one is past", "due": NOW_MS - 1},
        {"id": "one is past"},
        {"id": None},
        {"id": None},
    ]
    frame = given(rows_of(spark, *changes), {**MAP, "version": "version"})
    common = [
        ("None", "missing", 2),
        ("one is past", "None", 1),
        ("one is past", "past_due", 1),
        ("same", "None", 1),
        ("same", "repeated", 1),
        ("two dues", "duplicate", 2),
        ("two fields", "duplicate", 2),
        ("two headers", "duplicate", 2),
    ]
    newer = [
        ("bad versions", "duplicate", 2),
        ("bad versions", "superseded", 1),
        ("versions", "None", 1),
        ("versions", "repeated", 1),
        ("versions", "superseded", 1),
    ]
    insert = [("bad versions", "duplicate", 3), ("versions", "duplicate", 3)]
    for conflict, others in (("newer", newer), ("insert", insert)):
        rules = Rules(now_ms=NOW_MS, conflict="newer" if conflict == "newer" else "insert")
        told = Counter((f"{row['id']}", f"{row['reason']}") for row in judged(frame, rules).collect())
        assert sorted((*key, n) for key, n in told.items()) == sorted(common + others), conflict


def test_past_rows_may_be_stored_to_be_delivered_now(spark: SparkSession) -> None:
    frame = given(rows_of(spark, {"due": NOW_MS - 1}, {"id": "b", "due": -1}), MAP)
    rules = Rules(now_ms=NOW_MS, past_due="now", min_lead_ms=60_000)
    found = judged(frame, rules)
    (row,) = accepted(found, rules).collect()
    assert row["due_at"].timestamp() * 1000 == NOW_MS - 1
    assert [row["reason"] for row in rejected(found).collect()] == ["before_1970"]


def test_columns_are_converted(spark: SparkSession) -> None:
    frame = spark.sql(
        "SELECT 7 AS n, '2027-01-01T09:00:00+01:00' AS at, '2027-01-01 09:00:00' AS there, 'soon' AS never, "
        "TIMESTAMP_NTZ '2027-07-01 09:00:00' AS wall, 'é' AS word, named_struct('a', 1, 'b', INT(NULL)) AS nested"
    )
    first = mapped(frame, read_mapping("id=concat(n, ',a=b'),due_at=at,payload=nested"), to="redis-list:x")
    (row,) = first.collect()
    utc = datetime(2027, 1, 1, 8, tzinfo=UTC)
    assert row.asDict() == {
        "id": "7,a=b",
        "due_at": utc.astimezone().replace(tzinfo=None),
        "payload": bytearray(b'{"a":1,"b":null}'),
        "to": "redis-list:x",
        "encoding": "json",
    }
    in_zone = frame.select("n", "word", F.explode(F.array("there", "at", "never")).alias("due"))
    rows = mapped(in_zone, {"id": "n", "due_at": "due", "payload": "word"}, timezone="America/New_York").collect()
    dues = [each["due_at"] and each["due_at"].astimezone(UTC).isoformat() for each in rows]
    assert dues == ["2027-01-01T14:00:00+00:00", "2027-01-01T08:00:00+00:00", None]
    assert (rows[0]["id"], rows[0]["payload"]) == ("7", bytearray("é".encode()))
    (row,) = mapped(frame, {"id": "n", "due_at": "wall"}, timezone="Europe/Berlin").collect()
    assert row["due_at"].astimezone(UTC).isoformat() == "2027-07-01T07:00:00+00:00"


def test_a_time_that_clocks_show_twice_is_the_later_one_whatever_the_sessions_zone(spark: SparkSession) -> None:
    given = {
        ("UTC", "2026-10-25 01:30:00.123456"): "2026-10-25T01:30:00.123456",
        ("Europe/Berlin", "2026-10-25 02:30:00"): "2026-10-25T01:30:00",
        ("Europe/Berlin", "2026-10-25 01:30:00"): "2026-10-24T23:30:00",
        ("Europe/Berlin", "2026-03-29 02:30:00"): "2026-03-29T01:30:00",
        ("Australia/Lord_Howe", "2026-04-05 01:45:00"): "2026-04-04T15:15:00",
    }
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        for zone in {zone for zone, _ in given}:
            asked = [text for each, text in given if each == zone]
            frame = spark.createDataFrame([(text,) for text in asked], "id STRING")
            read = mapped(frame, {"id": "id", "due_at": "id"}, timezone=zone)
            for row in read.selectExpr("id", "unix_micros(due_at) us").collect():
                want = datetime.fromisoformat(f"{given[zone, row['id']]}Z")
                assert row["us"] == (want - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1), row
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_a_text_with_a_zone_that_is_no_offset_is_never_a_local_time(spark: SparkSession) -> None:
    """PostgreSQL writes offsets as `-05`. As a local time of the option, such a time would be early by hours."""
    given = {
        "2027-01-01 09:00:00-05": None,
        "2027-01-01T09:00+01": None,
        "2027-01-01 09:00:00 UTC": None,
        "2027-01-01 09:00:00 EST": None,
        "09:00:00": None,
        "2027-01-01T09:00:00+01:00": "2027-01-01 08:00:00",
        "2027-01-01 09:00:00.5 ": "2027-01-01 14:00:00.5",
        "2027-01-01": "2027-01-01 05:00:00",
    }
    frame = spark.createDataFrame([(text,) for text in given], "id STRING")
    read = mapped(frame, {"id": "id", "due_at": "id"}, timezone="America/New_York")
    assert {row["id"]: row["due"] for row in read.selectExpr("id", "cast(due_at AS STRING) due").collect()} == given


def test_a_time_of_a_database_without_a_zone_needs_the_option(spark: SparkSession, tmp_path: Path) -> None:
    url = f"jdbc:derby:{tmp_path / 'derby'};create=true"
    spark.sql("SELECT 'a' AS id, TIMESTAMP_NTZ '2027-01-01 09:00:00' AS due_at").write.jdbc(url, "ORDERS")
    found = read_source(spark, f"{url};dbtable=ORDERS")
    with pytest.raises(ConfigurationError, match="column 'due_at' is TIMESTAMP_NTZ, which is no instant"):
        mapped(found)
    (row,) = mapped(found, timezone="Asia/Tokyo").selectExpr("unix_seconds(due_at) AS due").collect()
    assert row["due"] == datetime(2027, 1, 1, tzinfo=UTC).timestamp()


def test_due_times_may_be_spread_by_an_expression(spark: SparkSession) -> None:
    """The expression is the one that the refusal of a column `spread` gives."""
    expression = NO_COLUMNS["spread"].removeprefix("a later due_at, such as ").partition(" for 5m;")[0]
    frame = spark.range(500).selectExpr("cast(id AS string) AS id", "TIMESTAMP '2027-01-01 09:00:00Z' AS due_at")
    found = mapped(frame, read_mapping(f"id=id,due_at={expression}"))
    minutes = {row[0] for row in found.selectExpr("minute(due_at)").distinct().collect()}
    assert minutes == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("id=n", "map is missing 'due_at'; allowed: due_at=COLUMN; columns: n, at, wall, size"),
        ("id=n,due=at", "map is 'due=at'; allowed: NAME=COLUMN, with NAME one of id, due_at, payload, "),
        ("id=n,due_at=at,spread=wall", "map is 'spread=wall'; allowed: a later due_at, such as timestampadd("),
        ("id=n,due_at=at,conflict=wall", "map is 'conflict=wall'; allowed: the option conflict for all rows: insert"),
        ("id=n,id=at", "map is given 'id' twice; allowed: each name once"),
        ("id=m,due_at=at", "map id is 'm'; allowed: a column or an SQL expression of n, at, wall, size"),
        ("id=n,due_at=(at", "map due_at is '(at'; allowed: a column or an SQL expression of "),
        (
            "id=n,due_at=wall",
            "column 'due_at' is TIMESTAMP_NTZ, which is no instant; allowed: TIMESTAMP; or give timezone",
        ),
        ("id=size,due_at=at", "column 'id' is DOUBLE; allowed: STRING or an integer"),
        ("id=n,due_at=at,payload=n", "column 'payload' is INT; allowed: BINARY, STRING, STRUCT, MAP or ARRAY"),
        ("id=n,due_at=at,headers=at", "column 'headers' is TIMESTAMP; allowed: MAP<STRING, BINARY>"),
    ],
)
def test_a_wrong_mapping_is_named(spark: SparkSession, text: str, told: str) -> None:
    frame = spark.sql(
        "SELECT 1 AS n, current_timestamp() AS at, TIMESTAMP_NTZ '2027-01-01 00:00:00' AS wall, 1D AS size"
    )
    with pytest.raises(ConfigurationError) as caught:
        mapped(frame, read_mapping(text))
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"to": "orders"}, "to is 'orders'; allowed: '<sink>:<address>'"),
        ({"to": None}, "map is missing 'to'; allowed: to=COLUMN, or the option `to`"),
        ({"conflict": "newest"}, "conflict is 'newest'; allowed: insert, newer"),
        ({"conflict": "throttle:1h"}, "conflict is 'throttle:1h'; allowed: insert, newer"),
        ({"mapping": {"id": "id", "spread": "'5m'"}}, "column is 'spread'; allowed: a later due_at, such as "),
        ({"conflict": "newer"}, "map is missing 'version'; allowed: version=COLUMN, which conflict=newer compares"),
        ({"past_due": "later"}, "past_due is 'later'; allowed: reject, now"),
        ({"min_lead": "soon"}, "min_lead is 'soon'; allowed: "),
        ({"timezone": "Mars/Olympus"}, "timezone is 'Mars/Olympus'; allowed: a time zone, such as Europe/Berlin"),
        ({"max_payload": 0}, "max_payload is 0; allowed: an integer from 1 to "),
        ({"rate": -1}, "option 'rate' is '-1'; allowed: an integer from 0 to "),
        ({"concurrency": 0}, "option 'concurrency' is '0'; allowed: an integer from 1 to "),
        ({"timeout": "soon"}, "option 'timeout' is 'soon'; allowed: "),
        ({"store": "redis:/h:secret@x"}, "url is redis:/h:***@x; allowed: redis://"),
    ],
)
def test_a_wrong_option_is_named_before_spark_works(spark: SparkSession, options: dict[str, Any], told: str) -> None:
    frame = spark.sql("SELECT 'a' AS id, current_timestamp() AS due_at, '' AS payload")
    with pytest.raises(ConfigurationError) as caught:
        backfill.run(frame, **({"store": "sqlite:///x.db", "to": "redis-list:x"} | options))
    assert str(caught.value).startswith(told)
    assert "secret" not in str(caught.value)


def test_a_run_stores_what_is_good_once_and_tells_of_the_rest(spark: SparkSession, tmp_path: Path) -> None:
    due_ms = SystemClock().now_ms() + DAY_MS
    changes: list[dict[str, Any]] = [{"id": f"order-{n}", "due": due_ms + n, "payload": b"%d" % n} for n in range(50)]
    changes[-1]["payload"] = b"x" * 270_000  # more than is allowed where nothing else is said
    soon = {"id": "soon", "due": due_ms - DAY_MS // 2}
    frame = rows_of(spark, *changes, soon, {"id": "late", "due": 0}, {"id": None, "due": due_ms}, changes[0])
    store = f"sqlite:///{tmp_path / 'delay.db'}"

    def run(*, dry_run: bool = False, rejects: str | None = None) -> Summary:
        options: dict[str, Any] = {"mapping": MAP, "min_lead": "18h", "max_payload": 300_000}
        return backfill.run(frame, store=store, namespace="shop", dry_run=dry_run, rejects=rejects, **options)

    dry = run(dry_run=True)
    assert dry.counts == {"accepted": 50, "repeated": 1, "superseded": 0}
    assert not (tmp_path / "delay.db").exists()
    first = run(rejects=f"{tmp_path / 'rejects'}")
    assert first.counts == {"accepted": 50, "repeated": 1, "superseded": 0, "stored": 50, "replaced": 0, "known": 0}
    assert (first.rows, first.rejected) == (54, 3)
    assert first.facts["reasons"] == {"due_at.past_due": 1, "due_at.too_soon": 1, "id.missing": 1}
    rejects = spark.read.parquet(f"{tmp_path / 'rejects'}")
    assert sorted((row["reason"], row["field"]) for row in rejects.collect()) == [
        ("missing", "id"),
        ("past_due", "due_at"),
        ("too_soon", "due_at"),
    ]
    with pytest.raises(ConfigurationError, match=r"rejects is .*allowed: a folder that does not exist yet"):
        run(rejects=f"{tmp_path / 'rejects'}", dry_run=True)

    async def look_and_cancel() -> list[tuple[str, int, bytes]]:
        async with Scheduler(store, namespace="shop", dispatch=False) as scheduler:
            found = [each.record async for each in scheduler.pending()]
            for n in range(10):
                assert await scheduler.cancel(f"order-{n}") is CancelOutcome.CANCELLED
        return sorted((each.id, each.due_ms, each.envelope.payload) for each in found)

    assert asyncio.run(look_and_cancel()) == sorted((each["id"], each["due"], each["payload"]) for each in changes)
    again = run()
    assert {name: again.counts[name] for name in ("stored", "replaced", "known")} == {
        "stored": 0,
        "replaced": 0,
        "known": 50,
    }


def test_files_and_tables_are_read(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;due_at;payload\n007;2027-01-01T09:00:00Z;{}\n")
    found = read_source(spark, f"csv:{tmp_path / 'a.csv'}", {"delimiter": ";"})
    assert found.dtypes == [("id", "string"), ("due_at", "string"), ("payload", "string")]
    frames = [found]
    (tmp_path / "a.json").write_text('{"id": "007", "due_at": "2027-01-01T09:00:00Z", "payload": "{}"}\n')
    frames.append(read_source(spark, f"json:{tmp_path / 'a.json'}"))
    found.write.orc(f"{tmp_path / 'orc'}")
    frames.append(read_source(spark, f"orc:{tmp_path / 'orc'}"))
    url = f"jdbc:derby:{tmp_path / 'derby'};create=true"
    found.write.jdbc(url, "ORDERS")
    frames.append(read_source(spark, f"{url};dbtable=ORDERS"))
    for frame in frames:
        (row,) = mapped(frame).collect()
        assert (row["id"], row["due_at"].timestamp(), row["payload"]) == ("007", 1_798_794_000.0, bytearray(b"{}"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("orders", "from is 'orders'; allowed: parquet:DIR, csv:DIR, json:DIR, orc:DIR or jdbc:URL?dbtable=TABLE"),
        ("avro:orders", "from is 'avro:orders'; allowed: parquet:DIR"),
        (
            "parquet:/none/such",
            "from is 'parquet:/none/such'; allowed: files or a table that Spark can read (PATH_NOT_FOUND)",
        ),
    ],
)
def test_what_cannot_be_read_is_named(spark: SparkSession, text: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_source(spark, text)
    assert str(caught.value).startswith(told)
