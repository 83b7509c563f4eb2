"""`aiodelay spark promote`: what comes due soon moves from a cold tier into a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from aiodelay.shapes import read_time

from .common import Cluster, Pace, StorePlace, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["promote"]


def promote(
    *,
    tier: str,
    window: str = "7d",
    min_lead: str = "1d",
    new_store: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    now: str | None = None,
    place: StorePlace,
    pace: Pace = Pace(),
    cluster: Cluster = Cluster(),
) -> int:
    """Move what is due within a window from a cold tier into a store; run it every day.

    May be repeated, also after it was killed. Ends with 1 if messages had less than the minimum lead left: they are
    stored, but a promotion was missed.

    Args:
        tier: The tier's folder, as of `cold put`.
        window: How far ahead of their time messages are moved, at least.
        min_lead: Messages that have less time than this when they are moved are late.
        new_store: Promote into this store from now on; without it, another one than before is refused.
        dry_run: Count, and move nothing.
        now: The time, ISO 8601 with an offset; without it, this machine's.
    """
    at = read_time(now, "--now")

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.promote import run  # noqa: PLC0415 - `--help` needs no Spark

        return run(
            spark,
            tier=tier,
            store=place.store,
            namespace=place.namespace,
            window=window,
            min_lead=min_lead,
            rate=pace.rate,
            concurrency=pace.concurrency,
            timeout=pace.timeout,
            new_store=new_store,
            dry_run=dry_run,
            now=at,
        )

    return run_job(job, cluster)
