"""Schedule a message a day after each delivery, with aiodelay as the sink of a flow."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

dp.create_sink(
    "follow_ups",
    "aiodelay",
    {"store": "env:AIODELAY_STORE", "namespace": "follow-ups", "to": "redis-list:follow-ups"},
)


@dp.append_flow(target="follow_ups")
def a_day_later() -> DataFrame:
    """Make a message due a day after the delivery. If Spark writes a row twice, the store knows the id already."""
    spark = SparkSession.getActiveSession()
    assert spark is not None
    return spark.readStream.table("deliveries").selectExpr(
        "concat('follow-up-', id) AS id", "at + interval 1 day AS due_at", "cast(id AS binary) AS payload"
    )
