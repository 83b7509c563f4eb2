"""Backfill: the rows of any frame become messages of a store; what cannot be one is told why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, get_args

from msgspec import structs
from pyspark.sql import DataFrame

from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.validation import HANDLER_TARGET, check_count, check_type_name, split_target
from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError, InputError
from aiodelay.operations.spark_options import BackfillOptions, OnConflict, PastDue
from aiodelay.ports.clock import SystemClock
from aiodelay.scheduler import MOST_PAYLOAD
from aiodelay.spark.summary import Summary
from aiodelay.spark.write_settings import read_settings, write_options
from aiodelay.spark.writing import write_frame

from .checking import DROPPED, Rules, accepted, judged, rejected
from .job import job
from .mapping import MAPPED, given
from .settings_origin import one_of, writing_anew

__all__ = ["Found", "OnConflict", "PastDue", "checked_destination", "given_whole", "run", "sorted_out"]


@dataclass(frozen=True, kw_only=True)
class _Options(BackfillOptions):
    now_ms: int | None = None


@job("backfill", _Options)
def run(frame: DataFrame, options: _Options) -> Summary:
    """Store a message for each row that can be one.

    May be repeated: what is known of an id, pending or ended within the tombstone window, stays as it is (`insert`),
    or as its highest version has it (`newer`). Rows are judged once, before the first is stored.

    Args:
        frame: Any rows.
        options: See `BackfillOptions`; callers give each by keyword. In Python also `now_ms`, the time by which rows
            are judged, in epoch milliseconds; None: this machine's.

    Returns:
        Counts of the rows that were accepted, repeated and superseded, and of the messages stored, replaced and
        known; `facts` has the reasons of rejected rows.

    Raises:
        ConfigurationError: An option, or a column's name or type, is wrong; nothing was stored.
        StoreUnavailableError: The store did not answer for too long; to run it again is safe.
    """
    rules = Rules(
        now_ms=SystemClock().now_ms() if options.now_ms is None else options.now_ms,
        min_lead_ms=parse_duration(options.min_lead, field="min_lead", error=ConfigurationError),
        past_due=one_of("past_due", options.past_due, get_args(PastDue)),
        max_payload=check_count(options.max_payload, "max_payload", 1, MOST_PAYLOAD),
        conflict=one_of("conflict", options.conflict, get_args(OnConflict)),
        timezone=options.timezone,
    )
    writing = write_options(options, conflict=rules.conflict, max_payload=rules.max_payload)
    rows = judged(given_whole(frame, options.mapping, options.to, rules), rules)
    read_settings(writing, accepted(rows, rules).schema)  # a mistake in them is told before Spark has any work
    with sorted_out(rows, rules, options.rejects) as (good, found):
        written = {} if options.dry_run else structs.asdict(write_frame(good, writing))
    return Summary(
        rows=found.rows,
        rejected=sum(found.reasons.values()),
        counts={"accepted": found.accepted, **found.dropped, **written},
        facts={
            "dry_run": options.dry_run,
            "reasons": found.reasons,
            "tombstone_window": format_duration(TOMBSTONE_WINDOW_MS),
        },
    )


def given_whole(
    frame: DataFrame,
    mapping: Mapping[str, str] | None,
    to: str | None,
    rules: Rules,
    names: Collection[str] = MAPPED,
) -> DataFrame:
    """Return what `given` does, of a frame that has all that a message needs.

    Raises:
        ConfigurationError: It has not.
    """
    found = given(frame, mapping, to=checked_destination(to), names=names)
    needed = ["payload", "to", *(["version"] if rules.conflict == "newer" else [])]
    for name in needed:
        if name not in found.columns:
            raise ConfigurationError("map", f"without {name!r}", _MISSING[name])
    return found


_MISSING = {
    "payload": "payload=COLUMN, such as payload=struct(*)",
    "to": "to=COLUMN, or the option `to` for all rows: SINK:ADDRESS or handler:TYPE",
    "version": "version=COLUMN, which conflict=newer compares",
}


def checked_destination(to: str | None) -> str | None:
    """Return the destination that is given for all rows, if there is one.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        if to is not None and (parts := split_target(to))[0] == HANDLER_TARGET:
            check_type_name(parts[1], "to")
    except InputError as error:
        raise ConfigurationError(error.field, error.value, f"{error.allowed}, or handler:TYPE") from None
    return to


class Found(NamedTuple):
    """How many rows there were, and how many became what.

    Attributes:
        rows: All of them.
        accepted: The good ones.
        dropped: Rows that were dropped although they are no mistake, by reason.
        reasons: Rejected rows, by `field.reason`.
    """

    rows: int
    accepted: int
    dropped: dict[str, int]
    reasons: dict[str, int]


@contextmanager
def sorted_out(rows: DataFrame, rules: Rules, rejects: str | None = None) -> Iterator[tuple[DataFrame, Found]]:
    """Work out judged rows once, write the rejected ones into a new folder, and yield the good ones and the counts.

    Raises:
        ConfigurationError: The folder is there already.
    """
    rows = rows.persist()
    try:
        groups = rows.groupBy("field", "reason").count().collect()
        counts = Counter({(row["field"], row["reason"]): row["count"] for row in groups})
        if rejects is not None:
            with writing_anew("rejects", rejects, "a folder that is not there yet"):
                rejected(rows).write.parquet(rejects)
        dropped = {reason: sum(n for (_, why), n in counts.items() if why == reason) for reason in DROPPED}
        wrong = {f"{at}.{why}": n for (at, why), n in sorted(counts.items(), key=str) if why and why not in DROPPED}
        yield accepted(rows, rules), Found(counts.total(), counts[None, None], dropped, wrong)
    finally:
        rows.unpersist()
