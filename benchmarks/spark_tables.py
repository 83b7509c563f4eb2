"""For BD1 to BD9: a session with two tasks at once, and tables of messages in Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .harness import PAYLOAD_BYTES, Plan, check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["COLUMNS", "DUE_MS", "PROCESSES", "TO", "messages", "session", "write_messages"]

PROCESSES = 2
"""Number of tasks at once, and of processes of the bare sides."""
TO = "redis-list:orders"
COLUMNS = ("id", "due_at", "payload", "to")
DUE_MS = 2_000_000_000_000
AT_ONCE_ROWS = 100_000


@contextmanager
def session(plan: Plan) -> Iterator[SparkSession]:
    """Start Spark in this process and warm it up. A running session stays."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - other benchmarks run without Spark

    from aiodelay.spark.session import local_session  # noqa: PLC0415 - as above

    is_there = SparkSession.getActiveSession() is not None
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": f"{plan.directory / 'spark'}",
        "spark.sql.shuffle.partitions": f"{2 * PROCESSES}",
        "spark.sql.warehouse.dir": f"{plan.directory / 'warehouse'}",
    }
    spark = local_session(f"local[{PROCESSES}]", settings)
    try:
        yield spark
    finally:
        if not is_there:
            spark.stop()


def messages(spark: SparkSession, n: int, *, to: str = TO) -> DataFrame:
    """Return messages 0 to n-1: ids of text, an hour of due times, payloads of 200 bytes."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name; as above

    number = F.col("id")
    return spark.range(n).select(
        F.concat(F.lit("order-"), number).alias("id"),
        F.timestamp_millis(DUE_MS + number % 3_600_000).alias("due_at"),
        F.rpad(number.cast("string"), PAYLOAD_BYTES, "x").cast("binary").alias("payload"),
        F.lit(to).alias("to"),
    )


def write_messages(spark: SparkSession, n: int, path: Path) -> DataFrame:
    """Write messages as Parquet, in at least as many files as tasks at once. Return the frame that reads them."""
    files = PROCESSES * -(-n // (PROCESSES * AT_ONCE_ROWS))
    messages(spark, n).repartition(files).write.mode("overwrite").parquet(f"{path}")
    frame = spark.read.parquet(f"{path}")
    check(frame.count() == n, "the table has other rows")
    return frame
