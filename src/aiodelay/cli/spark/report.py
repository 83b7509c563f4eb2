"""`aiodelay spark report`: how late messages were delivered, and what failed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from aiodelay.shapes import read_time

from .common import Cluster, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["report"]


def report(
    *,
    archive: str,
    by: Annotated[tuple[Literal["lane", "hour", "day"], ...], Parameter(negative="")] = ("lane", "hour"),
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    to: str | None = None,
    where: str | None = None,
    parquet: str | None = None,
    csv: Path | None = None,
    html: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    cluster: Cluster = Cluster(),
) -> int:
    """Report how late messages were delivered, and what failed, from the archive that `archive` has written.

    Args:
        archive: Folder of archived events, wherever Spark can read.
        by: What to have a row for: lane, and hour or day, in UTC; may be repeated.
        from_: Count what happened from then on; ISO 8601 with an offset.
        to: Count what happened before then; likewise.
        where: A condition in SQL on the events' columns, such as "lane = 'kafka'".
        parquet: Folder to write the rows to, wherever Spark can write.
        csv: File of this machine for the same rows.
        html: File of this machine for a page with plots.
        overwrite: Replace what is there already.
    """
    start, end = read_time(from_, "--from"), read_time(to, "--to")

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.report import run  # noqa: PLC0415 - `--help` needs no PySpark

        return run(
            spark,
            archive=archive,
            by=by,
            start=start,
            end=end,
            where=where,
            parquet=parquet,
            csv=csv,
            html=html,
            overwrite=overwrite,
        )

    return run_job(job, cluster)
