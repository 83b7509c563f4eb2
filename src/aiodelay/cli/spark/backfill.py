"""`aiodelay spark backfill`: the rows of files or of a database become messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from .common import Cluster, Pace, StorePlace, mapping_of, read_settings, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["backfill"]


def backfill(
    *,
    from_: Annotated[str, Parameter(name="--from")],
    to: str | None = None,
    map_: Annotated[tuple[str, ...], Parameter(name="--map", negative="")] = (),
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    conflict: Literal["insert", "newer"] = "insert",
    min_lead: str = "0s",
    past_due: Literal["reject", "now"] = "reject",
    max_payload: int = 262_144,
    timezone: str | None = None,
    rejects: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    place: StorePlace,
    pace: Pace = Pace(),
    cluster: Cluster = Cluster(),
) -> int:
    """Store the rows of files or of a database as messages.

    May be repeated: what the store knows of an id stays as it is, or as its highest version has it.

    Args:
        from_: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE.
        to: The destination of rows that give none: SINK:ADDRESS, or handler:TYPE.
        map_: Where a message's columns come from: id=order_id,due_at=remind_at,payload=struct(*); columns or SQL
            expressions; may be repeated. Without it, columns named as a message's.
        option: Spark's own for what is read, as NAME=VALUE, such as user=me; may be repeated.
        conflict: insert: the first version of an id stands; newer: the one with the highest version.
        min_lead: Reject rows that are due sooner than this.
        past_due: What becomes of rows whose time is up: reject them, or deliver them now.
        max_payload: Most bytes of a payload.
        timezone: Where times without an offset were written down; without it they are rejected.
        rejects: A new folder for the rejected rows, as Parquet, with the reason of each.
        dry_run: Count, and store nothing.
    """
    options = read_settings("--option", option)

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.backfill import run  # noqa: PLC0415 - `--help` needs no Spark
        from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415

        return run(
            read_source(spark, from_, options),
            mapping=mapping_of(map_),
            store=place.store,
            namespace=place.namespace,
            to=to,
            conflict=conflict,
            min_lead=min_lead,
            past_due=past_due,
            max_payload=max_payload,
            timezone=timezone,
            rate=pace.rate,
            concurrency=pace.concurrency,
            timeout=pace.timeout,
            rejects=rejects,
            dry_run=dry_run,
        )

    return run_job(job, cluster)
