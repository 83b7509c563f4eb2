"""`aiodelay spark snapshot`: copy a store's messages or dead letters to Parquet, for `replay`."""

from __future__ import annotations

from typing import Final, get_args

from pyspark.sql import SparkSession

from aiodelay.core.durations import from_epoch_ms
from aiodelay.operations.spark_options import Kept, SnapshotOptions
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.session import register
from aiodelay.spark.summary import Summary

from .job import job
from .settings_origin import one_of, writing_anew
from .sources import stored

__all__ = ["Kept", "run"]

_FOLDER: Final = "taken"


@job("snapshot", SnapshotOptions)
def run(spark: SparkSession, options: SnapshotOptions) -> Summary:
    """Write a store's messages, or its dead letters, into a new folder `taken=<time>` within a folder of snapshots.

    Args:
        spark: The session.
        options: See `SnapshotOptions`; callers give each option by keyword.

    Raises:
        ConfigurationError: An option is wrong, or the folder already has a snapshot from the same second.
        StoreUnavailableError: The store does not answer.
    """
    one_of("table", options.table, get_args(Kept))
    folder = f"{options.to.rstrip('/')}/{_FOLDER}={from_epoch_ms(SystemClock().now_ms()):%Y-%m-%dT%H-%M-%SZ}"
    register(spark)
    found = stored(spark, table=options.table, store=options.store, namespace=options.namespace)
    with writing_anew("to", folder, "a folder without a snapshot of this second"):
        found.write.parquet(folder)
    rows = spark.read.schema(found.schema).parquet(folder).count()
    return Summary(rows=rows, counts={options.table: rows}, facts={"folder": folder})
