"""`aiodelay spark replay`: a part of what was kept of messages, again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from .common import Cluster, StorePlace, mapping_of, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["replay"]


def replay(
    *,
    from_: Annotated[str, Parameter(name="--from")],
    name: str | None = None,
    same_ids: Annotated[bool, Parameter(negative="")] = False,
    map_: Annotated[tuple[str, ...], Parameter(name="--map", negative="")] = (),
    where: str | None = None,
    archive: str | None = None,
    events_where: str | None = None,
    shift: Annotated[str, Parameter(allow_leading_hyphen=True)] = "now",
    to: str | None = None,
    rate: Annotated[int, Parameter(validator=Number(gte=0))] = 500,
    concurrency: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    rejects: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    place: StorePlace,
    cluster: Cluster = Cluster(),
) -> int:
    """Store messages again, from a snapshot or from what they were once made of.

    Under the same name it may be repeated, and changes nothing.

    Args:
        from_: parquet:DIR of snapshots; or what a backfill was made from, with the same --map.
        name: What this replay is called: ids become ID-replay-NAME.
        same_ids: Keep ids instead; what is pending under one of them is replaced.
        map_: Where a message's columns come from, as for backfill; without it, columns named as a message's.
        where: A condition in SQL on what is read, such as "to = 'kafka:orders'".
        archive: Only messages to which an event of this archive happened.
        events_where: A condition in SQL on those events, such as "event = 'delivered' and day = '2026-11-21'".
        shift: now: all are due at once, as fast as the rate lets them; or so much later than they were: +1d, -2h.
        to: Another destination of all of them: SINK:ADDRESS, or handler:TYPE.
        rate: Most messages a second, of all tasks together; 0 = no limit.
        concurrency: How many tasks write at once.
        rejects: A new folder for rows that cannot be messages, as Parquet, with the reason of each.
        dry_run: Count, and store nothing.
    """

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.replay import run  # noqa: PLC0415 - `--help` needs no PySpark
        from aiodelay.spark.jobs.report import read_events  # noqa: PLC0415
        from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415

        return run(
            read_source(spark, from_),
            store=place.store,
            namespace=place.namespace,
            name=name,
            same_ids=same_ids,
            mapping=mapping_of(map_),
            where=where,
            events=None if archive is None else read_events(spark, archive),
            events_where=events_where,
            shift=shift,
            to=to,
            rate=rate,
            concurrency=concurrency,
            rejects=rejects,
            dry_run=dry_run,
        )

    return run_job(job, cluster)
