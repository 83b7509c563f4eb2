"""`aiodelay spark repair`: what a reconcile has found is mended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay.shapes import read_time

from .common import Cluster, StorePlace, Truth, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["repair"]


def repair(
    *,
    differences: str,
    truth: Truth,
    kinds: Annotated[tuple[Literal["missing", "drift"], ...], Parameter(negative="")] = ("missing", "drift"),
    delete_orphans: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    max_fraction: Annotated[float, Parameter(validator=Number(gte=0, lte=1))] = 0.01,
    margin: str = "5m",
    now: str | None = None,
    place: StorePlace,
    cluster: Cluster = Cluster(),
) -> int:
    """Mend what a reconcile has found, where it is still so: each is looked at again first.

    May be repeated: a second run changes nothing more.

    Args:
        differences: Folder that `reconcile --out parquet:DIR` has written, within the last 24 h.
        kinds: What to mend; may be repeated.
        delete_orphans: Cancel orphans too, at most so many; with more of them nothing is done.
        max_fraction: With more differences than this part of the truth's rows nothing is done, 0 to 1.
        margin: Change nothing that is due sooner than this.
        now: The time of the repair, ISO 8601 with an offset; without it, this machine's.
    """
    at = read_time(now, "--now")

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.repair import run  # noqa: PLC0415 - `--help` needs no Spark
        from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415

        return run(
            spark,
            read_source(spark, f"parquet:{differences}", field="differences"),
            truth.frame(spark),
            store=place.store,
            namespace=place.namespace,
            mapping=truth.mapping(),
            to=truth.to,
            timezone=truth.timezone,
            kinds=kinds,
            delete_orphans=delete_orphans,
            max_fraction=max_fraction,
            margin=margin,
            now=at,
        )

    return run_job(job, cluster)
