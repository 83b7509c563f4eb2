"""`aiodelay spark reconcile`: a truth against a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from aiodelay.shapes import read_time

from .common import Cluster, StorePlace, Truth, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["reconcile"]


def reconcile(
    *,
    truth: Truth,
    lane: str | None = None,
    margin: str = "5m",
    now: str | None = None,
    out: str | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    place: StorePlace,
    cluster: Cluster = Cluster(),
) -> int:
    """Compare a truth with what is pending in a store: what is missing, what is orphaned, what has drifted.

    Nothing is changed. The exit code is 1 if there are more differences than --max-rejected allows.

    Args:
        lane: Only messages of this sink or event type; the truth must then be of it alone.
        margin: Say nothing of what is due sooner than this; longer than reading takes.
        now: The time of the comparison, ISO 8601 with an offset; without it, this machine's.
        out: Where differences are written: parquet:DIR (which `repair` takes), csv:DIR or json:DIR.
        overwrite: Replace what is there already.
    """
    at = read_time(now, "--now")

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.reconcile import run  # noqa: PLC0415 - `--help` needs no Spark

        return run(
            spark,
            truth.frame(spark),
            store=place.store,
            namespace=place.namespace,
            lane=lane,
            mapping=truth.mapping(),
            to=truth.to,
            timezone=truth.timezone,
            margin=margin,
            now=at,
            out=out,
            overwrite=overwrite,
        )

    return run_job(job, cluster)
