"""`aiodelay spark promote`: move messages that become due soon from a cold tier into a store, each message once."""

from __future__ import annotations

import logging
from datetime import date, timedelta
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError
from aiodelay.operations.spark_options import PromoteOptions
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.cold import Standing, Tier, day_of, live
from aiodelay.spark.summary import Summary

from .hot import Hot
from .job import job, judging_ms

__all__ = ["MIN_LEAD", "WINDOW", "run"]

WINDOW: Final = PromoteOptions.window
MIN_LEAD: Final = PromoteOptions.min_lead

log: logging.Logger = logging.getLogger("aiodelay.spark")

_JUDGED: Final = ("kind", "id", "version", "due_at", "at", "due_day")


@job("promote", PromoteOptions)
def run(spark: SparkSession, options: PromoteOptions) -> Summary:
    """Move the messages that are due until the end of the day in which the window ends, and that were not moved yet.

    The job claims the days in the tier's log before it reads them. So a job that adds to these days later knows that it
    must also write to the store. When all messages are in the store, the log marks the days as promoted. If a run is
    killed, the next run promotes the same days again. The store recognises by version each message that it has, or that
    ended within the last 24 hours.

    If a promotion was missed, messages may have less time left than the minimum lead. The job stores such messages too,
    counts them as `late` and as rejected, and logs an error.

    Args:
        spark: A session, classic or Connect.
        options: See `PromoteOptions`; callers give each option by keyword.

    Returns:
        Counts of messages. Each message is either `stored`, or `replaced` (it replaced an older version), or `known`.
        Some of these messages are also counted as `late`, as `overdue`, or as `doubtful`. A message is `doubtful` if an
        unfinished run may have stored it, and it was due so long ago that the store may have forgotten its delivery.
        `facts` has the days, and the number of folders read.

    Raises:
        ConfigurationError: An option is wrong; or nothing was ever put into the tier; or the run took so long that the
            store may have forgotten messages that were cancelled since its start. In the last case, the days stay
            claimed, and running the job again is safe.
        StoreUnavailableError: The store did not answer for too long. Running the job again is safe.
    """
    read_ms, now_ms = SystemClock().now_ms(), judging_ms(options.now)
    window_ms = parse_duration(options.window, field="window", error=ConfigurationError)
    lead_ms = parse_duration(options.min_lead, field="min_lead", error=ConfigurationError)
    if window_ms < lead_ms:
        raise ConfigurationError("window", f"{options.window}, shorter than min_lead", f"at least {options.min_lead}")
    hot = Hot.of(options)
    name, place = hot.name, Tier(spark, options.tier)
    before = place.standing()
    if not before.loads:
        found = f"{options.tier!r}, which is empty"
        raise ConfigurationError("tier", found, "a folder that `cold put` has written")
    if not options.new_store:
        hot.check_of(before)
    through = max(day_of(now_ms + window_ms) + timedelta(days=1), before.claimed)
    is_due = through > before.promoted
    if (is_due or before.store != name) and not options.dry_run:
        place.claim(through, store=name, now_ms=now_ms)
    after = place.standing()  # race with puts: read facts after the claim; a later put sees the claim
    days = _Days(before.promoted, through, before.claimed)
    late = _late(place, after, days, now_ms=now_ms, lead_ms=lead_ms)
    facts = place.facts(after, days.has)
    moved = _moved(facts, hot, read_ms=read_ms, dry_run=options.dry_run)
    if is_due and not options.dry_run:
        place.promoted(through, store=name, now_ms=now_ms)
    if late["late"]:
        told = "%d messages had less than %s left when they were promoted, %d of them were overdue. Promote more often"
        log.error(told, late["late"], format_duration(lead_ms), late["overdue"])
    return Summary(
        rows=sum(moved.values()),
        rejected=late["late"],
        counts={**moved, **late},
        facts={
            "dry_run": options.dry_run,
            "days": sorted(f"{day}" for day in after.days(days.has)),
            "folders_read": len(place.places(after, days.has)),
            "promoted_before": f"{through}",
            "tombstone_window": format_duration(TOMBSTONE_WINDOW_MS),
        },
    )


class _Days(NamedTuple):
    """The days that a run promotes.

    Attributes:
        first: The first day.
        end: The day after the last day.
        tried: Earlier runs have claimed all days before this day, and may have stored some of their messages.
    """

    first: date
    end: date
    tried: date

    def has(self, day: date) -> bool:
        """Return whether the run promotes a day."""
        return self.first <= day < self.end


def _late(place: Tier, standing: Standing, days: _Days, *, now_ms: int, lead_ms: int) -> dict[str, int]:
    """Count messages that have too little time left. Read only the days that can have such messages."""
    last = day_of(now_ms + lead_ms)
    facts = place.facts(standing, lambda day: days.has(day) and day <= last)
    if facts is None:
        return {"late": 0, "overdue": 0, "doubtful": 0}
    due, was_tried = F.unix_millis("due_at"), F.col("due_day") < F.lit(days.tried)
    counts = {
        "late": F.count_if(due < now_ms + lead_ms),
        "overdue": F.count_if(due < now_ms),
        "doubtful": F.count_if(was_tried & (due < now_ms - TOMBSTONE_WINDOW_MS)),
    }
    (row,) = live(facts.select(*_JUDGED)).agg(*(count.alias(name) for name, count in counts.items())).collect()
    return dict(row.asDict())


def _moved(facts: DataFrame | None, hot: Hot, *, read_ms: int, dry_run: bool) -> dict[str, int]:
    if facts is None:
        return {}
    if dry_run:
        return {"found": live(facts.select(*_JUDGED)).count()}
    return hot.write(live(facts), read_ms=read_ms)
