"""`aiodelay spark replay`: store messages of a snapshot or of a backfill again, with new due times, at a rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import structs
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.errors import ConfigurationError, cut, shortened
from aiodelay.operations.spark_options import ReplayOptions
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.summary import Summary

from . import backfill
from .backfill import checked_destination
from .job import job
from .mapping import mapped
from .settings_origin import problem_of_condition

__all__ = ["NOW", "happened_to", "replayed", "run"]

NOW: Final = ReplayOptions.shift
_OCCURRENCE = "~[0-9]{10,15}$"
"""The end of the id of an occurrence of a recurring message."""


@dataclass(frozen=True, kw_only=True)
class _Options(ReplayOptions):
    events: DataFrame | None = None


@job("replay", _Options)
def run(frame: DataFrame, options: _Options) -> Summary:
    """Store messages again, with new due times.

    A second run with the same name changes nothing while the store remembers ended messages (24 h).

    Args:
        frame: Copies of the messages: a snapshot of a store, or the source of a backfill.
        options: See `ReplayOptions`; callers give each option by keyword. Python callers may also give `events`, the
            events of an archive. Then the job replays only messages that have such an event.

    Returns:
        The summary of `backfill`, with more counts. `without_message`: ids that have events but no message in the
        frame. `recurring`: with `same_ids`, the series that were left out.

    Raises:
        ConfigurationError: An option is wrong, or a column has a wrong name or type. Nothing was stored.
        StoreUnavailableError: The store did not answer for too long. Running the job again is safe.
    """
    _check_name(options.name, same_ids=options.same_ids)
    shift_ms = _shift_ms(options.shift)
    if options.events is None and options.events_where is not None:
        raise ConfigurationError("events_where", "given without events", "events, or no events_where")
    counts: dict[str, int] = {}
    frame = _filtered(frame, options.where, "where")
    if options.same_ids and options.mapping is None and "rule" in frame.columns:
        counts["recurring"] = frame.where("rule IS NOT NULL").count()
        frame = frame.where("rule IS NULL")
    messages = mapped(frame, options.mapping)
    messages = messages if options.to is None else messages.withColumn("to", F.lit(checked_destination(options.to)))
    if options.events is not None:
        wanted = happened_to(_filtered(options.events, options.events_where, "events_where"))
        ids = messages.select("id")
        left = wanted.join(ids, "id", "left_anti").join(ids.withColumnRenamed("id", "series"), "series", "left_anti")
        counts["without_message"] = left.select("series").distinct().count()
        wanted = wanted.select(F.explode(F.array("id", "series")).alias("id"))
        messages = messages.join(wanted, "id", "left_semi")
    summary = backfill.run(
        replayed(messages, name=options.name, now_ms=SystemClock().now_ms(), shift_ms=shift_ms),
        store=options.store,
        namespace=options.namespace,
        conflict="newer" if options.same_ids else "insert",
        past_due="now",
        rate=options.rate,
        concurrency=options.concurrency,
        rejects=options.rejects,
        dry_run=options.dry_run,
    )
    facts = {**summary.facts, "name": options.name}
    return structs.replace(summary, counts={**summary.counts, **counts}, facts=facts)


def replayed(messages: DataFrame, *, name: str | None, now_ms: int, shift_ms: int | None) -> DataFrame:
    """Return the newest row of each id, with its new id, version and due time.

    Args:
        messages: Rows with the columns of a message.
        name: The name of the replay, which becomes part of the ids. None = ids stay, and versions grow by one.
        now_ms: The due time if there is no shift, in epoch ms.
        shift_ms: The time by which each due time moves; None = all messages are due at `now_ms`.
    """
    version = F.coalesce("version", F.lit(0)) if "version" in messages.columns else F.lit(0)
    order = Window.partitionBy("id").orderBy(version.desc(), F.col("due_at").desc())
    newest = messages.withColumn("_place", F.row_number().over(order)).where("_place = 1").drop("_place")
    due_us = F.lit(1000 * now_ms) if shift_ms is None else F.unix_micros("due_at") + F.lit(1000 * shift_ms)
    found = newest.withColumn("due_at", F.timestamp_micros(due_us))
    if name is None:
        return found.withColumn("version", (version + F.lit(1)).cast("bigint"))
    return found.withColumn("id", F.concat("id", F.lit(f"-replay-{name}"))).drop("version")


def happened_to(events: DataFrame) -> DataFrame:
    """Return the ids that have events, each once, as `id`. For an occurrence, `series` is the id of its series.

    A snapshot of messages has the series, and a snapshot of dead letters has the occurrences. For another message,
    `series` is the id too.
    """
    return events.select("id", F.regexp_replace("id", _OCCURRENCE, "").alias("series")).distinct()


def _check_name(name: str | None, *, same_ids: bool) -> None:
    if same_ids == (name is not None):
        given = "given with same_ids" if same_ids else "missing"
        raise ConfigurationError("name", given, "either a name of this replay, such as 2026-11-21-orders, or same_ids")
    if name is not None and not (name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()):
        raise ConfigurationError("name", shortened(name), "letters, digits, '-', '_' and '.'")


def _shift_ms(shift: Duration) -> int | None:
    if shift == NOW:
        return None
    if not isinstance(shift, str):
        return parse_duration(shift, field="shift", error=ConfigurationError)
    is_earlier = shift.startswith("-")
    ms = parse_duration(shift.removeprefix("-" if is_earlier else "+"), field="shift", error=ConfigurationError)
    return -ms if is_earlier else ms


def _filtered(frame: DataFrame, where: str | None, field: str) -> DataFrame:
    if where is None:
        return frame
    if problem := problem_of_condition(frame, where):
        allowed = f"an SQL condition on {cut(', '.join(frame.columns), 200)}{problem}"
        raise ConfigurationError(field, shortened(where), allowed)
    return frame.where(where)
