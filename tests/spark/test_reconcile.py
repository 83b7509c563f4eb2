"""Compare a truth with a real store: the job finds exactly the differences that the test has made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from aiodelay import Scheduler
from aiodelay.core.durations import to_epoch_ms
from aiodelay.core.ids import new_op
from aiodelay.core.values import At, Envelope, Put
from aiodelay.errors import ConfigurationError, InputError
from aiodelay.spark.jobs import reconcile
from aiodelay.spark.writing import write_frame
from tests.support.planted import DUE, LANE, MAPPING, TO, apply, orders, plant


def test_what_was_planted_is_found_and_written(spark: SparkSession, url: str, namespace: str, tmp_path: Path) -> None:
    truth = orders(spark, 2000)
    plant(truth, url, namespace)
    elsewhere = Envelope("of another lane", "kafka", "orders")
    apply(url, namespace, Put(new_op(), elsewhere, At(to_epoch_ms(DUE, field="due"))))
    evaluated = spark.sparkContext.accumulator(0)

    def seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            evaluated.add(batch.num_rows)
            yield batch

    counted = truth.mapInArrow(seen, truth.schema)
    summary = reconcile.run(
        spark,
        counted,
        store=url,
        namespace=namespace,
        lane=LANE,
        mapping=MAPPING,
        to=TO,
        out=f"parquet:{tmp_path / 'd'}",
    )
    assert summary.counts == {"missing": 20, "orphan": 5, "drift": 40, "same": 1940} | dict.fromkeys(
        ["soon", "ended", "ahead", "recurring"], 0
    )
    assert (summary.rows, summary.rejected, summary.facts["stored"]) == (2000, 65, 1985)
    assert evaluated.value == 2000, "the truth is evaluated once"
    found = {row["id"]: row for row in spark.read.parquet(f"{tmp_path / 'd'}").collect()}
    assert {id_ for id_, row in found.items() if row["kind"] == "missing"} == {
        f"order-{n}" for n in range(1, 2000, 100)
    }
    assert {id_ for id_, row in found.items() if row["kind"] == "orphan"} == {
        f"order-{1_000_000 + n}" for n in range(5)
    }
    drift = {id_: row for id_, row in found.items() if row["kind"] == "drift"}
    assert {id_: row["differs"] for id_, row in drift.items()} == {
        f"order-{n + base}": what for n in range(0, 2000, 100) for base, what in ((2, "due_at"), (3, "payload"))
    }
    late = drift["order-2"]
    assert late["have_due_at"] - late["want_due_at"] == timedelta(hours=1)
    assert (late["have_version"], late["truth_rows"]) == (0, 2000)
    assert late["have_revision"] > 0
    assert len(found) == 65
    with pytest.raises(ConfigurationError, match=r"out is '.*'; allowed: a new folder, or the option overwrite"):
        reconcile.run(spark, truth, store=url, namespace=namespace, mapping=MAPPING, out=f"parquet:{tmp_path / 'd'}")
    of_all = {"store": url, "namespace": namespace, "mapping": MAPPING, "out": f"parquet:{tmp_path / 'd'}"}
    assert reconcile.run(spark, truth, overwrite=True, **of_all).counts["orphan"] == 6  # type: ignore[arg-type]
    assert spark.read.parquet(f"{tmp_path / 'd'}").where("kind = 'orphan'").count() == 6


def test_what_comes_due_soon_is_nobodys_difference(spark: SparkSession, url: str, namespace: str) -> None:
    truth = orders(spark, 10)
    apply(url, namespace)
    counts = {
        margin: reconcile.run(
            spark,
            truth,
            store=url,
            namespace=namespace,
            mapping=MAPPING,
            to=TO,
            margin=margin,
            now=DUE - timedelta(hours=1),
        ).counts
        for margin in ("1h4s", "0s")
    }
    assert (counts["1h4s"]["soon"], counts["1h4s"]["missing"]) == (5, 5)
    assert (counts["0s"]["soon"], counts["0s"]["missing"]) == (0, 10)


def test_what_is_delivered_while_it_is_read_is_no_difference(spark: SparkSession, url: str, namespace: str) -> None:
    spark.range(1).mapInArrow(
        lambda batches: batches, "id bigint"
    ).count()  # workers are there, so that reading begins at once
    since = datetime.now(UTC)
    at = F.timestamp_millis(F.lit(int(since.timestamp() * 1000)) + 5 * F.col("id"))
    truth = spark.range(6000).select(
        F.col("id").cast("string").alias("id"),
        at.alias("due_at"),
        F.lit("x").alias("payload"),
        F.lit("handler:tick").alias("to"),
    )
    write_frame(truth, {"store": url, "namespace": namespace, "rate": "0"})
    with dispatching(url, namespace) as delivered:
        delivered.wait()
        summary = reconcile.run(spark, truth, store=url, namespace=namespace, margin="0s")
    assert summary.rejected == 0
    delivered_since = summary.counts["soon"] + summary.counts["ended"]
    assert delivered_since > 0
    assert delivered_since + summary.counts["same"] == 6000


@contextmanager
def dispatching(url: str, namespace: str) -> Iterator[threading.Event]:
    """Deliver in another thread; the event is set once something was."""
    delivered, is_over = threading.Event(), threading.Event()

    async def run() -> None:
        scheduler = Scheduler(url, namespace=namespace)

        @scheduler.handler(name="tick")
        async def tick(_: bytes) -> None:
            delivered.set()

        async with scheduler:
            await asyncio.to_thread(is_over.wait)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: asyncio.run(run()))
        ended.add_done_callback(lambda _: delivered.set())
        try:
            yield delivered
        finally:
            is_over.set()
        ended.result()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([("a", DUE), (None, DUE)], "id of truth is null: 1 rows"),
        ([("a", DUE), ("b", None)], "due_at of truth is null: 1 rows, such as 'b'"),
        ([("a", DUE), ("a", DUE + timedelta(days=1))], "id of truth is in more than one row: 2 rows, such as 'a'"),
    ],
)
def test_a_truth_that_cannot_be_one_is_refused(
    spark: SparkSession, tmp_path: Path, namespace: str, rows: list[object], problem: str
) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}"
    plant(orders(spark, 2), url, namespace)
    truth = spark.createDataFrame(rows, "id string, due_at timestamp")
    with pytest.raises(InputError, match=problem.replace(".", r"\.")):
        reconcile.run(spark, truth, store=url, namespace=namespace, out=f"parquet:{tmp_path / 'd'}")
    assert not (tmp_path / "d").exists()


def test_options_are_refused_by_name(spark: SparkSession) -> None:
    truth = spark.createDataFrame([("a", DUE)], "id string, due_at timestamp")
    for options, problem in (
        ({"margin": "5"}, "margin"),
        ({"out": "orc:/d"}, "out is 'orc:/d'; allowed: parquet:DIR, csv:DIR, json:DIR"),
        ({"mapping": {"id": "nr", "due_at": "due_at"}}, "map id is 'nr'"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            reconcile.run(spark, truth, store="sqlite:///nowhere.db", **options)
