"""`aiodelay spark cold put` and `cold cancel`: schedules that are far ahead, in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from aiodelay.cli.errors import NOT_UNDERSTOOD, CommandError
from aiodelay.errors import ConfigurationError
from aiodelay.shapes import read_time

from .common import Cluster, Pace, mapping_of, read_settings, run_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["cold"]

cold: App = App(name="cold", help="Keep far schedules in files, or cancel them there.")


@cold.command
def put(
    *,
    from_: Annotated[str, Parameter(name="--from")],
    tier: str,
    store: str | None = None,
    namespace: Annotated[str, Parameter(env_var="AIODELAY_NAMESPACE")] = "default",
    to: str | None = None,
    map_: Annotated[tuple[str, ...], Parameter(name="--map", negative="")] = (),
    was_due: str | None = None,
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    conflict: Literal["insert", "newer"] = "insert",
    min_lead: str = "8d",
    max_payload: int = 262_144,
    timezone: str | None = None,
    rejects: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    now: str | None = None,
    pace: Pace = Pace(),
    cluster: Cluster = Cluster(),
) -> int:
    """Keep the rows of files or of a database in a cold tier, until `promote` moves them into a store.

    May be repeated: what the tier has of an id stays as it is, or as its highest version has it.

    Args:
        from_: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE.
        tier: The tier's folder, anywhere that Spark can read and write; it is made.
        store: The store that the tier is promoted into; with it rows that are due too soon go there, and what they
            replace is ended there too. Without it they are rejected.
        namespace: Whose messages.
        to: The destination of rows that give none: SINK:ADDRESS, or handler:TYPE.
        map_: Where a message's columns come from, as of `backfill`.
        was_due: A column or SQL expression: when the message was due that a row replaces, null of new ones; then only
            these days are looked at.
        option: Spark's own for what is read, as NAME=VALUE, such as user=me; may be repeated.
        conflict: insert: the first row of an id stands; newer: the one with the highest version.
        min_lead: Rows due sooner than this do not belong into the tier.
        max_payload: Most bytes of a payload.
        timezone: Where times without an offset were written down; without it they are rejected.
        rejects: A new folder for the rejected rows, as Parquet, with the reason of each.
        dry_run: Count, and keep nothing.
        now: The time by which rows are judged, ISO 8601 with an offset; without it, this machine's.
    """
    options = read_settings("--option", option)
    at = read_time(now, "--now")

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.cold_put import run  # noqa: PLC0415 - `--help` needs no Spark
        from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415

        return run(
            read_source(spark, from_, options),
            tier=tier,
            store=store,
            namespace=namespace,
            mapping=mapping_of(map_),
            to=to,
            was_due=was_due,
            conflict=conflict,
            min_lead=min_lead,
            max_payload=max_payload,
            timezone=timezone,
            rate=pace.rate,
            concurrency=pace.concurrency,
            timeout=pace.timeout,
            rejects=rejects,
            dry_run=dry_run,
            now=at,
        )

    return run_job(job, cluster)


@cold.command
def cancel(
    *,
    tier: str,
    ids: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    store: str | None = None,
    namespace: Annotated[str, Parameter(env_var="AIODELAY_NAMESPACE")] = "default",
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    timezone: str | None = None,
    now: str | None = None,
    pace: Pace = Pace(),
    cluster: Cluster = Cluster(),
) -> int:
    """Cancel messages in a cold tier, and in the store if they have gone there.

    May be repeated. Without a store, what has gone there, or is not found, is rejected.

    Args:
        tier: The tier's folder.
        ids: Which messages.
        from_: Or parquet:DIR, csv:DIR and so on, with the column id; version, of which no newer one is cancelled, and
            was_due_at, which tells where to look, may be there too.
        store: The store that the tier is promoted into.
        namespace: Whose messages.
        option: Spark's own for what is read, as NAME=VALUE, such as user=me; may be repeated.
        timezone: Where times without an offset were written down.
        now: The time, ISO 8601 with an offset; without it, this machine's.
    """
    if bool(ids) == (from_ is not None):
        given = "given with --from" if ids else "missing"
        raise CommandError(
            f"{ConfigurationError('ids', given, '--ids ID …, or --from WHAT')}", exit_code=NOT_UNDERSTOOD
        )
    options = read_settings("--option", option)
    at = read_time(now, "--now")

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.cold_cancel import run  # noqa: PLC0415 - `--help` needs no Spark
        from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415

        return run(
            read_source(spark, from_, options) if from_ is not None else _of_ids(spark, ids),
            tier=tier,
            store=store,
            namespace=namespace,
            timezone=timezone,
            rate=pace.rate,
            concurrency=pace.concurrency,
            timeout=pace.timeout,
            now=at,
        )

    return run_job(job, cluster)


def _of_ids(spark: SparkSession, ids: Sequence[str]) -> DataFrame:
    return spark.createDataFrame([(message_id,) for message_id in ids], "id STRING")
