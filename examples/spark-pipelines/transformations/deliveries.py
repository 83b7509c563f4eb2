"""Tables about messages: the events of a store, its deliveries, and their lateness by hour."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name


def session() -> SparkSession:
    """Return the session of the pipeline."""
    spark = SparkSession.getActiveSession()
    assert spark is not None
    return spark


@dp.table
def dispatch_log() -> DataFrame:
    """Every event of the store's journal, once."""
    events = session().readStream.format("aiodelay").option("table", "events").option("store", "env:AIODELAY_STORE")
    return events.load()


@dp.table
def deliveries() -> DataFrame:
    """Each delivery and its lateness in ms. Do not use withColumn here: see the README."""
    delivered = session().readStream.table("dispatch_log").where("event = 'delivered'")
    return delivered.selectExpr("id", "lane", "at", "due_at", "unix_millis(at) - unix_millis(due_at) AS lateness_ms")


@dp.materialized_view
def lateness_hourly() -> DataFrame:
    """The number of deliveries and their lateness, by lane and hour."""
    late = F.percentile_approx("lateness_ms", [0.5, 0.99])
    by_hour = session().read.table("deliveries").groupBy("lane", F.date_trunc("hour", "due_at").alias("hour"))
    found = by_hour.agg(F.count(F.lit(1)).alias("n"), late.alias("late"), F.max("lateness_ms").alias("max_ms"))
    return found.select(
        "lane", "hour", "n", F.col("late")[0].alias("p50_ms"), F.col("late")[1].alias("p99_ms"), "max_ms"
    )
