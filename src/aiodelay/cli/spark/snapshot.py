"""`aiodelay spark snapshot`: what a store holds, as Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .common import Cluster, StorePlace, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["snapshot"]


def snapshot(
    *, to: str, table: Literal["messages", "dead"] = "messages", place: StorePlace, cluster: Cluster = Cluster()
) -> int:
    """Write what a store holds into a new folder taken=TIME, so that it can be replayed once it has been delivered.

    Args:
        to: The folder of snapshots, where Spark can write.
        table: messages, which are pending or in flight, or dead letters.
    """

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.snapshot import run  # noqa: PLC0415 - `--help` needs no PySpark

        return run(spark, store=place.store, namespace=place.namespace, to=to, table=table)

    return run_job(job, cluster)
