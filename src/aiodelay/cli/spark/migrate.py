"""`aiodelay spark migrate`: what is due from a time on moves to another store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay.errors import ConfigurationError
from aiodelay.shapes import read_time

from .common import Cluster, Pace, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["migrate"]


def migrate(
    *,
    from_: Annotated[str, Parameter(name="--from")],
    to: str,
    cutover: str | None = None,
    work: str | None = None,
    namespace: str = "default",
    to_namespace: str = "default",
    lead: str = "10m",
    margin: str = "2m",
    passes: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    verify: Annotated[bool, Parameter(negative="")] = False,
    pace: Pace = Pace(),
    cluster: Cluster = Cluster(),
) -> int:
    """Move what is due from a time on to another store, while both are in use.

    May be repeated, and must be after a crash. Exit code 1: something is left in the first store, or differs.

    Args:
        from_: URL of the store that messages leave; env:NAME or file:PATH if it holds a password. Or
            etf1+kafka://host:9092/schedules or fred84+redis://host?prefix=de_, once that scheduler has been stopped.
        to: Of the store that they move to.
        cutover: ISO 8601 with an offset. What is due before it stays. Once it has passed, what is left is moved as far
            as it is due later than lead from now.
        work: A folder of this migration alone, where driver and executors can write; it holds payloads.
        namespace: Whose messages.
        to_namespace: Whose they become.
        lead: How far ahead the cut-over must be at least for a run to begin.
        margin: Move nothing any more that is due within this.
        passes: How many at most; 0: until one finds nothing, or it is margin before the cut-over.
        verify: Compare each copy with its original, in all their parts, before that is taken out.
    """
    at = read_time(cutover, "--cutover")

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs import takeover  # noqa: PLC0415 - `--help` needs no Spark
        from aiodelay.spark.jobs.migrate import run  # noqa: PLC0415
        from aiodelay.spark.options import store_url  # noqa: PLC0415

        if store_url(from_).startswith(takeover.SOURCES):
            return takeover.run(source=from_, target=to, to_namespace=to_namespace, verify=verify)
        if at is None or work is None:
            name = "--cutover" if at is None else "--work"
            raise ConfigurationError(name, "missing", "--cutover 2027-01-01T00:00:00Z --work DIR")
        return run(
            spark,
            source=from_,
            target=to,
            cutover=at,
            work=work,
            namespace=namespace,
            to_namespace=to_namespace,
            lead=lead,
            margin=margin,
            passes=passes,
            rate=pace.rate,
            concurrency=pace.concurrency,
            timeout=pace.timeout,
            verify=verify,
        )

    return run_job(job, cluster)
