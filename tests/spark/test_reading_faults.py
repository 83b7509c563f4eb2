"""Reading missing or unreadable data, or with wrong options: a clear error first, and no write."""

from __future__ import annotations

import logging
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from aiodelay.core.values import Envelope
from aiodelay.errors import AiodelayError, ConfigurationError, StoreMismatchError, StoreUnavailableError
from aiodelay.spark.errors import clear_error
from aiodelay.spark.reading import reader_of
from tests.spark.test_reading import DUE, numbered, put, reader, rows, schema_of, store_all
from tests.support.servers import redis_products, serving

ID = schema_of("messages", "id")
NOBODY = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "option 'store' is missing"),
        ({"store": NOBODY, "table": "events"}, "option 'table' is events"),
        ({"store": NOBODY, "dueFrom": "tomorrow"}, "option 'dueFrom' is 'tomorrow'"),
        ({"store": NOBODY, "dueto": "2031-01-01T00:00:00"}, "'2031-01-01T00:00:00', which has no offset"),
        ({"store": NOBODY, "dueFrom": "2031-01-02T00:00:00Z", "dueTo": "2031-01-01T00:00:00Z"}, "allowed: up to dueTo"),
        ({"store": NOBODY, "ids": "[1]"}, "option 'ids' is '[1]'"),
        ({"store": NOBODY, "Ids": " "}, "option 'ids' is blank"),
        ({"store": NOBODY, "namespace": "a b"}, "namespace is 'a b'"),
        ({"store": NOBODY, "partitions": "-1"}, "option 'partitions' is '-1'"),
        ({"store": NOBODY, "partitions": "²"}, "option 'partitions' is '²'"),
        ({"store": NOBODY, "pushdown": "yes"}, "option 'pushdown' is 'yes'"),
        ({"store": NOBODY, "rate": "5"}, "option is 'rate'"),
        ({"store": NOBODY, "table": "done", "lane": "x"}, "given with table done"),
    ],
)
def test_every_mistake_in_an_option_names_it(options: dict[str, str], told: str) -> None:
    schema = schema_of(options.get("table", "messages") if options.get("table") != "events" else "messages", "id")
    with pytest.raises(ConfigurationError) as raised:
        reader_of(options, schema)
    assert told in f"{raised.value}"


def test_columns_that_a_table_does_not_have_are_named() -> None:
    for field, told in (
        (StructField("due", StringType()), "column of table messages is 'due'"),
        (StructField("payload", LongType()), "type of column 'payload' is bigint; allowed: binary"),
    ):
        with pytest.raises(ConfigurationError) as raised:
            reader_of({"store": NOBODY}, StructType([field]))
        assert told in f"{raised.value}"


def test_a_file_that_is_none_of_ours_is_refused_and_a_missing_one_is_not_made(tmp_path: Path) -> None:
    missing, empty, other = (tmp_path / name for name in ("missing.db", "empty.db", "other.db"))
    empty.touch()
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (n)")
    for path, kind in ((missing, StoreUnavailableError), (empty, StoreMismatchError), (other, StoreMismatchError)):
        with pytest.raises(kind) as raised:
            reader(f"sqlite:///{path}", "id").partitions()
        assert path.name in f"{raised.value}"
    assert not missing.exists()
    assert empty.stat().st_size == 0


def test_reading_writes_nothing_to_a_server_and_fails_clearly_where_it_may_not_read() -> None:
    with serving(redis_products()[0]) as url:
        client: Any = redis.Redis.from_url(url)
        for table in ("messages", "dead", "done"):
            assert rows(url, "id", table=table) == []
            assert rows(url, "id", table=table, namespace="another", ids="m1") == []
        assert client.dbsize() == 0
        store_all(url, *numbered(10))
        before = {key: client.dump(key) for key in client.scan_iter()}
        assert len(rows(url)) == len(rows(url, "id", "due_at", ids="m1")) + 9 == 10
        assert {key: client.dump(key) for key in client.scan_iter()} == before
        client.execute_command("ACL", "SETUSER", "poor", "on", ">secret", "~*", "+ping", "+select", "+client|setname")
        poor = url.replace("redis://", "redis://poor:secret@", 1)
        with pytest.raises(StoreUnavailableError) as raised:
            rows(poor, "id")
        assert "NOPERM" in f"{raised.value}"
        assert "secret" not in f"{raised.value}"
        commands = re.findall(r"`\+([a-z]+)`", Path("docs/spark/data-source.md").read_text(encoding="utf-8"))
        allowed = [f"+{command}" for command in commands]
        client.execute_command(
            "ACL", "SETUSER", "reader", "on", ">secret", "~{default:00}:*", "+select", "+client", *allowed
        )
        reads = url.replace("redis://", "redis://reader:secret@", 1)
        assert len(rows(reads)) == 10
        assert len(rows(reads, ids="m1,m2")) == 2
        assert rows(reads, table="dead") == rows(reads, table="done") == []
        client.hset("{default:00}:meta", "schema", "2")
        with pytest.raises(StoreMismatchError):
            rows(url, "id")


def test_what_cannot_be_read_is_salvaged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with serving(redis_products()[0]) as url:
        store_all(url, *numbered(5))
        client: Any = redis.Redis.from_url(url)
        key = "{default:00}:msg"
        value = client.hget(key, b"\x02m3")
        client.hset(key, b"\x02m3", value[:40] + b"\xc1" + value[41:])
        client.hset(key, b"\x02m4", b"x")
        with caplog.at_level(logging.WARNING, "aiodelay.redis"):
            found = {row["id"]: row for row in rows(url)}
    assert sorted(found) == ["m0", "m1", "m2", "m3", "m4"]
    assert [name for name, row in found.items() if row["last_error"]] == ["m3", "m4"]
    assert found["m3"]["last_error"].startswith("cannot be read: ")
    assert (found["m3"]["due_at"], found["m2"]["payload"]) == (DUE, b"2")
    assert "m3" in caplog.text


def test_spark_reads_filters_and_tells_what_is_wrong(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}"
    store_all(url, *numbered(30), put(Envelope("h", "work", "a", headers={"a": b"1"}, trace={"t": "x"})))
    found = spark.read.format("aiodelay").option("store", url).option("partitions", "3").load()
    assert found.count() == 31
    assert found.where("id = 'h'").select("headers", "trace").collect()[0].asDict() == {
        "headers": {"a": b"1"},
        "trace": {"t": "x"},
    }
    spark.sql(f"CREATE TEMPORARY VIEW stored USING aiodelay OPTIONS (store '{url}', ids 'm1,m2')")
    assert spark.sql("SELECT count(DISTINCT id) FROM stored").collect()[0][0] == 2
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushing = spark.read.format("aiodelay").option("store", url).option("pushdown", "true")
        filtered = pushing.schema("id string, due_at timestamp").load().where("id IN ('m3', 'm4') AND id > 'm3'")
        assert [row.id for row in filtered.collect()] == ["m4"]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    for wrong, kind, told in (
        ({"store": NOBODY}, StoreUnavailableError, "redis://127.0.0.1:1"),
        ({"store": f"sqlite:///{tmp_path}/none.db"}, StoreUnavailableError, "none.db"),
        ({"store": url, "dueFrom": "soon"}, ConfigurationError, "dueFrom"),
        ({"store": "memory://"}, AiodelayError, "memory"),
    ):
        with pytest.raises(Exception) as raised:  # noqa: PT011 - Spark's, of several kinds
            spark.read.format("aiodelay").options(**wrong).load().count()
        clear = clear_error(raised.value)
        assert isinstance(clear, kind)
        assert told in f"{clear}"
