"""What `format("aiodelay")` writes: every part of a message, once, into a real store, whatever is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from aiodelay.model import Late, LateAction, Query, Record
from aiodelay.ports import Inspectable
from aiodelay.recurrence import Every, encode_rule
from aiodelay.registry import open_store
from aiodelay.spark.writing import Counts, write_frame
from tests.support.servers import RedisServer

DUE = datetime(2030, 1, 1, 12, tzinfo=UTC)
DUE_MS = int(DUE.timestamp() * 1000)


@pytest.fixture(params=["redis", "sqlite"])
def url(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> str:
    return redis_server.url if request.param == "redis" else f"sqlite:///{tmp_path / 'delay.db'}"


def stored(url: str, namespace: str) -> dict[str, Record]:
    async def read() -> dict[str, Record]:
        async with open_store(url, namespace=namespace, clock=None) as store:
            assert isinstance(store, Inspectable)
            found: dict[str, Record] = {}
            after = None
            while page := await store.search(Query(after=after, limit=1000)):
                found |= {each.record.id: each.record for each in page}
                after = (page[-1].next_attempt_ms, page[-1].record.id)
            return found

    return asyncio.run(read())


def write(frame: DataFrame, url: str, namespace: str, **options: str) -> None:
    given = {"store": url, "namespace": namespace, "rate": "0"} | options
    frame.write.format("aiodelay").mode("append").options(**given).save()


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
    frame = spark.range(1_200).select(
        F.concat(F.lit("m"), "id").alias("id"),
        F.lit(DUE).alias("due_at"),
        F.col("id").cast("string").alias("payload"),
        (F.col("id") % 2).alias("version"),
    )
    given = {"store": url, "namespace": namespace, "to": "redis-list:orders", "rate": "0"}
    assert write_frame(frame, given) == Counts(stored=1_200)
    assert write_frame(frame, given | {"concurrency": "2"}) == Counts(known=1_200)
    found = stored(url, namespace)
    assert len(found) == 1_200
    assert found["m7"].envelope.payload == b"7"
    assert {each.envelope.version for each in found.values()} == {0}, "the column counts with conflict=newer"
    newer = given | {"conflict": "newer"}
    assert write_frame(frame, newer) == Counts(replaced=600, known=600)
    assert Late.deliver().action is found["m7"].late


def test_an_empty_frame_is_written(spark: SparkSession, redis_server: RedisServer, namespace: str) -> None:
    frame = spark.createDataFrame([], "id string, due_at timestamp, payload string")
    write(frame, redis_server.url, namespace, to="redis-list:orders")
    assert write_frame(frame, {"store": redis_server.url, "to": "redis-list:orders"}) == Counts()
    assert stored(redis_server.url, namespace) == {}


def test_a_cap_holds_over_all_tasks(spark: SparkSession, redis_server: RedisServer, namespace: str) -> None:
    frame = spark.range(600).selectExpr("string(id) id", "timestamp'2030-01-01' due_at", "'x' payload")
    given = {"store": redis_server.url, "namespace": namespace, "to": "redis-list:orders", "rate": "300"}
    began = datetime.now(UTC)
    assert write_frame(frame, given) == Counts(stored=600)
    assert datetime.now(UTC) - began >= timedelta(seconds=2)
