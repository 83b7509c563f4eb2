"""`aiodelay spark simulate`: what lateness and backlog what is pending will bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from aiodelay.cli.errors import NOT_UNDERSTOOD, CommandError
from aiodelay.errors import ConfigurationError, masked_url, shortened
from aiodelay.shapes import read_time

from .common import Cluster, mapping_of, read_settings, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["simulate"]


def simulate(
    *,
    rate: str,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    store: Annotated[str | None, Parameter(env_var="AIODELAY_STORE")] = None,
    namespace: Annotated[str, Parameter(env_var="AIODELAY_NAMESPACE")] = "default",
    lane: str | None = None,
    map_: Annotated[tuple[str, ...], Parameter(name="--map", negative="")] = (),
    option: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    where: str | None = None,
    timezone: str | None = None,
    from_time: str | None = None,
    to_time: str | None = None,
    overdue: Literal["backlog", "ignore"] = "backlog",
    scale: float = 1.0,
    slot: str | None = None,
    out: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    cluster: Cluster = Cluster(),
) -> int:
    """Tell how late messages will be, and how long the backlog gets, at some rates of dispatch.

    Args:
        rate: Messages a second, up to six with commas, such as 500,1000,2000.
        from_: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE; then no store is read.
        store: URL of the store whose pending messages are read; env:NAME or file:PATH if it holds a password.
        namespace: Whose messages, in a store that several applications share.
        lane: Only this sink's or event type's, of a store.
        map_: Where the due time comes from, as for backfill: due_at=remind_at; the rest does not count.
        option: Spark's own for what is read, as NAME=VALUE, such as user=me; may be repeated.
        where: A condition in SQL on what is read with --from, such as "to = 'kafka:orders'".
        timezone: Where times without an offset were written down.
        from_time: Simulate from then on, ISO 8601 with an offset; from now on without it.
        to_time: Until then; 7 days without it, 92 at most.
        overdue: What is due before that time: it is backlog at its begin, or it is ignored.
        scale: As if there were so many times as many messages, 0.01 to 100.
        slot: Messages due within the same slot count as due at its begin: 100ms, 1s; what divides an hour. 1ms to 10s
            without it, by the length of the time.
        out: Folder of this machine for simulate.csv, a row for each hour and rate, and simulate.html, with plots.
        overwrite: Replace what is there already.
    """
    start, end = read_time(from_time, "--from-time"), read_time(to_time, "--to-time")
    options = read_settings("--option", option)

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.simulate import pending, read_rates, run, span_of  # noqa: PLC0415 - for `--help`
        from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415

        rates, span = read_rates(rate), span_of(start, end)
        if from_ is not None:
            frame = read_source(spark, from_, options)
        else:
            frame = pending(spark, store=f"{store}", span=span, namespace=namespace, lane=lane)
        return run(
            frame,
            rates=rates,
            span=span,
            mapping=mapping_of(map_),
            timezone=timezone,
            where=where,
            overdue=overdue,
            scale=scale,
            slot=slot,
            source=masked_url(from_ or f"{store}"),
            out=out,
            overwrite=overwrite,
        )

    _check_source(from_, store, lane)
    return run_job(job, cluster)


def _check_source(from_: str | None, store: str | None, lane: str | None) -> None:
    wrong = None
    if from_ is None and store is None:
        wrong = ConfigurationError("--store", "missing", "a store, or --from")
    if from_ is not None and lane is not None:
        wrong = ConfigurationError("--lane", shortened(lane), "with a store; of what is read with --from, --where")
    if wrong is not None:
        raise CommandError(f"{wrong}", exit_code=NOT_UNDERSTOOD)
