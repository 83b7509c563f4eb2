"""`aiodelay spark archive`: a store's events into Parquet, by day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from .common import Cluster, StorePlace, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["archive"]


def archive(
    *,
    to: str,
    checkpoint: str | None = None,
    every: str | None = None,
    max_rows_per_batch: Annotated[int, Parameter(validator=Number(gte=1))] = 1_000_000,
    fail_on_data_loss: bool = True,
    place: StorePlace,
    cluster: Cluster = Cluster(),
) -> int:
    """Write the events of a store that are not in the archive yet, and end: for cron; or go on, with --every.

    Each event once, whatever is killed on the way. The store needs a journal or a history in its URL: ?journal=100000,
    or ?history=TOPIC on Kafka.

    Args:
        to: The archive's folder, where Spark can write.
        checkpoint: Folder that holds how far was read; without it, one within the archive.
        every: Go on until interrupted, and look so often for more: 1m.
        max_rows_per_batch: How many events are committed at a time.
        fail_on_data_loss: End with an error where events were trimmed before they were read.
    """

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.archive import run  # noqa: PLC0415 - `--help` needs no PySpark

        return run(
            spark,
            store=place.store,
            namespace=place.namespace,
            to=to,
            checkpoint=checkpoint,
            every=every,
            max_rows_per_batch=max_rows_per_batch,
            fail_on_data_loss=fail_on_data_loss,
        )

    return run_job(job, cluster)
