"""Snapshot: what a store holds, as Parquet, so that there is something to replay when it has been delivered."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from pyspark.sql import SparkSession

from aiodelay.clock import SystemClock
from aiodelay.spark.session import register
from aiodelay.spark.summary import Summary
from aiodelay.timeunits import from_epoch_ms

from .given import one_of, writing_anew
from .sources import stored

__all__ = ["Kept", "run"]

Kept: TypeAlias = Literal["messages", "dead"]
_FOLDER: Final = "taken"


def run(spark: SparkSession, *, store: str, to: str, namespace: str = "default", table: Kept = "messages") -> Summary:
    """Write a store's messages, or its dead letters, into a new folder `taken=<time>` within a folder of snapshots.

    Args:
        spark: The session.
        store: The store's URL, also as `env:NAME` or `file:PATH`.
        to: The folder of snapshots, where the executors can write; to be read as a whole, or one of it.
        namespace: Whose messages.
        table: `messages`, which are pending or in flight, or `dead`.

    Raises:
        ConfigurationError: An option is wrong, or there is a snapshot of this second.
        StoreUnavailableError: The store does not answer.
    """
    clock = SystemClock()
    started_ms = clock.monotonic_ms()
    one_of("table", table, get_args(Kept))
    folder = f"{to.rstrip('/')}/{_FOLDER}={from_epoch_ms(clock.now_ms()):%Y-%m-%dT%H-%M-%SZ}"
    register(spark)
    found = stored(spark, table=table, store=store, namespace=namespace)
    with writing_anew("to", folder, "a folder without a snapshot of this second"):
        found.write.parquet(folder)
    rows = spark.read.schema(found.schema).parquet(folder).count()
    seconds = (clock.monotonic_ms() - started_ms) / 1000
    return Summary(job="snapshot", seconds=seconds, rows=rows, counts={table: rows}, facts={"folder": folder})
