"""Writing with `format("aiodelay")`: every part of a message, once, into a real store, despite repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from aiodelay.core.values import LateAction
from aiodelay.errors import ConfigurationError
from aiodelay.recurrence import Every, encode_rule
from aiodelay.spark.errors import clear_error
from aiodelay.spark.schemas import DEAD, MESSAGES
from aiodelay.spark.write_settings import read_settings
from aiodelay.spark.writing import Counts, write_frame
from tests.spark.messages import frame_of, given, stored
from tests.support.processes import ROOT
from tests.support.servers import RedisServer

DUE = datetime(2030, 1, 1, 12, tzinfo=UTC)
DUE_MS = int(DUE.timestamp() * 1000)


def write(frame: DataFrame, url: str, namespace: str, **options: str) -> None:
    frame.write.format("aiodelay").mode("append").options(**given(url, namespace, **options)).save()


def test_a_row_becomes_the_message_that_it_describes(spark: SparkSession, url: str, namespace: str) -> None:
    columns = (
        "id string, due_at timestamp, payload binary, to string, type string, encoding string, key binary, "
        "headers map<string,binary>, version bigint, expires_at timestamp, late string, rule string, "
        "trace map<string,string>, state string, attempt int, last_error string"
    )
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    none: Sequence[Any] = [None] * 8
    rows = [
        ("größe-✓", DUE, bytes(range(256)), "redis-list:orders", "order", "json", b"\0k", {"h": b"\xff"}, 7,
         DUE + timedelta(minutes=1), "drop", None, trace, "scheduled", 3, "was"),
        ("empty", DUE + timedelta(microseconds=1), b"", "handler:order.check", "order.check", "json", *none[:2], 0,
         *none[:7]),
        ("nothing", DUE, None, "kafka:orders", None, None, b"k", None, 1, *none[:7]),
        ("large", DUE, b"x" * 50_000, "redis-list:orders", None, None, None, {}, 2**63 - 1, *none[:7]),
        ("often", DUE, b"r", "redis-list:orders", None, None, None, None, 1, None, "deliver",
         '{"interval": "10m", "missed": "skip"}', *none[:4]),
    ]  # fmt: skip
    write(spark.createDataFrame(rows, columns), url, namespace, conflict="newer")
    found = stored(url, namespace)
    assert found.keys() == {"größe-✓", "empty", "nothing", "large", "often"}
    full = found["größe-✓"]
    assert (full.envelope.lane, full.envelope.address, full.envelope.type) == ("redis-list", "orders", "order")
    assert (full.envelope.payload, full.envelope.encoding, full.envelope.key) == (bytes(range(256)), "json", b"\0k")
    assert (dict(full.envelope.headers), full.envelope.version) == ({"h": b"\xff"}, 7)
    assert dict(full.envelope.trace) == trace
    assert (full.due_ms, full.expires_ms, full.late) == (DUE_MS, DUE_MS + 60_000, LateAction.DROP)
    assert (full.attempt, full.last_error) == (0, None), "a message that is written begins a new life"
    empty = found["empty"]
    assert (empty.envelope.lane, empty.envelope.address, empty.envelope.type) == ("order.check", "", "")
    assert (empty.due_ms, empty.late) == (DUE_MS + 1, LateAction.DELIVER), "a time is rounded up: never early"
    assert (found["nothing"].envelope.encoding, found["nothing"].envelope.payload) == ("null", b"")
    assert len(found["large"].envelope.payload) == 50_000
    assert found["large"].envelope.version == 2**63 - 1
    assert found["often"].envelope.rule == encode_rule(Every("10m", missed="skip"))


def test_what_is_written_again_is_known_and_only_a_newer_version_replaces(
    spark: SparkSession, url: str, namespace: str
) -> None:
    frame = frame_of(spark, 1_200).withColumn("version", F.col("id").cast("int") % 2)
    options = given(url, namespace)
    assert write_frame(frame, options) == Counts(stored=1_200)
    assert write_frame(frame, options | {"concurrency": "2"}) == Counts(known=1_200)
    found = stored(url, namespace)
    assert len(found) == 1_200
    assert found["7"].envelope.payload == b"7"
    assert {each.envelope.version for each in found.values()} == {0}, "the column counts with conflict=newer"
    assert write_frame(frame, options | {"conflict": "newer"}) == Counts(replaced=600, known=600)


def test_an_empty_frame_is_written(spark: SparkSession, redis_server: RedisServer, namespace: str) -> None:
    frame = spark.createDataFrame([], "id string, due_at timestamp, payload string")
    write(frame, redis_server.url, namespace)
    assert write_frame(frame, given(redis_server.url, namespace)) == Counts()
    assert stored(redis_server.url, namespace) == {}


def test_a_cap_holds_over_all_tasks(spark: SparkSession, redis_server: RedisServer, namespace: str) -> None:
    began = datetime.now(UTC)
    counts = write_frame(frame_of(spark, 600), given(redis_server.url, namespace, rate="300"))
    assert counts == Counts(stored=600)
    assert datetime.now(UTC) - began >= timedelta(seconds=2)


def test_what_our_reader_gives_can_be_written(spark: SparkSession) -> None:
    for table, conflict in ((MESSAGES, "newer"), (DEAD, "insert")):
        schema = spark.createDataFrame([], table).schema
        assert read_settings(given("redis://host", "default", conflict=conflict), schema).conflict == conflict


def test_a_mistake_is_told_before_a_task_starts(spark: SparkSession) -> None:
    frame = frame_of(spark, 1).withColumn("topic", F.lit("x"))
    with pytest.raises(Exception, match=r"ConfigurationError: column is 'topic'; allowed: id, due_at") as found:
        write(frame, "redis://127.0.0.1:1", "default")
    assert isinstance(clear_error(found.value), ConfigurationError)
    with pytest.raises(Exception, match=r"allowed: mode\('append'\)"):
        frame_of(spark, 1).write.format("aiodelay").mode("overwrite").options(**given("redis://h", "n")).save()


def test_the_example_of_the_page_writes_what_it_says(spark: SparkSession, redis_server: RedisServer) -> None:
    page = (ROOT / "docs" / "spark" / "data-source.md").read_text(encoding="utf-8")
    example = page.partition("## Writing")[2].partition("```python\n")[2].partition("```")[0]
    exec(example.replace("redis://localhost", redis_server.url), {"spark": spark})
    found = stored(redis_server.url, "shop")["order-1"]
    assert (found.envelope.address, found.due_ms) == ("reminders", DUE_MS)
