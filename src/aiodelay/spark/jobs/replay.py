"""Replay: a part of what was kept of messages again, shifted in time, at a rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.clock import SystemClock
from aiodelay.errors import ConfigurationError, cut, shortened
from aiodelay.spark.summary import Summary
from aiodelay.timeunits import Duration, parse_duration

from . import backfill
from .backfill import checked_destination
from .given import problem_of_condition
from .mapping import mapped

__all__ = ["NOW", "happened_to", "replayed", "run"]

NOW: Final = "now"
_OCCURRENCE = "~[0-9]{10,15}$"
"""How the id of a recurring message's occurrence ends."""


def run(
    frame: DataFrame,
    *,
    store: str,
    namespace: str = "default",
    name: str | None = None,
    same_ids: bool = False,
    mapping: Mapping[str, str] | None = None,
    where: str | None = None,
    events: DataFrame | None = None,
    events_where: str | None = None,
    shift: Duration = NOW,
    to: str | None = None,
    rate: int = 500,
    concurrency: int | None = None,
    rejects: str | None = None,
    dry_run: bool = False,
) -> Summary:
    """Store messages again.

    To run it again under the same name changes nothing, for as long as the store remembers what has ended (24 h).

    Args:
        frame: What was kept of messages: a snapshot of a store, or what a backfill was made from.
        store: The store's URL, also as `env:NAME` or `file:PATH`.
        namespace: Whose messages.
        name: What this replay is called: ids become `<id>-replay-<name>`.
        same_ids: Keep ids, under a version that is higher by one: what is pending under one of them is replaced.
        mapping: For each column of a message, a column or an SQL expression; None: columns called as ours.
        where: An SQL condition on the frame.
        events: Events of an archive: only messages to which one of them happened.
        events_where: An SQL condition on the events.
        shift: `now`: all are due at once, and the rate spreads them. A duration: due so much later than they were;
            with a minus sign, earlier. What is due in the past is delivered at once.
        to: Another destination of all of them.
        rate: Most rows a second, of all tasks together; 0 = no limit.
        concurrency: How many tasks write at once; None: as many as the session has cores.
        rejects: A folder for rows that cannot be messages.
        dry_run: Count, and store nothing.

    Returns:
        What `backfill` returns; `without_message` counts the ids of events of which the frame has no message.

    Raises:
        ConfigurationError: An option, or a column's name or type, is wrong; nothing was stored.
        StoreUnavailableError: The store did not answer for too long; to run it again is safe.
    """
    clock = SystemClock()
    started_ms = clock.monotonic_ms()
    _check_name(name, same_ids=same_ids)
    shift_ms = _shift_ms(shift)
    if events is None and events_where is not None:
        raise ConfigurationError("events_where", "given without events", "events, or no condition on them")
    messages = mapped(_filtered(frame, where, "where"), mapping)
    messages = messages if to is None else messages.withColumn("to", F.lit(checked_destination(to)))
    counts: dict[str, int] = {}
    if events is not None:
        wanted = happened_to(_filtered(events, events_where, "events_where"))
        counts["without_message"] = wanted.join(messages, "id", "left_anti").count()
        messages = messages.join(wanted, "id", "left_semi")
    summary = backfill.run(
        replayed(messages, name=name, now_ms=clock.now_ms(), shift_ms=shift_ms),
        store=store,
        namespace=namespace,
        conflict="newer" if same_ids else "insert",
        past_due="now",
        rate=rate,
        concurrency=concurrency,
        rejects=rejects,
        dry_run=dry_run,
    )
    return structs.replace(
        summary,
        job="replay",
        seconds=(clock.monotonic_ms() - started_ms) / 1000,
        counts={**summary.counts, **counts},
        facts={**summary.facts, "name": name},
    )


def replayed(messages: DataFrame, *, name: str | None, now_ms: int, shift_ms: int | None) -> DataFrame:
    """Return the newest row of each id, under its new id, version and due time.

    Args:
        messages: With a message's columns.
        name: Of the replay; None: ids stay, and versions grow by one.
        now_ms: The due time without a shift.
        shift_ms: How much later messages are due than they were; None: at `now_ms`.
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
    """Return the ids of the messages that events tell of, each once; of recurring ones, that of the whole series."""
    return events.select(F.regexp_replace("id", _OCCURRENCE, "").alias("id")).distinct()


def _check_name(name: str | None, *, same_ids: bool) -> None:
    if same_ids == (name is not None):
        given = "given with same_ids" if same_ids else "missing"
        raise ConfigurationError("name", given, "a name of this replay, such as 2026-11-21-orders, or same_ids")
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
