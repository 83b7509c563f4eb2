"""`aiodelay spark compact`: few files for each day of an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common import Cluster, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["compact"]


def compact(*, archive: str, before: str | None = None, keep: str = "1d", cluster: Cluster = Cluster()) -> int:
    """Merge the files of each day that has ended; who reads meanwhile sees each event once.

    Args:
        archive: The folder that `archive` writes, on this machine or mounted here.
        before: Merge days before this one, YYYY-MM-DD; without it, before today (UTC).
        keep: How long old files stay for readers that have begun with them.
    """

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.compact import run  # noqa: PLC0415 - `--help` needs no PySpark

        return run(spark, archive=archive, before=before, keep=keep)

    return run_job(job, cluster)
